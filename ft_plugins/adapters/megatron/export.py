"""Export a checkpoint to Megatron's format `torch_dist`, for Megatron-LM's `--load`.

Invariant: model parameters, masters and moments are bit for bit those of the version; parameters that were not captured
are cast from their masters as Megatron's own copy does. The optimizer's state has one global tensor per parameter
('fully_reshardable' of the distributed optimizer), so that the export loads at other tensor, pipeline and data parallel
sizes.

State common to all ranks is taken from rank 0, as in Megatron's own checkpoints: iteration, arguments (with the sample
counters of the version), scheduler, parameter groups, loss scaler. The random number generators are one object per
pipeline stage and tensor rank.

`Assembly` plans the blocks of each global tensor, and the ranks whose shares each is made from: every element of every
global tensor is covered once. If several ranks hold a block (replicas over tensor parallelism, tied embeddings on two
stages), the one with the smallest replica id provides it, as in Megatron's own save.

In: `CheckpointReader`, a folder to create. Out: `latest_checkpointed_iteration.txt` and `iter_<n>/` in it.
"""

from __future__ import annotations

import argparse
import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import StorageError, UnsupportedError
from ...model.topology import Topology
from ...snapshot.capture import codec
from ...snapshot.checkpoint.checkpoint_reader import CheckpointReader
from ...snapshot.checkpoint.index import Index
from ..export_command import installed
from ..script import values as coded

