"""The host as snapshots see it when a system lets replicas diverge: its small state also carries that system's state.

Invariant: the host never sees the carried state. A snapshot with it can be restored with the system off, and one
without it with the system on: then `carried` is None. Replicas that may diverge are each captured whole, because none
of them, and no combination of parts, can replace the others.

In: a host, the system's state. Out: a host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..model.host import Host
from ..model.inventory import Inventory

_ENTRY = "ft_plugins.paft"  # of the small state


class CarryingHost:
    """`host`, except for its small state and, where replicas may diverge, its inventory."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.state: Callable[[], dict[str, Any]] | None = None  # gives the state to carry; None for none
        self.carried: Mapping[str, Any] | None = None  # what the restored snapshot carried
        self.drifts = False  # whether replicas may differ at a version point

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def inventory(self) -> Inventory:
        """The host's inventory; every item belongs to this rank alone where replicas may diverge."""
        found = self._host.inventory()
        if not self.drifts:
            return found
        return Inventory.of(found.rank, (replace(item, replicas=(found.rank,)) for item in found.items))

    def small_state(self) -> dict[str, Any]:
        """The host's small state, with the carried state."""
        found = self._host.small_state()
        return found if self.state is None else {**found, _ENTRY: self.state()}

    def restore(self, small: Mapping[str, Any]) -> None:
        """Restore the host, and keep the carried state."""
        self.carried = small.get(_ENTRY)
        self._host.restore(_without(small))

    def restore_position(self, small: Mapping[str, Any]) -> None:
        """Restore the host's data position and RNG."""
        self._host.restore_position(_without(small))

    def merged(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge host states of several replicas. Carried state is dropped: it belongs to the previous size."""
        return self._host.merged([_without(part) for part in parts])


def _without(small: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in small.items() if key != _ENTRY}
