"""The end of a worker ends a wait at once, and only once."""

import os
import subprocess
import sys
import time

from ft_plugins.launcher.agent.worker_failures import WorkerExits

FOR_EVER = 3600.0  # longer than a test may take


def waiting():
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


def watched():
    """How many processes this one watches by a descriptor: of its descriptors only these, since what other tests left
    is closed at any time."""
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sum(link.endswith("[pidfd]") for link in links)


def test_a_killed_worker_ends_the_wait_and_the_next_wait_is_for_the_others():
    first, second = waiting(), waiting()
    exits = WorkerExits([first.pid, second.pid])
    first.kill()
    exits.wait(FOR_EVER)
    assert os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG), "it was reaped"
    began = time.monotonic()
    exits.wait(0.05)  # not ended by the same death again
    assert time.monotonic() - began >= 0.05
    second.kill()
    exits.wait(FOR_EVER)
    for process in (first, second):
        process.communicate()
    exits.close()


def test_all_killed_workers_are_waited_for_and_one_that_lives_only_for_the_given_time():
    processes = [waiting() for _ in range(3)]
    exits = WorkerExits([process.pid for process in processes])
    for process in processes[:2]:
        process.kill()
    began = time.monotonic()
    exits.wait_for_all(0.5)
    assert time.monotonic() - began >= 0.5
    processes[2].kill()
    exits.wait_for_all(FOR_EVER)
    assert all(os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) for each in processes)
    for process in processes:
        process.communicate()


def test_a_worker_that_is_gone_already_and_a_closed_watch_are_no_error():
    process = waiting()
    process.kill()
    process.communicate()
    exits = WorkerExits([process.pid])
    exits.wait(0.0)
    exits.close()
    exits.close()
    before = watched()
    other = waiting()
    exits = WorkerExits([other.pid])
    exits.close()
    other.kill()
    other.communicate()
    assert watched() == before
