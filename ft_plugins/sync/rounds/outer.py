"""The outer optimizer of local SGD: move the anchor towards the mean of the replicas. Tensor maths, in place.

The anchor is the value of the last synchronisation, the target the (weighted, clipped) mean of the replicas now. Their
difference, target - anchor, is the averaged pseudo-gradient; it points downhill, so the optimizer's gradient is its
negative:

    gradient  =  anchor - target
    buffer    =  momentum * buffer + gradient
    anchor   -=  lr * (gradient + momentum * buffer)     Nesterov

The target is passed, and not the pseudo-gradient, because anchor + (target - anchor) may differ from the target in the
last bit: with lr 1 and no momentum the target is copied, so a plain mean gives Post Local SGD bit for bit.

Invariant: the operations and their order are those of torch.optim.SGD, so the result has the same bits. Elementwise, so
each rank may step its own shards. A module that is rolled back is not stepped: anchor and buffer stay as they are.

In: anchor, target and momentum buffer of one shape, dtype (fp32 or float64) and device. Out: changed anchor, buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...errors import ConfigError


@dataclass(frozen=True)
class OuterRules:
    """Learning rate and Nesterov momentum of the outer optimizer. Raises ConfigError for a value out of range."""

    lr: float = 0.8
    momentum: float = 0.85

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"the outer learning rate is {self.lr}: expected a finite number above 0")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"the outer momentum is {self.momentum}: expected at least 0 and less than 1")

    @property
    def has_buffer(self) -> bool:
        return self.momentum != 0

    @property
    def takes_target(self) -> bool:
        """Whether a step makes the anchor equal to the target."""
        return self.lr == 1 and self.momentum == 0


@torch.no_grad()
def outer_step(
    anchor: torch.Tensor, target: torch.Tensor, momentum_buffer: torch.Tensor | None, rules: OuterRules
) -> None:
    """One step, in place on `anchor` and `momentum_buffer`; the buffer is zero before the first, and unused without
    momentum. Takes temporary memory for one tensor. Raises ValueError for tensors that do not match."""
    _require_match("target", target, anchor)
    if rules.takes_target:
        anchor.copy_(target)
        return
    step = anchor - target
    if rules.has_buffer:
        if momentum_buffer is None:
            raise ValueError(f"an outer momentum of {rules.momentum} needs a buffer: expected one of zeros at first")
        _require_match("momentum buffer", momentum_buffer, anchor)
        momentum_buffer.mul_(rules.momentum).add_(step)
        step.add_(momentum_buffer, alpha=rules.momentum)
    anchor.add_(step, alpha=-rules.lr)


def _require_match(name: str, tensor: torch.Tensor, anchor: torch.Tensor) -> None:
    """A silent broadcast or conversion would be a wrong update."""
    if (tensor.shape, tensor.dtype, tensor.device) != (anchor.shape, anchor.dtype, anchor.device):
        expected = f"{tuple(anchor.shape)}, {anchor.dtype}, {anchor.device}"
        found = f"{tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}"
        raise ValueError(f"the {name} does not match the anchor: expected {expected}, found {found}")
