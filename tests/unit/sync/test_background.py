"""What runs behind: in order, with its result or its error for whoever waits."""

import threading

import pytest
import torch

from ft_plugins.sync.background import Background

CPU = torch.device("cpu")


def test_tasks_run_one_after_another_on_one_thread_and_give_what_they_found():
    background, order = Background(CPU), []
    go = threading.Event()

    def first():
        assert go.wait(300)
        order.append(threading.current_thread().name)
        return "first"

    one = background.start(first)
    two = background.start(lambda: [*order, "second"])
    go.set()
    assert two.wait() == ["ftp-sync", "second"] and one.wait() == "first" and two.waited >= 0
    background.close()
    background.close()
    assert "ftp-sync" not in {thread.name for thread in threading.enumerate()}


def test_an_error_is_raised_where_it_is_waited_for_and_nothing_runs_after_it():
    background, done = Background(CPU), []

    def fails():
        raise ValueError("a peer is gone")

    bad = background.start(fails)
    after = background.start(lambda: done.append(1))
    for task in (bad, after):
        with pytest.raises(ValueError, match="a peer is gone"):
            task.wait()
    with pytest.raises(ValueError, match="a peer is gone"):
        background.start(lambda: done.append(1)).wait()
    assert done == []
    background.close()
