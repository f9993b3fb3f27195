"""A checkpoint of this project as one that Megatron itself loads: format `torch_dist`, for `--load` and nothing else.

Invariant: model parameters, masters and moments are bit for bit those of the version, whichever parallel sizes load
them; parameters that were not captured are cast from their masters as Megatron's own copy does. The optimizer's state
has one global tensor per parameter ('fully_reshardable' of the distributed optimizer), so that an exported checkpoint
loads at other tensor, pipeline and data parallel sizes.

What all ranks have alike is rank 0's, as in Megatron's own checkpoints: iteration, arguments (with the sample counters
as they were), scheduler, parameter groups, loss scaler. The random number generators are one object per pipeline stage
and tensor rank.

In: `Shares`, a folder to be made. Out: what `--load` names: `latest_checkpointed_iteration.txt`, `iter_<n>/`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import StorageError, UnsupportedError
from ...model.topology import Topology
from ...snapshot import codec
from ...snapshot.index import Index
from ...snapshot.shares import Shares
from .arguments import arguments_from_plain
from .assembly import Assembly, TensorBlock, assemble

CHECKPOINT_VERSION = 3.0  # of Megatron-LM's state dictionary
_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}
_COUNTED = ("iteration", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


def export(shares: Shares, folder: Path) -> dict[str, Any]:
    """Write the checkpoint below `folder`, which is made; what is told to people about it.

    Raises UnsupportedError when Megatron is not installed or the checkpoint cannot be described, StorageError, OSError.
    """
    torch_dist = _megatron()
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


def _described(shares: Shares) -> Iterator[Index]:
    """The indices of all ranks. Raises UnsupportedError for one without names."""
    for index in shares.indices():
        names = index.names or {}
        if "tensors" not in names:
            problem = names.get("problem", "it tells none")
            raise UnsupportedError(f"{shares.folder}: rank {index.rank} could not tell Megatron's names ({problem})")
        yield index


def _megatron() -> Any:
    from . import prepare

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron tells at import what it would be faster with
            prepare()  # where there is no CUDA device, before anything imports megatron
            from . import torch_dist
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("megatron"):
            raise
        raise UnsupportedError(
            "this is a checkpoint of a Megatron job, and megatron-core is not installed here; "
            "pip install 'ft_plugins[megatron]'"
        ) from error
    return torch_dist


class _Tensors:
    """Makes the tensor of a block. Holds the item that it has read last: blocks of one item follow each other."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._held: tuple[tuple[str, tuple[int, ...]], torch.Tensor] | None = None

    def of(self, block: TensorBlock) -> torch.Tensor:
        """A dense tensor of `block.size` in `block.dtype`."""
        which = block.source, block.ranks
        if self._held is None or self._held[0] != which:
            self._held = None
            raw, dtype = self._shares.whole(*which)
            self._held = which, torch.from_numpy(raw).view(getattr(torch, dtype))
        local = self._held[1]
        if block.view is not None:
            at, strides = block.view
            local = local.as_strided(block.size[len(block.size) - len(strides) :], strides, at)
        made = torch.empty(block.size, dtype=getattr(torch, block.dtype))
        made.copy_(local.reshape(block.size))
        return made


# ---- what is no tensor ----


def _arguments(names: Mapping[str, Any], small: Mapping[str, Any]) -> Any:
    """Megatron-LM's arguments, None where the job had none (a loop of its own on megatron.core)."""
    told = names["arguments"]
    if told is None:
        return None
    counters = small["counters"]
    return arguments_from_plain(told, {name: counters[name] for name in _COUNTED if name in counters})


def _common(shares: Shares, names: Mapping[str, Any], small: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    kinds: Sequence[str] = names["optimizers"]
    step = _step(shares)
    each = {number: _optimizer(kind, number, small, step) for number, kind in enumerate(kinds) if kind != "stub"}
    found: dict[str, Any] = {} if arguments is None else {"args": arguments}
    counters = dict(small["counters"])
    found |= {"checkpoint_version": CHECKPOINT_VERSION, "iteration": shares.manifest.iteration}
    found["optimizer"] = each[0] if len(kinds) == 1 else each
    found["opt_param_scheduler"] = small["scheduler"]
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    found["content_metadata"] = metadata | (_RESHARDABLE if "distributed" in kinds else {})
    if arguments is None:
        found["counters"] = counters  # there are no arguments that could carry them
    else:
        found["num_floating_point_operations_so_far"] = counters["num_floating_point_operations_so_far"]
    return found


def _optimizer(kind: str, number: int, small: Mapping[str, Any], step: torch.Tensor | None) -> dict[str, Any]:
    """An optimizer's part that is common to all ranks, as its `sharded_state_dict` has it.

    torch's Adam counts its steps per parameter, and Megatron stores them once; FusedAdam's are in the groups already.
    """
    groups = [dict(group) for group in small["groups"][number]]
    found: dict[str, Any] = {"param_groups": groups}
    if kind == "distributed":
        if step is not None:
            found["param_groups"] = [{**group, "step": step.item()} for group in groups]
    elif step is not None:
        found["state"] = {"common_step": step}
    if kind == "fp32":
        return found
    found = {"optimizer": found}
    if small["scalers"][number] is not None:
        found["grad_scaler"] = small["scalers"][number]
    if kind == "distributed":
        found["param_state_sharding_type"] = _RESHARDABLE["distrib_optim_sharding_type"]
    return found


def _step(shares: Shares) -> torch.Tensor | None:
    """The number of updates, where it is counted per parameter. Raises StorageError when that differs."""
    found = {
        float(scalars["step"]): scalars["step"]
        for rank in range(shares.manifest.world_size)
        for scalars in shares.small(rank)["scalars"].values()
        if "step" in scalars
    }
    if len(found) > 1:
        raise StorageError(f"{shares.folder}: parameters have had {sorted(found)} updates; Megatron stores one number")
    return next(iter(found.values()), None)


def _objects(assembly: Assembly) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, (kind, encoded) in assembly.objects.items():
        value = codec.decode(bytes.fromhex(encoded))
        found[key] = io.BytesIO(value) if kind == "stream" else value
    return found


def _generators(shares: Shares, topology: Topology, arguments: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """As Megatron-LM's `get_rng_state` shards them: by pipeline and tensor rank, with experts by data rank as well."""
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
