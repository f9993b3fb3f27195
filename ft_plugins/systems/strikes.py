"""What faults that alter numbers (`corruption`) strike in a host: gradients, state, copies. Off unless armed.

Invariant: a fault that could never strike here is an error at start, by name; nothing is armed and silently without
effect.

In: a host with `ReplicaOperations`. Out: altered live tensors, a `fault.injected` event for each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..corruption import Corruption
from ..errors import ConfigError
from ..events import Events, catalogue
from ..model.host import Host, ReplicaOperations

REDUCING, GRADIENTS, PARAMETERS, COPIES = (
    *("reduce.gradients", "update.gradients"),
    *("update.parameters", "update.copies"),
)


class Strikes:
    """One rank's."""

    def __init__(self, host: Host, operations: ReplicaOperations, events: Events) -> None:
        """Raises ConfigError for a word that alters no numbers, and for copies where there are none; UnsupportedError
        for a point that this host cannot reach."""
        self._host, self._operations, self._events = host, operations, events
        self._corruption = Corruption(host.rank)
        if self._corruption.armed(COPIES) and not operations.copies().items:
            raise ConfigError(f"fault at {COPIES}: {host.framework} computes with the parameters themselves here")
        if self._corruption.armed(REDUCING):
            operations.before_reduction(lambda step, gradients: self._at(REDUCING, step, gradients))

    def before_update(self, step: int) -> None:
        """Gradients after aggregation."""
        if self._corruption.armed(GRADIENTS):
            self._at(GRADIENTS, step, self._operations.gradients())

    def after_update(self, step: int) -> None:
        """State and copies."""
        if self._corruption.armed(PARAMETERS):
            self._at(PARAMETERS, step, self._host.tensors())
        if self._corruption.armed(COPIES):
            self._at(COPIES, step, self._operations.copy_tensors())

    def _at(self, point: str, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        struck = self._corruption.strike(point, step, tensors)
        if struck is not None:
            self._events.emit(catalogue.FAULT_INJECTED, iteration=step, **vars(struck))
