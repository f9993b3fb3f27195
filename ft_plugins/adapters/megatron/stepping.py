"""What replicas of a Megatron job have between two updates: gradients, and what is computed with beside what is held.

    optimizer                 gradients, by item                       copies
    FP32Optimizer             of the parameter (main_grad)             none: parameters are items
    Float16Optimizer...       of the parameter, of its master's item   the parameters, cast from their masters
    DistributedOptimizer      the part of main_grad that this rank     the parameters, cast and gathered; of fp32 ones
                              updates, of its shard's item             each rank's shard is a view of its part

Gradients are multiplied by the loss scale; clipping and unscaling come after `before_update`, in the update.

Invariant: facts and Megatron's own operations; what is to be done is decided elsewhere. Nothing is kept, and no
function of Megatron replaced, before `keep_iterations` or `before_reduction` asks for it.

In: what the host has. Out: `model.host.Steps`, for a host that is a `StateItems`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ...errors import UnsupportedError
from ...model.inventory import Inventory
from ...snapshot import codec
from ..host_parts import Recompute, StateItem, groups
from . import state
from .replay import MegatronReplay
from .support import is_stub


class MegatronStepping(Recompute[MegatronReplay]):
    """The part of a Megatron host that changes tensors between two updates."""

    rank: int
    chunks: tuple[Any, ...]
    optimizer: Any
    optimizers: tuple[Any, ...]
    _names: Mapping[torch.nn.Parameter, str]
    _completed: Callable[[], int]
    _replicas: Callable[[torch.nn.Parameter], tuple[int, ...]]
    _rebuild_derivable: Callable[[], None]
    _restore_optimizers: Callable[[Mapping[str, Any]], None]
    small_state: Callable[[], dict[str, Any]]
    _skipping = False  # whether the iteration under way is one whose batch is passed over

    def keep_iterations(self) -> None:
        """Keep from now on what `recompute` needs, where that can be done. Before the first iteration, once."""
        buffers = list(state.buffers(self.chunks, self.rank))
        self._start_replay(lambda: MegatronReplay(self.chunks, self.optimizer, buffers, self._completed))

    def recompute(self, step: int) -> None:
        """Gradients of iteration `step`, which is under way, once more. Of one whose batch the loop skips there are
        none. All ranks of the job call together."""
        replay = self._required_replay()
        if replay.number == step:
            replay.run()
        elif not self._skipping:
            raise UnsupportedError(
                f"rank {self.rank}: iteration {step} cannot be computed again: the last one that Megatron's schedules "
                f"have computed is {replay.number}; await verdicts before the forward (--paft-audit-at forward)"
            )

    def learning_rate(self) -> float:
        """The largest of the parameter groups, which Megatron's scheduler has set after the last update. 0 on a rank
        that updates nothing."""
        inner = (optimizer for optimizer in self.optimizers if not is_stub(optimizer))
        return max((float(group["lr"]) for one in inner for group in groups(one)), default=0.0)

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Between the reduction and the update, of what this rank updates."""
        found: dict[str, torch.Tensor] = {}
        for optimizer in self.optimizers:
            for one in state.trained(optimizer, self._names):
                gradient: torch.Tensor = one.parameter.main_grad  # type: ignore[attr-defined]  # set by Megatron's DDP
                if one.piece is not None:
                    gradient = gradient.view(-1)[one.piece[0] : one.piece[1]]
                found[one.item] = gradient
        return found

    def scalars(self) -> bytes:
        """Of the optimizers, their loss scalers and the scheduler; counters of the loop are none of it. b'' with the
        distributed optimizer: whether to update, all ranks agree there."""
        if any(isinstance(optimizer, DistributedOptimizer) for optimizer in self.optimizers):
            return b""
        small = self.small_state()
        return codec.encode({key: small[key] for key in ("groups", "scalars", "scalers", "scheduler")})

    def restore_scalars(self, encoded: bytes) -> None:
        """In place, as after a restore."""
        if encoded:
            self._restore_optimizers(codec.decode(encoded))

    def before_reduction(self, call: Callable[[int, Mapping[str, torch.Tensor]], None]) -> None:
        """Right before Megatron's DDP reduces; by the names of parameters, whole ones. Raises UnsupportedError where
        gradients are reduced while backward goes on."""
        first = self.chunks[0]
        if first.ddp_config.overlap_grad_reduce:
            raise UnsupportedError(
                f"rank {self.rank}: with --overlap-grad-reduce gradients are reduced while backward goes on: there is "
                "no moment before the reduction"
            )
        original = first.finish_grad_sync  # the first of all chunks', whose backward is over by then

        @functools.wraps(original)
        def finish_grad_sync(*args: Any, **kwargs: Any) -> Any:
            own = {name: p.main_grad for p, name in self._names.items() if hasattr(p, "main_grad")}
            call(self._completed() + 1, own)
            return original(*args, **kwargs)

        first.finish_grad_sync = finish_grad_sync

    def copies(self) -> Inventory:
        """See above. Raises UnsupportedError where they are gathered only while the next forward goes on."""
        return Inventory.of(self.rank, (one.item for one in self._copies))

    def copied(self) -> Mapping[str, torch.Tensor]:
        """The live parameters, by name."""
        return {one.item.name: one.read() for one in self._copies}

    def derive(self) -> None:
        """Masters -> parameters, then the parts of the other ranks. With the distributed optimizer a collective."""
        self._rebuild_derivable()

    @cached_property
    def _copies(self) -> list[StateItem]:
        found = list(state.copies(self.chunks, self.optimizers, self._replicas))
        if found and any(getattr(chunk.ddp_config, "overlap_param_gather", False) for chunk in self.chunks):
            raise UnsupportedError(
                f"rank {self.rank}: with --overlap-param-gather parameters are gathered behind the forward that uses "
                "them, later than they could be compared; drop it, or drop --paft"
            )
        return found
