"""FSDP2, two replicas of two shards: a killed and resumed run equals an unfailed one, bit for bit.

Under EDiT golden runs train with the same policy and without REFT; without local SGD they run without the package. All
items of all ranks, all small state, the losses of rank 0 (evaluations included) and what each synchronisation left out
and clipped are compared. Synchronisations are after iterations 2, 4, 6 and 8; an evaluation is after 4 and 8.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.emulated_nodes import network
from harness.forkserver import ForkServer, JobSpec, RunningJob
from harness.fsdp_runs import FsdpRun
from harness.golden import assert_identical
from harness.job_control import wait_until_stopped
from harness.multinode import BOUND, DETECT, MultiNodeJob, until

Spec = Callable[..., JobSpec]
SECONDS = 200.0  # for one run; far more than it takes on an idle machine
RANKS = 4

# norms grow with the learning rate: some of those at 6 and 8 are outliers
EDIT = (
    *("--sync-policy", "edit", "--sync-tau", "2", "--sync-shard-ranks", "2", "--sync-penalty-warmup", "1"),
    *("--sync-alpha", "0.3", "--sync-threshold", "1.5", "--sync-clip", "0.02"),
)
LOCAL = ("--local", "--shards", "2")
FORWARD, WAIT, UPDATE = "tied-forward", "untied-bf16-offload-wait", "tied-update"
CONFIGURATIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # flags of the example and of ft-run
    FORWARD: (LOCAL, EDIT),
    WAIT: ((*LOCAL, "--untied", "--bf16"), (*EDIT, "--sync-apply", "wait", "--sync-offload")),
    UPDATE: (LOCAL, (*EDIT, "--sync-apply", "update")),
}
KILLS = (  # a rank exchanges and applies three modules one after another: root, and two blocks
    "update.begin@iteration=4,rank=3,restart=0:kill",  # between two synchronisations
    "sync.exchange@rank=3,hit=5,restart=1:kill",  # in the middle of exchanging the second one after the restart
    "sync.apply@rank=0,hit=5,restart=2:kill",  # in the middle of its outer step
)
# A version at a synchronisation that is in flight (update) begins with it once more; whether that one or the version
# before is sealed on all ranks when a rank is killed behind it, depends on how far they have come.
RESTORED = {
    "sync": ([{2}, {4}, {6}], [{2}, {2, 4}, {2, 4, 6}]),
    "every": ([{3}, {5}, {7}], [{3}, {5, 6}, {7, 8}]),
}


def named(jobs: Spec, run: FsdpRun) -> JobSpec:
    """The job of a run, with a name that no other job has: jobs with local SGD have a snapshot process, too."""
    return jobs(**{**vars(run.spec()), "name": f"f{os.getpid()}-{abs(hash(run.folder)) % 10**6}"})


def finish(server: ForkServer, spec: JobSpec, restarts: int = 0) -> RunningJob:
    job = server.start(spec)
    outcome = job.wait(SECONDS)
    assert (outcome["status"], outcome["restarts"]) == ("succeeded", restarts), f"{outcome}\n{job.tail()}"
    return job


def synchronisations(*nodes: RunningJob) -> dict[Any, Any]:
    """What each rank reports of the last synchronisation of each iteration, time excluded."""
    return {
        (event.rank, event.fields["iteration"]): {
            key: value for key, value in event.fields.items() if key != "waited_seconds"
        }
        for job in nodes
        for event in job.events("replicas.synchronised")
    }


def restored(job: RunningJob) -> list[int]:
    """The iteration of each restore, the same on all ranks."""
    tokens = {event.pid: event.fields["token"] for event in job.events("rank.attached")}
    by_incarnation: dict[int, set[int]] = {}
    for event in job.events("state.restored"):
        by_incarnation.setdefault(tokens[event.pid], set()).add(event.fields["iteration"])
    assert all(len(versions) == 1 for versions in by_incarnation.values()), "every rank restores the same version"
    return [next(iter(versions)) for _, versions in sorted(by_incarnation.items())]


Golden = Callable[[str], tuple[FsdpRun, dict[Any, Any]]]


@pytest.fixture(scope="module")
def unfailed() -> dict[str, tuple[FsdpRun, dict[Any, Any]]]:
    """The golden runs so far."""
    return {}


@pytest.fixture
def golden(
    fsdp_server: ForkServer, jobs: Spec, tmp_path_factory: pytest.TempPathFactory,
    unfailed: dict[str, tuple[FsdpRun, dict[Any, Any]]],
) -> Golden:  # fmt: skip
    """The unfailed run of a configuration, and what it synchronised; made once."""

    def run(name: str) -> tuple[FsdpRun, dict[Any, Any]]:
        if name not in unfailed:
            argv, flags = CONFIGURATIONS[name]
            one = FsdpRun("golden", tmp_path_factory.mktemp("golden"), argv, flags)
            unfailed[name] = one, synchronisations(finish(fsdp_server, named(jobs, one)))
        return unfailed[name]

    return run


@pytest.mark.parametrize("versions", RESTORED)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_killed_between_synchronisations_in_an_exchange_and_in_the_outer_step_it_ends_as_the_unfailed_run(
    fsdp_server: ForkServer, golden: Golden, jobs: Spec, tmp_path: Path, name: str, versions: str
) -> None:
    """With apply forward the exchange of iteration 6 runs in the forward of 7, and that of 8 in the evaluation; with
    update both run behind the next iteration."""
    argv, flags = CONFIGURATIONS[name]
    whole, expected = golden(name)
    protected = ("--reft", "--reft-versions", versions, *flags)
    run = FsdpRun("killed", tmp_path, argv, protected, ";".join(KILLS))
    job = finish(fsdp_server, named(jobs, run), restarts=len(KILLS))
    possible = RESTORED[versions][name == UPDATE]
    assert all(one in those for one, those in zip(restored(job), possible, strict=True)), restored(job)
    assert_identical(run, whole, RANKS)
    assert synchronisations(job) == expected
    assert {iteration for _, iteration in expected} == {2, 4, 6, 8}
    assert any(one["left_out"] for one in expected.values()) and any(one["clipped"] for one in expected.values())


def test_replicas_differ_between_synchronisations_and_are_equal_after_the_last(
    fsdp_server: ForkServer, jobs: Spec, tmp_path: Path
) -> None:
    """Else the test above would compare runs that never trained on their own."""
    equal = {}
    for iterations in (7, 8):
        (tmp_path / str(iterations)).mkdir()
        run = FsdpRun("ends", tmp_path / str(iterations), LOCAL, (*EDIT, "--sync-apply", "wait"), "", iterations)
        finish(fsdp_server, named(jobs, run))
        equal[iterations] = [
            parameters(run, shard) == parameters(run, shard + 2) and parameters(run, shard) for shard in (0, 1)
        ]
    assert not any(equal[7]) and all(equal[8]) and equal[8][0] != equal[8][1]


def parameters(run: FsdpRun, rank: int) -> dict[str, object]:
    """Digests of a rank's shards at the end, by name."""
    state = json.loads(Path(f"{run.digests}{rank:05d}.json").read_text())
    return {name: digest for name, digest in state["items"].items() if ":" not in name}


