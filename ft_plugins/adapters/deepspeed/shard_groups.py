"""Divide data-parallel ranks into the replicas of local SGD, and have DeepSpeed build its engine over one replica.

    inner group    data-parallel ranks that follow one another: one replica. ZeRO and BF16_Optimizer shard over them
    sync group     the ranks at the same place of all replicas: they hold the same shards

Invariant: only the group over which DeepSpeed shards is replaced, and only while it builds the engine:

    groups._get_sequence_data_parallel_group   the inner group, which becomes `engine.seq_data_parallel_group`
    DeepSpeedEngine._broadcast_model           all replicas still start from the parameters of one rank
    param.ds_zero_partition_process_group      the inner group, for ZeRO-3

What DeepSpeed knows of batches comes from `_get_data_parallel_group`, which still has all data-parallel ranks:
`engine.dp_world_size`, `train_batch_size()`, accumulation steps and the samples that a rank reads. Each average is
divided by the size of the group that it was summed over. DeepSpeed's own checkpoints contain the first replica.

In: the number of ranks of a replica, before `deepspeed.initialize`. Out: an engine, and its `ShardGroups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...errors import ConfigError, UnsupportedError
from ..script.script_hooks import replaced

_SHARDING_GROUP = "_get_sequence_data_parallel_group"
_REMEMBERED = "_ft_plugins_shard_groups"  # attribute of an engine that was built over replicas
_ZERO_INIT = (
    "the model was built under deepspeed.zero.Init, which partitions parameters over all data-parallel ranks: build it "
    "without, or drop --sync"
)


@dataclass(frozen=True)
class ShardGroups:
    """The ranks that share this rank's part of the model, ascending, and process groups of two of the sets."""

    whole: tuple[int, ...]  # all data-parallel ranks
    inner: tuple[int, ...]
    sync: tuple[int, ...]
    inner_group: Any
    sync_group: Any


def replicas_of(whole: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """The data-parallel ranks `whole`, divided into replicas of `size`. Raises ConfigError if that is impossible."""
    if size < 1 or len(whole) % size:
        raise ConfigError(
            f"shard_ranks is {size}, but there are {len(whole)} data-parallel ranks ({_shown(whole)}): a replica must "
            "have a number of ranks that divides them"
        )
    return [tuple(whole[start : start + size]) for start in range(0, len(whole), size)]


def counterparts(replicas: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """For each place in a replica, the ranks that have it."""
    return list(zip(*replicas, strict=True))


def divide(whole_group: Any, size: int) -> ShardGroups:
    """Create the groups of replicas of `size` ranks. Every rank of the job calls, with its data-parallel group."""
    whole = tuple(sorted(dist.get_process_group_ranks(whole_group)))
    divided = [replicas_of(one, size) for one in _of_all_ranks(whole)]
    inner, inner_group = _own_group([replica for replicas in divided for replica in replicas])
    sync, sync_group = _own_group([ranks for replicas in divided for ranks in counterparts(replicas)])
    return ShardGroups(whole, inner, sync, inner_group, sync_group)


def _of_all_ranks(whole: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Each data-parallel group of the job once, in an order that is equal on all ranks."""
    if len(whole) == dist.get_world_size():
        return [whole]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, whole)
    return sorted(set(gathered))


def _own_group(sets: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], Any]:
    """Create a group for each set of ranks; returns this rank's."""
    created = [(ranks, dist.new_group(list(ranks))) for ranks in sets]  # all ranks create all, in the same order
    return next((ranks, group) for ranks, group in created if dist.get_rank() in ranks)


def require_known_early(early: Any, late: Any) -> None:
    """Raises ConfigError unless the keys of local SGD were known before the engine was built."""
    if early != late:
        raise ConfigError(
            "ft_plugins.sync: the DeepSpeed configuration is an encoded text, so that this block is known only after "
            "the engine was built; pass a file or a dictionary to deepspeed.initialize, or give --sync to ft-run"
        )


def require_divisible(model: Any) -> None:
    """Raises UnsupportedError if the model's parameters are partitioned already."""
    if any(hasattr(parameter, "ds_id") for parameter in getattr(model, "parameters", tuple)()):
        raise UnsupportedError(_ZERO_INIT)


def built_over(engine: Any) -> ShardGroups | None:
    """The groups that an engine was built over; None: all data-parallel ranks."""
    found: ShardGroups | None = getattr(engine, _REMEMBERED, None)
    return found


class ReplicaBuild:
    """Builds an engine over replicas of `size` data-parallel ranks; `groups` are known afterwards."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.groups: ShardGroups | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """DeepSpeed builds over the inner group within this context. Raises UnsupportedError, ConfigError."""
        from deepspeed.runtime.engine import DeepSpeedEngine  # DeepSpeed is imported by now
        from deepspeed.utils import groups

        if not (hasattr(groups, _SHARDING_GROUP) and hasattr(DeepSpeedEngine, "_broadcast_model")):
            raise UnsupportedError(
                f"this version of DeepSpeed has no groups.{_SHARDING_GROUP} or DeepSpeedEngine._broadcast_model: "
                "replicas cannot be built; use 0.19.8, or drop --sync"
            )
        sharding_group, broadcast_model = getattr(groups, _SHARDING_GROUP), DeepSpeedEngine._broadcast_model

        def inner_group() -> Any:
            if self.groups is None:
                self.groups = divide(sharding_group(), self._size)
            return self.groups.inner_group

        def _broadcast_model(engine: Any) -> None:
            inner, engine.seq_data_parallel_group = engine.seq_data_parallel_group, sharding_group()
            setattr(engine, _REMEMBERED, self.groups)
            with replaced(groups, _SHARDING_GROUP, sharding_group):
                broadcast_model(engine)
            engine.seq_data_parallel_group = inner
            if engine.zero_optimization_partition_weights():
                for parameter in engine.module.parameters():
                    parameter.ds_zero_partition_process_group = inner

        broadcasting = replaced(DeepSpeedEngine, "_broadcast_model", _broadcast_model)
        with replaced(groups, _SHARDING_GROUP, inner_group), broadcasting:
            yield


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) < 9 else f"{ranks[0]} to {ranks[-1]}"
