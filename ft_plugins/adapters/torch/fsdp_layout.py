"""Where a rank stands in a device mesh: the ranks that divide a replica of the model, and those that repeat its shard.

    mesh ("sync", "shard"), 2 x 2       0 1       ranks 0 and 1 are the shards of one replica, 2 and 3 of the other;
                                        2 3       0 and 2 hold the same shard

The dimension that shards is the one on whose ranks `fully_shard` has put the parameters, whatever its name.

Invariant: pure, except for `layout_of`, which only reads. In: a mesh, a sharded parameter. Out: `ShardLayout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, UnsupportedError

_PASS_MESH = "pass FsdpHost the whole mesh: FsdpHost(model, optimizer, ..., mesh=mesh)"


@dataclass(frozen=True)
class ShardLayout:
    """The place of one rank.

    `sizes` are those of the mesh. `shards` are the ranks of this replica in the order of their shards, this rank at
    `index`; `replicas` those with the same shard, ascending. `sync_dimension` is the dimension of the mesh over
    `replicas`, None without one. `hybrid`: the parameters themselves are replicated by `fully_shard` (HSDP).
    """

    sizes: tuple[int, ...]
    shards: tuple[int, ...]
    replicas: tuple[int, ...]
    index: int
    sync_dimension: int | None
    hybrid: bool

    def __str__(self) -> str:
        """For messages."""
        return f"ranks {list(self.shards)}{' and replicated by fully_shard (HSDP)' if self.hybrid else ''}"

    def piece(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """The elements of this rank in a flattened tensor that is sharded by its first dimension: start, stop, total.

        Shards have equally many rows, except for the last ones, which have fewer or none.
        """
        rows, width = shape[0], int(np.prod(shape[1:], dtype=np.int64))
        each = -(-rows // len(self.shards))
        start, stop = (min(rows, number * each) for number in (self.index, self.index + 1))
        return start * width, stop * width, rows * width


def placed(grid: npt.NDArray[Any], shards: Sequence[int], rank: int, hybrid: bool) -> ShardLayout | None:
    """The place of `rank` in the mesh `grid`, a dimension of which divides parameters over `shards`; None if none
    does."""
    if rank not in grid:
        return None
    at = [int(index) for index in np.argwhere(grid == rank)[0]]
    for dimension in reversed(range(grid.ndim)):
        along = tuple(slice(None) if number == dimension else index for number, index in enumerate(at))
        line = [int(one) for one in grid[along]]
        if line == list(shards):
            sync = None if grid.ndim == 1 else 1 - dimension
            others = [rank] if sync is None else grid.take(at[dimension], axis=dimension)
            return ShardLayout(
                sizes=tuple(grid.shape),
                shards=tuple(line),
                replicas=tuple(sorted(int(one) for one in others)),
                index=at[dimension],
                sync_dimension=sync,
                hybrid=hybrid,
            )
    return None


def layout_of(mesh: Any, parameter: Any, name: str, rank: int, world_size: int) -> ShardLayout:
    """The place of `rank` by the whole device mesh and a sharded parameter.

    `mesh` may be None if the parameter's own mesh has all ranks. Raises ConfigError or UnsupportedError.
    """
    own = parameter.device_mesh
    dimensions = sharding_mesh_dimensions(parameter)
    if len(dimensions) != 1 or own.ndim > 2:
        raise UnsupportedError(
            f"rank {rank}: '{name}' is placed by {parameter.placements} on a mesh of {own.ndim} dimensions, but "
            "FsdpHost supports one dimension that shards and at most one that replicates: use fully_shard without "
            "tensor or other parallelism"
        )
    whole = own if mesh is None else mesh
    if whole.ndim > 2 or whole.size() != world_size:
        raise ConfigError(
            f"rank {rank}: expected a mesh of one or two dimensions with all {world_size} ranks of the job, found one "
            f"of shape {tuple(whole.shape)}: {_PASS_MESH}"
        )
    if own.get_coordinate() is None:
        raise ConfigError(f"rank {rank}: '{name}' is sharded over a mesh without this rank: {_PASS_MESH}")
    here = [slice(None) if number in dimensions else index for number, index in enumerate(own.get_coordinate())]
    shards = [int(one) for one in own.mesh.numpy()[tuple(here)]]
    found = placed(whole.mesh.numpy(), shards, rank, hybrid=own.ndim == 2)
    if found is None:
        raise ConfigError(
            f"rank {rank}: '{name}' is sharded over ranks {shards}, which are no dimension of the mesh "
            f"{whole.mesh.tolist()}: {_PASS_MESH}, and fully_shard a one-dimensional part of it (mesh['shard'])"
        )
    return found


def sharding_mesh_dimensions(tensor: Any) -> list[int]:
    """The dimensions of its mesh over which a DTensor is divided."""
    return [number for number, placement in enumerate(tensor.placements) if not placement.is_replicate()]
