"""The stacks of ranks that hang: written by py-spy, or by the ranks themselves on a signal."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from ft_plugins.smp.watch import liveness, stacks
from harness.job_control import wait_until, wait_until_stopped

LISTENS = "from pathlib import Path; from ft_plugins.smp.watch import stacks; stacks.listen(Path({folder!r}), {rank}); "
SLEEPS = "import time\ndef outer(): print(flush=True); time.sleep(600)\n"
# in C, and keeps the interpreter's lock
LOCKS = "import re\ndef outer(): print(flush=True); re.match('(a*)*b', 'a' * 400)\n"
DEAF = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
SECONDS = 90.0


@pytest.fixture(autouse=True)
def no_py_spy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))


@pytest.fixture
def start(tmp_path, run_python):
    def start(rank, what, listens=True):
        begin = LISTENS.format(folder=str(tmp_path), rank=rank) if listens else ""
        return run_python(f"{begin}\n{what}\nouter()")

    return start


def test_ranks_that_sleep_and_that_keep_the_lock_write_their_stacks(start, tmp_path):
    processes = {4: start(4, SLEEPS), 5: start(5, LOCKS)}
    folder = stacks.dump(tmp_path, 3, processes, SECONDS)
    assert folder == tmp_path / "hangs" / "3"
    for rank in (4, 5):
        path = folder / f"rank{rank}.txt"
        assert "in outer" in path.read_text() and "<module>" in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert liveness.started(processes[rank][0]), "it goes on"


def test_a_second_dump_holds_only_what_is_new(start, tmp_path):
    processes = {0: start(0, SLEEPS)}
    first = (stacks.dump(tmp_path, 3, processes, SECONDS) / "rank0.txt").read_text()
    assert (stacks.dump(tmp_path, 4, processes, SECONDS) / "rank0.txt").read_text().count("outer") == first.count(
        "outer"
    )


def test_a_process_that_does_not_listen_is_not_ended_by_the_signal(start, tmp_path):
    stacks.listen(tmp_path, 0)()
    (tmp_path / "stack.0").touch()
    pid, began = start(0, SLEEPS, listens=False)
    folder = stacks.dump(tmp_path, 3, {0: (pid, began)}, SECONDS)
    assert (folder / "rank0.txt").read_text() == f"no stacks: process {pid} does not write its stacks\n"
    assert liveness.started(pid) == began


def test_of_a_stopped_an_ended_and_a_silent_process_it_is_said_why_there_are_none(start, tmp_path):
    stopped, silent = start(0, SLEEPS), start(2, DEAF + SLEEPS)
    os.kill(stopped[0], signal.SIGSTOP)
    wait_until_stopped(stopped[0], SECONDS)
    folder = stacks.dump(tmp_path, 3, {0: stopped, 1: (stopped[0], 1), 2: silent}, 1.0)
    texts = [(folder / f"rank{rank}.txt").read_text() for rank in range(3)]
    assert [text.split(":")[0] for text in texts] == ["no stacks"] * 3
    assert "is stopped by a signal" in texts[0] and "has ended" in texts[1] and "did not answer" in texts[2]


def test_stacks_are_kept_as_they_come_while_another_rank_is_waited_for(start, tmp_path):
    """The first one does not answer: it waits for a device, say. Another node has the workers restart meanwhile: the
    next incarnation empties the files."""
    processes = {0: start(0, DEAF + SLEEPS), **{rank: start(rank, SLEEPS) for rank in range(1, 4)}}
    dumping = threading.Thread(target=stacks.dump, args=(tmp_path, 3, processes, 3600.0), daemon=True)
    dumping.start()
    for rank in range(1, 4):
        written = tmp_path / "hangs" / "3" / f"rank{rank}.txt"
        wait_until(lambda: written.exists() and written.stat().st_size > 0, SECONDS, lambda: f"none of rank {rank}")  # noqa: B023
        (tmp_path / f"stack.{rank}").write_bytes(b"")
    os.kill(processes[0][0], signal.SIGKILL)
    dumping.join(SECONDS)
    assert not dumping.is_alive(), "one that has ended is not waited for"
    for rank in range(1, 4):
        assert "in outer" in (tmp_path / "hangs" / "3" / f"rank{rank}.txt").read_text()
    assert "did not answer" in (tmp_path / "hangs" / "3" / "rank0.txt").read_text()


def test_a_rank_that_goes_on_shows_where_its_main_thread_stands(start, tmp_path):
    other = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    pid, began = start(0, other + SLEEPS)
    process = {0: (pid, began)}
    stack = stacks.of_ranks(tmp_path, process, SECONDS)[0]
    innermost, *callers = stack.splitlines()
    assert innermost.strip().endswith("in outer") and "<module>" in callers[-1]
    assert stacks.of_ranks(tmp_path, process, SECONDS) == {0: stack}, "it has not moved"
    folder = stacks.dump(tmp_path, 3, process, SECONDS)
    assert stacks.place(folder / "rank0.txt") == innermost.strip() and liveness.started(pid) == began
    assert stacks.of_ranks(tmp_path, {1: (pid, began)}, SECONDS) == {1: ""} and stacks.place(folder / "rank1.txt") == ""


def test_the_file_of_a_rank_that_is_asked_again_and_again_does_not_grow(start, tmp_path):
    """It lies in memory, and a rank may be slow for days."""
    process, sizes = {0: start(0, SLEEPS)}, []
    for _ in range(3):
        assert "in outer" in stacks.of_ranks(tmp_path, process, SECONDS)[0]
        sizes.append((tmp_path / "stack.0").stat().st_size)
    assert sizes == [sizes[0]] * 3


def test_of_stacks_by_py_spy_the_thread_that_it_calls_the_main_one_is_taken(tmp_path):
    path = tmp_path / "rank0.txt"
    path.write_text(
        'Process 7: python train.py\nPython v3.11.7\n\nThread 7 (idle): "MainThread"\n    upload (train.py:12)\n'
        '    main (train.py:30)\nThread 8 (active): "capture"\n    run (threading.py:1)\n'
    )
    assert stacks.place(path) == "upload (train.py:12)"


SPY = """#!/bin/sh
if [ "$3" = "{fails}" ]; then exit 1; fi
echo "spied $1 $2 $3"
"""


def test_py_spy_comes_first_where_it_is_installed_and_the_ranks_themselves_where_it_fails(start, tmp_path, monkeypatch):
    processes = {rank: start(rank, SLEEPS) for rank in range(2)}
    tool = tmp_path / "bin" / "py-spy"
    tool.parent.mkdir()
    tool.write_text(SPY.format(fails=processes[1][0]))
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tool.parent}:/bin:/usr/bin")
    folder = stacks.dump(tmp_path, 3, processes, SECONDS)
    texts = [(folder / f"rank{rank}.txt").read_text() for rank in range(2)]
    assert texts[0] == f"spied dump --pid {processes[0][0]}\n"
    assert "in outer" in texts[1]


def test_py_spy_that_cannot_be_killed_is_not_waited_for(start, tmp_path, monkeypatch):
    """It reads a process whose memory lies on a file system that does not answer."""
    process = start(0, SLEEPS)
    tool = tmp_path / "bin" / "py-spy"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexec sleep 3600\n")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tool.parent}:/bin:/usr/bin")
    killed = []
    by_py_spy = stacks._by_py_spy
    with monkeypatch.context() as patched:
        patched.setattr(
            stacks, "_by_py_spy", lambda folder, processes, _: by_py_spy(folder, processes, time.monotonic() + 0.5)
        )
        patched.setattr(subprocess.Popen, "kill", lambda spy: killed.append(spy))
        folder = stacks.dump(tmp_path, 3, {0: process}, SECONDS)
    for spy in killed:
        spy.kill()
        spy.wait()
    assert killed
    assert "in outer" in (folder / "rank0.txt").read_text()


def test_several_py_spies_that_do_not_end_are_waited_for_together(tmp_path, monkeypatch):
    clock, waited, wait = SimpleNamespace(now=0.0), [], subprocess.Popen.wait

    def wait_in_vain(spy, timeout):
        waited.append(spy)
        clock.now += timeout
        raise subprocess.TimeoutExpired("py-spy", timeout)

    tool = tmp_path / "bin" / "py-spy"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexec sleep 3600\n")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tool.parent}:/bin:/usr/bin")
    monkeypatch.setattr(stacks, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "wait", wait_in_vain)
        this = os.getpid(), liveness.started(os.getpid())
        assert stacks._by_py_spy(tmp_path, dict.fromkeys(range(8), this), 2.0) == set()
    for spy in set(waited):
        wait(spy, SECONDS)
    assert len(set(waited)) == 8 and clock.now == 2.0 + stacks._KILLED_SECONDS


def test_the_stacks_of_the_last_hangs_are_kept(tmp_path):
    for token in range(1, 20):
        stacks.dump(tmp_path, token, {})
    kept = sorted(int(each.name) for each in (tmp_path / "hangs").iterdir())
    assert kept == list(range(20 - stacks.KEPT, 20))


def test_one_that_no_longer_listens_leaves_no_file(tmp_path):
    end = stacks.listen(tmp_path, 7)
    assert stat.S_IMODE((tmp_path / "stack.7").stat().st_mode) == 0o600
    (tmp_path / "stack.8").touch()
    stacks.forget(tmp_path)
    assert not list(tmp_path.glob("stack.*"))
    end()
    assert not (tmp_path / "stack.7").exists()
