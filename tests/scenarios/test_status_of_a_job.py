"""`ft-plugins status` of a job that trains, is killed, restarts and ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ft_plugins.cli import status_table
from ft_plugins.cli.status_facts import Facts, facts_of, is_over
from ft_plugins.testing.forkserver import ForkServer, JobSpec

KILLED_AT, SECONDS = 5, 60.0


def test_status_counts_the_restart_and_the_downtime_of_a_killed_rank_and_ends_with_the_job(
    torch_server: ForkServer, jobs: Callable[..., JobSpec], tmp_path: Path
) -> None:
    argv = ("--iterations", "60", "--seconds", "0.1", "--mib", "8", "--journal", str(tmp_path / "journal"))
    faults = f"iteration.forward@iteration={KILLED_AT},restart=0,rank=1:kill"
    flags = ("--reft", "--ftp-faults", faults)
    job = torch_server.start(jobs(entry="ft_plugins.testing.fills:main", argv=argv, flags=flags, nproc=2))

    def seen(until: Callable[[Facts], bool]) -> Facts:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            (facts,) = facts_of([job.spec.run_dir])
            if until(facts):
                return facts
            time.sleep(0.02)
        raise AssertionError(facts)

    before = seen(lambda facts: (facts["iteration"] or 0) >= 1)
    assert (before["restarts"], before["downtime_seconds"], before["ranks"], before["world_size"]) == (0, 0.0, 2, 2)
    down = seen(lambda facts: facts["down_for_seconds"] is not None)
    assert down["iteration"] < KILLED_AT and "; down for " in status_table.text_of([down], 80)
    after = seen(lambda facts: (facts["iteration"] or 0) > KILLED_AT + 2 and facts["restarts"] > 0)
    assert (after["restarts"], after["down_for_seconds"], after["ft_run_alive"]) == (1, None, True)
    assert 0 < after["downtime_seconds"] < SECONDS and after["iteration_age_seconds"] < SECONDS
    assert after["newest"]["process"]["iteration"] >= KILLED_AT and after["protection"] is None
    assert "1 restart; was down for " in status_table.text_of([after], 80)
    assert not is_over(job.spec.run_dir)
    outcome = job.wait(SECONDS)
    assert (outcome["status"], outcome["restarts"]) == ("succeeded", 1), job.tail()
    assert is_over(job.spec.run_dir)
