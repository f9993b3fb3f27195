"""A start that hangs, and one in which nothing attaches: what is decided, and what real processes show."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ft_plugins.launcher.agent import start_watch
from ft_plugins.launcher.agent.start_watch import HUNG, UNATTACHED, UNKNOWN_SECONDS, StartWatch, judge_start
from ft_plugins.smp.watch.hang import LEAST_SECONDS, LONG_SECONDS
from harness.job_control import wait_until

BOUND = 120.0
SLEEPS = "print(flush=True)\nimport time\ntime.sleep(600)\n"
LOOKS_FOR_A_FILE = "print(flush=True)\nimport os, time\nwhile not os.path.exists('/none'): time.sleep(0.1)\n"
SPINS = "print(flush=True)\nwhile True: pass\n"
CHILD_SPINS = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'while True: pass'])\n" + SLEEPS


@pytest.mark.parametrize(
    ("seconds", "idle", "before", "apart", "verdict"),
    [
        (600, UNKNOWN_SECONDS, None, False, ""),
        (601, UNKNOWN_SECONDS + 1, None, False, HUNG),  # ten minutes, where nothing is known
        (1700, UNKNOWN_SECONDS, None, False, ""),  # it worked until then
        (131, 131, 130, False, HUNG),  # as long as a start took
        (129, 129, 130, False, ""),
        (60, LEAST_SECONDS, 3, False, ""),
        (61, LEAST_SECONDS + 1, 3, False, HUNG),
        (LONG_SECONDS, LONG_SECONDS, 3, True, ""),  # ranks of another node may be at work
        (LONG_SECONDS + 1, LONG_SECONDS + 1, 3, True, HUNG),
        (LONG_SECONDS, 0, None, False, ""),
        (LONG_SECONDS + 1, 0, None, False, UNATTACHED),
        (LONG_SECONDS + 1, 0, 1000, False, ""),  # it may take longer here
        (4001, 0, 1000, False, UNATTACHED),
        (LONG_SECONDS + 1, LEAST_SECONDS, 1000, False, ""),  # it does not compute: perhaps it hangs
    ],
)
def test_a_start_without_work_hangs_and_one_at_work_for_too_long_may_never_attach(
    seconds: float, idle: float, before: float | None, apart: bool, verdict: str
) -> None:
    assert judge_start(seconds, idle, before, apart) == verdict


@pytest.fixture
def begin(
    monkeypatch: pytest.MonkeyPatch, run_python: Callable[[str], tuple[int, int]]
) -> Callable[..., tuple[StartWatch, Callable[[str], None]]]:
    """Watch a start of ranks that run these scripts, by times of a quick machine; with a wait for a verdict."""
    for name, seconds in (
        ("LOOK_SECONDS", 0.5),
        ("UNKNOWN_SECONDS", 2.0),
        ("LEAST_SECONDS", 2.0),
        ("LONG_SECONDS", 4.0),
    ):
        monkeypatch.setattr(start_watch, name, seconds)

    def begin(*scripts: str) -> tuple[StartWatch, Callable[[str], None]]:
        watch = StartWatch()
        watch.begin({rank: run_python(script)[0] for rank, script in enumerate(scripts)}, apart=False)
        found: list[str] = []

        def wait_for(verdict: str) -> None:
            wait_until(
                lambda: found.append(watch.look(lambda: False)) or bool(found[-1]), BOUND, lambda: str(watch.idle)
            )
            assert found[-1] == verdict, watch.idle

        return watch, wait_for

    return begin


@pytest.mark.parametrize("waits", [SLEEPS, LOOKS_FOR_A_FILE], ids=["sleeps", "waits for a lock"])
def test_ranks_that_all_wait_hang(begin: Callable[..., tuple[StartWatch, Callable[[str], None]]], waits: str) -> None:
    watch, wait_for = begin(waits, waits)
    wait_for(HUNG)
    assert watch.processes, "for their stacks"


@pytest.mark.parametrize("works", [SPINS, CHILD_SPINS], ids=["a rank", "a child of a rank"])
def test_where_one_works_the_others_may_wait_for_it_and_it_is_said_once_that_nothing_attaches(
    begin: Callable[..., tuple[StartWatch, Callable[[str], None]]], works: str
) -> None:
    watch, wait_for = begin(SLEEPS, works)
    wait_for(UNATTACHED)
    assert watch.look(lambda: False) == watch.look(lambda: False, ended=True) == ""


def test_a_start_is_over_when_all_have_attached_and_what_it_took_is_the_measure_of_the_next(
    begin: Callable[..., tuple[StartWatch, Callable[[str], None]]],
) -> None:
    watch, _ = begin(SLEEPS)
    assert watch.look(lambda: True, ended=True) == "" and not watch.processes
    assert watch._before is not None and 0 < watch._before < BOUND
    watch, _ = begin(SLEEPS)
    assert watch.look(lambda: False, ended=True) == UNATTACHED, "an end without having attached"
