"""64 ranks on 16 emulated nodes: two nodes of different redundancy groups are lost at once, later one through which
others are connected. The job ends as the unfailed one, bit for bit.

A tiny GPT is sharded over all ranks (FSDP2), so no two ranks hold the same state: a lost shard exists only as parity. A
rank of a node that will be lost stops itself first, so it is known how far the job has come.
"""

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from ft_plugins.collective.operations import place_of
from ft_plugins.events import catalogue
from ft_plugins.redundancy.grouping import redundancy_groups
from ft_plugins.snapshot.segment.paths import SHM
from harness.emulated_nodes import network
from harness.fsdp_runs import EXAMPLE, FsdpRun
from harness.golden import assert_identical
from harness.job_control import run_to_end
from harness.jobs import DETECT
from harness.multinode import BOUND, MultiNodeJob, until

SCRIPT = f"{Path(__file__).with_name('sharded_ranks.py')}:main"
NODES, PER_NODE, GROUP = 16, 4, 4
RANKS = NODES * PER_NODE
PAIR = (6, 9)  # positions of the two nodes that are lost at once
INNER = 1  # position of the node that is lost later
FIRST_STOP, SECOND_STOP, ITERATIONS = 3, 6, 8  # iterations
MODEL = ("--layers", "1", "--batch", "1", "--eval-at", "0", "--data", str(EXAMPLE))
PROTECTION = ("--reft", "--reft-redundancy", "raim5", "--reft-group-nodes", str(GROUP), "--reft-bucket-mib", "1")
DETECT_SECONDS = "60"  # a rank that has stopped itself is not found to be lost before its node is


@dataclass(frozen=True)
class ShardedRun(FsdpRun):
    """A run whose model is sharded over all ranks."""

    def spec(self, **fields):
        return super().spec(**{"entry": SCRIPT, **fields})


@pytest.fixture(scope="module")
def places():
    """One for each node of the job and each substitute."""
    with network(range(11, 11 + NODES + len(PAIR) + 1)) as hosts:
        yield hosts


def ranks_at(position):
    return range(position * PER_NODE, (position + 1) * PER_NODE)


def all_events(nodes, name):
    return sorted((event for job in nodes for event in job.events(name)), key=lambda event: event.time)


def until_restored(nodes):
    """Wait until all ranks of every node have been restored for the first time."""

    def restored(lines):
        names = [entry["name"] for entry in lines]
        assert catalogue.STATE_LOST.name not in names, "no tier had a version"
        return names.count(catalogue.STATE_RESTORED.name) == PER_NODE

    for job in nodes:
        until(job, restored)


def until_committed_since(nodes, time):
    """Wait until every node has committed a version after `time`."""

    def committed(lines):
        return any(e["name"] == catalogue.VERSION_COMMITTED.name and e["time"] > time for e in lines)

    for job in nodes:
        until(job, committed)


