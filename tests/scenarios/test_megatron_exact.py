"""A killed and resumed Megatron run equals an unfailed one, bit for bit: megatron-core, TP2 x PP2 x DP2, dropout on.

Golden runs are not protected at all. Every comparison is over all inventory items, all small state and all losses.
"""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import megatron_runs
from harness.claims import assert_proven, restored
from harness.golden import assert_identical, loss_differences, losses, state_differences
from harness.job_control import wait_for, wait_until_stopped
from harness.megatron_runs import ALL, HARDEST, ITERATIONS, RANKS, SKIPPED, MegatronRun

BOUND = 240  # seconds for one run; ten times what it takes on an idle machine

DEFAULT = {  # of the product, what the default run takes: both precisions, optimizers and schedules, overlap once
    "fp32-replicated-1f1b",
    "fp32-distopt-interleaved-overlap",
    "bf16-replicated-interleaved",
    "bf16-distopt-1f1b",
    "bf16-distopt-interleaved-overlap",
}


def start(jobs, configuration, kills):
    run = MegatronRun("protected", jobs.folder, configuration, protected=True, kills=kills)
    return run, jobs.start(run)


def unfailed(configuration):
    return MegatronRun("golden", Path(), configuration)


def resumed(job):
    """The iteration of each restore, asserting that it came from the process tier and lost at most one iteration."""
    for event in job.events("state.restored"):
        assert event.fields["tier"] == "process" and 0 <= event.fields["lost"] <= 1, event
    return restored(job)


def test_unfailed_runs_are_equal_to_each_other_and_unequal_with_another_seed(jobs, golden, tmp_path):
    first = golden(unfailed(HARDEST))
    again = MegatronRun("again", tmp_path / "again", HARDEST)
    other = MegatronRun("other", tmp_path / "other", HARDEST, seed=4321)
    for run in (again, other):
        jobs.finish(run)
    assert_identical(again, first, RANKS)
    found = state_differences(other.digests, first.digests, RANKS)
    for rank in range(RANKS):
        assert any(line.startswith(f"rank {rank}: /items/") for line in found), "another seed is another state"
    assert loss_differences(other.loss_log, first.loss_log)


def test_the_injected_infinity_skips_an_update(golden):
    entries = losses(golden(unfailed(HARDEST)).loss_log)
    assert entries[SKIPPED]["skipped"] and not entries[SKIPPED + 1]["skipped"]
    assert "valid_loss_hex" in entries[megatron_runs.EVALUATED], "one evaluation lies within the run"


@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(one, id=str(one), marks=() if str(one) in DEFAULT else pytest.mark.all_configurations)
        for one in ALL
    ],
)
def test_killed_in_forward_and_in_the_optimizer_step_it_ends_as_the_unfailed_run(
    golden, jobs, configuration, record_property
):
    whole = golden(unfailed(configuration))
    record_property("unprotected", "succeeded")  # for tests/matrix.sh
    kills = (
        "iteration.forward@iteration=4,rank=5,restart=0:kill;"  # right after the skipped update
        "update.middle@iteration=7,rank=2,restart=1:kill"
    )
    run, job = start(jobs, configuration, kills)
    outcome = job.wait(BOUND)
    assert outcome["status"] == "succeeded", f"{outcome}\n{job.tail()}"
    assert outcome["restarts"] == 2
    first, second = resumed(job)
    assert first in (2, 3) and second == 6, "in the update, every rank is past the fence of the version before"
    assert_proven(job, *UNSEALED)
    assert_identical(run, whole, RANKS)


# a rank was killed before it had sealed the version that all had completed, and no other rank knows what it held
UNSEALED = ("unproven: no rank knows captured bytes",)


@dataclass(frozen=True)
class Story:
    """Kills, one per incarnation, and what follows from them."""

    kills: str
    allowed: tuple[int, ...]  # iterations that may be restored; empty: killed before the first version
    restarts: int = 1
    last_killed: int = 0  # the rank of the last kill
    restores: int = 1  # that this rank has ended
    unproven: tuple[str, ...] = ()  # why a restore may be


