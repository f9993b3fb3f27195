"""What a loop calls, in which order, and what it no longer calls. Stepped by hand, but for one that runs."""

import math
import socket
import threading
import time
from contextlib import closing

import pytest

from ft_plugins.transport.loop import Loop

SECONDS = 90.0


@pytest.fixture
def loop():
    with closing(Loop("test")) as made:
        yield made


def test_what_has_arrived_is_read_before_calls_and_both_before_what_is_due(loop):
    called = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.watch(ours, lambda events: called.append(f"read {ours.recv(9).decode()}"))
        loop.soon(lambda now: called.append("due"))
        loop.call(lambda: called.append("call"))
        theirs.send(b"it")
        loop.step(SECONDS)
        loop.forget(ours)
    assert called == ["read it", "call", "due"]


def test_a_connection_that_is_forgotten_in_a_step_is_not_called_in_it(loop):
    called = []
    pairs = [socket.socketpair() for _ in range(2)]

    def ready(one):
        called.append(one)
        for ours, _ in pairs:
            loop.forget(ours)
            ours.close()

    for ours, theirs in pairs:
        loop.watch(ours, lambda events, one=ours: ready(one))
        theirs.send(b"1")
    loop.step(SECONDS)
    loop.step(0.0)
    assert len(called) == 1
    for _, theirs in pairs:
        theirs.close()


def test_a_connection_that_the_selector_has_lost_is_forgotten_too(loop):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.watch(ours, lambda events: None)
        loop._selector.unregister(ours)  # as it does itself when the kernel refuses a change
        loop.forget(ours)
        loop.forget(ours)


def test_a_time_replaces_the_one_before_and_infinity_is_never(loop):
    called = []

    def one(now):
        called.append("one")

    def other(now):
        called.append("other")

    began = time.monotonic()
    loop.at(began, one)
    loop.at(began + SECONDS, one)
    loop.at(began, other)
    loop.at(math.inf, other)
    loop.at(began - 1.0, lambda now: called.append("earlier"))
    loop.step(0.0)
    assert called == ["earlier"]
    loop.at(began + 0.05, one)
    loop.at(began + 0.04, other)
    while len(called) < 3:
        assert time.monotonic() < began + SECONDS
        loop.step(SECONDS)
    loop.step(0.0)
    assert called == ["earlier", "other", "one"] and time.monotonic() >= began + 0.05


def test_what_is_put_off_for_ever_again_and_again_leaves_nothing(loop):
    """As for each connection that a door admits before its time is up."""
    called = []
    for _ in range(100):
        loop.at(time.monotonic(), called.append)
        loop.at(math.inf, called.append)
        loop.step(0.0)
    assert not called and not loop._heap and not loop._times


def test_what_is_due_again_and_again_leaves_room_for_everything_else(loop):
    called = []

    def again(now):
        called.append("again")
        loop.soon(again)

    loop.soon(again)
    loop.call(lambda: called.append("call"))
    for _ in range(3):
        loop.step(SECONDS)
    assert called == ["call", "again", "again", "again"]


def test_a_call_wakes_the_thread_and_after_the_end_it_happens_at_once():
    loop, called = Loop("test"), threading.Event()
    loop.start()
    loop.call(called.set)
    assert called.wait(SECONDS / 2), "it waits for much longer otherwise"
    loop.stop()
    loop.stop()
    late = []
    loop.call(lambda: late.append(threading.current_thread()))
    assert not late
    loop.close()
    loop.call(lambda: late.append(threading.current_thread()))
    assert late == 2 * [threading.current_thread()] and "test" not in [each.name for each in threading.enumerate()]


def test_a_loop_is_not_closed_under_a_thread_that_wakes_it(loop):
    """Else the byte could go to whatever has the number of its descriptor by then."""
    begun, over, closed = threading.Event(), threading.Event(), threading.Event()
    real = loop._waker

    class Slow:
        def send(self, what):
            begun.set()
            over.wait(SECONDS)
            return 0 if closed.is_set() else real.send(what)

        def close(self):
            closed.set()
            real.close()

    loop._waker = Slow()
    waking = threading.Thread(target=loop.wake)
    waking.start()
    assert begun.wait(SECONDS)
    closing = threading.Thread(target=loop.close)
    closing.start()
    assert not closed.wait(0.1)
    over.set()
    waking.join()
    closing.join()
    assert closed.is_set()
