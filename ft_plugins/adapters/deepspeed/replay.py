"""Recompute an iteration of a pipeline: forward, backward and reduction, on the same batches and random numbers.

Invariant: afterwards generators, buffers, counters, loss scaler and data position are as before, and the gradients are
those of the current parameters. DeepSpeed's own instructions do the work, except for the update. The iteration's
reported loss is the recomputed one, because DeepSpeed reports it after the update.

    the schedule begins      generators and the model's buffers are saved
    a batch has been read    the batch is saved (copied: a loader may reuse its memory), and the generators

Only the current iteration is saved.

In: a PipelineEngine. Out: gradients, replaced.

Generators are the process's, DeepSpeed's tracker of the model-parallel stream, and Megatron's tracker if a script takes
its tensor-parallel layers from there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from ...errors import UnsupportedError
from .. import rng
from ..script.script_hooks import wrap

_STATE = ("_exec_schedule", "_next_batch", "_train_schedule", "_INSTRUCTION_MAP", "_force_grad_boundary")


class DeepSpeedReplay:
    """Saves the inputs of one engine's current iteration."""

    def __init__(self, engine: Any) -> None:
        """Hook the engine. Raises UnsupportedError for an engine or version without the methods to hook."""
        missing = [name for name in _STATE if not hasattr(engine, name)]
        if missing:
            raise UnsupportedError(f"{type(engine).__name__} has no {', '.join(missing)}")
        self._engine = engine
        self._began: Mapping[str, Any] | None = None  # generators at the start; None before the first iteration
        self._buffers: dict[str, torch.Tensor] = {}
        self._batches: list[tuple[Any, Mapping[str, Any]]] = []  # with the generators after each
        wrap(engine, "_exec_schedule", self._scheduling)
        wrap(engine, "_next_batch", self._reading)

    def _scheduling(self, original: Callable[..., Any], schedule: Any) -> Any:
        if self._engine.module.training:
            self._batches = []
            self._buffers = {name: one.clone() for name, one in self._engine.module.named_buffers()}
            self._began = rng_state()
        return original(schedule)

    def _reading(self, original: Callable[..., Any]) -> Any:
        batch = original()
        if self._engine.module.training:
            self._batches.append((_copied(batch), rng_state()))
        return batch

    def run(self) -> None:
        """Recompute, inside the optimizer's step of the same iteration. A collective of the job."""
        engine, batches = self._engine, iter(self._batches)
        if self._began is None:
            raise UnsupportedError("no iteration has begun that could be recomputed")

        def saved_batch() -> Any:
            batch, generators = next(batches)
            restore_rng(generators)
            return _copied(batch)

        after, reading, boundary = rng_state(), engine._next_batch, engine._force_grad_boundary
        discard_gradients(engine)
        for name, buffer in engine.module.named_buffers():
            buffer.copy_(self._buffers[name])
        restore_rng(self._began)
        engine._next_batch, engine._force_grad_boundary = saved_batch, False
        engine.total_loss = engine.total_additional_losses = None
        engine.fwd_outputs = []
        instructions = type(engine)._INSTRUCTION_MAP  # the class's, without spans
        try:
            for commands in engine._train_schedule():
                for command in commands:
                    if type(command).__name__ != "OptimizerStep":
                        instructions[type(command)](engine, **command.kwargs)
        finally:
            engine._next_batch, engine._force_grad_boundary = reading, boundary
            restore_rng(after)


def discard_gradients(engine: Any) -> None:
    """Clear gradients, as DeepSpeed does after an update."""
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
    """A copy of a batch, with its own tensors."""
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
    """Set all generators. Raises ResumeError if a tracker's streams are not those that were captured."""
    megatron = sys.modules.get(_MEGATRON)
    if state["megatron"] and megatron is not None:
        rng.restore_streams(megatron.get_cuda_rng_tracker(), state["megatron"])
    rng.restore_rng(state, get_cuda_rng_tracker())
