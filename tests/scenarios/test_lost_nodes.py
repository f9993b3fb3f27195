"""Nodes of real jobs are killed, silent or cut off; others take their place, and the job ends as the unfailed one.

Emulated nodes, n0 and so on, and substitutes: own agent, SMP, workers and network namespace each. With two replicas on
four nodes, nodes 0 and 2 share the sharding groups of one pipeline stage, and 1 and 3 those of the other.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest

from ft_plugins.snapshot.segment.slots import Mark
from harness.claims import (
    assert_checkpoints_intact,
    assert_committed_restored,
    assert_declared_lost,
    assert_newest_stored_restored,
    assert_replicas_compared,
    assert_restored,
    exchanged_before_restore,
    restores,
    stored,
)
from harness.emulated_nodes import network
from harness.golden import assert_identical
from harness.job_control import wait_until
from harness.multinode import BOUND, MultiNodeJob
from harness.shapes import JobShape

MEGATRON, DEEPSPEED = "megatron", "deepspeed"
BOTH = (MEGATRON, DEEPSPEED)
FIRST, LAST = 6, 7  # hosts whose addresses sort before and after those of all others
MANY = 40  # iterations: nodes are lost long before the end, on a busy machine too
SHARDED, REPLICATED = JobShape(2, 2, 2, True, MANY), JobShape(2, 2, 2, False, MANY)
TWENTY, FOURTEEN = replace(SHARDED, iterations=20), replace(SHARDED, iterations=14)


@pytest.fixture(autouse=True)
def _installed(request):
    if "deepspeed" in request.node.name and not find_spec("deepspeed"):
        pytest.skip("needs the extra [deepspeed]")


@pytest.fixture(scope="module")
def hosts():
    with network([11, 12, 13, 14, 15, 16, 5, 25]) as found:
        yield found


@dataclass(frozen=True)
class Killed:
    """Nodes that are killed at once, of a job on so many nodes, when a version is committed on all of them. Of two
    substitutes, the first one's address sorts before all others and the second one's after them."""

    shape: JobShape
    flags: tuple[str, ...] = ()
    nodes: int = 4
    lost: tuple[str, ...] = ("n2",)
    order: tuple[int, ...] = (FIRST, LAST)
    committed: int = 2
    frameworks: tuple[str, ...] = (MEGATRON,)

    def rows(self, name):
        return [pytest.param(self, framework, id=f"{name}-{framework}") for framework in self.frameworks]


FOUR_REPLICAS, LONG = JobShape(2, 2, 4, True, MANY), replace(SHARDED, iterations=120)
NARROW = JobShape(1, 2, 2, True, 120)  # each node a rank: half the processes, the same groups
KILLED = {
    "of-one-stage": Killed(SHARDED, frameworks=(DEEPSPEED,)),
    "that-serves-the-rendezvous": Killed(SHARDED, lost=("n0",), order=(LAST,)),
    "of-replicas": Killed(REPLICATED, order=(LAST,), frameworks=BOTH),
    "of-plain-engines": Killed(
        JobShape(1, 0, 3, True, 60), nodes=3, lost=("n1",), order=(LAST,), frameworks=(DEEPSPEED,)
    ),
    "of-plain-engines-that-are-replicas": Killed(
        JobShape(1, 0, 3, False, 60), nodes=3, lost=("n1",), order=(LAST,), frameworks=(DEEPSPEED,)
    ),
    "of-four-replicas": Killed(FOUR_REPLICAS, lost=("n3",)),
    "copied-to-the-neighbouring-stage": Killed(SHARDED, ("--reft-redundancy", "neighbour"), frameworks=BOTH),
    "copied-in-bubbles": Killed(NARROW, ("--baft",), committed=14, frameworks=BOTH),
    "both-with-the-copies-of-the-other": Killed(  # parity, which the same snapshots fed, has what they held
        LONG, ("--baft", "--reft-redundancy", "both"), lost=("n0", "n1"), committed=14
    ),
    "two-of-different-sharding-groups": Killed(SHARDED, lost=("n0", "n1")),
    "two-of-different-redundancy-groups": Killed(FOUR_REPLICAS, ("--reft-group-nodes", "2"), lost=("n0", "n1")),
    "two-of-one-group-raim6": Killed(JobShape(1, 2, 4, True, MANY), ("--reft-redundancy", "raim6"), lost=("n0", "n2")),
}


@pytest.mark.parametrize(("case", "framework"), [row for name, case in KILLED.items() for row in case.rows(name)])
def test_nodes_that_are_killed_are_rebuilt_on_substitutes(jobs, golden, tmp_path, hosts, case, framework):
    run = case.shape.run(framework, tmp_path / "run", case.flags, protected=True)
    with MultiNodeJob(jobs, run, case.nodes, hosts) as job:
        job.start_all()
        job.until_committed(case.committed)
        for name in case.lost:
            job.destroy(name)
        fresh = [job.start(f"s{name}", hosts[at]) for name, at in zip(case.lost, case.order, strict=False)]
        job.wait()
        for each in fresh:
            assert_restored(each, "node", case.committed)
        if "--baft" in case.flags:
            assert any(event.fields["in_bubbles"] for event in job.events("version.committed"))
    assert_identical(run, golden(case.shape.run(framework)), run.ranks)


def test_a_node_that_is_cut_off_is_missed_and_goes_on_by_itself_to_no_effect(jobs, golden, tmp_path, hosts):
    run = SHARDED.run(MEGATRON, tmp_path / "run", protected=True)
    with MultiNodeJob(jobs, run, 4, hosts) as job:
        job.start_all()
        job.until_committed(2)
        job.cut("n1", hosts[1])
        fresh = job.start("s", hosts[LAST])
        job.wait()
        assert_declared_lost(job.nodes, "n1")
        assert_restored(fresh, "node", 2)
    assert_identical(run, golden(SHARDED.run(MEGATRON)), run.ranks)


def test_a_node_whose_processes_all_stop_with_connections_open_is_missed_and_its_replicas_were_compared(
    jobs, golden, tmp_path, hosts
):
    run = REPLICATED.run(MEGATRON, tmp_path / "run", protected=True)
    with MultiNodeJob(jobs, run, 4, hosts) as job:
        job.start_all()
        job.until_committed(2)
        job.freeze("n3")
        fresh = job.start("s", hosts[FIRST])
        job.wait()
        assert_declared_lost(job.nodes, "n3")
        assert_restored(fresh, "node", 2)
        assert_replicas_compared(job.nodes)
    assert_identical(run, golden(REPLICATED.run(MEGATRON)), run.ranks)


# ---- more is lost than redundancy makes up for ----


@pytest.mark.parametrize(
    ("redundancy", "first", "said"),
    [
        ("neighbour", "n2", "the parts of ranks 4, 5, 6, 7 are gone with 2 nodes that protect each other"),
        ("raim5", "n1", "the parts of ranks 2, 3, 6, 7 are gone with 2 nodes that protect each other"),
    ],
)
def test_without_storage_a_silent_start_from_the_beginning_is_refused(jobs, tmp_path, hosts, redundancy, first, said):
    """Of neighbours, one kept the copy of the other; of one sharding group, parity makes up for one."""
    flags = ("--reft-redundancy", redundancy)
    run = replace(SHARDED, iterations=100).run(MEGATRON, tmp_path / "run", flags, protected=True)
    with MultiNodeJob(jobs, run, 4, hosts) as job:
        job.start_all()
        job.until_committed(2)
        for name, at in ((first, FIRST), ("n3", LAST)):
            job.destroy(name)
            job.start(f"s{name}", hosts[at])
        for reason in job.refusals():
            assert said in reason and "--ftp-resume fresh" in reason
            assert redundancy != "raim5" or "RAIM5 makes up for 1" in reason
        assert not job.events("state.lost")


def stores(tmp_path):
    return "--reft-checkpoint-dir", str(tmp_path / "ck"), "--reft-checkpoint-interval", "3"


def test_from_storage_all_nodes_restore_the_newest_checkpoint_and_say_why(jobs, golden, tmp_path, hosts):
    run = FOURTEEN.run(MEGATRON, tmp_path / "run", stores(tmp_path), protected=True)
    with MultiNodeJob(jobs, run, 4, hosts) as job:
        job.start_all()
        job.until_committed(2)
        base = tmp_path / "ck" / job.nodes["n0"].spec.name
        wait_until(lambda: max(stored(base), default=0) >= 3, BOUND, lambda: f"in storage: {stored(base)}")
        for name, at in (("n1", FIRST), ("n3", LAST)):
            job.destroy(name)
            job.start(f"s{name}", hosts[at])
        job.wait()
        assert_newest_stored_restored(job.nodes)
        for each in job.nodes.values():
            assert_restored(each, "storage", 3)
            reason = restores(each)[-1]["reason"]
            assert "the parts of ranks 2, 3, 6, 7 are gone with 2 nodes that protect each other" in reason
            assert "RAIM5 makes up for 1" in reason
        assert not job.events("state.lost")
        assert_checkpoints_intact(base, run.ranks, 6)  # a busy node may overwrite 9 or 12 while it writes
    assert_identical(run, golden(FOURTEEN.run(MEGATRON)), run.ranks)


@pytest.mark.parametrize(
    ("lost", "point"),
    [
        pytest.param("n0", "persist.manifest.before@iteration=6", id="before-the-manifest"),
        pytest.param("n2", "persist.file@rank=5,iteration=6", id="in-a-file"),
    ],
)
def test_a_checkpoint_during_which_a_node_is_killed_is_never_taken_for_a_complete_one(
    jobs, golden, tmp_path, hosts, lost, point
):
    run = FOURTEEN.run(MEGATRON, tmp_path / "run", stores(tmp_path), protected=True)
    with MultiNodeJob(jobs, run, 4, hosts) as job:
        job.start_all({lost: f"{point}:stop"})
        base = tmp_path / "ck" / job.nodes["n0"].spec.name
        job.until_smp_stopped(lost)
        assert 6 not in stored(base)
        committed = max(event.fields["iteration"] for event in job.events("version.committed"))
        job.destroy(lost)
        fresh = job.start("s", hosts[LAST if lost == "n0" else FIRST])
        job.wait()
        assert_restored(fresh, "node", committed)
        assert not job.events("state.lost")
        assert_checkpoints_intact(base, run.ranks, 9)  # a busy node may overwrite 12 while it writes 9
    assert_identical(run, golden(FOURTEEN.run(MEGATRON)), run.ranks)


# ---- in the middle of an exchange ----

BUBBLES = ("--baft", "--baft-profile-iterations", "2", "--reft-exchange-interval", "4")
# a stopped SMP is missed after so long, and before that three iterations go by, on a busy machine too
PATIENT = (*BUBBLES, "--ftp-detect-seconds", "30")
HALF_SENT = ";".join(f"exchange.frame@epoch=1,iteration={at},frame=1:stop" for at in (8, 12))


@pytest.mark.parametrize(
    ("shape", "silent", "framework"),
    [
        pytest.param(TWENTY, False, MEGATRON, id="killed-sharded-megatron"),
        pytest.param(replace(REPLICATED, iterations=20), False, MEGATRON, id="killed-replicated-megatron"),
        pytest.param(TWENTY, True, MEGATRON, id="silent-sharded-megatron"),
        pytest.param(TWENTY, True, DEEPSPEED, id="silent-sharded-deepspeed"),
    ],
)
def test_of_a_node_lost_while_it_sends_what_is_half_there_is_passed_over_for_the_version_before(
    jobs, golden, tmp_path, hosts, shape, silent, framework
):
    run = shape.run(framework, tmp_path / "run", PATIENT, protected=True)
    with MultiNodeJob(jobs, run, 4, hosts) as job:
        job.start_all({"n2": HALF_SENT})
        job.until_smp_stopped("n2")
        job.until_captured("n0", 11)
        (job.freeze if silent else job.destroy)("n2")
        fresh = job.start("s", hosts[LAST if silent else FIRST])
        job.wait()
        if silent:
            assert_declared_lost(job.nodes, "n2")
        assert_restored(fresh, "node", 4)
        assert_committed_restored(job.nodes, "s")
        assert not job.events("state.lost")
    assert_identical(run, golden(shape.run(framework)), run.ranks)


@pytest.mark.parametrize(
    ("shape", "framework"),
    [
        pytest.param(TWENTY, MEGATRON, id="sharded-megatron"),
        pytest.param(TWENTY, DEEPSPEED, id="sharded-deepspeed"),
        pytest.param(replace(REPLICATED, iterations=20), MEGATRON, id="replicated-megatron"),
    ],
)
def test_a_rank_killed_while_it_captures_and_its_node_sends_resumes_on_every_node_from_the_version_that_was_sent(
    jobs, golden, tmp_path, hosts, shape, framework
):
    """Version 8 is held half sent, version 9 ends half captured."""
    hold, kill = "exchange.frame@epoch=1,iteration=8,frame=1", "capture.bucket.end@rank=5,iteration=9,restart=0"
    run = shape.run(framework, tmp_path / "run", BUBBLES, protected=True)
    with MultiNodeJob(jobs, run, 4, hosts) as job:
        job.start_all({"n2": f"{hold}:hold;{kill}:kill"})
        job.wait()
        started, committed = exchanged_before_restore(job.nodes)
        assert 8 in started and 8 not in committed
        for each in job.nodes.values():
            assert_restored(each, "process", 8, 8)
        assert not job.events("state.lost")
    assert_identical(run, golden(shape.run(framework)), run.ranks)


# ---- with an audit ----


@pytest.mark.parametrize("framework", BOTH)
def test_after_a_replica_was_repaired_the_version_that_a_lost_node_gets_back_is_certified(
    jobs, golden, tmp_path, hosts, framework
):
    shape = JobShape(1, 2, 3, False, 160, 12)
    flags = ("--baft", "--paft", "--paft-mode", "audit", "--paft-audit-interval", "1")
    run = shape.run(framework, tmp_path / "run", flags, protected=True)
    with MultiNodeJob(jobs, run, 6, hosts) as job:
        job.start_all({"n1": "update.parameters@iteration=3,rank=1,restart=0:flip=20~5"})
        job.until_committed(14)
        job.destroy("n2")
        fresh = job.start("s", hosts[FIRST])
        job.wait()
        failed = {(event.fields["iteration"], *event.fields["ranks"]) for event in job.events("audit.failed")}
        assert failed == {(3, 1)}
        assert_restored(fresh, "node", 14)
        assert restores(fresh)[-1]["mark"] == Mark.CERTIFIED.word
        assert any(event.fields["in_bubbles"] for event in job.events("version.committed"))
    assert_identical(run, golden(shape.run(framework)), run.ranks)
