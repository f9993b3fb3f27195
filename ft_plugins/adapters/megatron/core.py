"""The host for a training loop on megatron.core: model chunks, optimizer, scheduler, and the caller's counters.

Invariant: building a host changes nothing, and installing it changes no numerics: what the optimizer keeps is known
before its first update makes it (`planned_state`), and `step` is wrapped on this one instance. `restore` leaves the job
as Megatron's own load would (param groups, scheduler, scaler, microbatch calculator), with the derived parameters
rebuilt by Megatron's own copy and gather; `restore_position` sets data position, then RNG.

In: what the training script has built, after `prepare()`. Out: a `model.host.Host`. The script's loop calls
`iteration_begin`, `iteration_end` and `shutdown` of the hooks; this module calls `before_update` and `after_update`.

Fault points:

    iteration.forward   first forward of an iteration     update.middle   inner optimizer stepped, nothing copied yet
    update.begin        after the fence; `inf` makes one gradient of this rank infinite      update.end   update done
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from megatron import core
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_micro_batch_size,
    update_num_microbatches,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ...base import faults
from ...errors import ResumeError
from ...model.host import Edges, Hooks, ScalarWriter
from ...model.observation import Observer
from ...model.progress import ProgressReceiver
from ...model.topology import Topology
from ...snapshot.capture import codec
from ..begun_again import BegunAgain
from ..data.observed_inputs import ObservedForwards, plain_number
from ..forward_edges import follow_forwards
from ..host_parts import groups, local_part, reach_fault_points, restore_groups
from ..observed import Root, module_roots
from ..parameter_groups import merged, numbered, packed, regrouped
from ..script.script_hooks import wrap
from ..script.undeclared_search import ignored
from . import fp8_scaling, inner_masters, state
from .reducing import MegatronReduction
from .replay import restore_rng, rng_state
from .support import is_stub, layer_wise

_ARCHITECTURE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("normalization", "layernorm_epsilon", "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
    *("hidden_dropout", "attention_dropout", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"),
    *("activation_func", "layernorm_zero_centered_gamma", "apply_residual_connection_post_layernorm", "window_size"),
    *("softmax_type", "rotary_interleaved", "multi_latent_attention", "apply_query_key_layer_scaling"),
    *("moe_router_load_balancing_type", "moe_router_score_function", "moe_router_pre_softmax", "moe_layer_freq"),
    *("mtp_num_layers", "params_dtype", "fp16", "bf16", "sequence_parallel"),
)
_FP8 = (  # left out without fp8
    *("fp8", "fp8_recipe", "fp8_param", "fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo"),
    *("fp8_wgrad", "tp_only_amax_red", "fp8_output_proj", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
)


@dataclass(frozen=True)
class StateEntry:
    """A part of the training state that the caller keeps: functions to read it as plain values and to set it."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