STORIES = {
    "first-forward": Story("iteration.forward@iteration=1,rank=0,restart=0:kill", (), restores=0),
    "fence": Story("update.begin@iteration=4,rank=1,restart=0:kill", (3,), last_killed=1),
    "after-update": Story("update.end@iteration=4,rank=6,restart=0:kill", (3,), last_killed=6),
    "mid-capture": Story("capture.bucket.end@iteration=4,bucket=0,rank=3,restart=0:kill", (3,), last_killed=3,
                         unproven=UNSEALED),
    "before-seal": Story("capture.seal.before@iteration=4,rank=7,restart=0:kill", (3,), last_killed=7,
                         unproven=UNSEALED),
    "twice-in-a-row": Story(
        "iteration.forward@iteration=5,rank=0,restart=0:kill;iteration.forward@hit=1,rank=4,restart=1:kill",
        (3, 4), restarts=2, last_killed=4, restores=2, unproven=("the job failed while iteration", *UNSEALED)),
    "in-restore": Story(
        "update.middle@iteration=5,rank=0,restart=0:kill;restore.tensors@rank=2,restart=1:kill;"
        "restore.end@rank=3,restart=2:kill", (4,), restarts=3, last_killed=3,
        unproven=("the job failed while iteration 4 was proven",)),
    "lineage-half-opened": Story(
        "update.middle@iteration=5,rank=0,restart=0:kill;restore.opened@rank=6,restart=1:kill",
        (4,), restarts=2, last_killed=6),
    "all-ranks-at-once": Story("update.begin@iteration=6,restart=0:kill", (5,)),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_wherever_it_is_killed_it_ends_as_the_unfailed_run(golden, jobs, name):
    story = STORIES[name]
    run, job = start(jobs, HARDEST, story.kills)
    outcome = job.wait(BOUND)
    assert outcome["status"] == "succeeded", job.tail()
    assert outcome["restarts"] == story.restarts, "every kill has fired, and nothing else has failed"
    versions = resumed(job)
    assert all(version in story.allowed for version in versions), versions
    done = [event.rank for event in job.events("state.restored")]
    assert done.count(story.last_killed) == story.restores
    assert set(done) == (set(range(RANKS)) if story.restores else set())
    if not story.allowed:
        begun = [*job.events("training.started"), *job.events("state.lost")]
        assert len(begun) == 2 * RANKS, "it started from the beginning, and said so"
        assert "from the beginning" in job.log.read_text()
    else:
        assert_proven(job, *story.unproven)
    assert_identical(run, golden(unfailed(HARDEST)), RANKS)


def test_killed_when_nothing_is_left_to_run_it_ends_as_the_unfailed_run(golden, jobs):
    """Data position and RNG are restored although no iteration begins any more."""
    run, job = start(jobs, HARDEST, "shutdown.before@rank=2,restart=0:stop")
    sealed = {"name": "snapshot.sealed", "iteration": ITERATIONS}
    wait_for(
        job.spec.run_dir / "events.jsonl",
        lambda lines: sum(sealed.items() <= line.items() for line in lines) == RANKS,
        BOUND,
    )
    [stopped] = [event.pid for event in job.events("rank.attached") if event.rank == 2]
    wait_until_stopped(stopped, BOUND)
    for written in run.folder.glob(f"{run.digests.name}*"):
        written.unlink()  # by the first incarnation, right before its shutdown
    os.kill(stopped, signal.SIGKILL)
    outcome = job.wait(BOUND)
    assert outcome["status"] == "succeeded", job.tail()
    assert outcome["restarts"] == 1
    assert resumed(job) == [ITERATIONS]
    assert_identical(run, golden(unfailed(HARDEST)), RANKS)


def test_killed_at_the_agent_the_same_command_given_again_resumes(golden, jobs):
    run, job = start(jobs, HARDEST, "")
    wait_for(run.loss_log, lambda lines: len(lines) >= 4, BOUND)
    job.kill()
    assert job.wait(BOUND)["status"] == "killed"
    again = jobs.server("megatron").start(job.spec)
    assert again.wait(BOUND)["status"] == "succeeded", again.tail()
    (version,) = resumed(again)
    assert version >= 3
    assert_identical(run, golden(unfailed(HARDEST)), RANKS)


@pytest.mark.parametrize("with_trainer", [False, True], ids=["alone", "with-a-trainer"])
def test_the_smp_killed_loses_at_most_one_iteration(golden, jobs, with_trainer):
    run, job = start(jobs, HARDEST, "")
    wait_for(run.loss_log, lambda lines: len(lines) >= 3, BOUND)
    os.kill(job.events("smp.started")[-1].pid, signal.SIGKILL)
    if with_trainer:
        os.kill(next(event.pid for event in job.events("rank.attached") if event.rank == 5), signal.SIGKILL)
    outcome = job.wait(BOUND)
    assert outcome["status"] == "succeeded", job.tail()
    assert len(job.events("smp.lost")) == 1, "the alarm"
    assert len(job.events("segments.adopted")) == 1, "a new SMP has adopted the segments"
    assert len(resumed(job)) == int(with_trainer), "training goes on when the SMP dies alone"
    assert_identical(run, golden(unfailed(HARDEST)), RANKS)
    assert ITERATIONS in losses(run.loss_log)