@pytest.mark.parametrize(
    "argv", [("--shards", "2"), ("--shards", "4", "--bf16", "--untied")], ids=["hybrid", "sharded"]
)
def test_reft_alone_protects_a_job_that_is_killed_around_an_update(
    fsdp_server: ForkServer, jobs: Spec, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    """Without local SGD, replicated by FSDP itself and not at all; golden is without the package."""
    (tmp_path / "golden").mkdir()
    whole = FsdpRun("golden", tmp_path / "golden", argv)
    finish(fsdp_server, named(jobs, whole))
    kills = "update.begin@iteration=5,rank=3,restart=0:kill;update.end@iteration=7,rank=0,restart=1:kill"
    run = FsdpRun("killed", tmp_path, argv, ("--reft",), kills)
    job = finish(fsdp_server, named(jobs, run), restarts=2)
    assert restored(job) == [4, 6]
    assert_identical(run, whole, RANKS)


def test_replicas_that_nothing_keeps_together_are_refused_at_start(
    fsdp_server: ForkServer, jobs: Spec, tmp_path: Path
) -> None:
    """Their snapshots would take parts of each. The flag of the script is that of local SGD, which is not on."""
    job = fsdp_server.start(
        jobs(**{**vars(FsdpRun("apart", tmp_path, LOCAL, ("--reft",)).spec()), "name": f"f{os.getpid()}-apart"})
    )
    outcome = job.wait(SECONDS)
    assert outcome["status"] == "refused", outcome
    assert "gradients are not averaged over the replicas" in outcome["reason"]


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_node_that_is_lost_in_a_synchronisation_is_rebuilt_from_parity(
    fsdp_server: ForkServer, golden: Golden, jobs: Spec, tmp_path: Path, nodes: int
) -> None:
    """Each replica on a node of its own, or each shard. RAIM5, version at a synchronisation: parameters and outer
    momentum have a replica elsewhere, the inner optimizer's state has none. The ranks of the node stop in the outer
    step of iteration 6, in the forward of 7; then it is destroyed."""
    argv, flags = CONFIGURATIONS[FORWARD]
    whole, expected = golden(FORWARD)
    run = FsdpRun("lost", tmp_path, argv, ("--reft", "--reft-redundancy", "raim5", *flags, DETECT, "15"))
    with network([11, 12, 13, 14, 15]) as places:
        endpoint = ",".join(f"{place.address}:{29480 + nodes}" for place in places[: nodes + 1])
        job = MultiNodeJob(fsdp_server, jobs, run, RANKS, nodes, endpoint)
        for index in range(nodes):
            job.start(f"n{index}", places[index], faults="sync.apply@hit=8:stop" if index == 1 else "")
        until_stopped(job.nodes["n1"])
        job.until_committed(2)
        job.destroy("n1")
        fresh = job.start("s", places[nodes])
        job.wait()
    found = [(event.fields["tier"], event.fields["iteration"] in (2, 4)) for event in fresh.events("state.restored")]
    assert found == [("node", True)] * (RANKS // nodes)
    assert_identical(run, whole, RANKS)
    seen = synchronisations(*job.nodes.values())
    assert seen == {key: value for key, value in expected.items() if key in seen}
    assert {iteration for _, iteration in seen} >= {6, 8}


def until_stopped(node: RunningJob) -> None:
    """Wait until a rank of the node has stopped at its fault point."""
    until(node, lambda lines: any(line["name"] == "rank.attached" for line in lines))
    wait_until_stopped(node.events("rank.attached")[0].pid, BOUND)