CHECKPOINT_VERSION = 3.0  # of Megatron-LM's state dictionary
_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}
_COUNTED = ("iteration", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


def export(shares: CheckpointReader, folder: Path) -> dict[str, Any]:
    """Write the checkpoint below `folder`, which is created; returns a summary.

    Raises UnsupportedError if Megatron is not installed or the checkpoint has no Megatron names, StorageError, OSError.
    """
    from . import prepare

    with installed("megatron-core", "Megatron", "megatron"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import Megatron recommends faster packages
        prepare()  # for a machine without a CUDA device; before anything imports megatron
        from . import torch_dist
    assembly = assemble(_described(shares), shares.place)
    names, small = dict(shares.index(0).names or {}), shares.small(0)
    topology = _topology(shares.manifest.fingerprint["parallel"])
    arguments = _arguments(names, small)
    objects = {**_objects(assembly), **dict(_generators(shares, topology, arguments))}
    common = _common(shares, names, small, arguments)
    folder.mkdir()
    iteration = shares.manifest.iteration
    torch_dist.write(folder / f"iter_{iteration:07d}", assembly.blocks, _Tensors(shares).of, objects, common)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return {
        "framework": "Megatron",
        "iteration": iteration,
        "tensors": len({block.key for block in assembly.blocks}),
        "left_out": (names["arguments"] or {"left_out": []})["left_out"],
    }


def _described(shares: CheckpointReader) -> Iterator[Index]:
    """The indices of all ranks. Raises UnsupportedError for one without Megatron's names."""
    for index in shares.indices():
        names = index.names or {}
        if "tensors" not in names:
            problem = names.get("problem", "none were stored")
            raise UnsupportedError(
                f"{shares.folder}: cannot be exported, because rank {index.rank} could not determine Megatron's names "
                f"of its tensors ({problem})"
            )
        yield index


class _Tensors:
    """Makes the tensors of blocks. Caches the last item, because blocks of one item follow each other."""

    def __init__(self, shares: CheckpointReader) -> None:
        self._shares = shares
        self._cached: tuple[tuple[str, tuple[int, ...]], torch.Tensor] | None = None

    def of(self, block: TensorBlock) -> torch.Tensor:
        """A dense tensor of `block.size` in `block.dtype`."""
        key = block.source, block.ranks
        if self._cached is None or self._cached[0] != key:
            self._cached = None  # frees the previous item before the next one is read
            raw, dtype = self._shares.whole(*key)
            self._cached = key, torch.from_numpy(raw).view(getattr(torch, dtype))
        local = self._cached[1]
        if block.view is not None:
            at, strides = block.view
            local = local.as_strided(block.size[len(block.size) - len(strides) :], strides, at)
        tensor = torch.empty(block.size, dtype=getattr(torch, block.dtype))
        tensor.copy_(local.reshape(block.size))
        return tensor


# ---- objects ----


def _arguments(names: Mapping[str, Any], small: Mapping[str, Any]) -> Any:
    """Megatron-LM's arguments; None if the job had none (its own loop on megatron.core)."""
    saved = names["arguments"]
    if saved is None:
        return None
    counters = small["counters"]
    return arguments_from_plain(saved, {name: counters[name] for name in _COUNTED if name in counters})


def arguments_to_plain(arguments: argparse.Namespace) -> dict[str, Any]:
    """`arguments` as 'values' by name, and the names 'left_out'."""
    values, left_out = {}, []
    for name, value in sorted(vars(arguments).items()):
        try:
            values[name] = coded.to_plain(value)
        except coded.Unknown:
            left_out.append(name)
    return {"values": values, "left_out": left_out}


def arguments_from_plain(saved: Mapping[str, Any], now: Mapping[str, Any]) -> argparse.Namespace:
    """The saved arguments, updated with the values that training has changed. Raises StorageError."""
    values = {
        name: coded.from_plain(value, ("megatron", "signal"), "Megatron") for name, value in saved["values"].items()
    }
    return argparse.Namespace(**{**values, **now})


def _common(
    shares: CheckpointReader, names: Mapping[str, Any], small: Mapping[str, Any], arguments: Any
) -> dict[str, Any]:
    kinds: Sequence[str] = names["optimizers"]
    step = _step(shares)
    if all(kind == "stub" for kind in kinds):
        raise UnsupportedError(f"{shares.folder}: cannot be exported, because rank 0 updates no parameter")
    each = {number: _optimizer(kind, number, small, step) for number, kind in enumerate(kinds) if kind != "stub"}
    common: dict[str, Any] = {} if arguments is None else {"args": arguments}
    counters = dict(small["counters"])
    common |= {"checkpoint_version": CHECKPOINT_VERSION, "iteration": shares.manifest.iteration}
    common["optimizer"] = each[0] if len(kinds) == 1 else each
    common["opt_param_scheduler"] = small["scheduler"]
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    common["content_metadata"] = metadata | (_RESHARDABLE if "distributed" in kinds else {})
    if arguments is None:
        common["counters"] = counters  # otherwise they are in the arguments
    else:
        common["num_floating_point_operations_so_far"] = counters["num_floating_point_operations_so_far"]
    return common


def _optimizer(kind: str, number: int, small: Mapping[str, Any], step: torch.Tensor | None) -> dict[str, Any]:
    """The part of an optimizer's `sharded_state_dict` that is common to all ranks.

    torch's Adam counts its steps per parameter, and Megatron stores them once; FusedAdam's are in the groups already.
    """
    groups = [dict(group) for group in small["groups"][number]]
    content: dict[str, Any] = {"param_groups": groups}
    if kind == "distributed":
        if step is not None:
            content["param_groups"] = [{**group, "step": step.item()} for group in groups]
    elif step is not None:
        content["state"] = {"common_step": step}
    if kind == "fp32":
        return content
    content = {"optimizer": content}
    if small["scalers"][number] is not None:
        content["grad_scaler"] = small["scalers"][number]
    if kind == "distributed":
        content["param_state_sharding_type"] = _RESHARDABLE["distrib_optim_sharding_type"]
    return content


def _step(shares: CheckpointReader) -> torch.Tensor | None:
    """The number of updates, if it is counted per parameter. Raises StorageError if it differs between parameters."""
    steps = {
        float(scalars["step"]): scalars["step"]
        for rank in shares.chosen
        for scalars in shares.small(rank)["scalars"].values()
        if "step" in scalars
    }
    if len(steps) > 1:
        raise StorageError(
            f"{shares.folder}: parameters have had different numbers of updates ({sorted(steps)}), but Megatron's "
            "format stores one number"
        )
    return next(iter(steps.values()), None)


def _objects(assembly: Assembly) -> dict[str, Any]:
    objects: dict[str, Any] = {}
    for key, (kind, encoded) in assembly.objects.items():
        value = codec.decode(bytes.fromhex(encoded))
        objects[key] = io.BytesIO(value) if kind == "stream" else value
    return objects


def _generators(
    shares: CheckpointReader, topology: Topology, arguments: Any
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The generators, sharded like Megatron-LM's `get_rng_state`: by pipeline and tensor rank; with experts also by
    data rank."""
    each = getattr(arguments, "data_parallel_random_init", False)
    for rank in range(topology.world_size):
        at, replicas = topology.coords(rank), topology.replicas(rank)
        offset, shape = [at.pp, at.tp], [topology.pp, topology.tp]
        if topology.ep > 1:
            offset, shape = [*offset, replicas.index(rank)], [*shape, len(replicas)]
        elif replicas[0] != rank:
            continue
        ranks = topology.group("dp", rank) if each else (rank,)
        key = f"rng_state/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"
        yield key, [_generator(shares.small(rank)["rng"]) for rank in ranks]


def _generator(rng: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "random_rng_state": rng["python"],
        "np_rng_state": rng["numpy"],
        "torch_rng_state": rng["torch"],
        "cuda_rng_state": rng["cuda"],
        "rng_tracker_states": rng["tracker"],
    }


def _topology(sizes: Mapping[str, Any]) -> Topology:
    known = {axis: sizes[axis] for axis in ("tp", "pp", "dp", "cp", "ep", "vpp", "order")}
    return Topology(**known, etp=sizes["expert_tp"])


# ---- which blocks, from which ranks ----


@dataclass(frozen=True)
class TensorBlock:
    """The block `size` at `offset` of the global tensor `key` of `shape`, stored as `dtype`.

    It is made from item `source` of `ranks`, a tensor of `local_shape`: from all of it in order or, with `view` =
    (first element, strides), from a strided view of its elements; the strides are for the last dimensions of `size`.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: str
    source: str
    ranks: tuple[int, ...]
    local_shape: tuple[int, ...]
    view: tuple[int, tuple[int, ...]] | None


@dataclass(frozen=True)
class Assembly:
    """The tensors of a checkpoint by blocks, and its sharded objects by key, as the indices hold them."""

    blocks: tuple[TensorBlock, ...]
    objects: Mapping[str, list[str]]


def assemble(indices: Iterable[Index], offset_of: Callable[[str, tuple[int, ...]], int]) -> Assembly:
    """The blocks that cover every global tensor once, sorted by group of ranks, then by `offset_of` their item in the
    file of the first rank. Raises StorageError for a gap, an overlap, or a tensor whose shape or dtype differs."""
    blocks: dict[tuple[str, tuple[int, ...]], tuple[list[int], TensorBlock]] = {}
    objects: dict[str, tuple[list[int], list[str]]] = {}
    for index in indices:
        names = index.names or {}
        for tensor in names["tensors"]:
            for block in _blocks(tensor, names["groups"]):
                at = block.key, block.offset
                if at not in blocks or tensor["replica"] < blocks[at][0]:
                    blocks[at] = tensor["replica"], block
        for entry in names["objects"]:
            if entry["key"] not in objects or entry["replica"] < objects[entry["key"]][0]:
                objects[entry["key"]] = entry["replica"], entry["value"]
    chosen = [block for _, block in blocks.values()]
    _require_whole(chosen)
    chosen.sort(key=lambda block: (block.ranks, offset_of(block.source, block.ranks), block.key, block.offset))
    return Assembly(tuple(chosen), {key: value for key, (_, value) in sorted(objects.items())})


def _blocks(tensor: Mapping[str, Any], groups: list[list[int]]) -> Iterable[TensorBlock]:
    ranks, local = tuple(groups[tensor["group"]]), tuple(tensor["shape"])
    for key, shape, offset, size, view in tensor["blocks"]:
        yield TensorBlock(
            key, tuple(shape), tuple(offset), tuple(size), tensor["dtype"], tensor["source"], ranks, local,
            (view[0], tuple(view[1])) if view else None,
        )  # fmt: skip


def _require_whole(blocks: Iterable[TensorBlock]) -> None:
    """Raises StorageError for a gap or an overlap: blocks lie within the tensor, are disjoint, and have its volume."""
    by_key: dict[str, list[TensorBlock]] = {}
    for block in blocks:
        by_key.setdefault(block.key, []).append(block)
    for key, of_one in by_key.items():
        first = of_one[0]
        for block in of_one:
            if (block.shape, block.dtype) != (first.shape, first.dtype):
                raise StorageError(
                    f"'{key}' is {block.dtype} {block.shape} on rank {block.ranks[0]} and {first.dtype} "
                    f"{first.shape} on rank {first.ranks[0]}"
                )
            if any(at < 0 or at + size > whole for at, size, whole in zip(*_place(block), block.shape, strict=True)):
                raise StorageError(f"'{key}' has shape {block.shape}, but rank {block.ranks[0]} a block beyond it")
        volume, whole = sum(math.prod(block.size) for block in of_one), math.prod(first.shape)
        if volume != whole or _overlap(of_one):
            problem = "the checkpoint is incomplete, an index is missing" if volume < whole else "blocks overlap"
            raise StorageError(f"'{key}' has {whole} elements, but the blocks of all ranks cover {volume}: {problem}")


def _overlap(blocks: Iterable[TensorBlock]) -> bool:
    """Whether two blocks of a tensor have an element in common."""
    open_blocks: list[TensorBlock] = []  # those that reach the present one in the first dimension
    for block in sorted(blocks, key=lambda one: one.offset):
        open_blocks = [one for one in open_blocks if not one.size or one.offset[0] + one.size[0] > block.offset[0]]
        for one in open_blocks:
            edges = zip(*_place(one), *_place(block), strict=True)
            if all(max(at, other) < min(at + size, other + length) for at, size, other, length in edges):
                return True
        open_blocks.append(block)
    return False


def _place(block: TensorBlock) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return block.offset, block.size
