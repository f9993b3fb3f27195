"""The host as snapshots see it beside a system that lets replicas drift: its small state carries that system's.

Invariant: the host never sees what is carried. A snapshot that carries it is restored where the system is off as well,
and one that does not where it is on: then nothing has been `carried`. Replicas that may drift are each captured whole:
one of them cannot stand for the others, and still less can parts of each.

In: a host, what the system would have kept. Out: a host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..model.host import Host
from ..model.inventory import Inventory

_ENTRY = "ft_plugins.paft"  # of the small state


class CarryingHost:
    """`host` in all but its small state."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.state: Callable[[], dict[str, Any]] | None = None  # what is to be carried; None for nothing
        self.carried: Mapping[str, Any] | None = None  # what the snapshot that was restored had
        self.drifts = False  # whether replicas may differ at a version point

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def inventory(self) -> Inventory:
        """Every item this rank's own, where replicas may drift."""
        found = self._host.inventory()
        if not self.drifts:
            return found
        return Inventory.of(found.rank, (replace(item, replicas=(found.rank,)) for item in found.items))

    def small_state(self) -> dict[str, Any]:
        """With what is carried."""
        found = self._host.small_state()
        return found if self.state is None else {**found, _ENTRY: self.state()}

    def restore(self, small: Mapping[str, Any]) -> None:
        """Without it."""
        self.carried = small.get(_ENTRY)
        self._host.restore(_without(small))

    def restore_position(self, small: Mapping[str, Any]) -> None:
        """Without it."""
        self._host.restore_position(_without(small))

    def merged(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Without it: of other replicas, as many as there were, nothing is to be gone on from."""
        return self._host.merged([_without(part) for part in parts])


def _without(small: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in small.items() if key != _ENTRY}
