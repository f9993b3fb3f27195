"""Who is alive: with real processes and real signals."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ft_plugins.errors import BusyError, ConfigError
from ft_plugins.smp.watch import liveness


def test_a_process_goes_with_its_start_time_and_a_dead_one_has_none(sleeper):
    began = liveness.started(sleeper.pid)
    assert began > 0 and began == liveness.started(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    assert liveness.started(sleeper.pid) == began, "a stopped process is alive"
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert liveness.started(sleeper.pid) == 0, "a zombie is not"
    sleeper.wait()
    assert liveness.started(sleeper.pid) == 0
    assert liveness.started(0) == liveness.started(-1) == 0


def test_a_process_whose_name_looks_like_a_status_line_is_read_right(tmp_path):
    odd = tmp_path / "a) Z 1 (b"
    odd.symlink_to("/bin/cat")
    with subprocess.Popen([odd], stdin=subprocess.PIPE) as process:
        assert ") Z 1 (" in Path(f"/proc/{process.pid}/stat").read_text()
        assert liveness.started(process.pid) > 0


def test_superseded_processes_are_gone_when_the_kill_returns_stopped_ones_too(sleeper):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        other.send_signal(signal.SIGSTOP)
        owners = [(process.pid, liveness.started(process.pid)) for process in (sleeper, other)]
        assert liveness.kill_and_wait(owners, 10) == []
        assert [liveness.started(pid) for pid, _ in owners] == [0, 0]
        assert sleeper.wait(300) == other.wait(300) == -signal.SIGKILL


def test_a_pid_that_is_used_again_by_another_process_is_left_alone(sleeper):
    began = liveness.started(sleeper.pid)
    others = [(sleeper.pid, began - 1), (sleeper.pid, 0), (0, 5), (-1, 5)]
    assert liveness.kill_and_wait(others, 3600) == [], "none is waited for"
    assert sleeper.poll() is None and liveness.started(sleeper.pid) == began


def test_a_process_that_ends_by_itself_between_the_look_and_the_kill_is_gone(sleeper, monkeypatch):
    """Its parent may reap it at any moment: an agent kills its workers too."""
    began, looks = liveness.started(sleeper.pid), []

    def started(pid):
        looks.append(pid)
        if len(looks) == 2:
            sleeper.kill()
            sleeper.wait()
        return began

    monkeypatch.setattr(liveness, "started", started)
    assert liveness.kill_and_wait([(sleeper.pid, began)], 10) == []


def test_a_pid_that_is_used_again_between_the_two_looks_is_neither_killed_nor_waited_for(sleeper, monkeypatch):
    answers = iter([77, liveness.started(sleeper.pid)])
    monkeypatch.setattr(liveness, "started", lambda pid: next(answers))
    assert liveness.kill_and_wait([(sleeper.pid, 77)], 3600) == []
    assert sleeper.poll() is None


def test_a_process_that_does_not_go_is_reported_after_the_time_given(sleeper, monkeypatch):
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda descriptor, number: None)
    assert liveness.kill_and_wait([(sleeper.pid, liveness.started(sleeper.pid))], 0.05) == [sleeper.pid]


HOLD = """
import sys
from pathlib import Path
from ft_plugins.smp.watch import liveness
got = liveness.acquire(Path(sys.argv[1]))
print(got is not None, flush=True)
sys.stdin.read()
"""


def holding(lock):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process


def test_a_lock_is_held_by_one_living_process_and_free_the_moment_it_dies(tmp_path):
    lock = tmp_path / "lock"
    assert not liveness.held(lock) and not lock.exists(), "asking makes no file"
    with holding(lock) as process:
        assert liveness.held(lock)
        assert liveness.holder(lock) == [(process.pid, liveness.started(process.pid))]
        assert liveness.acquire(lock) is None
        assert int(lock.read_text()) == process.pid, "who failed to take it did not change what it says"
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        process.kill()
        process.wait(300)
        assert not liveness.held(lock) and lock.read_text() and liveness.holder(lock) == []
    taken = liveness.acquire(lock)
    assert taken is not None and int(lock.read_text()) == os.getpid()
    os.close(taken)


@pytest.mark.parametrize("text", ["", "0", "-1", "no number", "999999999"])
def test_a_lock_whose_file_names_nobody_has_no_holder(tmp_path, text):
    lock = tmp_path / "lock"
    assert liveness.holder(lock) == [] and not lock.exists()
    with holding(lock) as process:
        lock.write_text(text)  # as in the moment before the pid is written
        assert liveness.held(lock) and liveness.holder(lock) == []
        process.kill()


def test_being_asked_about_never_costs_anyone_the_lock(tmp_path):
    """Given somebody who asks all the time, when another takes the free lock, then he gets it."""
    lock = tmp_path / "lock"
    lock.touch(0o600)
    over = threading.Event()

    def ask():
        while not over.is_set():
            liveness.held(lock)

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    try:
        for _ in range(300):
            taken = liveness.acquire(lock)
            assert taken is not None
            os.close(taken)
    finally:
        over.set()
        for asker in askers:
            asker.join(300)


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BusyError, match=r"lock cannot be locked \(.*symbolic links"):
        liveness.acquire(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named_in_one_line_with_what_to_do(tmp_path, monkeypatch, error):
    lock = tmp_path / "lock"
    lock.touch(0o600)

    def refused(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "fcntl", refused)
    for use in (liveness.acquire, liveness.held):
        with pytest.raises(ConfigError) as raised:
            use(lock)
        line = str(raised.value)
        assert "\n" not in line and line.startswith(f"{lock}: its file system (") and os.strerror(error) in line
        assert "(unknown)" not in line and "XDG_RUNTIME_DIR or TMPDIR to a folder on a local disk" in line
    # only the lock's: what other tests left is closed at any time
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert str(lock.resolve()) not in links, "no descriptor stays open"
