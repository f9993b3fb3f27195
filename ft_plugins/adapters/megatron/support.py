"""Reject Megatron features that are not supported, by name, before anything is captured.

Invariant: an accepted job has only state that `state` lists, and only updates that go through `optimizer.step`. In:
model chunks and optimizers. Out: UnsupportedError with one sentence per feature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from ...errors import UnsupportedError
from . import refusals

_SUPPORTED = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)


def flat(optimizer: Any) -> tuple[Any, ...]:
    """The Megatron optimizers in `optimizer`: itself, or those that a ChainedOptimizer chains."""
    if hasattr(optimizer, "chained_optimizers"):
        return tuple(part for chained in optimizer.chained_optimizers for part in flat(chained))
    return (optimizer,)


def is_stub(optimizer: Any) -> bool:
    """Whether this rank updates nothing with `optimizer` (all its parameters are frozen or on other ranks)."""
    return bool(getattr(optimizer, "is_stub_optimizer", False))


def require_supported(chunks: Sequence[torch.nn.Module], optimizers: Sequence[Any], rank: int) -> None:
    """Raises UnsupportedError that names every unsupported feature in use."""
    problems = [*_of_model(chunks), *(problem for optimizer in optimizers for problem in _of_optimizer(optimizer))]
    if problems:
        named = "; ".join(dict.fromkeys(problems))
        raise UnsupportedError(f"rank {rank}: cannot protect this job: {named}. {refusals.REMEDY}")


def _of_model(chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    for chunk in chunks:
        yield from refusals.of_model(getattr(chunk, "config", None))
        yield from refusals.of_ddp(getattr(chunk, "ddp_config", None))


def _of_optimizer(optimizer: Any) -> Iterator[str]:
    if not isinstance(optimizer, _SUPPORTED):
        yield f"the optimizer {type(optimizer).__name__} is not supported"
        return
    if is_stub(optimizer):
        return
    yield from refusals.of_optimizer(optimizer.config)
    for group in optimizer.optimizer.param_groups:
        if group.get("amsgrad"):
            yield "amsgrad"
