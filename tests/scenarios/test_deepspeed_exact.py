"""A killed and resumed DeepSpeed run equals an unfailed one, bit for bit: pipelines and plain engines, dropout on.

Golden runs are not protected at all. Every comparison is over all inventory items, all small state, all parameters and
all losses, evaluations included.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.deepspeed_runs import ITERATIONS, DeepSpeedConfiguration, DeepSpeedRun
from harness.forkserver import ForkServer, JobSpec, RunningJob
from harness.golden import assert_identical, loss_differences, losses, state_differences

Spec = Callable[..., JobSpec]
BOUND = 240  # seconds for one run; ten times what it takes on an idle machine

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
    DeepSpeedConfiguration(2, 0, bf16=False),
    DeepSpeedConfiguration(2, 0),
    DeepSpeedConfiguration(2, 3, bf16=False),
)
MORE = CONFIGURATIONS[-3:]  # plain engines, whose state is of the same kinds as that of pipelines


@pytest.fixture(scope="module")
def golden(deepspeed_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DeepSpeedRun]:
    """The unfailed run of a configuration, made once."""
    made: dict[DeepSpeedConfiguration, DeepSpeedRun] = {}

    def run(configuration: DeepSpeedConfiguration) -> DeepSpeedRun:
        if configuration not in made:
            folder = tmp_path_factory.mktemp("golden")
            made[configuration] = finish(deepspeed_server, DeepSpeedRun("golden", folder, configuration))
        return made[configuration]

    return run


def finish(server: ForkServer, run: DeepSpeedRun) -> DeepSpeedRun:
    job = server.start(run.spec())
    outcome = job.wait(BOUND)
    assert outcome["status"] == "succeeded", f"{outcome}\n{job.tail()}"
    return run


def start(
    server: ForkServer, jobs: Spec, folder: Path, configuration: DeepSpeedConfiguration, **block: Any
) -> tuple[DeepSpeedRun, RunningJob]:
    run = DeepSpeedRun("protected", folder, configuration, {"reft": {}, **block})
    return run, server.start(jobs(**{key: value for key, value in vars(run.spec()).items() if key != "name"}))


def restored(job: RunningJob) -> list[int]:
    """The iteration of each restore, asserting that it came from the process tier and lost at most one iteration."""
    tokens = {event.pid: event.fields["token"] for event in job.events("rank.attached")}
    by_incarnation: dict[int, set[int]] = {}
    for event in job.events("state.restored"):
        assert event.fields["tier"] == "process"
        assert 0 <= event.fields["lost"] <= 1, event
        by_incarnation.setdefault(tokens[event.pid], set()).add(event.fields["iteration"])
    assert all(len(versions) == 1 for versions in by_incarnation.values()), "every rank restores the same version"
    return [next(iter(versions)) for _, versions in sorted(by_incarnation.items())]


def test_unfailed_runs_are_equal_to_each_other_and_unequal_with_another_seed(
    deepspeed_server: ForkServer, golden: Callable[..., DeepSpeedRun], tmp_path: Path
) -> None:
    first = golden(SMALLEST)
    for name in ("again", "other"):
        (tmp_path / name).mkdir()
    again = finish(deepspeed_server, DeepSpeedRun("again", tmp_path / "again", SMALLEST))
    other = finish(deepspeed_server, DeepSpeedRun("other", tmp_path / "other", SMALLEST, seed=4321))
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
    deepspeed_server: ForkServer,
    golden: Callable[..., DeepSpeedRun],
    jobs: Spec,
    tmp_path: Path,
    configuration: DeepSpeedConfiguration,
    record_property: Callable[[str, object], None],
) -> None:
    unfailed = golden(configuration)
    record_property("unprotected", "succeeded")  # for tests/matrix.sh
    kills = (
        f"iteration.forward@iteration=3,rank={configuration.ranks - 1},restart=0:kill;"
        "update.middle@iteration=5,rank=0,restart=1:kill"
    )
    run, job = start(deepspeed_server, jobs, tmp_path, configuration, faults=kills)
    outcome = job.wait(BOUND)
    assert outcome["status"] == "succeeded", f"{outcome}\n{job.tail()}"
    assert outcome["restarts"] == 2
    first, second = restored(job)
    assert first in (1, 2) and second == 4, "in the update, every rank is past the fence of the version before"
    if configuration.pp:
        assert "valid_loss_hex" in losses(run.loss_log)[ITERATIONS], "the last evaluation is behind the kills"
    assert_identical(run, unfailed, configuration.ranks)
