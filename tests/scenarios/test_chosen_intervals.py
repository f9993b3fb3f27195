"""Jobs that choose the interval of their snapshots and are killed: they end bit for bit as if nothing had failed.

Failures are said to be rare, so after its first measurement a job takes snapshots less often than in every iteration,
however fast the machine is. How much less depends on it: what is checked follows from what the job announced.
"""

from pathlib import Path

import pytest

from harness.claims import restored
from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.golden import assert_identical
from harness.megatron_runs import MegatronConfiguration, MegatronRun

ITERATIONS, FIRST, SECOND = 40, 24, 33  # iterations in which a rank is killed
SNAPSHOTS = 16  # until the first choice
RARE = 1e-4  # failures of a node per day, of hardware and of software: one in ten thousand days

pytestmark = pytest.mark.all_configurations


def kills(rank):
    return (
        f"iteration.forward@iteration={FIRST},rank={rank},restart=0:kill;"
        f"update.middle@iteration={SECOND},rank=0,restart=1:kill"
    )


def assert_chosen_once_and_followed(job, ranks):
    """All ranks captured at the iterations that follow from the one change, and from its half after each kill."""
    change, *at_restarts = job.events("interval.changed")
    since, interval = change.fields["iteration"], change.fields["interval"]
    assert since == SNAPSHOTS + 1 and interval > 1 and change.rank == 0, change

    def due(before, every):
        return max(i for i in range(1, before) if (i < since or i % every == 0))

    # in its forward a version may not be sealed yet; in its update it is
    first, second = restored(job)
    half = max(1, interval // 2)
    told = {first + 1: half, second + 1: max(1, half // 2)} if half > 1 else {first + 1: half}
    assert {one.fields["iteration"]: one.fields["interval"] for one in at_restarts} == told
    assert first in (due(FIRST, interval), due(due(FIRST, interval), interval)), (first, change)
    assert second == due(SECOND, half), (second, change)
    lives = ((0, FIRST, interval), (first, SECOND, half), (second, ITERATIONS + 1, max(1, half // 2)))
    expected = {i for after, end, every in lives for i in range(after + 1, end) if i < since or i % every == 0}
    for rank in range(ranks):
        sealed = {event.fields["iteration"] for event in job.events("snapshot.sealed") if event.rank == rank}
        assert sealed == expected, (rank, change)


def test_a_megatron_job_that_chose_its_interval_is_killed_twice_and_ends_as_the_unfailed_run(golden, jobs):
    configuration = MegatronConfiguration(bf16=True, distributed_optimizer=True, interleaved=False)
    whole = golden(MegatronRun("golden", Path(), configuration, iterations=ITERATIONS, ranks=4))
    flags = ("--reft-interval", "auto", "--reft-hw-rate", str(RARE), "--reft-sw-rate", str(RARE))
    run = MegatronRun(
        "chosen", jobs.folder, configuration, True, kills(3), iterations=ITERATIONS, flags=flags, ranks=4
    )  # fmt: skip
    job = jobs.finish(run, 2)
    assert_chosen_once_and_followed(job, 4)
    assert_identical(run, whole, 4)


def test_a_deepspeed_job_that_chose_its_interval_is_killed_twice_and_ends_as_the_unfailed_run(golden, jobs):
    pytest.importorskip("deepspeed", reason="needs the extra [deepspeed]")
    configuration = DeepSpeedConfiguration(2, 1)
    whole = golden(DeepSpeedRun("golden", Path(), configuration, iterations=ITERATIONS))
    reft = {"interval": "auto", "hw_rate": RARE, "sw_rate": RARE}
    run = DeepSpeedRun("chosen", jobs.folder, configuration, {"reft": reft, "faults": kills(1)}, iterations=ITERATIONS)
    job = jobs.finish(run, 2)
    assert_chosen_once_and_followed(job, 2)
    assert_identical(run, whole, 2)
