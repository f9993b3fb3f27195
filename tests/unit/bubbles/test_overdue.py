"""A copy that its bubbles did not carry in the planned iterations goes on at a rate, by a clock of its own."""

from itertools import pairwise

import numpy as np
import pytest

from ft_plugins.bubbles.filling import Grant
from ft_plugins.bubbles.gate.gate import GATE_BYTES, STEADY, Gate
from ft_plugins.bubbles.gate.gate_pacer import GatePacer
from ft_plugins.bubbles.gate.overdue import GROWTH, OverdueFrames
from ft_plugins.bubbles.gate.pacing import GateSight, PacingState
from ft_plugins.bubbles.gate.pacing_limits import LIMITS
from ft_plugins.model.pacer import Allowance
from ft_plugins.transport.frame_codec import PAYLOAD_LIMIT
from harness.waited_clock import MS, Clock, Stop

PLANNED, PERIOD = 2, 1000 * MS  # iterations, and their length
COPY, PER_MS = 200_000, 1000  # bytes, and those that the link carries in a millisecond


class LateBubbles:
    """A trainer whose bubbles are over before their windows begin, and a sender of one copy after the other."""

    def __init__(self, iterations, window_bytes=10 * PER_MS, latency_ms=0, rate_duty=0.5):
        """A frame takes `latency_ms` besides its bytes."""
        self.latency_ms = latency_ms
        self.clock, self.gate = Clock(), Gate(np.zeros(GATE_BYTES, dtype=np.uint8))
        self.pacer = GatePacer(self.gate, clock_ns=self.clock, rate_duty=rate_duty)
        self.gate.plan(PLANNED, PERIOD / 1e9, window_bytes / 0.010)
        grant = Grant(1, 0, 0.012, 0.022, window_bytes)
        opened = {PERIOD * at: lambda: self.gate.open([grant], 0, self.clock.now) for at in range(iterations)}
        closed = {at + 10 * MS: self.gate.close for at in opened}
        self.stop = Stop(self.clock, iterations * PERIOD, {**opened, **closed})

    def send(self, nbytes):
        """Send a copy. When each frame began and ended, in milliseconds."""
        went = []
        self.pacer.begins(nbytes)
        while nbytes and (allowed := self.pacer.take(nbytes, self.stop)).nbytes:
            began = self.clock.now // MS
            self.clock.now += self.latency_ms * MS + allowed.nbytes * MS // PER_MS
            self.stop.wait(1e-9)  # what was due meanwhile has happened
            assert self.pacer.ended(allowed) is None, "it is in no window"
            nbytes -= allowed.nbytes
            went.append((began, self.clock.now // MS))
        return went


def overdue_copy():
    """One of which nothing has gone, half a second after it was due."""
    late = LateBubbles(0)
    late.pacer.begins(COPY)
    late.gate.open([Grant(1, 0, 0.012, 0.022, 10 * PER_MS)], 0, 0)
    assert not late.pacer.take(COPY, Stop(late.clock, 10 * MS)).nbytes
    late.gate.close()
    late.clock.now = 3500 * MS
    return late


def part_of_the_time(went):
    """In which frames were under way, each with the rest after it; without the last one, which has none."""
    return sum(ended - began for began, ended in went[:-1]) / (went[-1][0] - went[0][0])


def test_what_bubbles_did_not_carry_in_time_is_through_at_two_and_a_half_times_the_plan():
    late = LateBubbles(40)
    for begin in (0, 20_000):
        late.clock.now = begin * MS
        went = late.send(COPY)
        assert late.pacer.rate_bytes == COPY * (1 + begin // 20_000)
        assert begin + 1.5 * 2000 < went[0][0] < begin + 1.5 * 2000 + 100, "until then bubbles may carry it"
        # the first frame does not know how many there will be, the last one ends a poll after it is due
        assert begin + 0.9 * 5000 < went[-1][1] <= begin + 5000 + 100
        assert max(later[0] - sooner[1] for sooner, later in pairwise(went)) < 400, "evenly, without bursts"


def test_a_copy_whose_bubbles_are_never_opened_is_overdue_at_the_same_time():
    """On a busy machine each bubble may begin at another time than planned. Its trainer opens none of them then."""
    late = LateBubbles(0)
    late.stop = Stop(late.clock, 40 * PERIOD)
    for begin in (0, 20_000):
        late.clock.now = begin * MS
        went = late.send(COPY)
        assert begin + 1.5 * 2000 <= went[0][0] and went[-1][1] <= begin + 5000 + 100
        assert late.pacer.rate_bytes == COPY * (1 + begin // 20_000)


def test_an_overdue_copy_of_a_steady_rate_goes_as_any_other_and_at_no_other_rate():
    """Four ranks share the link, and a frame takes long whatever its bytes: the granted rate carries little."""
    late = LateBubbles(0, latency_ms=100, rate_duty=0.125)
    steady = Grant(STEADY, -1, 0.0, PERIOD / 1e9, COPY // PLANNED)
    late.stop = Stop(late.clock, 400 * PERIOD, {
        PERIOD * at: lambda: late.gate.open([steady], 0, late.clock.now) for at in range(400)
    })  # fmt: skip
    for times in (5, 3, 3):  # the first one finds how large a frame may be
        began = late.clock.now // MS
        assert late.send(COPY)[-1][1] - began < times * PLANNED * 1000


def test_a_copy_that_waited_for_a_plan_has_all_of_its_iterations():
    late = LateBubbles(0)
    late.pacer.begins(COPY)
    late.clock.now = 60_000 * MS
    late.gate.plan(PLANNED, PERIOD / 1e9 + 1e-3, 1e9)
    assert not late.pacer.take(COPY, Stop(late.clock, 62_900 * MS)).nbytes
    assert late.pacer.take(COPY, Stop(late.clock, 63_100 * MS)).nbytes


def test_a_plan_that_replaces_another_does_not_postpone_what_is_overdue():
    """On a busy machine a job may plan again and again, each time sooner than a copy becomes overdue."""
    late = LateBubbles(0)
    late.pacer.begins(COPY)
    for replaced in range(1, 3):
        assert not late.pacer.take(COPY, Stop(late.clock, 1400 * MS * replaced)).nbytes
        late.gate.plan(PLANNED, PERIOD / 1e9 + replaced * 1e-3, 1e9)
    assert late.pacer.take(COPY, Stop(late.clock, 3100 * MS)).nbytes


def test_more_than_fits_in_that_time_takes_its_part_of_the_link_and_no_more():
    late = LateBubbles(40)
    went = late.send(20 * COPY)
    assert 0.4 < part_of_the_time(went) <= 0.5
    assert went[-1][1] > 5000


def test_of_a_link_much_slower_than_planned_an_overdue_copy_takes_an_eighth():
    late = LateBubbles(120, window_bytes=10 * 10 * PER_MS)
    went = late.send(20 * COPY)
    assert went[0][0] > 3000
    assert 0.1 < part_of_the_time(went) <= 0.125


def test_the_end_of_a_small_copy_does_not_pass_a_slow_link_for_a_busy_machine():
    late = LateBubbles(120, window_bytes=10 * 10 * PER_MS, latency_ms=1)
    late.send(1)
    # a frame takes 16 ms, of which 1 ms is none of the link's
    assert part_of_the_time(late.send(20 * COPY)) <= 0.125 * 16 / 15


def test_frames_of_an_overdue_copy_go_one_at_a_time_whichever_lane_they_are_of():
    late = overdue_copy()
    first = late.pacer.take(COPY, Stop(late.clock, 3600 * MS))
    assert first.nbytes and not late.pacer.take(COPY, Stop(late.clock, 3700 * MS)).nbytes
    late.pacer.ended(first)
    assert late.pacer.take(COPY, Stop(late.clock, 9000 * MS)).nbytes


def test_on_a_fast_link_too_frames_are_compared_that_one_payload_can_carry():
    assert LIMITS.payload_bytes == PAYLOAD_LIMIT
    state = PacingState.start(LIMITS, GateSight(0, 0, 0, None), 0)
    state.window_rate = 10.0  # GB/s
    assert state.largest_frame() == PAYLOAD_LIMIT and state.overdue_bytes() == PAYLOAD_LIMIT // GROWTH


def test_where_a_frame_takes_long_whatever_its_bytes_an_overdue_copy_goes_in_few_of_them():
    """As on a machine whose ranks share cores: a tenth of a second for each frame, and four ranks share the link."""
    late = LateBubbles(400, latency_ms=100, rate_duty=0.125)
    late.send(COPY)  # the first one finds how large a frame may be
    for number in (1, 2, 3):
        began = late.clock.now // MS
        went = late.send(COPY)
        assert went[-1][1] - began < 3 * PLANNED * 1000, f"copy {number} of {len(went)} frames"
        assert len(went) <= COPY // (16 * PER_MS) + 2, "no longer on the link than a frame in a bubble may be"


@pytest.mark.parametrize("held", [True, False])
def test_while_the_gate_is_held_an_overdue_copy_waits(held):
    late = overdue_copy()
    if held:
        late.gate.hold(600.0, late.clock.now)
    allowed = late.pacer.take(COPY, Stop(late.clock, 4500 * MS))
    assert bool(allowed.nbytes) is not held


def test_a_copy_without_a_plan_is_never_overdue():
    late = LateBubbles(0)
    late.pacer.begins(COPY)
    late.gate.plan(0, 0.0, 0.0)
    assert not late.pacer.take(COPY, Stop(late.clock, 60_000 * MS)).nbytes


def test_larger_frames_are_kept_only_while_they_take_hardly_longer():
    limits, usual, most = LIMITS, 1000, 16_000
    busy = OverdueFrames()
    assert busy.size(usual, most) == 4000
    busy.ended(4000, 100 * MS, most, limits)
    assert busy.size(usual, most) == most
    busy.ended(700, 300 * MS, most, limits)  # the last one of a copy shows nothing
    busy.ended(most, 130 * MS, most, limits)
    assert busy.large and busy.size(usual, most) == most
    for took, large in ((900, True), (900, True), (100, True), (900, True), (900, True), (900, False)):
        busy.ended(most, took * MS, most, limits)
        assert busy.large is large, "one that is stuck now and then is none of three in a row"
    slow = OverdueFrames()
    slow.ended(4000, 40 * MS, most, limits)
    slow.ended(most, 160 * MS, most, limits)
    assert not slow.large
    for _ in range(limits.retry_frames):
        assert slow.size(usual, most) == usual
        slow.ended(usual, 10 * MS, most, limits)
    assert slow.size(usual, most) == 4000, "it may have become faster"


def judged(*frames):
    """After frames of (bytes, ms) of a copy that is overdue, on a link that is planned to carry PER_MS."""
    sight = GateSight(1, PLANNED, PERIOD, None, 1000 * PER_MS)
    state = PacingState.start(LIMITS, sight, 0)
    now = 2 * PLANNED * PERIOD
    state.begins(COPY, 0)
    for nbytes, took in frames:
        state.ended(Allowance(nbytes, began_ns=now), None, now := now + took * MS)
    assert state.is_overdue(now)
    return state


def test_two_frames_that_were_stuck_do_not_pass_a_busy_machine_for_a_slow_link_where_another_was_quick():
    most = 16 * PER_MS
    stuck = (most // GROWTH, 200), (most, 750)
    assert judged(*stuck).overdue_bytes() < most // GROWTH, "as on a slow link"
    fair = 4100  # bytes: a quarter of the largest frame, which is 16 KiB at first
    busy = judged((fair, 8), *stuck)
    assert busy.overdue_bytes() == most and busy.overdue_ns - busy.asked_ns < 1000 * MS
    slower = judged((fair, 41), *stuck)
    assert slower.overdue_bytes() < most // GROWTH, "a tenth as fast as planned"
    assert slower.overdue_ns - slower.asked_ns < 2 * 8 * 160 * MS, "it rests after what the link took"
    assert judged((1024, 1), *stuck).overdue_bytes() < most // GROWTH, "so small a frame says nothing of the link"
    assert judged((fair, 9), *stuck).overdue_bytes() < most // GROWTH, "less than half as fast as planned"
    small = [(1000, 20)] * 64  # as all frames of small windows are
    assert judged((fair, 8), *small, *stuck).overdue_bytes() < most // GROWTH, "it may have another speed by now"
    for before in ((fair, 8), *stuck), ((most, 16),):
        slow_by_now = judged(*before, *[(most, 160)] * 8)
        assert slow_by_now.overdue_bytes() <= most // GROWTH
