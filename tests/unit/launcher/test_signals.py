"""What a signal to ft-run does for the newest snapshot, and what is said of it."""

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig

from ft_plugins.errors import ProtectionError
from ft_plugins.events import Events
from ft_plugins.launcher.agent.signals import SignalStop, notices
from ft_plugins.launcher.node_launch import signals_of
from ft_plugins.smp.serve.client import REQUEST, STOP

WAIT = 60.0
Outcome = dict[str, Any] | None


def stored(iteration):
    return {"state": "done", "iteration": iteration, "path": f"/ck/v1-{iteration}"}


class Watcher:
    """One whose SMP answers `outcomes` one after another, then the last one again; None: there is no SMP."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.asked = []
        self.seconds = []
        self.answered = threading.Semaphore(0)

    def checkpoint(self, reason, only_due=False, seconds=None):
        self.asked.append((reason, only_due))
        self.seconds.append(seconds)
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        self.answered.release()
        if outcome is None:
            raise ProtectionError("there is no SMP")
        return outcome


@pytest.fixture
def found():
    """Names of the events."""
    return []


@pytest.fixture
def events(found):
    def seen(event):
        found.append(event.name)

    events = Events("n")
    events.subscribe(seen)
    return events


@pytest.mark.parametrize(
    ("outcome", "said", "told"),
    [
        (stored(7), "iteration 7 is in /ck/v1-7", False),
        ({"state": "off"}, "", False),
        ({"state": "nothing"}, "", False),
        ({"state": "failed", "reason": "No space left on device"}, "not in storage: No space left on device", True),
        ({"state": "writing"}, "not in storage: it was not written in time", True),
    ],
)
def test_what_became_of_the_newest_snapshot_is_one_line_or_nothing(outcome, said, told, events, found, capsys):
    watcher = Watcher(outcome)
    SignalStop(watcher, events, WAIT).finish()
    error = capsys.readouterr().err
    assert (said in error and error.count("\n") == 1) if said else error == ""
    assert found == (["checkpoint.missed"] if told else [])
    assert watcher.asked == [(STOP, False)] * 2 and 0 < (watcher.seconds[-1] or 0) <= WAIT


def test_what_is_in_memory_is_written_before_the_workers_have_ended_and_again_what_they_sealed_meanwhile(
    events, found, capsys
):
    watcher = Watcher(stored(7), stored(9))
    stop = SignalStop(watcher, events, WAIT)
    stop.begin()
    assert watcher.answered.acquire(timeout=WAIT), "no worker has ended yet"
    assert len(watcher.asked) == 1
    stop.finish()
    assert capsys.readouterr().err.splitlines() == [f"ft-run: iteration {n} is in /ck/v1-{n}" for n in (7, 9)]
    assert found == []


def test_a_storage_that_fails_after_the_first_version_is_said(events, found, capsys):
    SignalStop(Watcher(stored(7), {"state": "failed", "reason": "No space left on device"}), events, WAIT).finish()
    first, second = capsys.readouterr().err.splitlines()
    assert "iteration 7 is in /ck/v1-7" in first and "not in storage: No space left on device" in second
    assert found == ["checkpoint.missed"]


def test_an_smp_that_the_signal_ended_is_asked_again(events, capsys):
    watcher = Watcher(None, None, stored(7))
    stop = SignalStop(watcher, events, WAIT)
    stop.begin()
    for _ in range(3):
        assert watcher.answered.acquire(timeout=WAIT)
    stop.finish()
    assert capsys.readouterr().err == "ft-run: iteration 7 is in /ck/v1-7\n"


def test_without_an_smp_that_is_said_when_the_grace_is_over(events, found, capsys):
    stop = SignalStop(Watcher(None), events, 0.5)
    stop.finish()
    assert stop.left == 0 and "not in storage: " in capsys.readouterr().err and found == ["checkpoint.missed"]


def test_an_smp_that_never_answers_does_not_make_the_stop_longer(events, found):
    released = threading.Event()

    class Silent(Watcher):
        def checkpoint(self, *args, **words):
            released.wait()
            return {"state": "off"}

    SignalStop(Silent(), events, 0.2).finish()
    assert found == ["checkpoint.missed"]
    released.set()


def test_workers_get_three_quarters_of_the_grace(events):
    stop = SignalStop(None, events, 1000.0)
    stop.begin()
    assert 700 < stop.left_for_workers <= 750 and 950 < stop.left <= 1000


# ---- notices of preemption ----


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (stored(7), "iteration 7 is in /ck/v1-7"),
        (
            {"state": "off"},
            "nothing is written to storage: the job has no --reft-checkpoint-dir, or its ranks have not begun",
        ),
        ({"state": "nothing"}, "nothing is written to storage, because there is no version in memory yet"),
        ({"state": "failed", "reason": "No space left"}, "the newest snapshot is not in storage: No space left"),
        (None, "the newest snapshot is not in storage: there is no SMP"),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_notice_of_preemption_writes_a_checkpoint_and_says_where(outcome, said, number, capfd):
    watcher, before = Watcher(outcome), signal.getsignal(number)
    with notices(watcher, "SIGTERM,SIGINT", "n"):
        os.kill(os.getpid(), number)
        assert watcher.answered.acquire(timeout=WAIT)
        wait_for_threads()
    assert capfd.readouterr().err == f"ft-run: {number.name} on node n: {said}\n"
    assert watcher.asked == [(REQUEST, False)] and signal.getsignal(number) == before


def wait_for_threads():
    for thread in threading.enumerate():
        if thread.daemon and "_answer" in thread.name:
            thread.join(WAIT)


def test_a_signal_that_is_to_end_the_job_is_no_notice():
    before = signal.getsignal(signal.SIGUSR1)
    with notices(Watcher(stored(7)), "SIGTERM, SIGUSR1", "n"):
        assert signal.getsignal(signal.SIGUSR1) == before
        assert callable(signal.getsignal(signal.SIGUSR2))


def test_a_torch_without_an_option_for_signals_ends_jobs_at_the_same_ones():
    """The oldest torch that the package accepts has none."""
    newer = LaunchConfig(1, 1, 1)
    assert signals_of(SimpleNamespace()) == signals_of(newer) == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    newer.signals_to_handle = "SIGTERM"
    assert signals_of(newer) == "SIGTERM"
