"""A node is destroyed whole, a fresh one takes its place: the run ends as the unfailed one, bit for bit.

Emulated nodes: own agent, SMP, workers and network namespace; real megatron-core, TP2 x PP2. The order tp-cp-ep-pp-dp
puts data-parallel replicas on different nodes, so that every sharding group spans several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ft_plugins.rig.forkserver import ForkServer, RunningJob
from ft_plugins.rig.golden import assert_identical
from ft_plugins.rig.gpt_runs import Configuration, GptRun
from ft_plugins.rig.multinode import BOUND, MultiNodeJob, Spec
from ft_plugins.rig.nodes import Place, destroy, freeze, network

ARGV = ("--order", "tp-cp-ep-pp-dp")
ITERATIONS = 10


@pytest.fixture(scope="module")
def places() -> Iterator[list[Place]]:
    with network([11, 12, 13, 14, 5, 25]) as found:
        yield found


@pytest.fixture(scope="module")
def golden(megatron_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., GptRun]:
    """The unfailed run of a configuration on so many ranks, made once."""
    made: dict[tuple[Configuration, int], GptRun] = {}

    def run(configuration: Configuration, ranks: int, argv: tuple[str, ...] = ()) -> GptRun:
        if (configuration, ranks) not in made:
            folder = tmp_path_factory.mktemp("golden")
            found = GptRun("golden", folder, configuration, argv=(*ARGV, *argv), iterations=ITERATIONS)
            job = megatron_server.start(found.spec(nproc=ranks))
            assert job.wait(BOUND)["status"] == "succeeded", job.tail()
            made[configuration, ranks] = found
        return made[configuration, ranks]

    return run


def restored(job: RunningJob) -> set[tuple[str, int]]:
    """Tier and iteration of what the ranks of a node restored."""
    return {(event.fields["tier"], event.fields["iteration"]) for event in job.events("restore.done")}


@dataclass(frozen=True)
class Story:
    """Which node is lost, how, and where its substitute stands: its address sorts before or behind all others."""

    lost: str
    how: str
    substitute: str
    distributed: bool = True

    def __str__(self) -> str:
        kind = "distopt" if self.distributed else "replicated"
        return f"{self.lost}-{self.how}-substitute-sorts-{self.substitute}-{kind}"


STORIES = [
    Story("n2", "killed", "first"),
    Story("n2", "killed", "last", distributed=False),
    Story("n0", "killed", "last"),  # which also serves the rendezvous
    Story("n1", "cut", "last"),
    Story("n3", "frozen", "first", distributed=False),
]


@pytest.mark.parametrize("story", STORIES, ids=str)
def test_a_lost_node_is_rebuilt_on_a_fresh_one(
    megatron_server: ForkServer,
    golden: Callable[..., GptRun],
    jobs: Spec,
    tmp_path: Path,
    places: list[Place],
    story: Story,
) -> None:
    configuration = Configuration(bf16=True, distributed_optimizer=story.distributed, interleaved=False)
    run = GptRun("lost", tmp_path, configuration, protected=True, argv=ARGV, iterations=ITERATIONS)
    # the port differs from story to story: a node that was cut off may still hold the one before
    port = 29400 + STORIES.index(story)
    job = MultiNodeJob(megatron_server, jobs, run, 8, 4, ",".join(f"{place.address}:{port}" for place in places[:2]))
    for index, place in enumerate(places[:4]):
        job.start(f"n{index}", place)
    job.until_counts(2)
    silent: list[RunningJob] = []
    match story.how:
        case "killed":
            job.destroy(story.lost)
        case "cut":
            places[int(story.lost[1:])].cut()
            silent.append(job.nodes.pop(story.lost))
        case "frozen":
            freeze(job.nodes[story.lost])
            silent.append(job.nodes.pop(story.lost))
    fresh = job.start("s", places[4] if story.substitute == "first" else places[5])
    try:
        job.wait()
    finally:
        for lost in silent:
            destroy(lost)
        if story.how == "cut":
            places[int(story.lost[1:])].mend()
    ((tier, iteration),) = restored(fresh)
    assert tier == "node" and iteration >= 2
    if silent:
        declared = [event for each in job.nodes.values() for event in each.events("node.lost")]
        assert declared and all(event.fields["lost"] == [f"node {story.lost}"] for event in declared)
    assert_identical(run, golden(configuration, 8), 8)
    every = [event for each in job.nodes.values() for event in each.events()]
    assert not [event for event in every if event.name == "replica.differs"]
    sent = [event.fields for event in every if event.name == "exchange.sent"]
    slot = min(event.fields["share_bytes"] for event in every if event.name == "rank.attach")
    if story.distributed:
        assert max(fields["bytes"] for fields in sent) > slot and not any(fields["compared"] for fields in sent)
    else:  # all of it is replicated: what is sent are small state, digest tables, digests of what is compared
        assert max(fields["bytes"] for fields in sent) < slot / 5 and all(fields["compared"] for fields in sent)


@dataclass(frozen=True)
class Losses:
    """Several nodes lost at once, of a job of `ranks` on `count` nodes."""

    lost: tuple[int, ...]
    count: int
    ranks: int
    flags: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{'-'.join(map(str, self.lost))}-of-{self.count}-nodes-{self.ranks}-ranks{''.join(self.flags[1:])}"


@pytest.mark.parametrize(
    "losses",
    [
        Losses((0, 1), 4, 8),  # in different groups: 0 and 2 share groups, and so do 1 and 3
        Losses((1,), 3, 12, argv=("--global-batch", "12")),  # DP3
        Losses((3,), 4, 16),  # DP4
        Losses((0, 2), 4, 16, flags=("--reft-redundancy", "raim6")),
    ],
    ids=str,
)
def test_as_many_nodes_as_parity_makes_up_for_are_rebuilt(
    megatron_server: ForkServer,
    golden: Callable[..., GptRun],
    jobs: Spec,
    tmp_path: Path,
    places: list[Place],
    losses: Losses,
) -> None:
    configuration = Configuration(bf16=True, distributed_optimizer=True, interleaved=False)
    run = GptRun("lost", tmp_path, configuration, protected=True, argv=(*ARGV, *losses.argv), iterations=ITERATIONS)
    endpoint = ",".join(f"{place.address}:29410" for place in places)
    job = MultiNodeJob(megatron_server, jobs, run, losses.ranks, losses.count, endpoint, *losses.flags)
    for index in range(losses.count):
        job.start(f"n{index}", places[index])
    job.until_counts(2)
    for index in losses.lost:
        job.destroy(f"n{index}")
    fresh = [job.start(f"s{index}", places[4 + at]) for at, index in enumerate(losses.lost)]
    job.wait()
    for each in fresh:
        ((tier, iteration),) = restored(each)
        assert tier == "node" and iteration >= 2
    assert_identical(run, golden(configuration, losses.ranks, losses.argv), losses.ranks)


def test_more_lost_nodes_than_parity_makes_up_for_end_the_job_with_the_reason(
    megatron_server: ForkServer, jobs: Spec, tmp_path: Path, places: list[Place]
) -> None:
    """Nothing is in storage: what is refused is a silent start from the beginning."""
    configuration = Configuration(bf16=True, distributed_optimizer=True, interleaved=False)
    run = GptRun("lost", tmp_path, configuration, protected=True, argv=ARGV, iterations=100)
    job = MultiNodeJob(megatron_server, jobs, run, 8, 4, ",".join(f"{place.address}:29420" for place in places))
    for index, place in enumerate(places[:4]):
        job.start(f"n{index}", place)
    job.until_counts(2)
    for index in (1, 3):  # one group
        job.destroy(f"n{index}")
        job.start(f"s{index}", places[4 + index // 2])
    for each in job.nodes.values():
        outcome = each.wait(BOUND)
        assert outcome["status"] == "refused", each.tail()
        assert "the parts of ranks 2, 3, 6, 7 are gone with 2 nodes of a sharding group" in outcome["reason"]
        assert "RAIM5 makes up for 1" in outcome["reason"] and "--ftp-resume fresh" in outcome["reason"]
    for each in job.nodes.values():
        assert not [event for event in each.events("restore.scratch") if event.fields["completed"]]