class MegatronCoreHost(MegatronReduction):
    """One rank of a Megatron job. Raises UnsupportedError, TopologyError or InventoryError if it is not supported.

    `completed()` is the number of completed iterations. A restore sets `counters` before the scheduler, and `position`
    (the data position) right before the first iteration. `consumed_samples()` drives a batch size ramp-up. `identity`
    is what the caller adds to the fingerprint: seed, batch sizes, data. `arguments` are Megatron-LM's, if the job has
    them; they are part of its checkpoints.
    """

    checkpoint_lacks = ""  # set by a loop that keeps more than Megatron saves
    write_scalars: ScalarWriter | None = None  # set by a loop that has a writer
    fault_points = {"iteration.forward": (), "update.begin": ("inf",), "update.middle": (), "update.end": ()}

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        *,
        topology: Topology,
        completed: Callable[[], int],
        counters: Mapping[str, StateEntry],
        position: Mapping[str, StateEntry],
        identity: Mapping[str, Any],
        consumed_samples: Callable[[], int] | None = None,
        arguments: argparse.Namespace | None = None,
    ) -> None:
        super().__init__(chunks, optimizer, topology, completed, arguments)
        self.framework = f"megatron-core {core.__version__}"
        self.scheduler, self._consumed_samples = scheduler, consumed_samples
        self._counters, self._position, self._identity = dict(counters), dict(position), dict(identity)
        self._observer: Observer | None = None
        self.observed = BegunAgain(
            self._modules,
            lambda: (*self.tensors().values(), *(one for chunk in self.chunks for one in chunk.parameters())),
            ignored,
        )
        self._restored: list[torch.Tensor] | None = None  # scales of casts; None if nothing was restored
        if fp8_scaling.in_use(self.chunks):
            self.checkpoint_lacks = fp8_scaling.LACKED

    # facts

    def names(self) -> Mapping[str, Any]:
        """See `naming`; only `problem` if the model's sharded state cannot be described."""
        return self._checkpoint_names

    def fingerprint(self) -> Mapping[str, Any]:
        config, chunk, topology = self.chunks[0].config, self.chunks[0], self._topology
        known = {field.name for field in fields(config)}
        sizes = {axis: getattr(topology, axis) for axis in ("tp", "pp", "dp", "cp", "ep", "vpp", "expert_tp", "order")}
        if self._instances > 1:  # left out if there is one, as in state captured by older versions
            sizes["optimizer_instances"] = self._instances
        if self.sharded:
            sizes["fsdp"] = sorted({type(chunk).__name__ for chunk in self.chunks})
        kinds = {type(one).__name__ for one in (*self.optimizers, *map(layer_wise, self.optimizers)) if one}
        inner = set(map(inner_masters.kind, self._inner()))
        names = (*_ARCHITECTURE, *(_FP8 if getattr(config, "fp8", None) else ()))
        return {
            "framework": "megatron",
            "architecture": {name: _plain(getattr(config, name)) for name in names if name in known},
            "parallel": sizes,
            "optimizer": sorted(kinds | inner),
            "gradient_buckets": getattr(chunk.ddp_config, "bucket_size", None),
            **self._identity,
        }

    @cached_property
    def _members(self) -> str:
        named = [state.grouped(optimizer, self._names) for optimizer in self.optimizers]
        return packed({key: own for place, one in enumerate(named) for key, own in numbered(one, str(place)).items()})

    def regrouped(self, small: Mapping[str, Any]) -> str:
        return regrouped(small.get("members"), self._members, partial=True)

    def small_state(self) -> dict[str, Any]:
        """All state that is not a tensor. Raises UnsupportedError for state that has appeared and is not captured."""
        fp8_scaling.require_no_other(self.chunks, self.rank)
        return {
            "groups": [groups(inner_masters.counted(optimizer)) for optimizer in self.optimizers],
            "members": self._members,
            "scalars": state.scalars(self.optimizers, self._names),
            "scalers": [scaler.state_dict() if scaler else None for scaler in self._scalers()],
            "scheduler": self.scheduler.state_dict(),
            "counters": {name: entry.read() for name, entry in self._counters.items()},
            "position": {name: entry.read() for name, entry in self._position.items()},
            "rng": rng_state(),
            **({"fp8_unused": fp8_scaling.unused(self.chunks)} if fp8_scaling.in_use(self.chunks) else {}),
        }

    def _modules(self) -> Iterator[Root]:
        for at, chunk in enumerate(self.chunks):
            yield from module_roots(f"chunk{at}", _unwrapped(chunk), () if at else self._inner())

    def _inner(self) -> list[torch.optim.Optimizer]:
        return [optimizer.optimizer for optimizer in self.optimizers if not is_stub(optimizer)]

    def scalars(self) -> bytes:
        """Scalars of the optimizers, loss scalers and scheduler, without the loop's counters. b'' with the distributed
        optimizer, with which all ranks agree whether to update."""
        if any(isinstance(optimizer, DistributedOptimizer) for optimizer in self.optimizers):
            return b""
        small = self.small_state()
        return codec.encode({key: small[key] for key in ("groups", "scalars", "scalers", "scheduler")})

    def restore_scalars(self, encoded: bytes) -> None:
        if encoded:
            self._restore_optimizers(codec.decode(encoded))

    def merged(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The small state of the first replica, as in Megatron's own checkpoints, with the scalars of all. Raises
        ResumeError with `_of_one_size`."""
        if self._of_one_size:
            raise ResumeError(
                f"rank {self.rank}: with {self._of_one_size} the number of ranks that train has to stay the same: "
                "resume with that of the captured job, or start with --ftp-resume fresh"
            )
        scalars: dict[str, Any] = {}
        for part in parts:
            scalars |= part["scalars"]
        members = [part["members"] for part in parts if "members" in part]
        return {**parts[0], "scalars": scalars, **({"members": merged(members)} if members else {})}

    def admits(self, replicas: int) -> bool:
        """Whether the global batch divides by `replicas`, as Megatron's microbatch calculator requires, and they by the
        instances of the distributed optimizer."""
        resized = replicas != self._topology.dp
        if replicas * self._topology.cp % self._instances or (resized and self._of_one_size):
            return False
        batch = get_current_global_batch_size()
        return batch is None or batch % (get_micro_batch_size() * replicas) == 0

    @property
    def _of_one_size(self) -> str:
        """What of this job was not tested at another number of ranks; '' if all was."""
        facts = {
            "parameters that FSDP divides": self.sharded,
            "a layer-wise optimizer": any(map(layer_wise, self.optimizers)),
            "optimizer state in fp16": any(map(inner_masters.scaled, self._inner())),
            "delayed scaling": fp8_scaling.in_use(self.chunks),
        }
        return next((name for name, holds in facts.items() if holds), "")

    def _scalers(self) -> list[Any]:
        return [getattr(optimizer, "grad_scaler", None) for optimizer in self.optimizers]

    # restore

    def restore(self, small: Mapping[str, Any]) -> None:
        self._require_same_parts(small)
        for name, entry in self._counters.items():
            entry.write(small["counters"][name])
        self._restore_optimizers(small)
        if self._consumed_samples is not None:
            update_num_microbatches(self._consumed_samples(), consistency_check=False)
        fp8_scaling.restore_used(self.chunks, small.get("fp8_unused", ""))
        self._rebuild_derived()
        self._restored = fp8_scaling.scales_of_casts(self.chunks)

    def _restore_optimizers(self, small: Mapping[str, Any]) -> None:
        for optimizer, captured in zip(self.optimizers, small["groups"], strict=True):
            restore_groups(inner_masters.counted(optimizer), captured)
        state.restore_scalars(self.optimizers, self._names, small["scalars"])
        for scaler, captured in zip(self._scalers(), small["scalers"], strict=True):
            if scaler:
                scaler.load_state_dict(captured)
        self._restore_scheduler(small["scheduler"])

    def restore_position(self, small: Mapping[str, Any]) -> None:
        for name, entry in self._position.items():
            entry.write(small["position"][name])
        restore_rng(small["rng"])

    def _require_same_parts(self, small: Mapping[str, Any]) -> None:
        ours = {
            "optimizers": len(self.optimizers),
            "loss scalers": [scaler is not None for scaler in self._scalers()],
            "counters": sorted(self._counters),
            "data positions": sorted(self._position),
        }
        captured = {
            "optimizers": len(small["groups"]),
            "loss scalers": [scaler is not None for scaler in small["scalers"]],
            "counters": sorted(small["counters"]),
            "data positions": sorted(small["position"]),
        }
        for part, present in ours.items():
            if present != captured[part]:
                raise ResumeError(
                    f"rank {self.rank}: {part}: this job has {present}, the captured job had {captured[part]}: "
                    "resume with the settings of the captured job, or start with --ftp-resume fresh"
                )

    def _restore_scheduler(self, captured: Mapping[str, Any]) -> None:
        """Restore by Megatron's own load, which sets lr and weight decay of all groups."""
        self.scheduler.num_steps = 0  # the load adds the captured steps
        try:
            self.scheduler.load_state_dict(dict(captured))
        except AssertionError as error:
            raise ResumeError(
                f"rank {self.rank}: the schedule differs from the captured one: {error}; use the captured job's "
                "settings of learning rate and weight decay, or choose with a flag of Megatron-LM: "
                "use_checkpoint_opt_param_scheduler takes the captured ones, override_opt_param_scheduler this job's"
            ) from error

    # hooks

    def loop_begins(self) -> None:
        """What a loop of its own has loaded, it has loaded by now, perhaps after a restore."""
        now = fp8_scaling.scales_of_casts(self.chunks)
        if self._restored is None or not all(map(torch.equal, now, self._restored)):
            fp8_scaling.note_cast(self.chunks)

    def install_edges(self, edges: Edges) -> None:
        from .spans import follow  # a version without these names still works if no system needs spans

        follow(self.chunks, edges, self.optimizer, self._inner())

    def install(self, hooks: Hooks) -> None:
        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            iteration = self._completed() + 1
            hooks.before_update(iteration)
            if faults.reach("update.begin", iteration=iteration) == "inf":
                self._set_infinite_gradient()
            outcome = original(*args, **kwargs)
            if outcome[0]:
                fp8_scaling.note_cast(self.chunks)
            if self._observer is not None:
                self._observer.computed(norm=plain_number(outcome[1]) if outcome[0] else math.inf)  # else skipped
            faults.reach("update.end", iteration=iteration)
            hooks.after_update(iteration)
            return outcome

        wrap(self.optimizer, "step", step)
        reach_fault_points(self.chunks, self._inner(), lambda: self._completed() + 1)

    def install_progress(self, progress: ProgressReceiver, spans: bool) -> None:
        """Report forwards, unless they are spans, and evaluations."""
        follow_forwards(self.chunks, progress, evaluations_only=spans)
        if any(getattr(chunk.ddp_config, "overlap_param_gather", False) for chunk in self.chunks):
            progress.shares_forward()

    def install_observer(self, observer: Observer) -> None:
        """Report what forwards read, and the norm of the gradients. The loss is known to the loop alone."""
        self._observer = observer
        ObservedForwards(self.chunks, observer)

    def skip_update(self, hooks: Hooks) -> None:
        """Call the hooks of an update in an iteration whose batch the loop skips. A collective.

        A capture may overwrite the oldest version only when every rank has passed the fence of the version between.
        The collectives of an update guarantee that; here a barrier does.
        """
        iteration = self._completed() + 1
        self._skipping = True
        hooks.before_update(iteration)
        self._skipping = False
        torch.distributed.barrier()
        hooks.after_update(iteration)

    def _set_infinite_gradient(self) -> None:
        """Make the gradient of the first parameter that this rank updates infinite.

        Without the distributed optimizer, Megatron checks for infinities over the model-parallel group only, and with
        several instances of it inside an instance: to skip the update on all replicas, arm the fault on all of them.
        """
        for optimizer in self.optimizers:
            for one in state.trained(optimizer, self._names):
                gradient = getattr(one.parameter, "main_grad", one.parameter.grad)  # the latter is a shard of FSDP
                if gradient is not None and local_part(gradient).numel():
                    local_part(gradient).fill_(float("inf"))
                    return


def _plain(value: Any) -> Any:
    """`value` as JSON values; a function or another object as text."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_plain(part) for part in value]
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    while isinstance(inner := chunk._modules.get("module"), torch.nn.Module):
        chunk = inner
    return chunk
