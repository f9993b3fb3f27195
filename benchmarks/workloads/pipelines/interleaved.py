"""The interleaved schedule of megatron-core: the operations of `forward_backward_pipelining_with_interleaving`.

A rank's forward passes are numbered through all of its chunks in the order of `schedule_table`; its backward passes
too, with the chunks from last to first. The k-th forward pass needs the output of the previous rank's k-th forward
pass; the k-th backward pass that of the next rank's. Where the model wraps around from one chunk to the next, the
leading rank (the first in forwards, the last in backwards) has no such neighbour. With n microbatches in a group, its
pass k needs the output of pass (k - n) of the rank at the other end; n is `grouped` (Megatron's
microbatch_group_size_per_vp_stage), or smaller in the last group. It receives the output of that rank's pass j right
after its own pass (j + ranks - 1).

Invariant: passes, sends, receives and waits have the order of megatron-core 0.16; every receive matches a send.
`overlap` is overlap_p2p_comm; overlap_p2p_comm_warmup_flush and overlap_moe_expert_parallel_comm are not modelled.

In: `Pipeline` with several chunks. Out: a rank's program.
"""

from __future__ import annotations

from collections import deque

from workloads.pipelines.pipeline import Compute, MessagePost, Messages, Operation, Pass, Pipeline, Wait, post_blocking


def schedule_table(pipeline: Pipeline) -> list[tuple[int, int]]:
    """(microbatch, chunk) of each forward pass of any rank: groups of microbatches, in each group chunk by chunk."""
    return [
        (microbatch, chunk)
        for first in range(0, pipeline.microbatches, pipeline.grouped)
        for chunk in range(pipeline.chunks)
        for microbatch in range(first, min(first + pipeline.grouped, pipeline.microbatches))
    ]


