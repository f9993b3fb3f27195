"""An iteration of a pipeline once more: forward, backward and reduction, on what it read and drew the first time.

Invariant: afterwards the generators, buffers, counters, loss scaler and data position are what they were before, and
the gradients those that the parameters, as they are now, give. An iteration is once more what DeepSpeed's own
instructions make of it, but for the update: nothing is computed by us. The loss of the iteration is that of the last
time, for it is told only after the update.

    the schedule begins      generators, and the model's buffers, are kept
    a batch has been read    it is kept (copied: a loader may use its memory again), and the generators as they are then

Kept is one iteration; what the iteration before has kept goes when the next one begins.

In: a PipelineEngine. Out: gradients in the place of those that were there.

It guards the generators as well: the process's, DeepSpeed's tracker of the model-parallel stream, and Megatron's
where a script takes its tensor-parallel layers from there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from ...errors import UnsupportedError
from .. import rng

_STATE = ("_exec_schedule", "_next_batch", "_train_schedule", "_INSTRUCTION_MAP", "_force_grad_boundary")


class DeepSpeedReplay:
    """Of one engine, which is followed from now on. Guards what the iteration under way was computed from."""

    def __init__(self, engine: Any) -> None:
        """Raises UnsupportedError for an engine or a version whose iterations cannot be followed so."""
        missing = [name for name in _STATE if not hasattr(engine, name)]
        if missing:
            raise UnsupportedError(f"{type(engine).__name__} has no {', '.join(missing)}")
        self._engine = engine
        self._began: Mapping[str, Any] | None = None  # generators at the begin; None before the first iteration
        self._buffers: dict[str, torch.Tensor] = {}
        self._batches: list[tuple[Any, Mapping[str, Any]]] = []  # with the generators behind each
        engine._exec_schedule = self._scheduling(engine._exec_schedule)
        engine._next_batch = self._reading(engine._next_batch)

    def _scheduling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _exec_schedule(schedule: Any) -> Any:
            if self._engine.module.training:
                self._batches = []
                self._buffers = {name: one.clone() for name, one in self._engine.module.named_buffers()}
                self._began = rng_state()
            return original(schedule)

        return _exec_schedule

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _next_batch() -> Any:
            batch = original()
            if self._engine.module.training:
                self._batches.append((_copied(batch), rng_state()))
            return batch

        return _next_batch

    def run(self) -> None:
        """Once more, inside of the optimizer's step of the same iteration. All ranks of the job call together."""
        engine, batches = self._engine, iter(self._batches)
        if self._began is None:
            raise UnsupportedError("no iteration has begun that could be computed once more")

        def again() -> Any:
            batch, drawn = next(batches)
            restore_rng(drawn)
            return _copied(batch)

        after, reading, boundary = rng_state(), engine._next_batch, engine._force_grad_boundary
        discard_gradients(engine)
        for name, buffer in engine.module.named_buffers():
            buffer.copy_(self._buffers[name])
        restore_rng(self._began)
        engine._next_batch, engine._force_grad_boundary = again, False
        engine.total_loss = engine.total_additional_losses = None
        engine.fwd_outputs = []
        instructions = type(engine)._INSTRUCTION_MAP  # the class's: spans are of the first time
        try:
            for commands in engine._train_schedule():
                for command in commands:
                    if type(command).__name__ != "OptimizerStep":
                        instructions[type(command)](engine, **command.kwargs)
        finally:
            engine._next_batch, engine._force_grad_boundary = reading, boundary
            restore_rng(after)


def discard_gradients(engine: Any) -> None:
    """As they are before the first backward of an iteration: as DeepSpeed leaves them behind an update."""
    optimizer = engine.optimizer
    match type(optimizer).__name__:
        case "BF16_Optimizer":
            optimizer.zero_grad()
        case "DeepSpeedZeroOptimizer":
            optimizer.zero_grad()
            for group in list(optimizer.averaged_gradients):
                optimizer.averaged_gradients[group] = optimizer.all_grad_tensors[group] = None
        case _:
            engine.zero_grad()


def _copied(value: Any) -> Any:
    """A batch, with tensors of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [_copied(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


_MEGATRON = "megatron.core.tensor_parallel"


def rng_state() -> dict[str, Any]:
    """The state of all generators."""
    megatron = sys.modules.get(_MEGATRON)
    streams = None if megatron is None else rng.streams(megatron.get_cuda_rng_tracker())
    return {**rng.rng_state(get_cuda_rng_tracker()), "megatron": streams}


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set all generators. Raises ResumeError when a tracker's streams are not those that were captured."""
    megatron = sys.modules.get(_MEGATRON)
    if state["megatron"] and megatron is not None:
        rng.restore_streams(megatron.get_cuda_rng_tracker(), state["megatron"])
    rng.restore_rng(state, get_cuda_rng_tracker())
