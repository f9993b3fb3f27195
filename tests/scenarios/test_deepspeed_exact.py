"""A killed and resumed DeepSpeed run equals an unfailed one, bit for bit: pipelines and plain engines, dropout on.

Golden runs are not protected at all. Every comparison is over all inventory items, all small state, all parameters and
all losses, evaluations included.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness import kernels
from harness.claims import assert_proven, restored
from harness.deepspeed_runs import ITERATIONS, DeepSpeedConfiguration, DeepSpeedRun, computes_in_fp16
from harness.golden import assert_identical, loss_differences, losses, state_differences

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")

SMALLEST = DeepSpeedConfiguration(2, 1)
CONFIGURATIONS = (
    SMALLEST,
    DeepSpeedConfiguration(4, 0, bf16=False, pp=2),
    DeepSpeedConfiguration(4, 0, accumulate="bf16", pp=2),
    DeepSpeedConfiguration(4, 1, accumulate="bf16", pp=2),
    DeepSpeedConfiguration(4, 1, accumulate="fp32", pp=2),
    DeepSpeedConfiguration(8, 1, pp=2, tp=2),
    DeepSpeedConfiguration(4, 2),
    DeepSpeedConfiguration(4, 3),
    DeepSpeedConfiguration(4, 1, pp=2, optimizer="SGD"),
    DeepSpeedConfiguration(2, 3, optimizer="SGD"),
    DeepSpeedConfiguration(1, 2),
    DeepSpeedConfiguration(2, 2, offload="torch"),
    DeepSpeedConfiguration(2, 3, offload="torch"),
    DeepSpeedConfiguration(2, 3, offload="torch", offload_param=True),
    DeepSpeedConfiguration(2, 3, offload_param=True),
    DeepSpeedConfiguration(2, 1, optimizer="Lion"),
    DeepSpeedConfiguration(2, 3, optimizer="Lion"),
    DeepSpeedConfiguration(2, 0, bf16=False, optimizer="Lamb"),
    DeepSpeedConfiguration(2, 1, optimizer="Lamb"),
    DeepSpeedConfiguration(2, 1, optimizer="Adagrad"),
    DeepSpeedConfiguration(2, 0, fp16=True, optimizer="Lamb"),
    DeepSpeedConfiguration(4, 0, fp16=True, pp=2),
    DeepSpeedConfiguration(4, 1, fp16=True, pp=2),
    DeepSpeedConfiguration(2, 1, fp16=True),
    DeepSpeedConfiguration(2, 2, fp16=True),
    DeepSpeedConfiguration(2, 3, fp16=True),
    DeepSpeedConfiguration(2, 2, offload="own"),
    DeepSpeedConfiguration(2, 3, offload="own"),
    DeepSpeedConfiguration(2, 2, offload="own", optimizer="Lion"),
    DeepSpeedConfiguration(2, 2, offload="own", optimizer="Adagrad"),
    DeepSpeedConfiguration(2, 0, bf16=False),
    DeepSpeedConfiguration(2, 0),
    DeepSpeedConfiguration(2, 3, bf16=False),
)
MORE = CONFIGURATIONS[8:]  # whose state is of the same kinds as that of others


def test_unfailed_runs_are_equal_to_each_other_and_unequal_with_another_seed(jobs, golden, tmp_path):
    first = golden(DeepSpeedRun("golden", Path(), SMALLEST))
    again = DeepSpeedRun("again", tmp_path / "again", SMALLEST)
    other = DeepSpeedRun("other", tmp_path / "other", SMALLEST, seed=4321)
    for run in (again, other):
        jobs.finish(run)
    assert_identical(again, first, SMALLEST.ranks)
    found = state_differences(other.digests, first.digests, SMALLEST.ranks)
    for rank in range(SMALLEST.ranks):
        assert any(line.startswith(f"rank {rank}: /items/") for line in found), "another seed is another state"
    assert loss_differences(other.loss_log, first.loss_log)


@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(one, id=str(one), marks=pytest.mark.all_configurations if one in MORE else ())
        for one in CONFIGURATIONS
    ],
)
def test_killed_in_forward_and_in_the_optimizer_step_it_ends_as_the_unfailed_run(
    golden, jobs, configuration, record_property
):
    if configuration.fp16 and not computes_in_fp16():
        pytest.skip("this CPU does not compute in fp16")
    if configuration.offload == "own":
        kernels.compile_own(configuration.optimizer)
    whole = golden(DeepSpeedRun("golden", Path(), configuration))
    record_property("unprotected", "succeeded")  # for tests/matrix.sh
    kills = (
        f"iteration.forward@iteration=3,rank={configuration.ranks - 1},restart=0:kill;"
        "update.middle@iteration=5,rank=0,restart=1:kill"
    )
    run = DeepSpeedRun("protected", jobs.folder, configuration, {"reft": {}, "faults": kills})
    job = jobs.finish(run, 2)
    for event in job.events("state.restored"):
        assert event.fields["tier"] == "process" and 0 <= event.fields["lost"] <= 1, event
    first, second = restored(job)
    assert first in (1, 2) and second == 4, "in the update, every rank is past the fence of the version before"
    assert_proven(job, "unproven: no rank knows captured bytes")
    if configuration.fp16 and configuration.stage:
        assert run.state(0)["small"]["counters"]["skipped_steps"] >= 2, "the loss scale went down and up again"
    if configuration.pp:
        assert "valid_loss_hex" in losses(run.loss_log)[ITERATIONS], "the last evaluation is behind the kills"
    assert_identical(run, whole, configuration.ranks)


@pytest.mark.all_configurations
def test_what_two_optimizers_update_ends_as_the_unfailed_run(jobs, tmp_path):
    """ZeRO-3 updates what an offload of a part leaves on the device with an optimizer of its own."""
    configuration = DeepSpeedConfiguration(2, 3, offload="torch", ratio=0.5, sub_group_size=8_000)
    script, kills = "harness.deepspeed_runs:with_a_device", (
        "iteration.forward@iteration=3,rank=1,restart=0:kill;update.middle@iteration=5,rank=0,restart=1:kill"
    )  # fmt: skip
    whole = DeepSpeedRun("golden", tmp_path / "golden", configuration, script=script)
    jobs.finish(whole)
    run = replace(whole, name="killed", folder=tmp_path / "killed", block={"reft": {}, "faults": kills})
    job = jobs.finish(run, 2)
    first, second = restored(job)
    assert first in (1, 2) and second == 4, "in the update, every rank is past the fence of the version before"
    assert_identical(run, whole, configuration.ranks)
    assert len(run.state(0)["small"]["groups"]) == 2
