"""A DeepSpeed rank's training state: the live tensors as items, and scalar state.

Invariant: every tensor that training changes is exactly one item, or derives from items by DeepSpeed's own copy and
gather. Derived, hence not items: low-precision parameters with an fp32 master, and what ZeRO gathers. Also not items:
padding of flat partitions, which stays zero (it has no gradient), and gradients, which each iteration zeroes.

    torch's or a fused optimizer, no ZeRO         parameter, moments                     replicated over DP
    FP16_Optimizer (bf16 too), no ZeRO            fp32 master, moments                   replicated over DP
    BF16_Optimizer, DeepSpeedZeroOptimizer,       this rank's range of each parameter's  on this rank only
    DeepSpeedZeroOptimizer_Stage3                 fp32 master and moments
    no optimizer updates it                       parameter (frozen; ZeRO-3: its range)  replicated (ZeRO-3: this rank)
    buffers                                       as they are; may change anywhere       on this rank only

Names are the module's own, with `:main` for a master and `:<key>` for optimizer state. ZeRO flattens parameters and
partitions the result over the ranks; items are views of the flat partition, one for each parameter with elements in it,
so that another data-parallel size can take them over by element.

In: an engine. Out: `Fragment`s (what the inner optimizer updates), `StateItem`s."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress
from types import SimpleNamespace
from typing import Any

import torch

from ...errors import InventoryError, ResumeError, UnsupportedError
from ...model.inventory import Role
from ..host_parts import ANYWHERE, NEVER, UPDATE, StateItem, first_step, is_item, scalars_of, state_item
from ..planned_state import (
    PlannedTensor,
    allocate,
    item_of,
    items_of,
    plan_state,
    planned,
    set_numbers,
    set_plan,
)
from ..rules.deepspeed import CPU_ADAM

OWN_MOMENTS = {  # what DeepSpeed's own optimizers keep of a tensor from their first update on, and 'step'
    **dict.fromkeys(("FusedAdam", CPU_ADAM, "FusedLamb", "DeepSpeedCPULion"), ("exp_avg", "exp_avg_sq")),
    **{"FusedLion": ("exp_avg",), "DeepSpeedCPUAdagrad": ("exp_avg_sq",)},
}
_COUNTS_FROM = "__ft_counts_from__"  # attribute of one
_MODEL_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")  # attributes of optimizers with masters


@dataclass(frozen=True)
class Fragment:
    """The elements of one parameter that this rank updates: `start` to `stop` of the flattened parameter.

    They are all of `main`, or `main` is flat and holds them from `offset` on.
    """

    parameter: torch.nn.Parameter  # of the model
    main: torch.Tensor  # the tensor that the inner optimizer updates
    offset: int | None  # None: `main` has the parameter's shape
    start: int
    stop: int
    numel: int  # of the whole parameter
    sharded: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fragment's part of a tensor with the layout of `main`."""
        return tensor.detach() if self.offset is None else tensor.detach()[self.offset : self.offset + self.size]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def piece(self) -> tuple[int, int, int] | None:
        """(start, stop, total) in elements of the flattened parameter, if sharded."""
        return (self.start, self.stop, self.numel) if self.sharded else None


def inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that computes updates, inside DeepSpeed's wrapper if there is one."""
    unwrapped: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return unwrapped


