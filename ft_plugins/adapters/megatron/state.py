"""List the training state of a Megatron rank: the live tensors as state items, and the optimizers' scalars.

Invariant: every tensor that training changes is exactly one item, or is derived from items by Megatron's own copy
and gather. Derived: low-precision parameters with an fp32 master, and with the distributed optimizer every parameter
that it gathers (the shard of the owning rank is the item). Gradients are zeroed in each iteration and not captured.

    FP32Optimizer                   parameter, moments                replicated over DP x CP (experts: expert DP)
    Float16Optimizer...             fp32 master, moments              the same
    DistributedOptimizer            shard of the fp32 master or of    over its instances; not replicated if there
                                    the fp32 parameter, moments       is one (see `instances`)
    the same, whose inner one       shard of the parameter or of the  the same
    keeps masters (`inner_masters`) copy of it, masters, moments
    sharded by FSDP (see `fsdp`)    shard of the above                not replicated
    those that a layer-wise one     the same as without it, of the    not replicated: each parameter is updated
    (Muon's) chains                 parameters it gave to this rank   on one rank, and gathered on the others
    no optimizer updates it         parameter (frozen)                replicated over DP x CP (experts: expert DP)
    buffers, scales for fp8         may change at any time            not replicated

Names are `chunk<i>.<parameter>`, with `:main` for a master and `:<key>` for optimizer state. Moments are all tensors
with dimensions that the inner optimizer keeps per parameter, FusedAdam's as well as torch Adam's; those without
dimensions ('step') are small state.

In: model chunks, optimizers, functions from a parameter to its replica set and to that of its shard. Out: `StateItem`,
`TrainedParameter`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from ...errors import InventoryError, ResumeError
from ...model.inventory import Role
from ..host_parts import ANYWHERE, NEVER, UPDATE, StateItem, scalars_of, state_item
from ..planned_state import allocate, item_of, items_of, plan_state, set_numbers
from . import fp8_scaling, fsdp, inner_masters
from .support import is_stub, layer_wise

Replicas = Callable[[torch.nn.Parameter], tuple[int, ...]]


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that an optimizer updates on this rank."""

    name: str
    parameter: torch.nn.Parameter  # the model's
    main: torch.Tensor  # what the inner optimizer updates: the parameter, its fp32 master, or this rank's shard
    inner: torch.optim.Optimizer
    held: torch.Tensor  # the tensor under which the inner optimizer keeps state of `main`
    # (start, stop, total) in elements of the flattened parameter, if other replicas do not update the same
    piece: tuple[int, int, int] | None = None
    scales: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of state in fp16, by key

    @property
    def item(self) -> str:
        """The name of the item that is updated."""
        return self.name if self.main is self.parameter else f"{self.name}:main"

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """What the inner optimizer keeps of it: tensors with dimensions, by key; stand-ins of those to come."""
        kept = items_of(self.inner, self.held)
        return {key: one for key, one in kept.items() if one is not self.main}


def parameter_names(chunks: Sequence[torch.nn.Module]) -> dict[torch.nn.Parameter, str]:
    """A name for every parameter, equal on all data-parallel replicas; a shared parameter has its first name."""
    names: dict[torch.nn.Parameter, str] = {}
    for index, chunk in enumerate(chunks):
        for name, parameter in fsdp.named_parameters(chunk):
            names.setdefault(parameter, f"chunk{index}.{unwrapped(name)}")
    return names


def plan_optimizer_state(optimizer: Any) -> None:
    """Find out what the inner optimizer keeps. Raises UnsupportedError."""
    if is_stub(optimizer):
        return
    inner, initialise = optimizer.optimizer, optimizer.init_state_fn
    if getattr(optimizer.config, "use_precision_aware_optimizer", False):
        inner_masters.plan(inner)  # Megatron's own function for it fails with newer versions of its FusedAdam
    elif initialise is None or isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        plan_state(inner)
    else:  # Megatron's own, for Adam and its emerging optimizers
        plan_state(inner, initialise=lambda twin: initialise(twin, optimizer.config))


def allocate_optimizer_state(optimizer: Any, names: Mapping[torch.nn.Parameter, str], absent: Collection[str]) -> None:
    """Give memory to the moments, but to none of the items `absent`."""
    for one in trained(optimizer, names):
        allocate(one.inner, one.held, lambda key, name=one.name: f"{name}:{key}" in absent)  # type: ignore[misc]
    if not is_stub(optimizer):
        inner_masters.took_over(optimizer.optimizer)


