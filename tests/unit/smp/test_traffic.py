"""An SMP gives way to training: a thread that moves data, never the ones beside it."""

from __future__ import annotations

import os
import threading

from ft_plugins.smp import traffic as priority


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_one_thread_steps_back_and_the_others_stay() -> None:
    before, found = _niceness(), []

    def work() -> None:
        priority.step_back()
        found.append(_niceness())
        priority.step_back()
        found.append(_niceness())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [min(before + priority.NICE, 19)] * 2
    assert _niceness() == before


def test_who_has_stepped_back_further_stays_there() -> None:
    found = []

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        priority.step_back()
        found.append(_niceness())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [19]
