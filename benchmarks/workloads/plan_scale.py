"""What each plan of the project costs on a process that computes it, by the size of the job.

Each plan is computed twice by the project's own functions: for processor seconds, and for the peak of the memory that
it allocates (`tracemalloc`, which slows it down). `message_bytes` is what the process receives or sends for it: for the
facts of all ranks what arrives at each rank, for requests to the SMP the message on its socket.

In: number of ranks, name of a shape (`scaled_job.SHAPES`). Out: `PlanFigure`s.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgpack

from ft_plugins.bubbles.bubble_plan import plan_bubbles
from ft_plugins.bubbles.filling import transfers_of
from ft_plugins.bubbles.timeline.messages import traffic
from ft_plugins.bubbles.timeline.timeline_exchange import RankSummary
from ft_plugins.bubbles.timeline.timeline_readers import TimelineReaders
from ft_plugins.bubbles.timeline.timeline_values import Packed, pack
from ft_plugins.bubbles.windows import Reserve
from ft_plugins.model.timeline import Profile, SenderFacts, Timeline
from ft_plugins.model.topology import Topology
from ft_plugins.planner.group_survival import choose_group_nodes
from ft_plugins.planner.intervals import Costs
from ft_plugins.planner.survival import Cluster, plan_survival
from ft_plugins.recovery.facts import NodeFacts, RankFacts
from ft_plugins.recovery.recovery_plan import RecoveryPlan, plan_recovery
from ft_plugins.recovery.resize import refill
from ft_plugins.recovery.resize.refill import PullRange
from ft_plugins.recovery.resize.reshard import plan_moves
from ft_plugins.recovery.resize.sizes import admissible
from ft_plugins.redundancy.exchange_plan import ExchangePlan, plan_exchange
from ft_plugins.redundancy.grouping import copies_possible, parity_possible, redundancy_groups
from ft_plugins.redundancy.neighbour import pipelines, plan_copies_and_parity, plan_neighbours
from ft_plugins.smp.exchange.frames import decoded
from ft_plugins.smp.serve import job_file
from ft_plugins.smp.serve.requests import local
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.snapshot.capture import manifest
from ft_plugins.snapshot.capture.double import replica_extents, with_parity
from ft_plugins.snapshot.capture.layout import Layout
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Slot, SlotState, Version
from ft_plugins.systems.reft.reft_reports import budget_table
from workloads.pipelines.outlook import PlannedPipeline, plan_pipeline
from workloads.pipelines.pipeline import Pipeline, PipelineSchedule
from workloads.pipelines.simulate import Times, simulate
from workloads.scaled_job import BUCKET, ScaledJob, topology_of

MICROBATCHES = 64
V4, V5 = Version(1, 4), Version(1, 5)
_LINK = 5e9  # bytes per second


@dataclass(frozen=True)
class PlanFigure:
    """The cost of one plan on one process."""

    plan: str
    seconds: float  # of processor
    peak_bytes: int  # allocated at once
    message_bytes: int = 0


@dataclass(frozen=True)
class _Plan:
    """`compute` returns the plan; or the bytes of its messages, if it `has_messages`."""

    name: str
    compute: Callable[[], object]
    has_messages: bool = False


def plan_figures(ranks: int, shape: str) -> tuple[PlanFigure, ...]:
    """The figures of every plan of a job of that many ranks, eight a node."""
    job = ScaledJob(topology_of(ranks, shape))
    with TemporaryDirectory() as folder:
        return tuple(_measured(plan) for plan in _plans(job, Path(folder)))


def _measured(plan: _Plan) -> PlanFigure:
    gc.collect()
    begin = time.process_time()
    result = plan.compute()
    seconds = time.process_time() - begin
    nbytes = int(str(result)) if plan.has_messages else 0
    del result
    gc.collect()
    tracemalloc.start()
    plan.compute()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return PlanFigure(plan.name, seconds, peak, nbytes)


def _plans(job: ScaledJob, folder: Path) -> Iterator[_Plan]:
    rank = job.topology.world_size - 1
    yield _Plan("layout and double capture", lambda: _layout(job, rank))
    yield _Plan("redundancy groups", lambda: redundancy_groups(job.nodes, job.sharding_groups, 8, 1))
    yield from _exchange_plans(job)
    yield _Plan("start tables", lambda: _tables(job), has_messages=True)
    yield _bubbles(job)
    yield from _recovery(job)
    yield _Plan("admissible sizes, RAIM5", lambda: _sizes(job, copied=False))
    yield _Plan("admissible sizes, copies", lambda: _sizes(job, copied=True))
    yield _facts(job)
    yield _resize(job)
    yield from _messages(job, folder)
    yield from _planner(job)


def _layout(job: ScaledJob, rank: int) -> Layout:
    return with_parity(job.layout(rank), job.nodes, job.groups, 1, BUCKET)


def _tables(job: ScaledJob) -> int:
    """What rank 0 prints at the start: its length."""
    return len(budget_table([(shape, shape.first_slots) for shape in job.shapes], job.nodes)) + len(_raim5(job).table())


def _sizes_of(job: ScaledJob) -> list[int]:
    return [shape.data_nbytes for shape in job.shapes]


def _raim5(job: ScaledJob) -> ExchangePlan:
    return plan_exchange(job.nodes, job.groups, _sizes_of(job), 1, job.replicated)


def _used(plan: ExchangePlan) -> ExchangePlan:
    """The plan, after what an SMP reads of it was read."""
    position = len(plan.nodes) - 1
    _ = (plan.parity_bytes(position), plan.small_state_on(position), list(plan.sends_to(position)))
    _ = (plan.sends[position], plan.parts, plan.parts_of_stripe)
    return plan


def _exchange_plans(job: ScaledJob) -> Iterator[_Plan]:
    sizes, stages = _sizes_of(job), pipelines(job.topology)
    yield _Plan("RAIM5, half computed locally", lambda: _used(_raim5(job)))
    yield _Plan("RAIM5, all exchanged", lambda: _used(plan_exchange(job.nodes, job.groups, sizes, 1)))
    yield _Plan("copies", lambda: _used(plan_neighbours(job.nodes, stages, sizes).exchange()))
    yield _Plan(
        "copies and parity",
        lambda: _used(plan_copies_and_parity(job.nodes, stages, job.groups, sizes, job.replicated)),
    )


def _timelines(job: ScaledJob) -> tuple[Timeline, ...]:
    """One pipeline's iteration, by stage."""
    pipeline = Pipeline(PipelineSchedule.ONE_F_ONE_B, job.topology.pp, MICROBATCHES)
    return simulate(pipeline, Times((0.01,), (0.02,), (0.01,)))


