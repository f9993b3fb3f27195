"""Wrap a host so that its snapshots also carry the state of the synchronizer: tensors and small values.

Invariant: the host never sees the carried state. Small state without it can be restored with a synchronizer
(`restored_state` is None then), and small state with it without one, if the layout is the same: a synchronizer that
lets replicas differ, or has tensors of its own, changes the layout. Replicas that may differ at a version point are
each captured whole, because neither one of them nor a combination of parts can replace the others. After a resize a
rank takes over such state of the ranks that the synchronizer names (`inherited`).

In: a host, a `Synchronizer`. Out: a host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from ...errors import ResumeError
from ...model.host import Grouped, Host, Observing, Planning
from ...model.inventory import Inventory
from ...snapshot.capture import codec
from ..synchronizer import Synchronizer

_PREFIX = "ft_plugins."  # of the carried state's entry in the small state
OBSERVED = "observed"  # of what is observed next to the host's state
ABSENT = "absent"  # the items that no update has made yet


class CarryingHost:
    """`host`, except for its inventory, tensors and small state. Without a synchronizer nothing is added."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.synchronizer: Synchronizer | None = None  # what is carried is known once it is connected
        self.restored_state: Mapping[str, Any] | None = None  # carried by the restored snapshot
        self._held: bytes | None = None  # the host's small state at an earlier version point
        self._kept: dict[str, torch.Tensor] = {}  # copies of the items that may have changed since
        self._uses_held = False
        self.observed = host.observed if isinstance(host, Observing) else None
        self.completed = 0  # the last iteration, 0 before this process has completed one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def inventory(self) -> Inventory:
        """The host's items as the synchronizer has them captured, and its own."""
        inventory, synchronizer = self._host.inventory(), self.synchronizer
        if synchronizer is None:
            return inventory
        items = [synchronizer.captured(item) for item in inventory.items]
        return Inventory.of(inventory.rank, [*items, *synchronizer.items()])

    def tensors(self) -> Mapping[str, torch.Tensor]:
        tensors = self._host.tensors()
        return tensors if self.synchronizer is None else {**tensors, **self.synchronizer.tensors()}

    def small_state(self) -> dict[str, Any]:
        held = self._held if self._uses_held else None
        small = self._small() if held is None else codec.decode(held)
        if self.synchronizer is None:
            return small
        return {**small, _PREFIX + self.synchronizer.name: self.synchronizer.state()}

    def _small(self) -> dict[str, Any]:
        small = self._host.small_state()
        if self.observed is not None:
            small = {**small, OBSERVED: self.observed.captured(self.completed, small)}
        absent = [name for name, tensor in self._host.tensors().items() if tensor.is_meta]
        return {**small, ABSENT: absent} if absent else small

    def allocate(self, absent: Collection[str]) -> None:
        if isinstance(self._host, Planning):
            self._host.allocate(absent)

    def hold(self) -> None:
        """Keep what may change before the update: the host's small state, and copies of items such as buffers. For a
        version whose other state is not final yet."""
        self._held = codec.encode(self._small())
        tensors = self._host.tensors()
        self._kept = {name: tensors[name].detach().clone() for name in self._unsteady}

    @cached_property
    def _unsteady(self) -> tuple[str, ...]:
        """The items that more than the update may change."""
        return tuple(item.name for item in self._host.inventory().items if not item.background)

    @contextmanager
    def held(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yields the kept copies. Within it, `small_state` has the kept state of the host and the present state of the
        synchronizer."""
        self._uses_held = True
        try:
            yield self._kept
        finally:
            self._uses_held, self._held, self._kept = False, None, {}

    def restore(self, small: Mapping[str, Any]) -> None:
        """Restore the host, and put the carried state in `restored_state`."""
        name = None if self.synchronizer is None else _PREFIX + self.synchronizer.name
        self.restored_state = None if name is None else small.get(name)
        self._host.restore(_without(small))

    def restore_position(self, small: Mapping[str, Any], proves: bool = False) -> None:
        """`proves`: the restored version is the one before, and the next iteration proves the restore."""
        self._host.restore_position(_without(small))
        if self.observed is not None:
            getattr(self._host, "placed", bool)()  # by the loop of a library
            self.observed.restored(small.get(OBSERVED), proves)

    def recomputed(self, small: Mapping[str, Any]) -> tuple[str, ...]:
        """The version point of the restored iteration, whose version has `small`, after it was computed again. Returns
        what is not what it was."""
        if self.observed is None or OBSERVED not in small:
            return ()
        self.observed.recomputed(small[OBSERVED])
        return self.observed.differing

    def regrouped(self, small: Mapping[str, Any]) -> str:
        """See `model.host.Grouped`; '' if the host does not restore groups."""
        return self._host.regrouped(small) if isinstance(self._host, Grouped) else ""

    def inherited(self, parts: Sequence[Mapping[str, Any]]) -> Sequence[int] | None:
        """After a resize, the places in `parts` of the previous ranks whose own state this rank takes over; None if
        replicas are equal. `parts`: the small states of all previous ranks at its place in the model. Raises
        ResumeError."""
        if self.synchronizer is not None:
            return self.synchronizer.inherited([part.get(_PREFIX + self.synchronizer.name) for part in parts])
        from ..local_sgd.local_sgd import LocalSgd  # imports much that ranks without it do not need

        if any(_PREFIX + LocalSgd.name in part for part in parts):
            raise ResumeError(
                "the state in memory was captured under local SGD, where each replica has its own, and cannot be taken "
                "over at another size without it: give --sync as before, or start from the beginning with --ftp-resume "
                "fresh"
            )
        return None

    def merged(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the small states of the previous ranks that `inherited` names, with what the synchronizer continues
        from."""
        merged = self._host.merged([_without(part) for part in parts])
        if absent := sorted({name for part in parts for name in part.get(ABSENT, ())}):
            merged = {**merged, ABSENT: absent}  # an update makes the parts of an item on all ranks
        if self.synchronizer is None:
            return merged
        name = _PREFIX + self.synchronizer.name
        carried = self.synchronizer.continued([part.get(name) for part in parts])
        return merged if carried is None else {**merged, name: carried}


def carried_by(small: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """What the synchronizer `name` has in a small state; None if there is nothing."""
    found: Mapping[str, Any] | None = small.get(_PREFIX + name)
    return found


def _without(small: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in small.items() if key not in (OBSERVED, ABSENT)}
    return {key: value for key, value in own.items() if not key.startswith(_PREFIX)}