def updating(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """`inner`, and the one with which ZeRO-3 updates what an offload of a part leaves on the device."""
    on_device = getattr(optimizer, "backup_optimizer", None)
    return (inner(optimizer),) if on_device is None else (inner(optimizer), on_device)


def all_groups(optimizer: Any) -> Any:
    """The parameter groups of `updating`, as of one optimizer."""
    return SimpleNamespace(param_groups=[group for one in updating(optimizer) for group in one.param_groups])


def _updates(optimizer: Any, main: torch.Tensor) -> torch.optim.Optimizer:
    """The one that updates a tensor."""
    return next((one for one in updating(optimizer)[1:] if main in planned(one)), inner(optimizer))


def _state_of(optimizer: Any, main: torch.Tensor) -> dict[str, Any]:
    """The state of a tensor as it is."""
    return _updates(optimizer, main).state.get(main) or {}


def is_own(updating: Any) -> bool:
    """Whether DeepSpeed made the class of an inner optimizer."""
    return type(updating).__module__.startswith("deepspeed.")


def updated_tensors(optimizer: Any) -> list[tuple[int, torch.Tensor]]:
    """(index of the parameter group, tensor) for each tensor that the inner optimizer updates, in a fixed order."""
    kind = type(optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer_Stage3":  # fills its groups only during a step
        groups = optimizer.sub_group_to_group_id
        return [(groups[index], flat) for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat)]
    return [(index, main) for index, group in enumerate(inner(optimizer).param_groups) for main in group["params"]]


def with_optimizer_state(optimizer: Any, main: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor that the inner optimizer updates, and its moments."""
    yield main
    yield from (value for value in _state_of(optimizer, main).values() if is_item(value))


def fragments(optimizer: Any) -> Iterator[Fragment]:
    """All that the inner optimizer updates on this rank, by parameter."""
    match type(optimizer).__name__:
        case "DeepSpeedZeroOptimizer_Stage3":
            for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
                yield from _of_stage3(parameters, flat)
        case "DeepSpeedZeroOptimizer":
            known = getattr(optimizer, "round_robin_bit16_offsets", None)  # since 0.18, with gaps
            for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
                parameters = optimizer.round_robin_bit16_groups[index]
                offsets = known[index] if known is not None else _contiguous_offsets(parameters)
                partition = _group_rank(optimizer.real_dp_process_group[index])
                yield from _of_flat(parameters, offsets, flat, partition)
        case "BF16_Optimizer":
            for index, flat in enumerate(optimizer.fp32_groups_flat_partition):
                parameters = optimizer.bf16_groups[index]
                partition = _group_rank(optimizer.real_dp_process_group[index])
                yield from _of_flat(parameters, _contiguous_offsets(parameters), flat, partition)
        case "FP16_Optimizer":
            for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
                for parameter, offset in zip(parameters, _contiguous_offsets(parameters), strict=True):
                    numel = parameter.numel()
                    yield Fragment(parameter, flat, offset, 0, numel, numel, False)
        case "FP16_UnfusedOptimizer":
            for parameters, own_mains in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                for parameter, main in zip(parameters, own_mains, strict=True):
                    yield _whole(parameter, main)
        case _:
            for group in optimizer.param_groups:
                yield from (_whole(parameter, parameter) for parameter in group["params"])


def _whole(parameter: torch.nn.Parameter, main: torch.Tensor) -> Fragment:
    return Fragment(parameter, main, None, 0, parameter.numel(), parameter.numel(), False)


def _contiguous_offsets(parameters: Iterable[torch.Tensor]) -> list[int]:
    return list(accumulate((parameter.numel() for parameter in parameters), initial=0))[:-1]


def _group_rank(group: Any) -> int:
    return int(torch.distributed.get_rank(group))


def _of_flat(
    parameters: Iterable[torch.nn.Parameter], offsets: Iterable[int], flat: torch.Tensor, partition: int
) -> Iterator[Fragment]:
    """`flat` is the partition of that number of the parameters, at `offsets` of the whole; padding is left out."""
    first, last = partition * flat.numel(), (partition + 1) * flat.numel()
    for parameter, offset in zip(parameters, offsets, strict=True):
        low, high = max(first, offset), min(last, offset + parameter.numel())
        if low < high:
            yield Fragment(parameter, flat, low - first, low - offset, high - offset, parameter.numel(), True)


def _of_stage3(parameters: Iterable[Any], flat: torch.Tensor) -> Iterator[Fragment]:
    """Each parameter has equal partitions over its group, the last one padded; `flat` joins this rank's."""
    offset = 0
    for parameter in parameters:
        size = parameter.partition_numel()
        low = min(_group_rank(parameter.ds_process_group) * size, parameter.ds_numel)
        high = min(low + size, parameter.ds_numel)
        if low < high:
            yield Fragment(parameter, flat, offset, low, high, parameter.ds_numel, True)
        offset += size


def plan_optimizer_state(optimizer: Any) -> None:
    """Find out what is kept of each updated tensor. Raises UnsupportedError."""
    updated = updated_tensors(optimizer)
    if len(updating(optimizer)) > 1:
        on_device = [place != "cpu" for _, place in sorted(optimizer.subgroup_to_device.items())]
        _plan(updating(optimizer)[1], list(compress(updated, on_device)))
        updated = [one for one, is_there in zip(updated, on_device, strict=True) if not is_there]
    _plan(inner(optimizer), updated)


def allocate_optimizer_state(optimizer: Any, names: Mapping[Any, str], absent: Collection[str]) -> None:
    """Give memory to the moments, but to none of the items `absent`. `names`: of the model's parameters."""
    mains = {one.main: names[one.parameter] for one in fragments(optimizer)}  # of its parameters all or none has them
    for main, name in mains.items():
        allocate(_updates(optimizer, main), main, lambda key, name=name: f"{name}:{key}" in absent)  # type: ignore[misc]


def _plan(updating: torch.optim.Optimizer, updated: Sequence[tuple[int, torch.Tensor]]) -> None:
    groups: Any = updating.param_groups
    adam = isinstance(updating, torch.optim.Adam | torch.optim.AdamW) and not any(one["amsgrad"] for one in groups)
    name = CPU_ADAM if adam else type(updating).__name__
    moments = OWN_MOMENTS.get(name, ()) if adam or is_own(updating) else ()
    if not moments:
        own = [[main for place, main in updated if place == index] for index in range(len(groups))]
        plan_state(updating, [{**group, "params": mains} for group, mains in zip(groups, own, strict=True)])
        return
    known: dict[torch.Tensor, Mapping[str, Any]] = {}
    for index, main in updated:  # without the copies of a large partition that `plan_state` makes
        step = first_step(groups[index], main) if adam else groups[index].get("step", 0)
        dtype = torch.float32 if getattr(updating, "fp32_optimizer_states", False) else None
        known[main] = {"step": step, **{key: PlannedTensor.like(main.detach(), dtype) for key in moments}}
    set_plan(updating, known)


def state_items(
    engine: Any, rank: int, replicas: tuple[int, ...], first: bool = True, sharers: tuple[int, ...] = ()
) -> list[StateItem]:
    """Every item of this rank. Raises InventoryError for state of none of the kinds above.

    `sharers`: the ranks that hold the same shards, if not this rank alone.

    `first`: whether this is the first tensor-parallel rank, the only one whose norm counts parameters that all of them
    hold whole, as in DeepSpeed.
    """
    names: Mapping[Any, str] = {parameter: name for name, parameter in engine.module.named_parameters()}
    optimizer, updated = engine.optimizer, set()
    items: list[StateItem] = []
    for one in fragments(optimizer):
        if one.parameter not in names:
            shape = tuple(getattr(one.parameter, "ds_shape", one.parameter.shape))
            raise InventoryError(
                f"rank {rank}: the optimizer updates a parameter of shape {shape} that engine.module "
                "does not have: build the optimizer from engine.module.parameters()"
            )
        updated.add(one.parameter)
        own_replicas = (sharers or (rank,)) if one.sharded else replicas_of(engine, one.parameter, replicas)
        items.extend(_of_fragment(one, names[one.parameter], optimizer, own_replicas, first))
    elsewhere = set(derived(optimizer))  # may have all elements on other ranks
    for parameter, name in names.items():
        if parameter in updated or parameter in elsewhere:
            continue
        if parameter.requires_grad:
            raise InventoryError(
                f"rank {rank}: parameter '{name}' requires a gradient, but no optimizer updates it: "
                "freeze it, or give it to the optimizer"
            )
        holders = replicas_of(engine, parameter, replicas)
        items.append(_frozen(name, parameter, sharers or (rank,), holders, first))
    return [*items, *_buffers(engine.module, rank)]


def replicas_of(engine: Any, parameter: torch.nn.Parameter, replicas: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that hold a whole parameter: of an expert those with the same experts, of others the `replicas`."""
    if getattr(parameter, "allreduce", True):
        return replicas
    group = engine.expert_data_parallel_group[parameter.group_name]  # type: ignore[attr-defined]
    return tuple(sorted(torch.distributed.get_process_group_ranks(group)))


def layer_of(name: str) -> int | None:
    """The first number in a parameter's name: in a PipelineModule the index among all layers of the pipeline."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def grouped(optimizer: Any) -> list[list[torch.nn.Parameter]]:
    """The parameters of the model in each group, the same on all data-parallel ranks."""
    if type(optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3":
        groups: list[list[torch.nn.Parameter]] = [[] for _ in inner(optimizer).param_groups]
        for index, parameters in enumerate(optimizer.fp16_groups):
            groups[optimizer.sub_group_to_group_id[index]] += parameters
        return groups
    known = (getattr(optimizer, name, None) for name in _MODEL_GROUPS)
    return next((list(map(list, one)) for one in known if one), [group["params"] for group in optimizer.param_groups])


def derived(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """The parameters that are rebuilt from masters, on this rank or others."""
    for name in _MODEL_GROUPS:
        for group in getattr(optimizer, name, ()):
            yield from group


def _of_fragment(
    one: Fragment, name: str, optimizer: Any, replicas: tuple[int, ...], first: bool
) -> Iterator[StateItem]:
    role, label = (Role.PARAMETER, name) if one.main is one.parameter else (Role.MAIN_PARAMETER, f"{name}:main")
    layer, in_norm = layer_of(name), _in_norm(one.parameter, first)
    yield state_item(label, role, replicas, layer, UPDATE, partial(one.of, one.main), one.piece, in_norm)
    updates = _updates(optimizer, one.main)
    for key, value in items_of(updates, one.main).items():
        if one.offset is not None and value.shape != one.main.shape:
            raise UnsupportedError(
                f"{type(inner(optimizer)).__name__} keeps '{key}' of shape {tuple(value.shape)} for a "
                f"flat partition of {one.main.numel()} elements, so its elements belong to no parameter; use "
                "another optimizer"
            )
        read = lambda one=one, key=key: one.of(item_of(updates, one.main, key))  # noqa: E731
        yield state_item(f"{name}:{key}", Role.MOMENT, replicas, layer, UPDATE, read, one.piece, in_norm)


def _in_norm(parameter: Any, first: bool) -> bool:
    """Whether a norm over the whole model counts it on this rank, as DeepSpeed's norm of gradients does."""
    sharded = getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False)
    return (first or sharded) and not getattr(parameter, "ds_pipe_replicated", False)


def _frozen(name: str, parameter: Any, sharers: tuple[int, ...], replicas: tuple[int, ...], first: bool) -> StateItem:
    layer, in_norm = layer_of(name), _in_norm(parameter, first)
    if hasattr(parameter, "ds_tensor"):  # partitioned by ZeRO-3, padding included
        read = lambda: parameter.ds_tensor.detach()  # noqa: E731
        return state_item(name, Role.PARAMETER, sharers, layer, NEVER, read, in_norm=in_norm)
    return state_item(name, Role.PARAMETER, replicas, layer, NEVER, parameter.detach, in_norm=in_norm)


def _buffers(module: torch.nn.Module, rank: int) -> Iterator[StateItem]:
    for name, buffer in module.named_buffers():
        owner, _, key = name.rpartition(".")
        part = module.get_submodule(owner)
        if isinstance(buffer, torch.Tensor):
            read = lambda part=part, key=key: part._buffers[key]  # noqa: E731  (may be replaced by the model)
            yield state_item(name, Role.BUFFER, (rank,), layer_of(name), ANYWHERE, read)


# scalar state


def scalars(optimizer: Any) -> list[dict[str, Any]]:
    """The inner optimizer's state without dimensions ('step'), for each tensor that it updates."""
    return [scalars_of(_state_of(optimizer, main)) for _, main in updated_tensors(optimizer)]


def counts_from(optimizer: Any) -> int:
    """The update from which DeepSpeedCPUAdam has multiplied its powers of beta up: 1, or the first after a load."""
    return int(getattr(inner(optimizer), _COUNTS_FROM, 1))


def count_from_loaded(optimizer: Any) -> None:
    """DeepSpeed has loaded a checkpoint into the optimizer, not into its compiled part."""
    if type(inner(optimizer)).__name__ == CPU_ADAM:
        steps = [int(_state_of(optimizer, main).get("step", 0)) for _, main in updated_tensors(optimizer)]
        setattr(inner(optimizer), _COUNTS_FROM, 1 + max(steps, default=0))


def restore_scalars(optimizer: Any, saved: list[dict[str, Any]], since: int = 1) -> None:
    """Set them, each in a tensor of its own. `since`: as `counts_from`. Raises ResumeError if the number of tensors
    differs."""
    updated = updated_tensors(optimizer)
    if len(updated) != len(saved):
        raise ResumeError(
            f"the optimizer updates {len(updated)} tensors, but the captured job's updated {len(saved)}: resume with "
            "the captured job's model and ZeRO settings"
        )
    for (_, main), values in zip(updated, saved, strict=True):
        set_numbers(_updates(optimizer, main), main, values)
    if type(inner(optimizer)).__name__ == CPU_ADAM:
        _count_up(inner(optimizer), [one for one in updated if one[1] in inner(optimizer).state], since)


def _count_up(optimizer: Any, updated: Sequence[tuple[int, torch.Tensor]], since: int) -> None:
    """Bring DeepSpeedCPUAdam's powers of its betas to the restored step, by updates of nothing. It multiplies them up
    from update to update in compiled code, out of reach, and computes them again where one does not follow the last."""
    setattr(optimizer, _COUNTS_FROM, since)
    steps = {int(optimizer.state[main]["step"]) for _, main in updated}
    if len(steps) > 1:
        raise ResumeError(
            f"DeepSpeedCPUAdam has made between {min(steps)} and {max(steps)} updates of its tensors, so its powers of "
            "beta cannot be restored exactly; start with --ftp-resume fresh"
        )
    nothing = torch.empty(0)
    for step in range(since, 1 + max(steps, default=0)):
        for index, _ in updated:
            group = optimizer.param_groups[index]
            settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
            optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *settings, *[nothing] * 4)


_PLAIN = (bool, int, float, str, type(None))
_OWN_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter")  # attributes of optimizers that scale the loss themselves


def scaler(optimizer: Any) -> dict[str, Any]:
    """Plain values: 'scaler': attributes of the loss scaler, empty without one; 'overflow': bool, None if unknown."""
    owner = _scaler_of(optimizer)
    values = {} if owner is None else {name: value for name, value in vars(owner).items() if type(value) in _PLAIN}
    if owner is optimizer:
        values = {name: values[name] for name in _OWN_SCALE if name in values}
    overflow = getattr(optimizer, "overflow", None)
    return {"scaler": values, "overflow": None if overflow is None else bool(overflow)}


def _scaler_of(optimizer: Any) -> Any:
    for name in ("loss_scaler", "loss_scale_config"):
        if getattr(optimizer, name, None) is not None:
            return getattr(optimizer, name)
    return optimizer if hasattr(optimizer, _OWN_SCALE[0]) else None


def restore_scaler(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Set the loss scaler's state. Raises ResumeError if the captured job scaled the loss differently."""
    present = scaler(optimizer)["scaler"]
    now, captured = set(present), set(saved["scaler"])
    if now != captured:
        raise ResumeError(
            f"the loss scaler is of another kind than the captured job's: only now {sorted(now - captured)}, only "
            f"captured {sorted(captured - now)}; resume with the captured job's precision and loss scale settings"
        )
    for name, value in saved["scaler"].items():
        setattr(_scaler_of(optimizer), name, value)
    if saved["overflow"] is not None:
        optimizer.overflow = saved["overflow"]


# derived parameters


@torch.no_grad()
def rebuild_derived(optimizer: Any) -> None:
    """Cast masters to the parameters that the model computes with, and gather those of other ranks. A collective."""
    match type(optimizer).__name__:
        case "DeepSpeedZeroOptimizer_Stage3":
            for index in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
            persistent = optimizer.persistent_parameters
            if persistent:
                persistent[0].partition(persistent)
                persistent[0].all_gather(persistent)
            optimizer.invalidate_secondary_tensor()
        case "DeepSpeedZeroOptimizer":
            optimizer.update_lp_params()
            for index in range(len(optimizer.bit16_groups)):
                optimizer._update_model_bit16_weights(index)
        case "BF16_Optimizer":
            optimizer.update_lp_params()
        case "FP16_Optimizer" | "FP16_UnfusedOptimizer":
            for one in fragments(optimizer):
                one.parameter.data.copy_(one.of(one.main).view(one.parameter.shape))
