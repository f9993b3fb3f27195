"""A host whose snapshots also carry the state of PAFT, and hold each replica whole if replicas may diverge.

Invariant: the host never sees the carried state. A snapshot with it can be restored with PAFT off, and one without it
with PAFT on: then `carried` is None. Replicas that may diverge are each captured whole, because neither one of them nor
a combination of parts can replace the others.

In: a host, the system's state. Out: a host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..model.host import Host
from ..model.inventory import Inventory

_ENTRY = "ft_plugins.paft"  # in the small state


class CarryingHost:
    """`host`, except for its small state and, if replicas may diverge, its inventory."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.state: Callable[[], dict[str, Any]] | None = None  # returns the state to carry; None: nothing is carried
        self.carried: Mapping[str, Any] | None = None  # by the restored snapshot
        self.diverges = False  # whether replicas may differ at a version point

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def inventory(self) -> Inventory:
        """The host's inventory; if replicas may diverge, every item belongs to this rank alone."""
        inventory = self._host.inventory()
        if not self.diverges:
            return inventory
        return Inventory.of(inventory.rank, (replace(item, replicas=(inventory.rank,)) for item in inventory.items))

    def small_state(self) -> dict[str, Any]:
        """The host's small state, with the carried state."""
        small = self._host.small_state()
        return small if self.state is None else {**small, _ENTRY: self.state()}

    def restore(self, small: Mapping[str, Any]) -> None:
        """Restore the host, and keep the carried state."""
        self.carried = small.get(_ENTRY)
        self._host.restore(_without(small))

    def restore_position(self, small: Mapping[str, Any]) -> None:
        """Restore the host's data position and RNG."""
        self._host.restore_position(_without(small))

    def merged(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the small states of several replicas, without carried state: that belongs to the previous size."""
        return self._host.merged([_without(part) for part in parts])


def _without(small: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in small.items() if key != _ENTRY}
