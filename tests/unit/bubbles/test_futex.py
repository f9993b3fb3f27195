"""A word that another process changes wakes who waits for it, and nothing is missed in between."""

import mmap
import os
import threading
import time

import numpy as np
import pytest

from ft_plugins.bubbles.gate import gate
from ft_plugins.bubbles.gate.gate import POLL_SECONDS, FutexWord

FOR_EVER = 3600.0  # seconds: longer than a test may take


@pytest.fixture
def words():
    return np.frombuffer(mmap.mmap(-1, 4096), dtype=np.uint64)


def test_a_change_by_another_process_ends_the_wait(words):
    word = FutexWord(words, 3)
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(ready, 1)
        words[3] = 7
        FutexWord(words, 3).wake()
        os._exit(0)
    os.write(go, b"1")
    while words[3] != 7:
        word.wait(0, FOR_EVER)
    os.waitpid(pid, 0)
    for end in (ready, go):
        os.close(end)


def test_a_word_that_has_changed_already_is_not_waited_for(words):
    words[3] = 5
    assert FutexWord(words, 3).wait(4, FOR_EVER) == 0.0


def test_a_wait_is_over_after_its_time(words):
    began = time.monotonic()
    assert FutexWord(words, 3).wait(0, 0.05) == 0.0
    assert time.monotonic() - began > 0.04


def test_other_threads_run_while_one_waits(words):
    """A wait that kept the interpreter would let nobody wake it before its time is over."""
    waiter = threading.Thread(target=FutexWord(words, 0).wait, args=(0, FOR_EVER), daemon=True)
    waiter.start()
    words[0] = 1
    while waiter.is_alive():
        FutexWord(words, 0).wake()  # again and again: it may have looked before, and not waited yet
        waiter.join(0.01)


def test_without_a_futex_it_is_looked_at_again_and_again(words, monkeypatch):
    monkeypatch.setattr(gate, "_futex", None)
    word = FutexWord(words, 0)
    word.wake()
    assert word.wait(0, 1.0) == POLL_SECONDS and word.wait(0, 0.001) == 0.001
