"""What a session asks of the system that keeps replicas together: PAFT, or local SGD.

    begin(k, state)         resume after iteration k
    iteration_begin(k)
    complete(k)             before the fence: end what still has to end before the next version can be captured
    before_update(k)        a fence; the capture of the previous version is sealed
    after_update(k)
    defers(k)               at the version point: whether its tensors are captured later, when `on_complete` is called
    mark(k)                 what is known of the replicas of version k

Invariant: every rank does the same at the same iteration. What a synchronizer keeps is restored with the version that
it belongs to: small values by `state`, tensors as state items (`items`, `tensors`).

In: a host. Out: changed tensors, between the hooks named above; state for snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from ..collective import Collective
from ..config import Config
from ..errors import ConfigError
from ..events import Events
from ..model.host import Host
from ..model.inventory import Item
from ..snapshot.segment.slots import Mark


class Synchronizer(Protocol):
    """One way to keep replicas together. `name` is the key of its state in snapshots. Defaults suit one that
    carries no tensors and defers no version."""

    name: str
    on_complete: Callable[[], None]  # set by the session; called when the tensors of a deferred version are final
    on_agreed: Callable[[int], None]  # the same; called on another thread when the replicas of an iteration are equal
    in_step: bool  # whether no rank of the job can complete another iteration while one waits between two

    def connect(self, collective: Collective) -> None:
        """Create process groups and claim memory. Every rank of the job calls."""

    def table(self) -> str:
        """A message on what it does and what that guarantees."""

    # ---- state that a snapshot carries ----

    def captured(self, item: Item) -> Item:
        """The item as a snapshot must hold it: with fewer replicas if they may differ at a version point."""

    def items(self) -> Sequence[Item]:
        """Its own tensors, as state items. Known after `connect`."""
        return ()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The live tensors of `items`, by name."""
        return {}

    def state(self) -> dict[str, Any]:
        """Its other state at a version point, as plain values."""

    def inherited(self, previous: Sequence[Mapping[str, Any] | None]) -> Sequence[int] | None:
        """After a resize, the places in `previous` of the ranks whose own state this rank takes over; None if replicas
        are equal. `previous`: the `state` of all previous ranks at its place in the model, by rank; None for one that
        carried none. Raises ResumeError."""
        return None

    def continued(self, taken_over: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        """After a resize, the state to begin from, given that of the ranks that `inherited` names, or of all; None to
        start from nothing."""
        return None

    def begin(self, completed: int, state: Mapping[str, Any] | None = None, last: int | None = None) -> int:
        """Continue after version `completed` from the `state` of that version; None if it carries none. `last`: the
        iteration at which training ends, if known. Returns the last iteration that this rank completed. Raises
        ConfigError if `last` makes no sense, ResumeError for a state of another policy."""

    def continues(self, step: int, last: int) -> bool:
        """Whether this rank trains on after its iteration `step`, in a job of `last` iterations."""
        return step < last

    # ---- versions ----

    def version(self, step: int) -> int:
        """The number of the version at the end of this rank's iteration `step`; 0 if no version may be taken there.
        The same number means the same state of the job on all ranks. Mostly it is the iteration itself."""
        return step

    def defers(self, step: int) -> bool:
        """Whether the tensors of version `step` are still to be changed, during the next iteration."""
        return False

    def mark(self, step: int) -> Mark:
        """What is known of the replicas of version `step`."""

    def tainted(self) -> int | None:
        """The iteration after which snapshots must not be restored; None if that was not found since the last call."""
        return None

    # ---- hooks ----

    @property
    def waits_at_begin(self) -> bool:
        """Whether `iteration_begin` has something to do."""

    def iteration_begin(self, step: int, wait_for_capture: Callable[[], None]) -> None: ...

    def complete(self, step: int) -> None:
        return

    def before_update(self, step: int) -> None: ...
    def after_update(self, step: int) -> None: ...

    def shutdown(self) -> None:
        """The orderly end. Idempotent."""


def synchronizer_of(host: Host, config: Config, events: Events, folder: Path | None) -> Synchronizer:
    """The configured synchronizer, not connected yet; `folder`: of files about this run. Raises ConfigError,
    UnsupportedError."""
    if config.sync is not None:
        from .local_sgd.local_sgd import LocalSgd  # each imports much that ranks without it do not need

        every = config.capture is not None and config.capture.versions == "every"
        return LocalSgd(host, config.sync, events, every, folder)
    if config.paft is not None:
        from .paft import Paft

        return Paft(host, config.paft, events)
    raise ConfigError("no system that keeps replicas together is configured")