def _bubbles(job: ScaledJob) -> _Plan:
    """BAFT's plan of a rank: who reads which timelines, those that this rank reads, windows and grants. Its messages
    are the summaries of all ranks and the timelines that it receives; no two are equal."""
    by_stage, world = _timelines(job), job.topology.world_size
    stages = pipelines(job.topology)
    copies = plan_neighbours(job.nodes, stages, _sizes_of(job))
    parts = [msgpack.packb(pack(replace(line, rank=0))) for line in by_stage]
    places = [job.topology.coords(rank).pp for rank in range(world)]
    facts = SenderFacts(0.5, 1 << 20)
    senders = (facts,) * world
    summary = RankSummary("", (), (0.0,), astuple(facts), len(parts[0]), (1 << 64) - 1, ("10.0.0.1", 40000))

    def plan() -> int:
        reads = TimelineReaders(copies, stages).reads(world - 1)
        timelines = Packed([parts[place] if rank in reads else None for rank, place in enumerate(places)])
        profile = Profile(timelines, senders, (0.0,))
        linked = copies.linked_copies(world - 1)
        ranks = {copy.rank for copy in linked}
        plan_bubbles(
            transfers_of(linked, dict(enumerate(senders))), {rank: profile.timelines[rank] for rank in ranks},
            {rank: profile.bubbles(rank) for rank in ranks}, _LINK, Reserve(1e-3, 1e-3),
            messages=traffic(profile.timelines, stages, ranks),
        )  # fmt: skip
        return world * len(msgpack.packb(summary)) + sum(len(parts[places[rank]]) for rank in reads)

    return _Plan(f"bubble plan, {MICROBATCHES} microbatches", plan, has_messages=True)


