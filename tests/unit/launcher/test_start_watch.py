"""A start that hangs, and one in which nothing attaches: what is decided, and what real processes show."""

import os
import signal

import pytest

from ft_plugins.launcher.agent import start_watch
from ft_plugins.launcher.agent.start_watch import ATTACHED, HUNG, IDLE_SECONDS, UNATTACHED, StartWatch, judge_start
from ft_plugins.smp.watch.hang import LEAST_SECONDS, LONG_SECONDS
from harness.job_control import wait_until

BOUND = 120.0
SLEEPS = "print(flush=True)\nimport time\ntime.sleep(600)\n"
LOOKS_FOR_A_FILE = "print(flush=True)\nimport os, time\nwhile not os.path.exists('/none'): time.sleep(0.1)\n"
SPINS = "print(flush=True)\nwhile True: pass\n"
CHILD_SPINS = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'while True: pass'])\n" + SLEEPS


@pytest.mark.parametrize(
    ("seconds", "idle", "before", "apart", "alarms", "verdict"),
    [
        (600, IDLE_SECONDS, 0, False, 0, ""),
        (601, IDLE_SECONDS + 1, 0, False, 0, HUNG),
        (1700, IDLE_SECONDS, 0, False, 0, ""),  # it worked until then
        (65, 65, 15, False, 0, ""),  # rank 0 waits for a service that took no time before, the others for rank 0
        (601, 601, 15, False, 0, HUNG),
        (1201, 1200, 300, False, 0, ""),  # four times what a start took
        (1202, 1201, 300, False, 0, HUNG),
        (2400, 2400, 15, False, 1, ""),
        (2401, 2401, 15, False, 1, HUNG),
        (LONG_SECONDS, LONG_SECONDS, 3, True, 0, ""),  # ranks of another node may be at work
        (LONG_SECONDS + 1, LONG_SECONDS + 1, 3, True, 0, HUNG),
        (LONG_SECONDS, 0, 0, False, 0, ""),
        (LONG_SECONDS + 1, 0, 0, False, 0, UNATTACHED),
        (LONG_SECONDS + 1, 0, 1000, False, 0, ""),  # it may take longer here
        (4001, 0, 1000, False, 0, UNATTACHED),
        (LONG_SECONDS + 1, LEAST_SECONDS, 1000, False, 0, ""),  # it does not compute: perhaps it hangs
    ],
)
def test_a_start_without_work_hangs_and_one_at_work_for_too_long_may_never_attach(
    seconds, idle, before, apart, alarms, verdict
):
    assert judge_start(seconds, idle, before, apart, alarms) == verdict


@pytest.fixture
def begin(monkeypatch, run_python):
    """Watch a start of ranks that run these scripts, by times of a quick machine; with a wait for a verdict."""
    for name, seconds in (
        ("LOOK_SECONDS", 0.5),
        ("IDLE_SECONDS", 2.0),
        ("LEAST_SECONDS", 2.0),
        ("LONG_SECONDS", 4.0),
    ):
        monkeypatch.setattr(start_watch, name, seconds)

    def begin(*scripts):
        watch = StartWatch()
        watch.begin({rank: run_python(script)[0] for rank, script in enumerate(scripts)}, apart=False)
        found = []

        def wait_for(verdict):
            wait_until(
                lambda: found.append(watch.look(lambda: False)) or bool(found[-1]), BOUND, lambda: str(watch.idle)
            )
            assert found[-1] == verdict, watch.idle

        return watch, wait_for

    return begin


@pytest.mark.parametrize("waits", [SLEEPS, LOOKS_FOR_A_FILE], ids=["sleeps", "waits for a lock"])
def test_ranks_that_all_wait_hang(begin, waits):
    watch, wait_for = begin(waits, waits)
    wait_for(HUNG)
    assert watch.processes, "for their stacks"


@pytest.mark.parametrize("works", [SPINS, CHILD_SPINS], ids=["a rank", "a child of a rank"])
def test_where_one_works_the_others_may_wait_for_it_and_it_is_said_once_that_nothing_attaches(begin, works):
    watch, wait_for = begin(SLEEPS, works)
    wait_for(UNATTACHED)
    assert watch.look(lambda: False) == "" and watch.processes, "it is watched further"
    assert watch.look(lambda: False, ended=True) == UNATTACHED, "they have ended without"
    assert watch.look(lambda: False, ended=True) == ""


def test_a_start_that_works_for_long_and_then_waits_hangs_after_the_alarm_that_nothing_attaches(begin):
    watch, wait_for = begin(SPINS)
    wait_for(UNATTACHED)
    os.kill(watch.processes[0][0], signal.SIGSTOP)
    wait_for(HUNG)
    assert watch.alarms == 2, "which starts nothing again: the script may be training"
    assert watch.look(lambda: True, ended=True) == ATTACHED


def test_a_start_after_one_that_hung_or_that_another_node_ended_counts_that_one(begin):
    watch, _ = begin(SLEEPS)
    assert watch.alarms == 0, "the first one"
    watch.begin({}, apart=False, again=False)
    assert watch.alarms == 0, "a rank failed before"
    watch, _ = begin(SLEEPS)
    watch.begin({0: watch.processes[0][0]}, apart=False, again=True)
    assert watch.alarms == 1
    assert watch.look(lambda: True, ended=True) == "", "this one gave no alarm that could end"
    watch, _ = begin(SLEEPS)
    assert watch.look(lambda: True, ended=True) == ""
    watch.begin({}, apart=False, again=True)
    assert watch.alarms == 0, "the one before had attached"


def test_a_start_is_over_when_all_have_attached_and_what_it_took_is_the_measure_of_the_next(begin):
    watch, _ = begin(SLEEPS)
    assert watch.look(lambda: True, ended=True) == "" and not watch.processes
    assert 0 < watch._before < BOUND
    watch, _ = begin(SLEEPS)
    assert watch.look(lambda: False, ended=True) == UNATTACHED, "an end without having attached"
