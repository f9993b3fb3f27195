"""The replica operations of a Megatron host: gradients, copies, scalars, recompute.

    optimizer                 gradients, by item                       copies
    FP32Optimizer             of the parameter (main_grad)             none: parameters are items
    Float16Optimizer...       of the parameter, under its master       the parameters, cast from their masters
    DistributedOptimizer      the part of main_grad that this rank     the parameters, cast and gathered; of fp32 ones
                              updates, under its shard                 each rank's shard is a view of its part

Gradients are multiplied by the loss scale; clipping and unscaling come after `before_update`, in the update.

Invariant: only facts and Megatron's own operations; policies decide elsewhere. Nothing is recorded and no function of
Megatron replaced before `keep_iterations` or `before_reduction` is called.

In: a rank. Out: what `model.host.ReplicaOperations` asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from ...errors import UnsupportedError
from ...model.inventory import Inventory
from ..host_parts import StateItem, groups
from ..rules import findings, line
from ..rules.megatron import COMPARED, OTHERWISE
from ..script.script_hooks import wrap
from . import state
from .rank import MegatronRank
from .replay import MegatronReplay
from .support import is_stub


class MegatronStepping(MegatronRank):
    """The part of a Megatron host that implements `model.host.ReplicaOperations`, but for `scalars`."""

    _skipping = False  # whether the loop skips the batch of the present iteration

    def keep_iterations(self, discarded: Callable[[], bool] = lambda: False) -> None:
        self._require_replicas()
        buffers = list(state.buffers(self.chunks, self.rank))
        self._start_replay(lambda: MegatronReplay(self.chunks, self.optimizer, buffers, self._completed, discarded))

    def recompute(self, step: int) -> None:
        """Recompute iteration `step`; nothing if the loop skips its batch, so that there are no gradients."""
        replay = self._required_replay()
        if replay.number == step:
            replay.run()
        elif not self._skipping:
            raise UnsupportedError(
                f"rank {self.rank}: iteration {step} cannot be recomputed: Megatron's schedules last computed "
                f"{replay.number}; wait for the audit before the forward (--paft-audit-at forward)"
            )

    def learning_rate(self) -> float:
        """The largest of the parameter groups, set by Megatron's scheduler; 0 on a rank that updates nothing."""
        inner = (optimizer for optimizer in self.optimizers if not is_stub(optimizer))
        return max((float(group["lr"]) for one in inner for group in groups(one)), default=0.0)

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """The reduced gradients of what this rank updates."""
        gradients: dict[str, torch.Tensor] = {}
        for optimizer in self.optimizers:
            for one in state.trained(optimizer, self._names):
                gradient: torch.Tensor = one.parameter.main_grad  # type: ignore[attr-defined]  # set by Megatron's DDP
                if one.piece is not None:
                    gradient = gradient.view(-1)[one.piece[0] : one.piece[1]]
                gradients[one.item] = gradient
        return gradients

    def before_reduction(self, call: Callable[[int, Mapping[str, torch.Tensor]], None]) -> None:
        """Call `call` right before Megatron's DDP reduces, with whole gradients by parameter name. Raises
        UnsupportedError if the reduction overlaps the backward."""
        first = self.chunks[0]
        if first.ddp_config.overlap_grad_reduce:
            raise UnsupportedError(
                f"rank {self.rank}: with --overlap-grad-reduce gradients are reduced during the backward, so that "
                "nothing can be called before the reduction"
            )

        def finish_grad_sync(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            own = {name: p.main_grad for p, name in self._names.items() if hasattr(p, "main_grad")}
            call(self._completed() + 1, own)
            return original(*args, **kwargs)

        wrap(first, "finish_grad_sync", finish_grad_sync)  # called before the other chunks', after the backward of all

    def _require_replicas(self) -> None:
        """Raises UnsupportedError unless replicas can be compared and repaired."""
        job = {"num_distributed_optimizer_instances": self._instances, **self.built}
        if problem := line(findings(COMPARED, job, systems=("paft",)), OTHERWISE):
            raise UnsupportedError(f"rank {self.rank}: {problem}")

    def derive(self) -> None:
        self._rebuild_derived()

    def copies(self) -> Inventory:
        """See above. Raises UnsupportedError if replicas cannot be repaired."""
        self._require_replicas()
        return super().copies()

    @cached_property
    def _copies(self) -> list[StateItem]:
        return list(state.copies(self.chunks, self.optimizers, self._replicas))

    def finish_copies(self) -> None:
        """With --overlap-param-gather they are gathered now: the next forward finds that done, and overlaps nothing."""
        for chunk in self.chunks:
            if getattr(chunk.ddp_config, "overlap_param_gather", False):
                chunk.start_param_sync(force_sync=True)
