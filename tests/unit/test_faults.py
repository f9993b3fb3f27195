"""Fault points: they strike where, when and how they were told to, and nowhere else."""

import os
import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.base import faults
from ft_plugins.base.faults import Fault, parse, reach
from ft_plugins.errors import ConfigError

words = st.text("abcdefghijklmnopqrstuvwxyz0123456789._-", min_size=1)


def test_a_point_that_is_not_armed_does_nothing():
    faults.arm("")
    assert reach("update.begin", iteration=1) is None
    faults.arm("update.begin@iteration=2:inf")
    assert reach("update.begin", iteration=1) is None and reach("update.end", iteration=2) is None


def test_all_conditions_must_hold_ambient_facts_and_those_of_the_point():
    faults.arm("update.begin@iteration=6,rank=3,restart=0:inf", rank=3, restart=0)
    assert reach("update.begin", iteration=5) is None
    assert reach("update.begin", iteration=6) == "inf"
    faults.arm("update.begin@iteration=6,rank=3:inf", rank=2)
    assert reach("update.begin", iteration=6) is None
    assert reach("update.begin", iteration=6, rank=3) == "inf", "the point's own fact counts before the ambient one"
    faults.arm("update.begin@slot=1:inf")
    assert reach("update.begin", iteration=6) is None, "a fact that nobody reports holds for nobody"


def test_arming_replaces_what_was_armed_and_the_first_fault_that_applies_acts():
    faults.arm("a.b:one;a.b:two;a.b@x=1:three")
    assert reach("a.b", x=1) == "one"
    faults.arm("a.b@x=1:three;a.b:two")
    assert (reach("a.b", x=1), reach("a.b", x=2)) == ("three", "two")
    faults.arm("c.d:one")
    assert reach("a.b", x=1) is None


def test_a_point_counts_how_often_it_was_reached():
    faults.arm("a.b@hit=3:word")
    assert [reach("a.b") for _ in range(4)] == [None, None, "word", None]
    faults.arm("a.b@hit=1:word")
    assert reach("a.b") == "word", "arming counts anew"


def test_a_condition_on_a_remainder_holds_every_so_many_times():
    faults.arm("a.b@iteration%5=0:word;a.b@iteration%5=1,x=2:other")
    assert [reach("a.b", iteration=k) for k in range(1, 11)] == [*[None] * 4, "word", *[None] * 4, "word"]
    assert reach("a.b", iteration=6, x=2) == "other" and reach("a.b") is None
    assert [fault.action for fault in faults.armed("a.b")] == ["word", "other"] and not faults.armed("c.d")


def test_raise_names_the_point_and_the_facts():
    faults.arm("a.b:raise", rank=4)
    with pytest.raises(RuntimeError, match=r"fault injected at a.b \(.*'rank': '4'.*'iteration': '9'"):
        reach("a.b", iteration=9)


@pytest.mark.parametrize("in_thread", [False, True], ids=["main thread", "other thread"])
@pytest.mark.parametrize("action, number", [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP), ("exit", None)])
def test_a_strike_takes_effect_before_anything_else_runs(action, number, in_thread):
    """Also from a thread that is not the main one: the next instruction of that thread is not reached."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:

        def strike():
            reach("a.b")
            os.write(writable, b"went on")
            os._exit(0)

        faults.arm(f"a.b:{action}")
        if in_thread:
            thread = threading.Thread(target=strike)
            thread.start()
            thread.join()
        strike()
    os.close(writable)
    status = os.waitpid(pid, os.WUNTRACED)[1]
    if action == "stop":
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == number
        os.set_blocking(readable, False)
        with pytest.raises(BlockingIOError):
            os.read(readable, 1)
        os.kill(pid, signal.SIGCONT)
        os.set_blocking(readable, True)
        assert os.read(readable, 10) == b"went on", "once continued it goes on"
        assert os.waitpid(pid, 0)[1] == 0
    else:
        assert os.WTERMSIG(status) == number if number else os.WEXITSTATUS(status) == 1
        assert os.read(readable, 1) == b""
    os.close(readable)


@given(st.lists(st.tuples(words, st.dictionaries(words, words, max_size=3), words), max_size=4))
def test_a_specification_is_read_as_it_was_written(told):
    text = " ; ".join(
        point + ("@" + ",".join(f"{key}={value}" for key, value in facts.items()) if facts else "") + ":" + action
        for point, facts, action in told
    )
    assert parse(text) == [Fault(point, tuple(facts.items()), action) for point, facts, action in told]


@pytest.mark.parametrize(
    "text",
    [
        *("a.b", "a.b:", ":kill", "@x=1:kill", "a.b@x:kill", "a.b@=1:kill", "a.b@x=:kill", "ok:kill;b"),
        *("a.b@x%=1:kill", "a.b@x%0=0:kill", "a.b@x%a=0:kill", "a.b@%5=0:kill"),
    ],
)
def test_a_part_that_cannot_be_read_is_named_and_nothing_stays_armed(text):
    with pytest.raises(ConfigError, match="cannot be read: expected point@fact=value,...:action") as caught:
        faults.arm(text)
    assert f"'{text.split(';')[-1]}'" in str(caught.value)
    assert reach("ok") is None
