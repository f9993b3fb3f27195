"""Create the process groups of local SGD: which ranks are synchronised with each other, which form a replica; and the
state items that it adds.

Invariant: every rank of the job creates the same groups in the same order, and each group has `sync.timeout`, but
`between_first_ranks` a longer one.

A wait for another rank ends with one error that names iteration and module (`PeerWait`): after torch's timeout of the
process group if the other rank hangs, or its link does, and at once if it has ended. Every other error passes
unchanged. With NCCL torch's watchdog ends the process itself at the timeout.

In: a host, its sync group and modules, the collective of the job. Out: `SyncGroups`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import msgpack
import torch
import torch.distributed as dist

from ...collective import Collective
from ...errors import ProtocolError
from ...model.host import Host
from ...model.inventory import Item, IterationSpan, Role
from ...sync.layers.layers_job import JobLayers, job_layers
from ...sync.links import Links, Ranks
from ...sync.rounds.modules import GroupPlan, JobGroups, ModulePlan, plan_groups
from ...sync.rounds.synchronisation import ModuleState

_CPU = torch.device("cpu")
_UPDATE = frozenset({IterationSpan.UPDATE})
T = TypeVar("T")
_LATE = re.compile(r"timed? ?out", re.IGNORECASE).search
_GONE = re.compile(r"connection (closed|reset|refused)|broken pipe", re.IGNORECASE).search


@dataclass(frozen=True)
class SyncGroups:
    """The groups of one rank. `peers`: links within the sync group; `replica`: within this copy of the model; both for
    tensors on `device`. `stages`: the pipeline stage of each rank of the job."""

    rank: int
    job: JobGroups
    plan: GroupPlan
    stages: tuple[int, ...]
    peers: Links
    replica: Links
    device: torch.device
    wait: PeerWait

    @property
    def stage(self) -> int:
        return self.stages[self.rank]

    def layers(self) -> JobLayers:
        """The modules of this replica, by pipeline stage."""
        ranks = self.plan.replica
        return job_layers([self.stages[rank] for rank in ranks], [self.job.modules[rank] for rank in ranks])

    def between_first_ranks(self, seconds: float) -> Links | None:
        """Links on processors between the first ranks of all replicas, which wait for `seconds` at most; None on other
        ranks. A collective."""
        first_ranks = tuple(ranks[0] for ranks in self.job.replicas)
        group = self._on_processors([first_ranks], seconds)[first_ranks]
        return Links(self.rank, {}, group, _CPU) if self.rank == self.plan.replica[0] else None

    def within_replica(self) -> Links:
        """Links on processors within this replica. A collective."""
        made = self._on_processors([ranks for ranks in self.job.replicas if len(ranks) > 1], self.wait.seconds)
        return Links(self.rank, {}, made.get(self.plan.replica), _CPU)

    def _on_processors(self, groups: Sequence[Ranks], seconds: float) -> dict[Ranks, dist.ProcessGroup]:
        timeout = timedelta(seconds=seconds)
        return {ranks: dist.new_group(list(ranks), timeout, backend="gloo") for ranks in groups}


def connect_groups(
    host: Host, members: Ranks, modules: Sequence[str], collective: Collective, timeout: float,
    computed: Sequence[str], shard: Ranks,
) -> SyncGroups:  # fmt: skip
    """Every rank of the job calls. `modules`: of which this rank holds a part; `computed`, `shard`: of `JobGroups`.
    Raises UnsupportedError if sync groups differ in size."""
    stage = host.topology().coords(host.rank).pp
    parts = collective.gather(msgpack.packb([stage, members, shard, modules, computed]))
    stages, sync, shards, held, forwards = zip(*(msgpack.unpackb(part, use_list=False) for part in parts), strict=True)
    with collective.agreement():
        job = plan_groups(sync, held, forwards, shards)
    plan = job.of(host.rank)
    device = next((tensor.device for tensor in host.tensors().values()), _CPU)
    made = {ranks: dist.new_group(list(ranks), timeout=timedelta(seconds=timeout)) for ranks in job.all()}
    return SyncGroups(
        rank=host.rank, job=job, plan=plan, stages=stages,
        peers=Links(host.rank, made, made.get(members), device),
        replica=Links(host.rank, made, made.get(plan.replica), device), device=device,
        wait=PeerWait(host.rank, members, plan.replica, timeout),
    )  # fmt: skip


class OuterItems:
    """The tensors of local SGD on one rank as state items: last synchronised parameters (anchors), outer momentum.
    `anchors`: whether versions are taken where anchors differ from parameters.

    Anchors equal the parameters at a synchronisation, so they are captured only if versions are taken elsewhere, or
    where their dtype is wider than that of the parameters. Both are equal on all replicas at every version point, so
    replicas share out their capture. They are divided as their parameters are, so a resize reshards them the same way.
    """

    def __init__(self, modules: Sequence[ModulePlan], states: Mapping[str, ModuleState], anchors: bool) -> None:
        self._live: dict[str, torch.Tensor] = {}
        self.items: list[Item] = []
        self.has_anchors = anchors
        for item, state in ((item, states[module.name]) for module in modules for item in module.items):
            anchor = state.anchors.get(item.name)
            widened = anchor is not None and str(anchor.dtype).removeprefix("torch.") != item.dtype
            self.has_anchors = self.has_anchors or widened
        for item, state in ((item, states[module.name]) for module in modules for item in module.items):
            if self.has_anchors and item.name in state.anchors:
                self._add(item, "anchor", state.anchors[item.name])
            if item.name in state.momentum:
                self._add(item, "momentum", state.momentum[item.name])

    def _add(self, of: Item, kind: str, tensor: torch.Tensor) -> None:
        name = f"local_sgd.{kind}:{of.name}"
        self.items.append(
            replace(
                of, name=name, dtype=str(tensor.dtype).removeprefix("torch."), nbytes=tensor.nbytes, role=Role.OUTER,
                shape=tuple(tensor.shape), changed_by=_UPDATE,
            )
        )  # fmt: skip
        self._live[name] = tensor

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._live


# ---- waits for other ranks ----


@dataclass(frozen=True)
class PeerWait:
    """Which ranks a rank waits for, those of its sync group and of its replica, and for how many seconds at most."""

    rank: int
    sync: Ranks
    replica: Ranks
    seconds: float

    def within(self, step: int, what: str, work: Callable[[], T]) -> T:
        """Do `work`: `what` of iteration `step`. Raises ProtocolError if a rank did not come, or has ended."""
        try:
            return work()
        except RuntimeError as error:  # torch has no narrower type for both
            outcome = self._outcome(str(error))
            if not outcome:
                raise
            raise ProtocolError(
                f"rank {self.rank}: local SGD, iteration {step}, {what}: a rank of its sync group {list(self.sync)} or "
                f"of its replica {list(self.replica)} {outcome}"
            ) from error

    def _outcome(self, message: str) -> str:
        if _LATE(message):
            return (
                f"did not come within {self.seconds:g} s: it hangs, or its link does; the job goes back to its last "
                "version (if it is only slow, raise --sync-timeout)"
            )
        return "has ended: see its own error" if _GONE(message) else ""
