"""Recompute an iteration of Megatron's schedules: forward, backward and reduction on the same data and random numbers.

    a schedule begins        record its arguments, the generators and the model's buffers
    it reads a microbatch    record a copy, and the generators after the read, because a data set may draw

One iteration is recorded, until the next one begins; evaluations are not.

Invariant: the recompute calls the schedule that the loop called, with the same arguments. Afterwards generators, data
position and Megatron's validation of results are as before; gradients and buffers follow from the present parameters,
and the loop's list of losses holds the new ones. Loss scale, norm and counters are not touched: they belong to the
update, which comes later. (Megatron's logged sums of auxiliary losses include both computations.)

In: model chunks, optimizer, buffers. Out: new gradients and losses, in place.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import rerun_state_machine
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from ...errors import ReplicaError, UnsupportedError
from .. import rng
from ..host_parts import StateItem
from ..rules.megatron import cuda_graphs
from ..script.script_hooks import wrap

_SCHEDULES = (
    *("forward_backward_no_pipelining", "forward_backward_pipelining_with_interleaving"),
    "forward_backward_pipelining_without_interleaving",
)
_VALIDATION = ("large_value_counts", "max_values")  # state that accumulates over iterations


@dataclass(frozen=True)
class _RecordedIteration:
    """The inputs of an iteration, and its losses."""

    number: int
    schedule: Callable[..., Any]
    arguments: Mapping[str, Any]
    generators: Mapping[str, Any]  # at its begin
    buffers: Sequence[torch.Tensor]
    validation: Mapping[str, Any]
    batches: list[list[tuple[Any, Mapping[str, Any]]]]  # by data iterator; each with the generators after the read
    losses: list[Any]


class MegatronReplay:
    """Records the inputs of each iteration from now on, and recomputes the last one."""

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        buffers: Sequence[StateItem],
        completed: Callable[[], int],
        discarded: Callable[[], bool] = lambda: False,
    ) -> None:
        """`discarded`: see `model.host.ReplicaOperations.keep_iterations`. Raises UnsupportedError for a job or a
        version whose iterations cannot be recomputed."""
        missing = [name for name in _SCHEDULES if not callable(getattr(schedules, name, None))]
        if missing:
            raise UnsupportedError(f"megatron.core.pipeline_parallel.schedules has no {', '.join(missing)}")
        graphs = cuda_graphs(chunks[0].config)
        if graphs != "none":
            raise UnsupportedError(f"captured CUDA graphs ({graphs}) draw other random numbers when replayed")
        self._chunks, self._optimizer, self._buffers, self._completed = chunks, optimizer, buffers, completed
        self._recorded: _RecordedIteration | None = None
        for name in _SCHEDULES:
            wrap(schedules, name, self._recording)
        self._recomputing = False
        self._follow_checks(discarded)

    @property
    def number(self) -> int | None:
        """The number of the recorded iteration, from 1; None if there is none."""
        return None if self._recorded is None else self._recorded.number

    def _recording(self, original: Callable[..., Any], **arguments: Any) -> Any:
        if arguments.get("forward_only") or not torch.is_grad_enabled() or not self._is_ours(arguments["model"]):
            return original(**arguments)
        self._recorded = None  # free its memory before this iteration is recorded
        began, machine = rng_state(), _machine()
        validation = {name: copy.deepcopy(getattr(machine, name)) for name in _VALIDATION} if machine else {}
        buffers = [one.read().clone() for one in self._buffers]
        source = arguments["data_iterator"]
        batches: list[_Batches] = [[] for _ in source] if isinstance(source, list) else [[]]
        losses = original(**{**arguments, "data_iterator": _each(source, _RecordingIterator, batches)})
        number = self._completed() + 1
        self._recorded = _RecordedIteration(number, original, arguments, began, buffers, validation, batches, losses)
        return losses

    def _follow_checks(self, discarded: Callable[[], bool]) -> None:
        """Accept a result that Megatron's checks reject if the iteration is to be recomputed anyhow: otherwise Megatron
        would save the wrong replica and exit before its repair. Raise one that is still rejected after the repair."""
        kind: Any = getattr(rerun_state_machine, "RerunStateMachine", None)
        if not hasattr(kind, "validate_result"):
            return

        def validate_result(
            original: Any, machine: Any, result: Any, rejection_func: Any, message: str, *more: Any, **named: Any
        ) -> Any:
            def rejects(value: Any) -> bool:
                if not rejection_func(value):
                    return False
                if self._recomputing and named.get("fatal", True):
                    raise ReplicaError(
                        f"rank {torch.distributed.get_rank()}: iteration {self._completed() + 1} was recomputed after "
                        f"replicas were repaired, but Megatron's check still rejects its result ({message}: {value}): "
                        "the job goes back to an earlier version; if it repeats, look at the data and the loss"
                    )
                return self._recomputing or not discarded()

            return original(machine, result, rejects, message, *more, **named)

        kind.validate_result = inspect.unwrap(kind.validate_result)  # of a host that was built before, nothing is asked
        wrap(kind, "validate_result", validate_result)

    def _is_ours(self, model: Any) -> bool:
        return (model[0] if isinstance(model, list) else model) is self._chunks[0]

    @torch.no_grad()
    def _restore_begin(self, recorded: _RecordedIteration) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        for one, value in zip(self._buffers, recorded.buffers, strict=True):
            one.read().copy_(value)
        restore_rng(recorded.generators)

    def run(self) -> None:
        """Recompute the recorded iteration, before its update. A collective. Raises UnsupportedError if none is
        recorded."""
        recorded = self._recorded
        if recorded is None:
            raise UnsupportedError("no iteration of Megatron's schedules is recorded that could be recomputed")
        after = rng_state()
        self._restore_begin(recorded)
        self._recomputing = True
        try:
            with _validating(recorded.validation):
                source = recorded.arguments["data_iterator"]
                replayed = _each(source, lambda one, read: _replayed(read), recorded.batches)
                losses = recorded.schedule(**{**recorded.arguments, "data_iterator": replayed})
        finally:
            self._recomputing = False
        recorded.losses[:] = losses
        restore_rng(after)


class _RecordingIterator:
    """A data iterator that records each batch with the generators after its read."""

    def __init__(self, source: Any, into: list[tuple[Any, Mapping[str, Any]]]) -> None:
        self._source, self._into = source, into

    def __iter__(self) -> _RecordingIterator:
        return self

    def __next__(self) -> Any:
        batch = next(self._source)
        self._into.append((copy.deepcopy(batch), rng_state()))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


_Batches = list[tuple[Any, Mapping[str, Any]]]


def _each(source: Any, made: Callable[[Any, _Batches], Any], batches: list[_Batches]) -> Any:
    """What is made of the schedule's data iterator, or of each if there is one per chunk; None of None."""
    several = isinstance(source, list)
    pairs = zip(source if several else [source], batches, strict=True)
    iterators = [None if one is None else made(one, own) for one, own in pairs]
    return iterators if several else iterators[0]


def _replayed(batches: _Batches) -> Iterator[Any]:
    for batch, generators in batches:
        restore_rng(generators)
        yield copy.deepcopy(batch)


def _machine() -> Any:
    """Megatron-LM's rerun state machine, which validates results; None if it is not in use."""
    return getattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None)


@contextmanager
def _validating(known: Mapping[str, Any]) -> Iterator[None]:
    """Validate results from the recorded state, as the first time, and drop a request for a rerun."""
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
    """The state of all generators, Megatron's tensor- and expert-parallel streams included."""
    return rng.rng_state(get_cuda_rng_tracker())


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set all generators. Raises ResumeError if the tracker's streams are not those captured."""
    rng.restore_rng(state, get_cuda_rng_tracker())
