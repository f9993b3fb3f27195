"""What links carry: counted over enough of time, for each target together, and by all nodes alike."""

from __future__ import annotations

import pytest

from ft_plugins.recovery.nodes import links_of
from ft_plugins.smp import probe
from ft_plugins.smp.wire import PAYLOAD_LIMIT


class Wire:
    """Takes `latency` and nbytes / `speed` for what is sent."""

    def __init__(self, speed: float, latency: float = 0.0) -> None:
        self.now, self.speed, self.latency = 0.0, speed, latency
        self.sent: list[int] = []

    def send(self, nbytes: int) -> None:
        self.sent.append(nbytes)
        self.now += self.latency + nbytes / self.speed

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("speed", [1e4, 1e6, 1e8, 1e10])
def test_a_link_is_measured_as_it_is_whatever_it_carries(speed: float) -> None:
    wire = Wire(speed)
    assert probe.rate(wire.send, 0.25, wire.clock) == pytest.approx(speed)
    assert wire.now <= 2 * 0.25 + 2 * max(wire.sent) / speed, "growing, counting, and a frame of each that is long"
    assert max(wire.sent) == (PAYLOAD_LIMIT if speed >= 1e8 else 64 << 10)


def test_the_way_through_both_processes_belongs_to_it() -> None:
    wire = Wire(1e9, latency=PAYLOAD_LIMIT / 1e9)
    assert probe.rate(wire.send, 0.25, wire.clock) == pytest.approx(0.5e9)


def test_a_link_carries_what_goes_out_or_comes_in_whichever_is_more() -> None:
    ring = [[(3, 100.0)], [(0, 90.0)], [(1, 80.0)], [(2, 95.0)]]
    assert links_of(ring) == {0: 100.0, 1: 90.0, 2: 95.0, 3: 100.0}
    assert links_of([[(1, 50.0), (2, 30.0)], [(0, 60.0)], [(0, 60.0)]]) == {0: 120.0, 1: 60.0, 2: 60.0}
    assert links_of([[(1, 50.0)], [], []]) == {0: 50.0, 1: 50.0, 2: 50.0}, "one of which nothing is known"
    assert links_of([[], []]) == {}
