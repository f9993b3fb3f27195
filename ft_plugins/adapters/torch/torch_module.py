"""Check what `TorchHost` is given.

In: a module, an optimizer, a scheduler. Out: plain values for the codec, and back; errors, and names of what is not
captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import torch
import xxhash

from ...config import Config, launch_context
from ...errors import ConfigError, InventoryError, UnsupportedError
from ...events import Events
from ...model.inventory import Role
from ...snapshot.capture import codec
from ...snapshot.capture.copiers import flat_bytes
from ...systems.reft.claim import join_ranks
from ..host_parts import local_part
from ..optimizers import EXPECTED, Optimizers

COMMUTES = 2  # replicas whose sum does not depend on the order of the summands
BUCKETS = (
    "DistributedDataParallel reorders its gradient buckets after its first iteration, also after a restore: on more "
    "than 2 ranks the sums of that one iteration may differ in their last bits from those of a run without a failure; "
    "DistributedDataParallel(..., find_unused_parameters=True) keeps the order"
)
NO_POSITION = (
    "no sampler was given, so that the data position is not captured: derive the batches from the iteration, or pass "
    "TorchHost the loader"
)
_EQUAL = "wrap the model in DistributedDataParallel, or build it from the same seed on all ranks"


def only_updated(known: Mapping[str, tuple[Role, torch.Tensor]], optimizers: Optimizers) -> dict[str, torch.Tensor]:
    """The items that only updates change."""
    updated = {id(one) for group in optimizers.param_groups for one in group["params"]}
    return {
        name: tensor
        for name, (role, tensor) in known.items()
        if role is Role.MOMENT or (role is Role.PARAMETER and id(tensor) in updated)
    }


def require_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{EXPECTED}, found a {type(model).__name__} as the model: pass a torch.nn.Module")


def require_encodable_caller(state: Any, place: str) -> None:
    """Raises InventoryError, naming the value of `get_state` that cannot be captured."""
    what, here = f"{place}: what get_state returns cannot be captured: ", "; here 'state' is what get_state returns"
    codec.require_encodable(state, InventoryError, what, here)


def require_whole_parameters(module: torch.nn.Module, place: str) -> None:
    require_known_wrappers(module, place)
    for name, one in module.named_parameters():
        if local_part(one) is not one:
            raise UnsupportedError(
                f"{place}: parameters are sharded ({name}), but TorchHost supports replicas only: if fully_shard did "
                "it, use ft_plugins.FsdpHost(model, optimizer, ..., mesh=mesh)"
            )


def require_known_wrappers(module: torch.nn.Module, place: str) -> None:
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise UnsupportedError(
            f"{place}: parameters are sharded by FullyShardedDataParallel, which is not supported: use fully_shard "
            "(FSDP2) with ft_plugins.FsdpHost, DistributedDataParallel, DeepSpeed or Megatron"
        )
    if any(type(part).__module__.startswith("apex.parallel.distributed") for part in module.modules()):
        raise UnsupportedError(
            f"{place}: apex.parallel.DistributedDataParallel sums gradients in buckets that its first backward makes: "
            "use torch's DistributedDataParallel"
        )


def require_known_parameters(module: torch.nn.Module, optimizers: Optimizers, place: str) -> None:
    """Raises InventoryError if `optimizers` update parameters that are not in `module`."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    for number, group in enumerate(optimizers.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise InventoryError(
                    f"{place}: group {number} of the optimizer updates a parameter of shape {tuple(parameter.shape)} "
                    "that the model does not have: pass TorchHost a module that holds all of them "
                    "(torch.nn.ModuleList([model, ...]))"
                )


def require_equal_replicas(
    rank: int, replicas: Mapping[str, tuple[torch.Tensor, int]], host: str, remedy: str = _EQUAL
) -> None:
    """Raises InventoryError if the bytes of a tensor differ between ranks that hold replicas of it. A collective.

    `replicas`: by name, this rank's tensor and the lowest rank that holds a replica of it. `host` and `remedy` are for
    messages.
    """
    own = {name: (_digest(name, tensor), first) for name, (tensor, first) in replicas.items()}
    context = launch_context()
    with join_ranks(context.config or Config(), context, Events()) as collective:
        gathered = [msgpack.unpackb(part) for part in collective.gather(msgpack.packb(own))]
    for other, theirs in enumerate(gathered):
        names = theirs.keys() | gathered[0].keys()
        firsts = {name: theirs[name][1] if name in theirs else 0 for name in names}
        differing = sorted(name for name in names if theirs.get(name) != gathered[firsts[name]].get(name))
        if differing:
            raise InventoryError(
                f"rank {other}: '{differing[0]}' differs from rank {firsts[differing[0]]}'s ({len(differing)} of "
                f"{len(theirs)} tensors do), but {host} needs equal replicas: {remedy}",
                echo=rank != other,
            )


def _digest(name: str, tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(flat_bytes(name, tensor).cpu().numpy().data)
