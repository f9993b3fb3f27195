"""A job that hangs is noticed, its culprit named with stacks, and goes on; one that is only slow is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ft_plugins.events import catalogue
from ft_plugins.testing.forkserver import ForkServer, JobSpec, RunningJob
from ft_plugins.testing.job_control import entries

BOUND = 90
HANG_SECONDS = "2"


@pytest.fixture
def run(
    torch_server: ForkServer, jobs: Callable[..., JobSpec], tmp_path: Path
) -> Callable[..., tuple[RunningJob, list[dict[str, Any]]]]:
    def start(
        *words: str, restarts: int, hang_seconds: str = HANG_SECONDS, flags: tuple[str, ...] = ()
    ) -> tuple[RunningJob, list[dict[str, Any]]]:
        journal = tmp_path / "journal"
        given = ("--reft", "--ftp-hang-seconds", hang_seconds, *flags)
        argv = ("--journal", str(journal), *words)
        job = torch_server.start(jobs(entry="ft_plugins.testing.hangs:main", argv=argv, flags=given, nproc=2))
        outcome = job.wait(BOUND)
        assert outcome == {"status": "succeeded", "reason": "", "restarts": restarts}, job.tail()
        return job, entries(journal)

    return start


@pytest.fixture(scope="module")
def unfailed() -> dict[int, str]:
    """The digest of each rank's final state where nothing happens, once a test has found it."""
    return {}


def ended(found: list[dict[str, Any]]) -> dict[int, str]:
    return {entry["rank"]: entry["ended"] for entry in found if "ended" in entry}


def require_as_unfailed(run: Any, unfailed: dict[int, str], found: list[dict[str, Any]], tmp_path: Path) -> None:
    """Compares bit for bit with a run in which nothing happens."""
    assert len(ended(found)) == 2
    if not unfailed:
        (tmp_path / "journal").unlink()
        unfailed.update(ended(run(restarts=0)[1]))
    assert ended(found) == unfailed


@pytest.mark.parametrize(
    ("how", "phase", "function", "ranks"),
    [
        ("sleep-forward", "forward", "before_forward", [1]),
        ("sleep-loader", "data", "in_loader", [1]),
        ("stop-backward", "after_forward", "", [1]),
        ("spin-forward", "forward", "before_forward", [1]),
        ("spin-with-lock", "forward", "before_forward", [1]),
        ("deadlock", "after_forward", "all_reduce", []),
    ],
)
def test_a_job_that_hangs_restarts_with_its_culprit_named_and_ends_as_the_unfailed_one(
    run: Any, unfailed: dict[int, str], tmp_path: Path, how: str, phase: str, function: str, ranks: list[int]
) -> None:
    job, found = run("--how", how, restarts=1, flags=("--ftp-detect-seconds", "60"))
    [hung] = [event.fields for event in job.events(catalogue.JOB_HUNG.name)]
    assert (hung["iteration"], hung["phase"], hung["ranks"], hung["even"]) == (6, phase, ranks, not ranks)
    assert hung["culprit"] == "node0" and float(HANG_SECONDS) <= hung["seconds"] < 20
    if ranks:
        assert hung["about"] == ranks[0]
    stacks = [(Path(hung["stacks"]) / f"rank{rank}.txt").read_text() for rank in range(2)]
    assert "in all_reduce" in stacks[0] if how == "deadlock" else "in backward" in stacks[0]
    assert f"in {function}" in stacks[1] if function else "is stopped by a signal" in stacks[1]
    assert "no iteration was completed for" in job.log.read_text(), "the agent says why it kills the workers"
    assert [entry["from"] for entry in found if entry.get("restart") == 1] == [6, 6]
    require_as_unfailed(run, unfailed, found, tmp_path)


@pytest.mark.parametrize("how", ["slow-evaluation", "slow-first", "slow-save"])
def test_a_job_that_is_slow_where_it_may_be_is_left_alone(
    run: Any, unfailed: dict[int, str], tmp_path: Path, how: str
) -> None:
    job, found = run("--how", how, restarts=0)
    assert job.events(catalogue.JOB_HUNG.name) == []
    require_as_unfailed(run, unfailed, found, tmp_path)


def test_without_the_watch_nothing_is_noticed_and_no_words_are_written(run: Any, tmp_path: Path) -> None:
    job, found = run("--how", "slow-first", "--seconds", "3", restarts=0, hang_seconds="0")
    assert job.events(catalogue.JOB_HUNG.name) == [] and len(ended(found)) == 2
