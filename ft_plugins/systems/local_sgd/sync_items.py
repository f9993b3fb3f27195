"""The tensors of local SGD as state items: last synchronised parameters (anchors) and momentum of the outer optimizer.

Anchors equal the parameters at a synchronisation, so they are captured only if versions are taken elsewhere, or where
their dtype is wider than that of the parameters.

Invariant: both are equal on all replicas at every version point, so replicas share out their capture. They are divided
as their parameters are, so a resize reshards them in the same way.

In: modules and their state. Out: items, live tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...model.inventory import Item, IterationSpan, Role
from ...sync.rounds.modules import ModulePlan
from ...sync.rounds.synchronisation import ModuleState

_UPDATE = frozenset({IterationSpan.UPDATE})


class OuterItems:
    """The items of one rank. `anchors`: whether versions are taken where anchors differ from parameters."""

    def __init__(self, modules: Sequence[ModulePlan], states: Mapping[str, ModuleState], anchors: bool) -> None:
        self._live: dict[str, torch.Tensor] = {}
        self.items: list[Item] = []
        self.has_anchors = anchors
        for item, state in ((item, states[module.name]) for module in modules for item in module.items):
            anchor = state.anchors.get(item.name)
            widened = anchor is not None and str(anchor.dtype).removeprefix("torch.") != item.dtype
            self.has_anchors = self.has_anchors or widened
        for item, state in ((item, states[module.name]) for module in modules for item in module.items):
            if self.has_anchors and item.name in state.anchors:
                self._add(item, "anchor", state.anchors[item.name])
            if item.name in state.momentum:
                self._add(item, "momentum", state.momentum[item.name])

    def _add(self, of: Item, kind: str, tensor: torch.Tensor) -> None:
        name = f"local_sgd.{kind}:{of.name}"
        self.items.append(
            replace(
                of, name=name, dtype=str(tensor.dtype).removeprefix("torch."), nbytes=tensor.nbytes, role=Role.OUTER,
                shape=tuple(tensor.shape), changed_by=_UPDATE,
            )
        )  # fmt: skip
        self._live[name] = tensor

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._live