class Interleaved:
    """Builds the program of one rank."""

    def __init__(self, pipeline: Pipeline, rank: int) -> None:
        self._pipeline, self._rank = pipeline, rank
        self._is_first, self._is_last = rank == 0, rank == pipeline.ranks - 1
        self._table = schedule_table(pipeline)
        self._passes = len(self._table)
        warmup_passes = 2 * (pipeline.ranks - 1 - rank) + (pipeline.chunks - 1) * pipeline.grouped
        self._warmup_passes = min(warmup_passes, self._passes)
        self._operations: list[Operation] = []
        # receives posted and not yet waited for, oldest first
        self._activations: deque[Messages] = deque()
        self._gradients: deque[Messages] = deque()
        self._sent_forward: Messages = ()
        self._sent_backward: Messages = ()

    def program(self) -> list[Operation]:
        """The operations of one iteration."""
        self._warm_up()
        for k in range(self._passes - self._warmup_passes):
            (self._steady_overlapped if self._pipeline.overlap else self._steady_blocking)(k)
        self._flush()
        return self._operations

    def _warm_up(self) -> None:
        first_activation = () if self._is_first else (self._pipeline.activation(self._rank - 1, 0),)
        self._post_blocking((), first_activation)
        for k in range(self._warmup_passes):
            self._compute(Pass.FORWARD, k)
            begins_steady = k == self._warmup_passes - 1 and self._warmup_passes < self._passes
            gradient = self._first_gradient() if begins_steady else ()
            if self._pipeline.overlap:
                self._post_blocking(self._sends_after_forward(k), self._receives_after_forward(k))
                if gradient:
                    self._operations.append(MessagePost((), gradient, False))
                    self._gradients.append(gradient)
            else:
                self._post_blocking(self._sends_after_forward(k), self._receives_after_forward(k) + gradient)

    def _steady_blocking(self, k: int) -> None:
        """A forward pass and then the k-th backward pass; send and receive for both at once."""
        forward = k + self._warmup_passes
        self._compute(Pass.FORWARD, forward)
        self._compute(Pass.BACKWARD, k)
        self._post_blocking(
            self._sends_after_forward(forward) + self._sends_after_backward(k),
            self._receives_after_forward(forward) + self._receives_after_backward(k),
        )

    def _steady_overlapped(self, k: int) -> None:
        """A forward pass and then the k-th backward pass. Wait for a pass's send only after the next pass of its kind,
        and for a receive right before the pass that needs it."""
        forward = k + self._warmup_passes
        begins_model = self._is_first and self._table[forward][1] == 0  # the pass then needs no activation
        if self._activations and not begins_model:
            self._operations.append(Wait((), self._activations.popleft()))
        self._compute(Pass.FORWARD, forward)
        sends = self._sends_after_forward(forward)
        self._post(sends, self._receives_after_forward(forward), self._activations, self._sent_forward)
        self._sent_forward = sends
        self._wait_for_pending_gradient(k)
        self._compute(Pass.BACKWARD, k)
        sends = self._sends_after_backward(k)
        self._post(sends, self._receives_after_backward(k), self._gradients, self._sent_backward)
        self._sent_backward = sends

    def _flush(self) -> None:
        if self._warmup_passes == self._passes:
            self._post_blocking((), self._first_gradient())
        for k in range(self._passes - self._warmup_passes, self._passes):
            self._wait_for_pending_gradient(k)
            self._compute(Pass.BACKWARD, k)
            self._post_blocking(self._sends_after_backward(k), self._receives_after_backward(k))
        # the last forward send is never waited for: megatron-core does not wait for it either
        if self._sent_backward:
            self._operations.append(Wait(self._sent_backward, ()))

    def _wait_for_pending_gradient(self, k: int) -> None:
        """Wait for the gradient of the k-th backward if its receive was posted without waiting."""
        ends_model = self._is_last and self._chunk_backward(k) == self._pipeline.chunks - 1  # it needs no gradient
        if self._gradients and not ends_model:
            self._operations.append(Wait((), self._gradients.popleft()))

    def _post(self, sends: Messages, receives: Messages, pending: deque[Messages], previous_sends: Messages) -> None:
        """Post without waiting, then wait for the previous sends. `pending`: receives not yet waited for."""
        if sends or receives:
            self._operations.append(MessagePost(sends, receives, False))
        if previous_sends:
            self._operations.append(Wait(previous_sends, ()))
        if receives:
            pending.append(receives)

    def _compute(self, what: Pass, k: int) -> None:
        microbatch, chunk = self._table[k]
        self._operations.append(Compute(what, microbatch, chunk if what is Pass.FORWARD else self._chunk_backward(k)))

    def _post_blocking(self, sends: Messages, receives: Messages) -> None:
        self._operations.extend(post_blocking(sends, receives))

    def _chunk_backward(self, k: int) -> int:
        return self._pipeline.chunks - 1 - self._table[k][1]

    def _sends_after_forward(self, k: int) -> Messages:
        """The messages sent after the k-th forward pass."""
        microbatch, chunk = self._table[k]
        stage = chunk * self._pipeline.ranks + self._rank
        return (self._pipeline.activation(stage, microbatch),) if stage < self._pipeline.virtual_stages - 1 else ()

    def _sends_after_backward(self, k: int) -> Messages:
        """The messages sent after the k-th backward pass."""
        stage = self._chunk_backward(k) * self._pipeline.ranks + self._rank
        return (self._pipeline.gradient(stage, self._table[k][0]),) if stage else ()

    def _receives_after_forward(self, k: int) -> Messages:
        """The messages received after the k-th forward pass."""
        ranks = self._pipeline.ranks
        if k == self._passes - 1:
            return ()
        if not self._is_first:
            microbatch, chunk = self._table[k + 1]
            return (self._pipeline.activation(chunk * ranks + self._rank - 1, microbatch),)
        aligned = k - (ranks - 1)  # the last rank's pass at the same time
        if aligned < 0 or self._table[aligned][1] == self._pipeline.chunks - 1:
            return ()
        microbatch, chunk = self._table[aligned]
        return (self._pipeline.activation(chunk * ranks + ranks - 1, microbatch),)

    def _receives_after_backward(self, k: int) -> Messages:
        """The messages received after the k-th backward pass."""
        ranks = self._pipeline.ranks
        if k == self._passes - 1:
            return ()
        if not self._is_last:
            stage = self._chunk_backward(k + 1) * ranks + self._rank + 1
            return (self._pipeline.gradient(stage, self._table[k + 1][0]),)
        aligned = k - (ranks - 1)  # the first rank's pass at the same time
        if aligned < 0 or self._chunk_backward(aligned) == 0:
            return ()
        return (self._pipeline.gradient(self._chunk_backward(aligned) * ranks, self._table[aligned][0]),)

    def _first_gradient(self) -> Messages:
        if self._is_last:
            return ()
        stage = (self._pipeline.chunks - 1) * self._pipeline.ranks + self._rank + 1
        return (self._pipeline.gradient(stage, 0),)
