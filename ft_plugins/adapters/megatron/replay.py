"""An iteration of Megatron's schedules once more: forward, backward and reduction, on what it read and drew before.

    a schedule begins        generators, buffers of the model and what it was called with are kept
    it reads a microbatch    a copy is kept, and the generators as they are then: a data set may draw, too

Kept is one iteration, until the next one begins. Evaluations are none.

Invariant: computed is what the schedule computes that the loop had called, with the same arguments; by us nothing.
Afterwards generators, data position and Megatron's validation of results are what they were before, buffers and
gradients what the parameters, as they are now, make of them; the losses in the list that the loop was given are
replaced by those of the second time. No loss scale, norm or counter is touched: they are the update's, which comes
later. (Megatron's sums of auxiliary losses, shown in logs, count both times.)

In: model chunks, optimizer, buffers. Out: gradients and losses in the place of those that were there.

It guards the generators as well: the process's, and Megatron's tracker of the tensor- and expert-parallel streams.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import rerun_state_machine
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from ...errors import UnsupportedError
from .. import rng
from ..host_parts import StateItem
from .refusals import cuda_graphs

_SCHEDULES = (
    *("forward_backward_no_pipelining", "forward_backward_pipelining_with_interleaving"),
    "forward_backward_pipelining_without_interleaving",
)
_VALIDATION = ("large_value_counts", "max_values")  # what grows from iteration to iteration


@dataclass(frozen=True)
class _Iteration:
    """What one was computed from, and what it gave."""

    number: int
    schedule: Callable[..., Any]
    told: Mapping[str, Any]
    generators: Mapping[str, Any]  # at its begin
    buffers: Sequence[torch.Tensor]
    validation: Mapping[str, Any]
    batches: list[list[tuple[Any, Mapping[str, Any]]]]  # by data iterator; each with the generators behind it
    losses: list[Any]


class MegatronReplay:
    """Of one job, which is followed from now on. Guards what the iteration under way was computed from."""

    def __init__(
        self, chunks: Sequence[Any], optimizer: Any, buffers: Sequence[StateItem], completed: Callable[[], int]
    ) -> None:
        """Raises UnsupportedError for a job or a version whose iterations cannot be followed so, by name."""
        missing = [name for name in _SCHEDULES if not callable(getattr(schedules, name, None))]
        if missing:
            raise UnsupportedError(f"megatron.core.pipeline_parallel.schedules has no {', '.join(missing)}")
        graphs = cuda_graphs(chunks[0].config)
        if graphs != "none":
            raise UnsupportedError(f"captured CUDA graphs ({graphs}) draw other random numbers when replayed")
        self._chunks, self._optimizer, self._buffers, self._completed = chunks, optimizer, buffers, completed
        self._kept: _Iteration | None = None
        for name in _SCHEDULES:
            setattr(schedules, name, self._following(getattr(schedules, name)))

    @property
    def number(self) -> int | None:
        """Of the iteration that was computed last, from 1."""
        return None if self._kept is None else self._kept.number

    def _following(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward_backward(**told: Any) -> Any:
            if told.get("forward_only") or not torch.is_grad_enabled() or not self._ours(told["model"]):
                return original(**told)
            self._kept = None  # one is enough
            began, machine = rng_state(), _machine()
            validation = {name: copy.deepcopy(getattr(machine, name)) for name in _VALIDATION} if machine else {}
            buffers = [one.read().clone() for one in self._buffers]
            reading, batches = _kept_while_read(told["data_iterator"])
            losses = original(**{**told, "data_iterator": reading})
            number = self._completed() + 1
            self._kept = _Iteration(number, original, told, began, buffers, validation, batches, losses)
            return losses

        return forward_backward

    def _ours(self, model: Any) -> bool:
        return (model[0] if isinstance(model, list) else model) is self._chunks[0]

    @torch.no_grad()
    def _begin_again(self, kept: _Iteration) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        for one, value in zip(self._buffers, kept.buffers, strict=True):
            one.read().copy_(value)
        restore_rng(kept.generators)

    def run(self) -> None:
        """Once more, before the update of the same iteration. All ranks of the job call together."""
        kept = self._kept
        if kept is None:
            raise UnsupportedError("Megatron's schedules have computed no iteration that could be computed once more")
        after = rng_state()
        self._begin_again(kept)
        with _validating(kept.validation):
            losses = kept.schedule(**{**kept.told, "data_iterator": _read_again(kept)})
        kept.losses[:] = losses
        restore_rng(after)


class _Reading:
    """A data iterator, each batch of which is kept."""

    def __init__(self, source: Any, into: list[tuple[Any, Mapping[str, Any]]]) -> None:
        self._source, self._into = source, into

    def __iter__(self) -> _Reading:
        return self

    def __next__(self) -> Any:
        batch = next(self._source)
        self._into.append((copy.deepcopy(batch), rng_state()))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def _kept_while_read(source: Any) -> tuple[Any, list[list[tuple[Any, Mapping[str, Any]]]]]:
    """The data iterator of a schedule, or its iterators by chunk, and where what they give will be."""
    several = isinstance(source, list)
    sources = source if several else [source]
    batches: list[list[tuple[Any, Mapping[str, Any]]]] = [[] for _ in sources]
    reading = [None if one is None else _Reading(one, into) for one, into in zip(sources, batches, strict=True)]
    return (reading if several else reading[0]), batches


def _read_again(kept: _Iteration) -> Any:
    source = kept.told["data_iterator"]
    several = isinstance(source, list)
    sources = source if several else [source]
    again = [None if one is None else _again(batches) for one, batches in zip(sources, kept.batches, strict=True)]
    return again if several else again[0]


def _again(batches: list[tuple[Any, Mapping[str, Any]]]) -> Iterator[Any]:
    for batch, generators in batches:
        restore_rng(generators)
        yield copy.deepcopy(batch)


def _machine() -> Any:
    """Megatron-LM's validation of results; None where nobody has asked for it."""
    return getattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None)


@contextmanager
def _validating(known: Mapping[str, Any]) -> Iterator[None]:
    """Results are validated as the first time: on from what was known then. A rerun cannot be asked for any more."""
    machine = _machine()
    if machine is None:
        yield
        return
    state, requested = machine.state, machine.rerun_requested
    machine.state, machine.validation_counts = rerun_state_machine.RerunState.INITIAL_RUN, defaultdict(int)
    for name, value in known.items():
        setattr(machine, name, copy.deepcopy(value))
    try:
        yield
    finally:
        machine.state, machine.rerun_requested = state, requested


def rng_state() -> dict[str, Any]:
    """The state of all generators."""
    return rng.rng_state(get_cuda_rng_tracker())


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set all generators. Raises ResumeError when the tracker's streams are not those that were captured."""
    rng.restore_rng(state, get_cuda_rng_tracker())