def trained(optimizer: Any, names: Mapping[torch.nn.Parameter, str]) -> Iterator[TrainedParameter]:
    """The parameters that `optimizer` updates on this rank. Raises InventoryError for one that the model lacks."""
    if is_stub(optimizer):
        return
    inner = optimizer.optimizer
    for parameter, held in _pairs(optimizer):
        if parameter not in names:
            raise InventoryError(
                f"the optimizer updates a parameter of shape {tuple(parameter.shape)} that no model chunk has; "
                "pass the host all chunks of this rank"
            )
        main, scales = inner_masters.updated(inner, held), inner_masters.scales(inner, held)
        piece = _piece(optimizer, parameter)
        yield TrainedParameter(names[parameter], parameter, main, *inner_masters.keeper(inner, held), piece, scales)


def _piece(optimizer: Any, parameter: torch.nn.Parameter) -> tuple[int, int, int] | None:
    """The elements of the flattened parameter that this rank updates: start, stop, and their total number; None if all
    replicas update all of them."""
    if fsdp.is_shard(parameter):
        return fsdp.piece(parameter)
    if isinstance(optimizer, DistributedOptimizer):
        owned = optimizer._get_model_param_range_map(parameter)["param"]
        return int(owned.start), int(owned.end), parameter.numel()
    return (0, parameter.numel(), parameter.numel()) if layer_wise(optimizer) else None


