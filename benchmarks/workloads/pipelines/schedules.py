"""Pipeline schedules as data: what each rank of a pipeline computes, sends and receives in one iteration, in order.

    gpipe         all forwards, then all backwards, the newest microbatch first (GPipe, figure 2)
    1f1b          megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving:
                  p-1-rank forwards to warm up, then one forward, one backward; sends and receives in blocking pairs
    interleaved   ..._with_interleaving: each rank has `chunks` pieces of the model, with `group` microbatches of one
                  in a row; without `overlap`: megatron-core's default, with it: Megatron-LM's
                  (--overlap-p2p-communication-warmup-flush, which also overlaps warm-up and flush, is not modelled)
    deepspeed     deepspeed.runtime.pipe.schedule.TrainSchedule: 1f1b, each send and receive separate and blocking,
                  results sent one step after they were made
    zero-bubble   ZB-H1 (Qi et al., 'Zero Bubble Pipeline Parallelism'): 1f1b with weight gradients deferred on rank r
                  by r microbatches, so no rank holds more activations than rank 0 of 1f1b; receives are posted a pass
                  ahead, sends are not waited for
    chimera       two replicas of the model in opposite directions (Li and Hoefler, 'Chimera', figure 3): half of the
                  microbatches begin on the last rank, whose stage is then the first. Messages as with zero-bubble. The
                  reduction of gradients over the two replicas is not modelled

Invariant: a program has each pass and each end of each message once; a wait follows its post.

In: `Pipeline`. Out: `program`, a rank's list of `Compute`, `MessagePost` and `Wait`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workloads.pipelines.interleaved import Interleaved
from workloads.pipelines.pipeline import (
    Compute,
    MessagePost,
    Messages,
    Operation,
    Pass,
    Pipeline,
    PipelineSchedule,
    Wait,
    post_blocking,
)


def program(pipeline: Pipeline, rank: int) -> list[Operation]:
    """The operations of `rank` in one iteration, up to its last backward pass."""
    match pipeline.schedule:
        case PipelineSchedule.GPIPE:
            return list(_gpipe(_Ends(pipeline, rank)))
        case PipelineSchedule.ONE_F_ONE_B:
            return list(_one_f_one_b(_Ends(pipeline, rank)))
        case PipelineSchedule.DEEPSPEED:
            return list(_deepspeed(_Ends(pipeline, rank)))
        case PipelineSchedule.ZERO_BUBBLE:
            return _posted_ahead(pipeline, rank, _zero_bubble_passes(pipeline, rank))
        case PipelineSchedule.CHIMERA:
            return _posted_ahead(pipeline, rank, _chimera_passes(pipeline, rank))
        case PipelineSchedule.INTERLEAVED:
            return Interleaved(pipeline, rank).program()


@dataclass(frozen=True)
class _Ends:
    """The messages of a rank (chimera: of a stage) with one chunk; empty at the ends of the pipeline."""

    pipeline: Pipeline
    rank: int

    def receive_forward(self, microbatch: int) -> Messages:
        return (self.pipeline.activation(self.rank - 1, microbatch),) if self.rank else ()

    def send_forward(self, microbatch: int) -> Messages:
        return (self.pipeline.activation(self.rank, microbatch),) if self.rank < self.pipeline.ranks - 1 else ()

    def receive_backward(self, microbatch: int) -> Messages:
        return (self.pipeline.gradient(self.rank + 1, microbatch),) if self.rank < self.pipeline.ranks - 1 else ()

    def send_backward(self, microbatch: int) -> Messages:
        return (self.pipeline.gradient(self.rank, microbatch),) if self.rank else ()


def _gpipe(ends: _Ends) -> Iterator[Operation]:
    for microbatch in range(ends.pipeline.microbatches):
        yield from post_blocking((), ends.receive_forward(microbatch))
        yield Compute(Pass.FORWARD, microbatch, 0)
        yield from post_blocking(ends.send_forward(microbatch), ())
    for microbatch in reversed(range(ends.pipeline.microbatches)):
        yield from post_blocking((), ends.receive_backward(microbatch))
        yield Compute(Pass.BACKWARD, microbatch, 0)
        yield from post_blocking(ends.send_backward(microbatch), ())


def _one_f_one_b(ends: _Ends) -> Iterator[Operation]:
    count = ends.pipeline.microbatches
    warm = _warm_up(ends.pipeline, ends.rank)
    for forward in range(warm):
        yield from post_blocking((), ends.receive_forward(forward))
        yield Compute(Pass.FORWARD, forward, 0)
        yield from post_blocking(ends.send_forward(forward), ())
    if warm < count:
        yield from post_blocking((), ends.receive_forward(warm))
    for backward, forward in enumerate(range(warm, count)):
        yield Compute(Pass.FORWARD, forward, 0)
        yield from post_blocking(ends.send_forward(forward), ends.receive_backward(backward))
        yield Compute(Pass.BACKWARD, backward, 0)
        following = ends.receive_forward(forward + 1) if forward + 1 < count else ()
        yield from post_blocking(ends.send_backward(backward), following)
    for backward in range(count - warm, count):
        yield from post_blocking((), ends.receive_backward(backward))
        yield Compute(Pass.BACKWARD, backward, 0)
        yield from post_blocking(ends.send_backward(backward), ())


def _deepspeed(ends: _Ends) -> Iterator[Operation]:
    """In each step a rank alternates between a forward and a backward pass; steps at both ends may have none."""
    count, ranks, rank = ends.pipeline.microbatches, ends.pipeline.ranks, ends.rank
    before = -1
    for step in range(2 * (count + ranks - 1)):
        forward = (step + rank) % 2 == 0
        microbatch = (step - rank) // 2 if forward else (step + rank + 1) // 2 - ranks
        now, last = 0 <= microbatch < count, 0 <= before < count
        if forward:
            yield from post_blocking(ends.send_backward(before) if last else (), ())
            yield from post_blocking((), ends.receive_forward(microbatch) if now else ())
        else:
            yield from post_blocking((), ends.receive_backward(microbatch) if now else ())
            yield from post_blocking(ends.send_forward(before) if last else (), ())
        if now:
            yield Compute(Pass.FORWARD if forward else Pass.BACKWARD, microbatch, 0)
        before = microbatch


def _zero_bubble_passes(pipeline: Pipeline, rank: int) -> list[Compute]:
    count, warm = pipeline.microbatches, _warm_up(pipeline, rank)
    passes = [Compute(Pass.FORWARD, forward, 0) for forward in range(warm)]
    for backward in range(count):
        if backward + warm < count:
            passes.append(Compute(Pass.FORWARD, backward + warm, 0))
        passes.append(Compute(Pass.BACKWARD, backward, 0))
        if backward >= rank:
            passes.append(Compute(Pass.WEIGHT, backward - rank, 0))
    return passes + [Compute(Pass.WEIGHT, weight, 0) for weight in range(max(0, count - rank), count)]


def _chimera_passes(pipeline: Pipeline, rank: int) -> list[Compute]:
    """By the slots of passes of equal length, in which no two of a rank meet. A unit has as many microbatches as there
    are ranks, and begins as many passes after the one before as a rank has of a unit."""
    ranks, slots = pipeline.ranks, []
    for microbatch in range(pipeline.microbatches):
        unit, place = divmod(microbatch, ranks)
        upward = pipeline.upward(microbatch)
        stage = ranks - 1 - rank if upward else rank
        number = place - (min(ranks, pipeline.microbatches - unit * ranks) + 1) // 2 if upward else place
        first = 2 * (ranks * unit + number)
        slots.append((first + stage, Compute(Pass.FORWARD, microbatch, 0)))
        slots.append((first + 2 * ranks - 1 - stage, Compute(Pass.BACKWARD, microbatch, 0)))
    return [one for _, one in sorted(slots, key=lambda each: each[0])]


def _posted_ahead(pipeline: Pipeline, rank: int, passes: list[Compute]) -> list[Operation]:
    """The program of `passes` with the receive of each posted before the previous pass."""
    down, up = _Ends(pipeline, rank), _Ends(pipeline, pipeline.ranks - 1 - rank)
    ends = [up if pipeline.upward(one.microbatch) else down for one in passes]
    receive = {Pass.FORWARD: _Ends.receive_forward, Pass.BACKWARD: _Ends.receive_backward}
    send = {Pass.FORWARD: _Ends.send_forward, Pass.BACKWARD: _Ends.send_backward}
    needs = [
        receive[one.what](end, one.microbatch) if one.what in receive else ()
        for one, end in zip(passes, ends, strict=True)
    ] + [()]
    operations: list[Operation] = [MessagePost((), needs[0], False)] if needs[0] else []
    for one, end, need, following in zip(passes, ends, needs, needs[1:], strict=False):
        if need:
            operations.append(Wait((), need))
        if following:
            operations.append(MessagePost((), following, False))
        operations.append(one)
        if one.what in send and (made := send[one.what](end, one.microbatch)):
            operations.append(MessagePost(made, (), False))
    return operations


def _warm_up(pipeline: Pipeline, rank: int) -> int:
    return min(pipeline.ranks - 1 - rank, pipeline.microbatches)
