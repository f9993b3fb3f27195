"""What one rank of a DeepSpeed job holds: an engine, its place in the job, its state items.

In: the engine that `deepspeed.initialize` returned. Out: the base of `core.DeepSpeedHost` and of its parts."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any

import torch

from ...errors import TopologyError
from ...model.topology import Topology
from ..host_parts import FrameworkHost, StateItem
from . import state
from .replay import DeepSpeedReplay
from .shard_groups import ShardGroups, built_over
from .support import require_supported

_AXES = {"pipe": "pp", "data": "dp", "model": "tp"}


class DeepSpeedRank(FrameworkHost[DeepSpeedReplay]):
    """`shards`: the groups that the engine was built over; None: those that the engine remembers."""

    def __init__(self, engine: Any, shards: ShardGroups | None) -> None:
        self.rank, self.engine = torch.distributed.get_rank(), engine
        self._shards = built_over(engine) if shards is None else shards
        require_supported(engine, self.rank)
        self._topology = topology(engine, self._shards)
        self._require_deepspeeds_layout()

    @cached_property
    def _state_items(self) -> list[StateItem]:
        state.plan_optimizer_state(self.engine.optimizer)
        topology, sharers = self._topology, () if self._shards is None else self._shards.sync
        replicas, first = topology.replicas(self.rank), topology.coords(self.rank).tp == 0
        return state.state_items(self.engine, self.rank, replicas, first, sharers)

    def allocate(self, absent: Collection[str]) -> None:
        names = {parameter: name for name, parameter in self.engine.module.named_parameters()}
        state.allocate_optimizer_state(self.engine.optimizer, names, absent)

    def _require_deepspeeds_layout(self) -> None:
        """Raises TopologyError unless an item's replica set is the group over which DeepSpeed reduces gradients."""
        group = tuple(sorted(torch.distributed.get_process_group_ranks(self.engine.seq_data_parallel_group)))
        group = group if self._shards is None else self._shards.whole
        expected = self._topology.replicas(self.rank)
        if group != expected:
            raise TopologyError(
                f"rank {self.rank}: DeepSpeed's data-parallel group is {list(group)}, but with the rank order "
                f"{self._topology.order} it would be {list(expected)}: this layout is not supported"
            )


def topology(engine: Any, shards: ShardGroups | None = None) -> Topology:
    """The job's topology: that of a PipelineModule, else replicas of a model that may be sharded."""
    grid = getattr(engine.module, "_topo", None)
    if grid is None:
        group = engine.seq_data_parallel_group
        replicas = torch.distributed.get_world_size(group) if shards is None else len(shards.whole)
        return Topology(tp=torch.distributed.get_world_size() // replicas, pp=1, dp=replicas)
    axes = grid.get_axis_names()
    unknown = [axis for axis in axes if axis not in _AXES and grid.get_dim(axis) > 1]
    if unknown:
        raise TopologyError(f"the PipelineModule's topology has an unknown axis '{unknown[0]}'; known: {list(_AXES)}")
    sizes = {_AXES[axis]: grid.get_dim(axis) for axis in axes if axis in _AXES}
    order = "-".join(_AXES[axis] for axis in reversed(axes) if axis in _AXES)  # DeepSpeed's last axis varies fastest
    return Topology(tp=sizes.get("tp", 1), pp=sizes.get("pp", 1), dp=sizes.get("dp", 1), order=order)
