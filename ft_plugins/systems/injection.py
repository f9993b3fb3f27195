"""Inject faults that alter numbers (`corruption`) into a host: gradients, state, copies. Off unless armed.

Invariant: an armed fault that could never take effect here is an error at start, by name.

In: a host with `ReplicaOperations`. Out: altered live tensors, a `fault.injected` event for each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..base.corruption import Corruption
from ..errors import ConfigError
from ..events import Events, catalogue
from ..model.host import Host, ReplicaOperations

_REDUCING = "reduce.gradients"
_GRADIENTS = "update.gradients"
_PARAMETERS = "update.parameters"
_COPIES = "update.copies"


class FaultInjector:
    """Injects the faults of one rank."""

    def __init__(self, host: Host, operations: ReplicaOperations, events: Events) -> None:
        """Raises ConfigError for an action that alters no numbers, and for copies if there are none; UnsupportedError
        for a point that this host cannot reach."""
        self._host, self._operations, self._events = host, operations, events
        self._corruption = Corruption(host.rank)
        if self._corruption.armed(_COPIES) and not operations.copies().items:
            raise ConfigError(f"fault at {_COPIES}: {host.framework} computes with the parameters themselves here")
        if self._corruption.armed(_REDUCING):
            operations.before_reduction(lambda step, gradients: self._at(_REDUCING, step, gradients))

    def before_update(self, step: int) -> None:
        """Alter gradients after their reduction."""
        if self._corruption.armed(_GRADIENTS):
            self._at(_GRADIENTS, step, self._operations.gradients())

    def after_update(self, step: int) -> None:
        """Alter state and copies."""
        if self._corruption.armed(_PARAMETERS):
            self._at(_PARAMETERS, step, self._host.tensors())
        if self._corruption.armed(_COPIES):
            self._at(_COPIES, step, self._operations.copy_tensors())

    def _at(self, point: str, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        strike = self._corruption.strike(point, step, tensors)
        if strike is not None:
            self._events.emit(catalogue.FAULT_INJECTED, iteration=step, **vars(strike))
