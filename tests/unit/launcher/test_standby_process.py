"""A standby worker as its agent sees it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from ft_plugins.launcher.preload.standby_channel import StandbyChannel
from ft_plugins.launcher.preload.standby_process import StandbyProcess

WAIT = 20.0


@pytest.fixture
def standby() -> Iterator[StandbyProcess]:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sh", "-c", "sleep 100 & wait"], start_new_session=True)
    made = StandbyProcess(process, StandbyChannel(ours), (), time.monotonic())
    yield made
    made.end()
    theirs.close()


def states(standby: StandbyProcess, wanted: str) -> set[str]:
    """Of it and the process that it has started; waits for `wanted`."""
    whole = psutil.Process(standby.process.pid)
    deadline = time.monotonic() + WAIT
    while True:
        found = [each.status() for each in (whole, *whole.children())]
        if len(found) == 2 and set(found) == {wanted} or time.monotonic() > deadline:
            return set(found)
        time.sleep(0.01)


def test_it_is_not_stopped_before_it_is_bound_to_its_agent(standby: StandbyProcess) -> None:
    """A stopped process cannot bind itself, and would outlive an agent that is killed."""
    standby.let_run(False)
    assert not standby.stopped and states(standby, psutil.STATUS_SLEEPING) == {psutil.STATUS_SLEEPING}


def test_what_it_has_started_is_stopped_and_goes_on_with_it(standby: StandbyProcess) -> None:
    standby.bound = True
    for run, status in ((False, psutil.STATUS_STOPPED), (True, psutil.STATUS_SLEEPING)):
        standby.let_run(run)
        assert states(standby, status) == {status}
    standby.end()
    assert standby.process.returncode == -9
