"""What a DeepSpeed host offers between two updates: gradients, and copies that ranks compute with.

    optimizer                    gradients, by item                         copies
    torch's, no ZeRO             of the parameter                           none: parameters are items
    FP16_Optimizer (bf16 too)    of the parameter, under its master's item  the parameters, cast from the masters
    BF16_Optimizer, ZeRO-1, 2    this rank's range                          the parameters, cast and gathered
    ZeRO-3                       none                                       refused: nothing is gathered between updates

Gradients of fp16 are multiplied by the loss scale; clipping and unscaling come after `before_update`, in the update.

Invariant: facts and DeepSpeed's own operations only; decisions are made elsewhere.

In: an engine. Out: what `model.host.ReplicaOperations` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch

from ...errors import UnsupportedError
from ...model.inventory import Role
from ..host_parts import UPDATE, StateItem, state_item
from ..script.script_hooks import wrap
from . import state
from .reducing import STAGE3, DeepSpeedReduction
from .replay import DeepSpeedReplay

Strike = Callable[[int, Mapping[str, torch.Tensor]], None]
_PLAIN = (
    "the script may compute anything between engine(...) and engine.backward(...); with --paft-audit-at forward "
    "verdicts come before that, and nothing has to be recomputed"
)


class DeepSpeedStepping(DeepSpeedReduction):
    """The part of a DeepSpeed host that changes tensors between two updates, but for `scalars`."""

    @property
    def clips_together(self) -> str:  # type: ignore[override]
        """Only in float32 without ZeRO: in low precision each replica clips by its own norm, or all by that of all
        shards."""
        engine = self.engine
        low = engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization()
        return "" if low or not engine.gradient_clipping() else "DeepSpeed clips by the mean of all replicas' norms"

    def keep_iterations(self, discarded: Callable[[], bool] = lambda: False) -> None:
        """Only for a pipeline: what a script computes between the engine's calls is unknown. Raises UnsupportedError
        for MoE."""
        if getattr(self.engine, "has_moe_layers", False):
            raise UnsupportedError(
                f"rank {self.rank}: MoE layers: copies and gradients of experts have other replicas than the rest of "
                "the model, and are not compared apart; drop --paft"
            )
        if not hasattr(self.engine, "train_batch"):
            self.no_recompute_reason = _PLAIN
            return
        self._start_replay(lambda: DeepSpeedReplay(self.engine))

    def recompute(self, step: int) -> None:
        """Recompute the gradients of the current iteration `step`. A collective of the job."""
        self._required_replay().run()
        self.complete_reduction()

    def learning_rate(self) -> float:
        """The largest of the parameter groups, which is that of the coming update: DeepSpeed steps the scheduler after
        an update. Raises UnsupportedError for an optimizer without a learning rate."""
        group_rates = rates(state.inner(self.engine.optimizer))
        if not group_rates:
            raise UnsupportedError(
                f"rank {self.rank}: the optimizer has no learning rate: give its param_groups an 'lr', or remove the "
                "block ft_plugins from the DeepSpeed configuration"
            )
        return max(group_rates)

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Reduced gradients, before the update. With ZeRO and BF16_Optimizer the range that this rank updates."""
        optimizer = self.engine.optimizer
        if type(optimizer).__name__ == STAGE3:
            return {}
        flat_gradient = _flat_gradients(optimizer)
        gradients: dict[str, torch.Tensor] = {}
        for one in state.fragments(optimizer):
            gradient = one.parameter.grad if flat_gradient is None else flat_gradient(one)
            if gradient is not None:
                label = self._names[one.parameter]
                gradients[label if one.main is one.parameter else f"{label}:main"] = gradient.detach()
        return gradients

    def before_reduction(self, call: Strike) -> None:
        """Call `call(step, gradients)` right before DeepSpeed's data-parallel reduction; gradients are whole, by
        parameter name. Raises UnsupportedError if gradients are reduced one by one during backward."""
        engine, optimizer = self.engine, self.engine.optimizer
        if getattr(optimizer, "partition_gradients", False) or getattr(optimizer, "overlap_comm", False):
            raise UnsupportedError(
                f"rank {self.rank}: ZeRO-2, ZeRO-3 and overlap_comm reduce gradients during backward: there is no "
                "moment before the reduction"
            )
        zero = type(optimizer).__name__ == "DeepSpeedZeroOptimizer"
        owner, name = (optimizer, "reduce_gradients") if zero else (engine, "buffered_allreduce_fallback")

        def reduce(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            call(engine.global_steps + 1, dict(self._unreduced()))
            return original(*args, **kwargs)

        wrap(owner, name, reduce)

    def _unreduced(self) -> Iterator[tuple[str, torch.Tensor]]:
        optimizer = self.engine.optimizer
        if type(optimizer).__name__ == "BF16_Optimizer":
            for parameters, gradients in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    yield self._names[parameter], gradient
            return
        for parameter, name in self._names.items():
            own = getattr(parameter, "grad_accum", None)
            gradient = parameter.grad if own is None else own
            if gradient is not None:
                yield name, gradient.detach()

    def derive(self) -> None:
        """Rebuild parameters from masters. A collective with ZeRO and BF16_Optimizer."""
        state.rebuild_derived(self.engine.optimizer)

    @cached_property
    def _copies(self) -> list[StateItem]:
        """The table above. Raises UnsupportedError for ZeRO-3."""
        if type(self.engine.optimizer).__name__ == STAGE3:
            raise UnsupportedError(
                f"rank {self.rank}: ZeRO-3 gathers parameters only while they are used: between two updates a single "
                "rank holds each element, and there is nothing to compare or average; drop --paft"
            )
        replicas = self._topology.replicas(self.rank)
        return [
            state_item(
                self._names[parameter], Role.COPY, replicas, state.layer_of(self._names[parameter]), UPDATE,
                parameter.detach,
            )
            for parameter in state.derived(self.engine.optimizer)
        ]  # fmt: skip

    @cached_property
    def _names(self) -> dict[torch.nn.Parameter, str]:
        return {parameter: name for name, parameter in self.engine.module.named_parameters()}


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]


def _flat_gradients(optimizer: Any) -> Callable[[state.Fragment], torch.Tensor | None] | None:
    """Maps a fragment to its gradient, if gradients are laid out like masters; None if each parameter has its own."""
    match type(optimizer).__name__:
        case "BF16_Optimizer":
            flat = {
                main: gradients
                for (_, main), gradients in zip(
                    state.updated_tensors(optimizer), optimizer.fp32_groups_gradient_flat_partition, strict=True
                )
            }
            return lambda one: one.of(flat[one.main])
        case "DeepSpeedZeroOptimizer":
            pieces: dict[tuple[torch.Tensor, int], torch.Tensor] = {}
            for index, main in state.updated_tensors(optimizer):
                at = 0
                for piece in optimizer.averaged_gradients.get(index) or ():
                    pieces[main, at] = piece.view(-1)
                    at += piece.numel()
            return lambda one: pieces.get((one.main, one.offset or 0))
    return None