def _recovery(job: ScaledJob) -> Iterator[_Plan]:
    exchange = _raim5(job)
    count = len(exchange.nodes)
    held = tuple(Slot(index, SlotState.CLEAN, version) for index, version in enumerate((V4, V5)))

    def plan(lost: set[int]) -> RecoveryPlan:
        gone = {rank for position in lost for rank in exchange.ranks[position]}
        facts = [
            RankFacts(rank, () if rank in gone else held, 0 if rank in gone else 1, None if rank in gone else 5)
            for rank in range(job.topology.world_size)
        ]
        nodes = [
            NodeFacts(
                {} if at in lost else {rank: frozenset((V4, V5)) for rank in exchange.ranks[at]},
                frozenset() if at in lost else frozenset((V4,)), None if at in lost else at, 7, committed=V4,
            )
            for at in range(count)
        ]  # fmt: skip
        found = plan_recovery(facts, (), nodes, exchange, 7)
        assert found.version is not None, found.reason
        return found

    yield _Plan("recovery, 1 node lost", lambda: plan({count // 2}))
    if count >= 64:  # of different groups
        apart = _apart(job, exchange, 8)
        yield _Plan("recovery, 8 nodes lost", lambda: plan(apart))
    lost = count // 2
    rank = exchange.ranks[lost][0]
    yield _Plan("frames of a lost rank", lambda: sum(1 for _ in decoded(exchange, rank, V4, (lost,))))


def _apart(job: ScaledJob, exchange: ExchangePlan, most: int) -> set[int]:
    """Nodes of which no two are in one redundancy group, as far as there are so many."""
    chosen, used = set[int](), set[int]()
    for position in range(len(exchange.nodes)):
        near = {at for rank in exchange.ranks[position] for at in exchange.nodes_for(rank)}
        if not near & chosen and position not in used and len(chosen) < most:
            chosen.add(position)
            used |= near
    return chosen


def _sizes(job: ScaledJob, copied: bool) -> tuple[int, ...]:
    def survives(resized: Topology, per_node: int) -> bool:
        return copies_possible(resized, per_node) if copied else parity_possible(resized, per_node, 1)

    return admissible(job.topology, job.nodes, lambda replicas: True, survives)


def _facts(job: ScaledJob) -> _Plan:
    """What `recovery.nodes.JobNodes` gathers of all ranks, and each unpacks."""
    parts = [
        msgpack.packb([astuple(shape), shares]) for shape, shares in zip(job.shapes, job.replica_shares, strict=True)
    ]

    def unpack() -> int:
        facts = [msgpack.unpackb(part) for part in parts]
        tuple(Shape(*values) for values, _ in facts)
        replica_extents([shares for _, shares in facts])
        return sum(map(len, parts))

    return _Plan("facts of all ranks, unpacked", unpack, has_messages=True)


def _resize(job: ScaledJob) -> _Plan:
    """The re-partition of one rank when the job shrinks to half of its replicas: manifests of its place, its moves, and
    what it learns of the requests of all ranks."""
    before, now = job, job.resized(max(1, job.topology.dp // 2))
    rank = now.topology.world_size - 1
    at = now.topology.coords(rank)
    of_place = before.topology.sharding_groups()[at.pp, at.tp]
    encoded = {previous: before.encoded_manifest(previous) for previous in of_place}
    target = now.manifest(rank)
    holder = {previous: previous % now.topology.world_size for previous in of_place}

    def plan() -> int:
        held = [manifest.read(one) for one in encoded.values()]
        moves = plan_moves(held, target)
        counts: dict[int, int] = {}
        for move in moves:
            frames = refill._frames(PullRange(holder[move.rank], move.rank, move.source, move.nbytes, move.target))
            counts[holder[move.rank]] = counts.get(holder[move.rank], 0) + len(frames)
        message = refill._packed(counts)
        refill._asked_of(rank, [message] * now.topology.world_size)
        return len(message) * now.topology.world_size

    return _Plan("re-partition of a resize", plan, has_messages=True)


def _protection(job: ScaledJob) -> Protection:
    count = len(job.positions[0])
    return Protection(
        1, None, job.nodes, job.groups, job.shapes, 1, count - 1,
        tuple((f"10.{at >> 16}.{at >> 8 & 255}.{at & 255}", 40000) for at in range(count)), 1, 0.0, 5.0,
        job.replicated, committed=V4,
    )  # fmt: skip


def _messages(job: ScaledJob, folder: Path) -> Iterator[_Plan]:
    """Requests to the SMP: written and sent by a trainer, read by the SMP."""

    def describe() -> int:
        return job_file.refer(_protection(job))[0].nbytes

    def protect() -> int:
        reference = job_file.write(folder, _protection(job))
        message = {"do": "protect", "rank": 0, "token": 1, "protection": reference.block()}
        job_file.read(folder, local(message).protection)
        return len(msgpack.packb(message))

    def rebuild() -> int:
        protection = _protection(job)
        reference, rank = job_file.write(folder, protection), job.topology.world_size // 2
        needed = protection.plan().nodes_for(rank)
        holders = [[position, *protection.endpoints[position]] for position in sorted(needed)]
        message = {
            "do": "rebuild", "rank": rank, "token": 1, "version": [1, 4], "protection": reference.block(),
            "holders": holders, "lost": [], "source": None, "previous": False, "fingerprint": {},
        }  # fmt: skip
        job_file.read(folder, local(message).protection)
        return len(msgpack.packb(message))

    yield _Plan("description of the job, written", describe, has_messages=True)
    yield _Plan("protect", protect, has_messages=True)
    yield _Plan("rebuild", rebuild, has_messages=True)
    yield _Plan("digest of the plan", lambda: _protection(job).digest)


def _planner(job: ScaledJob) -> Iterator[_Plan]:
    """`ft-plugins plan` for this job: survival in redundancy groups and racks, goodput as the job grows."""
    nodes = len(job.positions[0])
    replicas = len({job.nodes[rank] for rank in job.sharding_groups[0]})
    width = max(width for width in range(2, max(replicas, 2) + 1) if nodes % width == 0)
    cluster = Cluster(nodes, width, 0.004, 0.002, 1.0, choose_group_nodes(nodes, 1), 8, 1e-4)
    costs = Costs(100.0, 10.0, 0.1, 5.0, 100.0)
    pipeline = Pipeline(PipelineSchedule.ONE_F_ONE_B, job.topology.pp, MICROBATCHES)
    yield _Plan("survival", lambda: plan_survival(cluster, 0.9).table())
    yield _Plan("goodput", lambda: plan_pipeline(PlannedPipeline(pipeline), cluster, costs).table())
