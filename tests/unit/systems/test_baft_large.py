"""In a large job a rank plans for the nodes that share its links, as all of the job would plan for them."""

from dataclasses import replace

import msgpack
import numpy as np
import pytest

from ft_plugins.bubbles.bubble_plan import plan_bubbles
from ft_plugins.bubbles.filling import transfers_of
from ft_plugins.bubbles.gate.gate import GATE_BYTES, Gate
from ft_plugins.bubbles.gate.pacing_limits import least_bytes
from ft_plugins.bubbles.timeline.messages import traffic
from ft_plugins.bubbles.timeline.timeline_readers import TimelineReaders
from ft_plugins.bubbles.timeline.timeline_values import Packed, pack
from ft_plugins.bubbles.windows import SHORTEST_SECONDS, Reserve
from ft_plugins.config import BaftConfig
from ft_plugins.events import Events
from ft_plugins.model.timeline import Kind, Profile, SenderFacts, Span, reduce_work, reductions
from ft_plugins.redundancy.neighbour import plan_neighbours
from ft_plugins.systems.baft import Baft
from workloads.pipelines.pipeline import Pipeline, PipelineSchedule
from workloads.pipelines.simulate import PipelineLink, Times, simulate

CONFIG = BaftConfig()
SIZES = (200_000, 3_000_000, 700_000, 20_000_000)  # bytes of the ranks of a pipeline: one iteration, and many


def reducing(timeline, rank):
    """With a reduction of 4 to 12 ms at the end, of which 4 are work."""
    end = timeline.seconds + 0.012
    reduced = Span(Kind.REDUCE, end - 0.004 * (1 + rank % 3), end)
    return replace(timeline, rank=rank, seconds=end, spans=(*timeline.spans, reduced))


class Job:
    """`wide` pipelines of so many stages, `per_node` ranks of them on a node, stage by stage. The first rank of all has
    no bubbles, and the links of nodes are several."""

    def __init__(self, stages, wide, per_node, schedule=PipelineSchedule.ONE_F_ONE_B):
        chunks = 2 if schedule is PipelineSchedule.INTERLEAVED else 1
        pipeline = Pipeline(schedule, stages, 2 * stages, chunks)
        forward = tuple(0.01 + 0.002 * (stage % 2) for stage in range(pipeline.virtual_stages))
        links = tuple(PipelineLink(0.001 * (1 + stage % 4)) for stage in range(stages))
        times = Times(forward, (0.02,), (0.005,), links=links)
        played = simulate(pipeline, times, eager=True)
        world = stages * wide
        self.pipelines = [tuple(range(first, world, wide)) for first in range(wide)]
        self.timelines = [reducing(played[rank // wide], rank) for rank in range(world)]
        busy = Span(Kind.FORWARD, 0.0, self.timelines[0].seconds, 0)
        self.timelines[0] = replace(self.timelines[0], spans=(busy,))  # without a bubble
        self.senders = tuple(SenderFacts(0.001 * (rank % 7), 100 + rank) for rank in range(world))
        nodes = [f"n{rank // per_node}" for rank in range(world)]
        nbytes = [SIZES[rank % wide % len(SIZES)] for rank in range(world)]
        self.copies = plan_neighbours(nodes, self.pipelines, nbytes)
        self.links = {position: 2e7 * (1 + position % 3) for position in range(len(self.copies.nodes))}

    def profile(self, rank):
        """As `rank` has it: with the timelines that it reads."""
        reads = TimelineReaders(self.copies, self.pipelines).reads(rank)
        packed = Packed([msgpack.packb(pack(one)) if at in reads else None for at, one in enumerate(self.timelines)])
        return Profile(packed, self.senders, reduce_work([reductions(one) for one in self.timelines]))

    def rank(self, rank):
        baft = Baft(rank, CONFIG, Events("n", rank), self.pipelines)
        baft.use_gate(Gate(np.zeros(GATE_BYTES + 8, dtype=np.uint8)), self.copies, self.links)
        return baft


@pytest.mark.parametrize(
    "schedule", [PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED, PipelineSchedule.DEEPSPEED]
)
@pytest.mark.parametrize(("stages", "wide", "per_node"), [(4, 4, 2), (5, 4, 2), (6, 4, 4), (2, 4, 1), (4, 3, 2)])
def test_what_ranks_plan_for_themselves_is_what_would_be_planned_for_the_job(stages, wide, per_node, schedule):
    job = Job(stages, wide, per_node, schedule)
    profile = Profile(tuple(job.timelines), job.senders)
    ranks = range(len(job.timelines))
    reserve = Reserve(CONFIG.reserve_ms / 1e3, CONFIG.reserve_ms / 1e3, SHORTEST_SECONDS)
    whole = plan_bubbles(
        transfers_of(job.copies.copies, dict(enumerate(job.senders))), dict(enumerate(job.timelines)),
        {rank: profile.bubbles(rank) for rank in ranks}, job.links, reserve,
        ready_seconds=max(one.ready_seconds for one in job.senders), least_bytes=least_bytes(min(job.links.values())),
        messages=traffic(job.timelines, job.pipelines),
    )  # fmt: skip
    found = [job.rank(rank) for rank in ranks]
    needed = [one.plan(job.profile(rank)) for rank, one in enumerate(found)]
    most = max(needed)
    assert most == whole.iterations and whole.senders[0].reason and not all(one.reason for one in whole.senders)
    assert min(needed) < most, "not all of them share links"
    seen = set()
    for rank, one in enumerate(found):
        plan = one.adopt(most)
        assert plan is not None and plan.iterations == most
        planned = [sender.transfer.sender for sender in plan.senders]
        assert rank in planned and list(plan.senders) == [whole.senders[sender] for sender in planned]
        seen.update(planned)
    assert seen == set(ranks)


def _unpacked(job, rank):
    profile = job.profile(rank)
    assert job.rank(rank).plan(profile) > 0 and isinstance(profile.timelines, Packed)
    return sorted(profile.timelines.unpacked)


def test_of_thousands_of_ranks_those_of_two_nodes_and_of_the_stages_beside_theirs_are_looked_at():
    job = Job(stages=16, wide=128, per_node=8)  # 2048 ranks
    stage, first = 6, 24  # on the fourth node of stage 6; its copies are on the fourth of stage 7
    beside = [128 * (stage + step) + first + place for step in (-1, 0, 1, 2) for place in range(8)]
    assert _unpacked(job, 128 * stage + first + 5) == beside