def _pairs(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Pairs of a model parameter and the tensor that the inner optimizer's groups have for it."""
    match optimizer:
        case DistributedOptimizer() if not fsdp.is_megatrons(optimizer):
            both = zip(optimizer.shard_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
            # no master where the inner optimizer keeps it
            held = [[half if main is None else main for half, main in zip(*pair, strict=True)] for pair in both]
            groups = (
                (optimizer.model_float16_groups, held),
                (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
            )
        case Float16OptimizerWithFloat16Params():
            groups = (
                (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
                (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
            )
        case _:
            updated = [group["params"] for group in optimizer.optimizer.param_groups]
            groups = ((updated, updated), ([], []))
    for models, mains in groups:
        for model_group, main_group in zip(models, mains, strict=True):
            yield from zip(model_group, main_group, strict=True)


def grouped(optimizer: Any, names: Mapping[torch.nn.Parameter, str]) -> list[list[str]]:
    """The names of the parameters in each group; with the distributed optimizer those that this rank has a shard of."""
    if is_stub(optimizer):
        return []
    named = {id(held): names[parameter] for parameter, held in _pairs(optimizer)}
    groups = [group["params"] for group in optimizer.optimizer.param_groups]
    return [[named[id(held)] for held in group if id(held) in named] for group in groups]


def covered(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """The parameters that need no item in addition to those of `trained`, of this rank and of their other replicas."""
    if is_stub(optimizer):
        return
    if isinstance(optimizer, DistributedOptimizer) and not fsdp.is_megatrons(optimizer):
        for buffer in optimizer.buffers:
            yield from buffer.params
        return
    yield from (parameter for parameter, _ in _pairs(optimizer))
    if divided := layer_wise(optimizer):  # None in place of its lists: this rank updates all
        for by_rank in (divided.dp_cp_params_list, divided.expt_dp_params_list):
            yield from chain.from_iterable(by_rank or ())


def state_items(
    chunks: Sequence[torch.nn.Module],
    optimizers: Sequence[Any],
    rank: int,
    replicas: Replicas,
    same_shard: Replicas | None = None,
) -> list[StateItem]:
    """Every item of this rank. `same_shard`: the ranks that hold its shard of a parameter; None: no other rank does.
    Raises InventoryError for state that belongs to none of the kinds above."""
    shard_replicas = same_shard or (lambda parameter: (rank,))
    names, layers = parameter_names(chunks), layers_by_module(chunks)
    items: list[StateItem] = []
    for optimizer in optimizers:
        for one in trained(optimizer, names):
            items.extend(_of_trained(one, (shard_replicas if one.piece else replicas)(one.parameter), layers))
    covered_by_trained = {parameter for optimizer in optimizers for parameter in covered(optimizer)}
    for parameter, name in names.items():
        if parameter in covered_by_trained:
            continue
        if parameter.requires_grad:
            raise InventoryError(
                f"rank {rank}: parameter '{name}' requires a gradient, but no optimizer updates it: "
                "freeze it, or pass the host its optimizer"
            )
        items.append(
            state_item(name, Role.PARAMETER, replicas(parameter), _layer_of(name, layers), NEVER, parameter.detach)
        )
    items.extend(buffers(chunks, rank))
    return items


def buffers(chunks: Sequence[torch.nn.Module], rank: int) -> Iterator[StateItem]:
    """The buffers of this rank, and what delayed scaling keeps."""
    layers = layers_by_module(chunks)
    for index, chunk in enumerate(chunks):
        for name, buffer in chunk.named_buffers():
            owner, _, key = name.rpartition(".")
            module = chunk.get_submodule(owner)
            name = f"chunk{index}.{unwrapped(name)}"
            if isinstance(buffer, torch.Tensor):
                read = lambda module=module, key=key: module._buffers[key]  # noqa: E731  (the model may replace it)
                yield state_item(name, Role.BUFFER, (rank,), _layer_of(name, layers), ANYWHERE, read)
        for name, scales in fp8_scaling.tensors(chunk):
            name = f"chunk{index}.{unwrapped(name)}"
            yield state_item(name, Role.BUFFER, (rank,), _layer_of(name, layers), ANYWHERE, scales)


def _of_trained(one: TrainedParameter, replicas: tuple[int, ...], layers: Mapping[str, int]) -> Iterator[StateItem]:
    piece, layer, in_norm = one.piece, _layer_of(one.name, layers), _in_norm(one.parameter)
    role = Role.PARAMETER if one.main is one.parameter else Role.MAIN_PARAMETER
    yield state_item(one.item, role, replicas, layer, UPDATE, one.main.detach, piece, in_norm)
    for key in one.moments:
        read = partial(item_of, one.inner, one.held, key)
        yield state_item(f"{one.name}:{key}", Role.MOMENT, replicas, layer, UPDATE, read, piece, in_norm)
    for key, scale in one.scales.items():
        yield state_item(f"{one.name}:{key}:scale", Role.MOMENT, replicas, layer, UPDATE, scale.detach, None, in_norm)


def _in_norm(parameter: torch.nn.Parameter) -> bool:
    """Whether Megatron's gradient norm includes this copy; of copies on several tensor ranks or stages, only one."""
    return bool(param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter))


def copies(chunks: Sequence[torch.nn.Module], optimizers: Sequence[Any], replicas: Replicas) -> Iterator[StateItem]:
    """The working copies that forward reads, derived from items. Role COPY; but PARAMETER for fp32 parameters of the
    distributed optimizer, whose shards are views of them, so that every rank holds all shards."""
    names, layers = parameter_names(chunks), layers_by_module(chunks)
    for optimizer in optimizers:
        items = {one.parameter for one in trained(optimizer, names) if one.main is one.parameter}
        for parameter in covered(optimizer):
            if parameter not in items:
                views = isinstance(optimizer, DistributedOptimizer) and parameter.dtype == torch.float32
                role, name = (Role.PARAMETER if views else Role.COPY), names[parameter]
                layer, in_norm = _layer_of(name, layers), _in_norm(parameter)
                yield state_item(name, role, replicas(parameter), layer, UPDATE, parameter.detach, None, in_norm)


# scalars


def scalars(optimizers: Sequence[Any], names: Mapping[torch.nn.Parameter, str]) -> dict[str, dict[str, Any]]:
    """The 0-dimensional state of the inner optimizers ('step'), by parameter."""
    return {
        one.name: scalars_of(one.inner.state.get(one.held) or {})
        for optimizer in optimizers
        for one in trained(optimizer, names)
    }


def restore_scalars(
    optimizers: Sequence[Any], names: Mapping[torch.nn.Parameter, str], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Set the scalars, each in a tensor of its own. Raises ResumeError if those of a parameter were not captured."""
    for optimizer in optimizers:
        for one in trained(optimizer, names):
            if one.name not in saved:
                raise ResumeError(
                    f"parameter '{one.name}' is trained, but no optimizer scalars of it were captured: resume with the "
                    "model and optimizer of the captured job, or start with --ftp-resume fresh"
                )
            set_numbers(one.inner, one.held, saved[one.name])


# names


def unwrapped(name: str) -> str:
    """The name of a module or parameter without the wrappers around the model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def layers_by_module(chunks: Sequence[torch.nn.Module]) -> dict[str, int]:
    """Global layer number, from 1, by the name of each module that has one."""
    layers = {}
    for index, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            number = getattr(module, "layer_number", None)
            if name and isinstance(number, int):
                layers[f"chunk{index}.{unwrapped(name)}"] = number
    return layers


def _layer_of(name: str, layers: Mapping[str, int]) -> int | None:
    """The layer of the outermost module on the path that has a number."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((layers[prefix] for prefix in prefixes if prefix in layers), None)
