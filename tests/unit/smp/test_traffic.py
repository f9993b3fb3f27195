"""Exchange traffic stays behind training; links are measured over enough of time, for each target together."""

import os
import threading

import pytest

from ft_plugins.recovery.nodes import links_of
from ft_plugins.smp.exchange import traffic
from ft_plugins.transport.frame_codec import PAYLOAD_LIMIT


def _niceness():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_one_thread_steps_back_and_the_others_stay():
    before, found = _niceness(), []

    def work():
        traffic.step_back()
        found.append(_niceness())
        traffic.step_back()
        found.append(_niceness())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [min(before + traffic.NICE, 19)] * 2
    assert _niceness() == before


def test_the_first_thread_keeps_its_priority():
    before = _niceness()
    for _ in range(2):
        traffic.step_back()
    assert _niceness() == before


def test_who_has_stepped_back_further_stays_there():
    found = []

    def work():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        traffic.step_back()
        found.append(_niceness())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [19]


class Wire:
    """Takes `latency` and nbytes / `speed` for what is sent."""

    def __init__(self, speed, latency=0.0):
        self.now, self.speed, self.latency = 0.0, speed, latency
        self.sent = []

    def send(self, nbytes):
        self.sent.append(nbytes)
        self.now += self.latency + nbytes / self.speed

    def clock(self):
        return self.now


@pytest.mark.parametrize("speed", [1e4, 1e6, 1e8, 1e10])
def test_a_link_is_measured_as_it_is_whatever_it_carries(speed):
    wire = Wire(speed)
    assert traffic.rate(wire.send, 0.25, wire.clock) == pytest.approx(speed)
    assert wire.now <= 2 * 0.25 + 2 * max(wire.sent) / speed, "growing, counting, and a frame of each that is long"
    assert max(wire.sent) == (PAYLOAD_LIMIT if speed >= 1e8 else 64 << 10)


def test_the_way_through_both_processes_belongs_to_it():
    wire = Wire(1e9, latency=PAYLOAD_LIMIT / 1e9)
    assert traffic.rate(wire.send, 0.25, wire.clock) == pytest.approx(0.5e9)


def test_a_link_carries_what_goes_out_or_comes_in_whichever_is_more():
    ring = [[(3, 100.0)], [(0, 90.0)], [(1, 80.0)], [(2, 95.0)]]
    assert links_of(ring) == {0: 100.0, 1: 90.0, 2: 95.0, 3: 100.0}
    assert links_of([[(1, 50.0), (2, 30.0)], [(0, 60.0)], [(0, 60.0)]]) == {0: 120.0, 1: 60.0, 2: 60.0}
    assert links_of([[(1, 50.0)], [], []]) == {0: 50.0, 1: 50.0, 2: 50.0}, "one of which nothing is known"
    assert links_of([[], []]) == {}
