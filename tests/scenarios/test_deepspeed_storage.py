"""Storage under a DeepSpeed job: REFT's checkpoints when memory is gone, and DeepSpeed's own beside what is in memory.

With both at hand the larger iteration wins, whichever was loaded first; what is captured afterwards is what DeepSpeed
trains with, not what its load has replaced.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.golden import assert_identical
from harness.job_control import lose_memory, run_to_end, stop_after, write_checkpoints

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")

SCRIPT = f"{Path(__file__).with_name('own_loader.py')}:main"
ITERATIONS = 7  # an epoch has three
FLAGS = ("--reft", "--ftp-detect-seconds", "120", "--reft-checkpoint-interval", "0")  # ranks that stand still mean to


@pytest.fixture
def run(tmp_path):
    """Makes runs of the script that are not protected by their configuration."""

    def made(name, stage, *words):
        configuration = DeepSpeedConfiguration(2, stage)
        return DeepSpeedRun(name, tmp_path / name, configuration, {}, 1234, ITERATIONS, SCRIPT, words)

    return made


def protected(jobs, run, *words, faults=""):
    """By flags, which can be others at the next start."""
    folder = run.folder.parent / "checkpoints"
    flags = (*FLAGS, "--reft-checkpoint-dir", str(folder), *(("--ftp-faults", faults) if faults else ()))
    spec = vars(replace(run, words=words or run.words).spec(flags=flags))
    return jobs(**{key: value for key, value in spec.items() if key != "name"})  # the same at each start


def restored(job):
    """Tier and iteration of each restore of rank 0."""
    found = [event.fields for event in job.events("state.restored") if event.rank == 0]
    return [(fields["tier"], fields["iteration"]) for fields in found]


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.all_configurations)])
def test_when_memory_is_gone_a_job_goes_on_from_storage(deepspeed_server, jobs, run, stage):
    golden, other = run("golden", stage), run("other", stage)
    jobs.finish(golden)
    spec = protected(jobs, other)
    write_checkpoints(deepspeed_server, spec, 4)
    lose_memory(spec)
    job = run_to_end(deepspeed_server, spec)
    assert restored(job) == [("storage", 4)]
    assert_identical(other, golden, 2)


@pytest.mark.parametrize(
    "stage", [1, *(pytest.param(each, marks=pytest.mark.all_configurations) for each in (0, 2, 3))]
)
def test_an_older_checkpoint_that_the_script_loads_gives_way_to_memory(deepspeed_server, jobs, tmp_path, run, stage):
    golden, other = run("golden", stage), run("other", stage)
    jobs.finish(golden)
    own = str(tmp_path / "own")
    kills = "iteration.forward@iteration=5,rank=0,restart=0:kill;update.middle@iteration=7,rank=1,restart=1:kill"
    spec = protected(jobs, other, "--load", own, "--save", own, "--save-at", "2", faults=kills)
    job = run_to_end(deepspeed_server, spec, 2)
    assert {iteration for _, iteration in restored(job)} in ({3, 6}, {4, 6})
    assert_identical(other, golden, 2)


def test_a_newer_checkpoint_that_the_script_loads_wins_and_is_protected(deepspeed_server, jobs, tmp_path, run):
    own = str(tmp_path / "own")
    jobs.finish(run("writes", 1, "--save", own, "--save-at", "4"))
    golden, other = run("golden", 1, "--load", own), run("other", 1)
    jobs.finish(golden)
    job = stop_after(deepspeed_server, protected(jobs, other), 2)
    job.kill()
    job.wait(90)
    other.loss_log.unlink()
    kill = "update.middle@iteration=7,rank=1,restart=0:kill"
    job = run_to_end(deepspeed_server, protected(jobs, other, "--load", own, faults=kill), 1)
    assert restored(job)[-1] == ("process", 6)
    assert_identical(other, golden, 2)
