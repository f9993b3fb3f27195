"""Parameters that FSDP divides over the data-parallel ranks: torch's FSDP2 in Megatron-LM, and Megatron's own.

    torch's FSDP2     the model's parameters are DTensors divided by rows; so are the fp32 masters of a bf16 model
    Megatron FSDP     the optimizer updates one DTensor for each parameter, this rank's part of the flattened
                      parameter: a view of a buffer of fp32 masters, or of parameters if there are no masters. What a
                      forward reads is cast, and gathered from all ranks

Invariant: the local tensors of these DTensors are the items, each on one rank, and stay in place: `fully_shard` may
replace them in its first forward, to pad them, which is caused here before items are listed. What was gathered is
derived: it is forgotten, or gathered again, whenever shards are written.

In: model chunks and what their optimizers update. Out: names, pieces. Raises UnsupportedError for a version of Megatron
FSDP that keeps its parameters in another way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from ..host_parts import local_part
from ..torch.fsdp_layout import ShardLayout
from ..torch.fsdp_reduction import fsdp_units


def is_megatrons(holder: Any) -> bool:
    """Whether a model chunk, or an optimizer, is one of Megatron FSDP."""
    return bool(getattr(getattr(holder, "ddp_config", None), "use_megatron_fsdp", False))


def named_parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a chunk as optimizers know them; modules of Megatron FSDP have others while they compute."""
    if not is_megatrons(chunk):
        yield from chunk.named_parameters()
        return
    named = getattr(getattr(chunk, "param_and_grad_buffer", None), "optimizer_named_parameters", None)
    if named is None:
        raise UnsupportedError(
            "this version of Megatron FSDP does not name the shards that its optimizer updates: use another version, "
            "or drop --use-megatron-fsdp"
        )
    yield from named


def is_shard(parameter: torch.Tensor) -> bool:
    """Whether FSDP has divided `parameter`, so that this rank has a part that no other has."""
    return local_part(parameter) is not parameter


def piece(parameter: Any) -> tuple[int, int, int] | None:
    """The elements of the flattened parameter, or of this tensor rank's part of it, that this rank has: start, stop,
    and their total number; None if they are not consecutive."""
    if (owned := getattr(parameter, "megatron_fsdp_slice", None)) is not None:
        return owned.start, owned.stop, parameter.orig_param.numel()
    (placement,) = parameter.placements
    ranks, index = parameter.device_mesh.size(), parameter.device_mesh.get_local_rank()
    layout = ShardLayout((), tuple(range(ranks)), (), index, None, False)
    return layout.piece(parameter.shape) if placement.is_shard(0) else None


def keep_in_place(chunks: Sequence[torch.nn.Module]) -> None:
    """Have `fully_shard` pad its local tensors now. A collective if it has divided a chunk."""
    for unit in [unit for chunk in chunks for unit in fsdp_units(chunk)]:
        unit.modules[0].unshard()
        unit.reshard()


def without_names(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """What `naming.names` returns: Megatron's description of shards gathers them. Like it, has routers of a bf16 model
    convert their biases to fp32, as their first forward would."""
    for module in [module for chunk in chunks for module in chunk.modules()]:
        getattr(module, "_maintain_float32_expert_bias", lambda: None)()
    return {"framework": "megatron", "problem": "its parameters are sharded by FSDP"}


@torch.no_grad()
def follow_shards(chunks: Sequence[Any]) -> None:
    """Compute with the present shards from now on. A collective."""
    for chunk in chunks:
        for unit in fsdp_units(chunk):
            unit.reshard()
        if is_megatrons(chunk):
            chunk.module.synchronize_param_gather()  # forgets what was gathered
            whole = [group.model_weight_buffer for group in chunk.param_and_grad_buffer.parameter_groups]
            if not all(buffer is None or buffer.is_data_distributed for buffer in whole):
                chunk.start_param_sync(force_sync=True)
