"""What a DeepSpeed rank's training state is made of: the live tensors, and the scalars beside them.

Invariant: every tensor that training changes is exactly one item, or is derivable from items by DeepSpeed's own copy
and gather. Derivable, hence no item: low-precision parameters with an fp32 master, and what ZeRO gathers; padding of
flat partitions, which is zero and stays zero (it gets no gradient); gradients, zeroed in each iteration.

    torch's or a fused optimizer, no ZeRO         parameter, moments                     replicated over DP
    FP16_Optimizer (bf16 too), no ZeRO            fp32 master, moments                   replicated over DP
    BF16_Optimizer, DeepSpeedZeroOptimizer,       this rank's range of the fp32 master   this rank's alone
    DeepSpeedZeroOptimizer_Stage3                 of each parameter, and of its moments
    no optimizer updates it                       parameter (frozen; ZeRO-3: its range)  replicated (this rank's alone)
    buffers                                       as they are; may change anywhere       this rank's alone

Names are the module's own, with `:main` for a master and `:<key>` for optimizer state. ZeRO flattens parameters and
cuts the result over the ranks; items are views of the flat partition, one for each parameter that has elements in it,
so that another data-parallel size can take them over by element.

In: an engine. Out: `Fragment`s (what the inner optimizer updates), `StateItem`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...errors import InventoryError, ResumeError
from ...model.inventory import Role
from ..host_parts import ANYWHERE, NEVER, UPDATE, StateItem, first_step, is_item, own_copy, scalars_of, state_item


@dataclass(frozen=True)
class Fragment:
    """The elements of one parameter that this rank updates, `start` to `stop` of the flattened parameter.

    They are the whole of `main`, or `main` is flat and holds them from `offset` on.
    """

    parameter: torch.nn.Parameter  # the model's
    main: torch.Tensor  # what the inner optimizer updates
    offset: int | None  # None: `main` has the parameter's shape
    start: int
    stop: int
    numel: int  # of the whole parameter
    sharded: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fragment's part of a tensor that is laid out as `main` is."""
        return tensor.detach() if self.offset is None else tensor.detach()[self.offset : self.offset + self.size]

    @property
    def size(self) -> int:
        """How many elements."""
        return self.stop - self.start

    @property
    def piece(self) -> tuple[int, int, int] | None:
        """`Item.piece`."""
        return (self.start, self.stop, self.numel) if self.sharded else None


def inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that computes updates, in whatever DeepSpeed has wrapped it."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def mains(optimizer: Any) -> list[tuple[int, torch.Tensor]]:
    """What the inner optimizer updates, with the index of its parameter group, in a fixed order."""
    kind = type(optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer_Stage3":  # whose groups are filled for the time of a step only
        groups = optimizer.sub_group_to_group_id
        return [(groups[index], flat) for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat)]
    return [(index, main) for index, group in enumerate(inner(optimizer).param_groups) for main in group["params"]]


