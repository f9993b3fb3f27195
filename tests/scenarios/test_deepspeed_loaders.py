"""DeepSpeed scripts with torch loaders of their own, killed in any epoch, go on with the batch that would have come.

Likewise where updates were skipped: versions count completed iterations, and counters and scheduler are restored.
"""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun, computes_in_fp16
from harness.golden import assert_identical

SCRIPT = f"{Path(__file__).with_name('own_loader.py')}:main"
CONFIGURATION = DeepSpeedConfiguration(2, 1)
ITERATIONS = 7  # an epoch has three

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")


def golden_and_killed(jobs, folder, configuration, kills, *words):
    """The unfailed run is not protected; the other one ended as it did, after as many restarts as kills."""
    golden = DeepSpeedRun("golden", folder / "golden", configuration, {}, 1234, ITERATIONS, SCRIPT, words)
    jobs.finish(golden)
    run = replace(golden, name="killed", folder=folder / "killed", block={"reft": {}, "faults": kills})
    job = jobs.finish(run, kills.count(":kill"))
    assert_identical(run, golden, configuration.ranks)
    return run, job


@pytest.mark.parametrize(
    "kind",
    [
        "distributed",
        *(pytest.param(one, marks=pytest.mark.all_configurations) for one in ("shuffled", "stream", "augmented")),
    ],
)
def test_a_loader_of_the_scripts_own_goes_on_where_it_was(jobs, tmp_path, kind):
    kills = "update.begin@iteration=3,rank=1,restart=0:kill;iteration.forward@iteration=5,rank=0,restart=1:kill"
    _, job = golden_and_killed(jobs, tmp_path, CONFIGURATION, kills, "--loader", kind)
    said = job.log.read_text()
    assert ("read again and dropped" in said) == (kind in ("stream", "augmented")), said
    assert "is not tracked" not in said and "will be refused" not in said


@pytest.mark.all_configurations
def test_frozen_layers_of_zero3_are_restored_too(jobs, tmp_path):
    kills = "update.begin@iteration=3,rank=1,restart=0:kill;update.middle@iteration=5,rank=0,restart=1:kill"
    _, job = golden_and_killed(jobs, tmp_path, DeepSpeedConfiguration(2, 3), kills, "--frozen")
    assert [sorted({event.fields["iteration"] for event in job.events("state.restored")})] == [[2, 4]]


SKIPPING = (
    DeepSpeedConfiguration(2, 1, checked=True),
    DeepSpeedConfiguration(2, 2, checked=True),
    DeepSpeedConfiguration(2, 3, checked=True),
    DeepSpeedConfiguration(2, 0, fp16=True),
)


@pytest.mark.parametrize(
    "configuration",
    [SKIPPING[0], *(pytest.param(each, marks=pytest.mark.all_configurations) for each in SKIPPING[1:])],
    ids=str,
)
def test_a_skipped_update_is_an_iteration_of_its_own(jobs, tmp_path, configuration):
    kills = "update.end@iteration=2,rank=0,restart=0:kill;iteration.forward@iteration=6,rank=1,restart=1:kill"
    if configuration.fp16 and not computes_in_fp16():
        pytest.skip("this CPU does not compute in fp16")
    words = ("--skip-at", "2", "4", "5")
    run, job = golden_and_killed(jobs, tmp_path, configuration, kills, *words)
    small = json.loads(Path(f"{run.digests}00000.json").read_text())["small"]
    assert (small["counters"]["global_steps"], small["counters"]["skipped_steps"]) == (ITERATIONS, 3)
    restored = sorted({event.fields["iteration"] for event in job.events("state.restored")})
    assert restored in ([1, 4], [1, 5]), "an iteration without an update has a version of its own"


@pytest.mark.parametrize("mode", ["eval", "module"])
def test_training_that_the_engine_is_not_told_of_is_captured(jobs, tmp_path, mode):
    kills = "update.begin@iteration=3,rank=1,restart=0:kill;update.middle@iteration=6,rank=0,restart=1:kill"
    _, job = golden_and_killed(jobs, tmp_path, CONFIGURATION, kills, "--mode", mode)
    assert [sorted({event.fields["iteration"] for event in job.events("state.restored")})] == [[2, 5]]
    assert ("without a forward of the engine in training mode" in job.log.read_text()) == (mode == "eval")