def connections(pid):
    """Local and remote address of each established connection (IPv4) of a process, as the kernel writes them."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]  # of all processes on its node
    ends = {line.split()[9]: (line.split()[1], line.split()[2]) for line in lines if line.split()[3] == "01"}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            inode = entry.readlink().name.removeprefix("socket:[").removesuffix("]")
            if inode in ends:
                yield ends[inode]


def connected_ranks(pids, agents):
    """The ranks with which each rank has one connection more than the framework makes.

    The framework connects each rank with each other one in the same way; the rest are the package's. What several
    processes have is their agent's, from which they were forked.
    """
    holders = {}
    for rank, pid in (*pids.items(), *((-1, agent) for agent in agents)):
        for ends in connections(pid):
            holders.setdefault(ends, []).append(rank)
    rank_at = {ends: ranks[0] for ends, ranks in holders.items() if len(ranks) == 1 and ranks[0] >= 0}
    counts = {(rank, other): 0 for rank in pids for other in pids if rank != other}
    for (local, remote), rank in rank_at.items():
        other = rank_at.get((remote, local), rank)
        if other != rank:
            counts[rank, other] += 1
    framework = min(counts.values())
    assert framework > 0, "the framework connects all ranks with each other"
    assert max(counts.values()) == framework + 1, "two ranks never have more than one connection"
    return {rank: {other for other in pids if other != rank and counts[rank, other] > framework} for rank in pids}


def neighbours(rank):
    """The ranks with which a rank is connected in the tree."""
    place = place_of(rank, RANKS, PER_NODE)
    return {*place.children, *([] if place.parent is None else [place.parent])}


def is_inner(position):
    """Whether a node other than the root connects others with the rest, in the trees of ranks and of SMPs."""
    below = any(child not in ranks_at(position) for child in place_of(position * PER_NODE, RANKS, PER_NODE).children)
    if find_spec("ft_plugins.smp.tree.tree") is not None:
        below = below and bool(import_module("ft_plugins.smp.tree.tree").children_of(position, NODES))
    return position > 0 and below


def assert_recovered(job, restores, lost, fresh,
                     versions):  # fmt: skip
    """All ranks restored one version, the `lost` ones from parity on the `fresh` nodes. Returns its iteration."""
    assert sorted(event.rank for event in restores if event.rank is not None) == list(range(RANKS))
    [(tier, iteration)] = {(event.fields["tier"], event.fields["iteration"]) for event in restores}
    assert tier == "node" and iteration in versions, (tier, iteration)
    rebuilt = all_events((job.nodes[name] for name in fresh), catalogue.SLOT_REBUILT.name)
    assert {event.fields["about"] for event in rebuilt} == set(lost)
    assert all(event.fields["decoded"] and event.fields["iteration"] == iteration for event in rebuilt), rebuilt
    return int(iteration)


def assert_nothing_left(job, places):
    """No process or socket, no shared memory; run directories only of the nodes that were not lost."""
    for place in places:
        if place.namespace:  # a process of the job is in the one of its node
            words = ["ip", "netns", "pids", place.namespace]
            left = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout.split()
            assert not left, f"{place.namespace}: {[psutil.Process(int(pid)).cmdline() for pid in left]}"
    [(name, folder)] = {(each.spec.name, each.spec.run_dir.parent) for each in job.nodes.values()}
    assert not list(SHM.glob(f"ftp-{name}@*"))
    assert {path.name for path in folder.iterdir()} == set(job.nodes)
    assert not [path for path in folder.rglob("*") if path.is_socket()]


@pytest.mark.timeout(1200)
def test_a_job_of_16_nodes_loses_two_of_different_groups_and_one_that_connects_others(jobs, tmp_path, places):
    groups = redundancy_groups([str(rank // PER_NODE) for rank in range(RANKS)], [range(RANKS)], GROUP, losses=1)
    together = {group for group in groups for position in PAIR if ranks_at(position)[0] in group}
    assert len(together) == 2
    assert is_inner(INNER), "the tree of SMPs has no inner node: it needs an arity of 8 at most, or the job more nodes"

    golden = ShardedRun("golden", tmp_path / "golden", MODEL, iterations=ITERATIONS, ranks=RANKS)
    run_to_end(jobs.server("fsdp"), golden.spec(), seconds=BOUND)

    run = ShardedRun("many", tmp_path / "many", MODEL, PROTECTION, iterations=ITERATIONS, ranks=RANKS)
    job = MultiNodeJob(jobs, run, NODES, places, DETECT, DETECT_SECONDS)
    stops = {PAIR[0]: FIRST_STOP, INNER: SECOND_STOP}
    job.start_all(
        {f"n{at}": f"update.begin@iteration={stop},rank={ranks_at(at)[0]}:stop" for at, stop in stops.items()}
    )

    job.until_committed(1)
    job.until_rank_stopped(f"n{PAIR[0]}", ranks_at(PAIR[0])[0])
    for position in PAIR:
        job.destroy(f"n{position}")
    pair = [f"s{position}" for position in PAIR]
    for name, place in zip(pair, places[NODES:], strict=False):
        job.start(name, place)

    until_restored(job.nodes.values())
    restores = all_events(job.nodes.values(), catalogue.STATE_RESTORED.name)
    gone = [rank for position in PAIR for rank in ranks_at(position)]
    first = assert_recovered(job, restores, gone, pair, range(1, FIRST_STOP))
    until_committed_since(job.nodes.values(), restores[-1].time)
    job.until_rank_stopped(f"n{INNER}", ranks_at(INNER)[0])
    attached = all_events(job.nodes.values(), catalogue.RANK_ATTACHED.name)
    pids = {event.rank: event.pid for event in attached if event.rank is not None}
    agents = [each.pid for each in job.nodes.values()]
    assert connected_ranks(pids, agents) == {rank: neighbours(rank) for rank in range(RANKS)}
    job.destroy(f"n{INNER}")
    job.start(f"s{INNER}", places[NODES + len(PAIR)])

    job.wait()
    restores = all_events(job.nodes.values(), catalogue.STATE_RESTORED.name)[-RANKS:]
    assert_recovered(job, restores, ranks_at(INNER), [f"s{INNER}"], range(first, SECOND_STOP))
    for name, each in job.nodes.items():
        started = each.events(catalogue.TRAINING_STARTED.name)
        assert len(started) == (PER_NODE if name.startswith("n") else 0), "a rank began from the beginning later"
        for kind in (catalogue.STATE_LOST, catalogue.PROTECTION_LOST, catalogue.SMP_LOST):
            assert not each.events(kind.name), each.events(kind.name)
    assert_identical(run, golden, RANKS)
    assert_nothing_left(job, places)