def kept_of(optimizer: Any, main: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor that the inner optimizer updates, and the tensors that it keeps for it."""
    yield main
    yield from (value for value in inner(optimizer).state[main].values() if is_item(value))


def fragments(optimizer: Any) -> Iterator[Fragment]:
    """Everything that the inner optimizer updates on this rank, parameter by parameter."""
    match type(optimizer).__name__:
        case "DeepSpeedZeroOptimizer_Stage3":
            for parameters, flat in zip(
                optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True
            ):
                yield from _of_stage3(parameters, flat)
        case "DeepSpeedZeroOptimizer":
            known = getattr(optimizer, "round_robin_bit16_offsets", None)  # since 0.18 parameters may have gaps between
            for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
                parameters = optimizer.round_robin_bit16_groups[index]
                offsets = known[index] if known is not None else _in_a_row(parameters)
                yield from _of_flat(parameters, offsets, flat, _place(optimizer.real_dp_process_group[index]))
        case "BF16_Optimizer":
            for index, flat in enumerate(optimizer.fp32_groups_flat_partition):
                parameters = optimizer.bf16_groups[index]
                yield from _of_flat(
                    parameters, _in_a_row(parameters), flat, _place(optimizer.real_dp_process_group[index])
                )
        case "FP16_Optimizer":
            for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
                for parameter, offset in zip(parameters, _in_a_row(parameters), strict=True):
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


def _in_a_row(parameters: Iterable[torch.Tensor]) -> list[int]:
    offsets, at = [], 0
    for parameter in parameters:
        offsets.append(at)
        at += parameter.numel()
    return offsets


def _place(group: Any) -> int:
    return int(torch.distributed.get_rank(group))


def _of_flat(
    parameters: Iterable[torch.nn.Parameter], offsets: Iterable[int], flat: torch.Tensor, place: int
) -> Iterator[Fragment]:
    """`flat` is the partition number `place` of the parameters, which lie at `offsets` of the whole; padding is cut."""
    first, last = place * flat.numel(), (place + 1) * flat.numel()
    for parameter, offset in zip(parameters, offsets, strict=True):
        low, high = max(first, offset), min(last, offset + parameter.numel())
        if low < high:
            yield Fragment(
                parameter, flat, low - first, low - offset, high - offset, parameter.numel(), True
            )


def _of_stage3(parameters: Iterable[Any], flat: torch.Tensor) -> Iterator[Fragment]:
    """Each parameter is cut into equal partitions over its group, the last one padded; `flat` joins this rank's."""
    offset = 0
    for parameter in parameters:
        size = parameter.partition_numel()
        low = min(_place(parameter.ds_process_group) * size, parameter.ds_numel)
        high = min(low + size, parameter.ds_numel)
        if low < high:
            yield Fragment(parameter, flat, offset, low, high, parameter.ds_numel, True)
        offset += size


def create_optimizer_state(optimizer: Any) -> None:
    """Give the inner optimizer the state that its first update would give it: zero moments, step 0. Idempotent."""
    updating = inner(optimizer)
    for index, main in mains(optimizer):
        kept, group = updating.state[main], updating.param_groups[index]
        if kept or isinstance(updating, torch.optim.SGD):
            continue
        adam = isinstance(updating, torch.optim.Adam | torch.optim.AdamW)
        kept["step"] = first_step(group, main) if adam else group.get("step", 0)  # else DeepSpeed's FusedAdam
        kept["exp_avg"] = torch.zeros_like(main.detach(), memory_format=torch.preserve_format)
        kept["exp_avg_sq"] = torch.zeros_like(main.detach(), memory_format=torch.preserve_format)


def held(engine: Any, rank: int, replicas: tuple[int, ...], first: bool = True) -> list[StateItem]:
    """Every item of this rank. Raises InventoryError for state that belongs to none of the kinds above.

    `first`: of its tensor-parallel neighbours: in a norm what all of them hold whole counts there, as in DeepSpeed's.
    """
    names: Mapping[Any, str] = {parameter: name for name, parameter in engine.module.named_parameters()}
    optimizer, updated = engine.optimizer, set()
    found: list[StateItem] = []
    for one in fragments(optimizer):
        if one.parameter not in names:
            raise InventoryError(
                f"rank {rank}: the optimizer updates a parameter of {one.numel} elements that the module does not have"
            )
        updated.add(one.parameter)
        own_replicas = (rank,) if one.sharded else replicas
        found.extend(_of_fragment(one, names[one.parameter], inner(optimizer), own_replicas, first))
    elsewhere = set(derived(optimizer))  # their elements are all on other ranks
    for parameter, name in names.items():
        if parameter in updated or parameter in elsewhere:
            continue
        if parameter.requires_grad:
            raise InventoryError(
                f"rank {rank}: parameter '{name}' requires a gradient, but no optimizer updates it: "
                "freeze it, or give it to the optimizer"
            )
        found.append(_frozen(name, parameter, rank, replicas, first))
    return [*found, *_buffers(engine.module, rank)]


def layer_of(name: str) -> int | None:
    """The layer by the number in a parameter's name: of a PipelineModule its place among all layers of the pipeline."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def derived(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """The parameters that are rebuilt from masters, those of this rank or of others."""
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        for group in getattr(optimizer, name, ()):
            yield from group


def _of_fragment(
    one: Fragment, name: str, optimizer: torch.optim.Optimizer, replicas: tuple[int, ...], first: bool
) -> Iterator[StateItem]:
    is_own = one.main is one.parameter
    role, label = (Role.PARAMETER, name) if is_own else (Role.MAIN_PARAMETER, f"{name}:main")
    layer, counts = layer_of(name), _counts(one.parameter, first)
    yield state_item(label, role, replicas, layer, UPDATE, partial(one.of, one.main), one.piece, counts)
    kept = optimizer.state[one.main]
    for key, value in kept.items():
        if is_item(value):
            read = lambda one=one, kept=kept, key=key: one.of(kept[key])  # noqa: E731
            yield state_item(f"{name}:{key}", Role.MOMENT, replicas, layer, UPDATE, read, one.piece, counts)


def _counts(parameter: Any, first: bool) -> bool:
    """Whether a norm over the whole model takes this rank's copy, as DeepSpeed's norm of gradients does."""
    cut = getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False)
    return (first or cut) and not getattr(parameter, "ds_pipe_replicated", False)


def _frozen(name: str, parameter: Any, rank: int, replicas: tuple[int, ...], first: bool) -> StateItem:
    layer, counts = layer_of(name), _counts(parameter, first)
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3 has cut it, padding included
        read = lambda: parameter.ds_tensor.detach()  # noqa: E731
        return state_item(name, Role.PARAMETER, (rank,), layer, NEVER, read, counts=counts)
    return state_item(name, Role.PARAMETER, replicas, layer, NEVER, parameter.detach, counts=counts)


def _buffers(module: torch.nn.Module, rank: int) -> Iterator[StateItem]:
    for name, buffer in module.named_buffers():
        owner, _, key = name.rpartition(".")
        part = module.get_submodule(owner)
        if isinstance(buffer, torch.Tensor):
            read = lambda part=part, key=key: part._buffers[key]  # noqa: E731  (may be replaced by the model)
            yield state_item(name, Role.BUFFER, (rank,), layer_of(name), ANYWHERE, read)


# beside the tensors


def scalars(optimizer: Any) -> list[dict[str, Any]]:
    """What the inner optimizer keeps without dimensions ('step'), for each tensor that it updates."""
    return [scalars_of(inner(optimizer).state[main]) for _, main in mains(optimizer)]


def restore_scalars(optimizer: Any, saved: list[dict[str, Any]]) -> None:
    """Set them, each in a tensor of its own. Raises ResumeError for another number of tensors."""
    updated = mains(optimizer)
    if len(updated) != len(saved):
        raise ResumeError(
            f"the optimizer updates {len(updated)} tensors, captured were the scalars of {len(saved)}: "
            "resume with the model and the settings of ZeRO of the captured job"
        )
    for (_, main), values in zip(updated, saved, strict=True):
        kept = inner(optimizer).state[main]
        kept.update({key: own_copy(value, kept.get(key)) for key, value in values.items()})


_PLAIN = (bool, int, float, str, type(None))
_OWN_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter")  # of optimizers that scale the loss themselves


def scaler(optimizer: Any) -> dict[str, Any]:
    """What scales the loss, as plain values; empty where the optimizer has nothing of the kind."""
    found = _scaler_of(optimizer)
    kept = {name: value for name, value in vars(found).items() if type(value) in _PLAIN} if found is not None else {}
    if found is optimizer:
        kept = {name: kept[name] for name in _OWN_SCALE if name in kept}
    overflow = getattr(optimizer, "overflow", None)
    return {"scaler": kept, "overflow": None if overflow is None else bool(overflow)}


def _scaler_of(optimizer: Any) -> Any:
    for name in ("loss_scaler", "loss_scale_config"):
        if getattr(optimizer, name, None) is not None:
            return getattr(optimizer, name)
    return optimizer if hasattr(optimizer, _OWN_SCALE[0]) else None


def restore_scaler(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Set it. Raises ResumeError where the loss was scaled otherwise."""
    ours = scaler(optimizer)["scaler"]
    if set(ours) != set(saved["scaler"]):
        raise ResumeError(
            f"the loss scaler keeps {sorted(ours)}, captured were {sorted(saved['scaler'])}: "
            "resume with the precision and the loss scale settings of the captured job"
        )
    for name, value in saved["scaler"].items():
        setattr(_scaler_of(optimizer), name, value)
    if saved["overflow"] is not None:
        optimizer.overflow = saved["overflow"]


# derivable


@torch.no_grad()
def rebuild_derivable(optimizer: Any) -> None:
    """Masters -> the parameters that the model computes with, then those of the other ranks. A collective."""
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
