"""What is tested of both forks that train a DeepSpeed engine: killed, and with a lost node, they end as if unfailed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ft_plugins.rehearse.driver import DrivenJob, DrivePhase
from harness.deepspeed_forks import SCRIPTS, ForkCase, comparison, killed, require_exact, run
from harness.megatron_lm import RUN_SECONDS, SETTINGS

LOST_FROM = 4  # the iteration that must be committed before the node is lost


def a_killed_run_ends_like_an_unfailed_one(
    fork: str, checkout: Path, corpus: Path, case: ForkCase, folder: Path, record: Callable[[str, object], None]
) -> None:
    """Run the case twice, once killed. `record` is for tests/matrix.sh."""
    unfailed = run(fork, checkout, corpus, case, folder / "unfailed")
    unfailed.require_success()
    record("unprotected", "succeeded")
    other = killed(fork, checkout, corpus, case, folder / "killed")
    print(other.output)
    other.require_success()
    record("compared", str(require_exact(case, unfailed, other)))


def a_lost_node_is_replaced(
    fork: str, checkout: Path, corpus: Path, case: ForkCase, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the case on one node, unfailed, and on two, of which the second is lost and replaced."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    unfailed = run(fork, checkout, corpus, case, folder / "unfailed")
    unfailed.require_success()
    saved, half = folder / "saved", case.ranks // 2
    saved.mkdir()
    script = SCRIPTS[fork](checkout, corpus, case, folder, saved)
    command = [str(word) for word in ("--nproc-per-node", half, *script, *case.protected)]
    job = folder / "job"
    job.mkdir()
    with DrivenJob(f"{case.name}-nodes", command, job, job / "none", case.iterations, nodes=2) as running:
        deadline, lost = time.monotonic() + RUN_SECONDS, False
        while running.follow(0.1, RUN_SECONDS).phase is not DrivePhase.DONE:
            assert time.monotonic() < deadline, running.tail(60)
            if not lost and _newest_committed(running) >= LOST_FROM:
                running.kill_node()
                lost = True
        assert lost, "the job ended before its node was lost"
        reported = running.events()
    rebuilt = [event for event in reported if event.name == "slot.rebuilt"]
    assert sorted(event.fields["about"] for event in rebuilt) == list(range(half, case.ranks)), "of the lost node"
    found = comparison(unfailed.saved, saved, case.iterations)
    assert not found.differences, "\n".join([str(found), *found.differences])


def _newest_committed(running: DrivenJob) -> int:
    return max((e.fields["iteration"] for e in running.events() if e.name == "version.committed"), default=0)
