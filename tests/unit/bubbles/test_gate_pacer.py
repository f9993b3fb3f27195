"""What goes while a gate is open, and what does not: the pacer's arithmetic by a clock of its own, then real processes.

Trainers are real processes that are killed in the middle of what they do. Times that two processes measure are of one
clock, CLOCK_MONOTONIC, so they are compared without tolerance.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from multiprocessing.connection import Connection

import numpy as np
import pytest

from ft_plugins.bubbles.bubble_plan import LARGEST_RATE_DUTY
from ft_plugins.bubbles.filling import Grant
from ft_plugins.bubbles.gate.gate import GATE_BYTES, STEADY, Gate
from ft_plugins.bubbles.gate.gate_pacer import GatePacer
from ft_plugins.bubbles.gate.pacing import AskFallback, GateSight, PacingState, SendNow, WaitFor, decide
from ft_plugins.bubbles.gate.pacing_limits import LIMITS, PacingLimits
from ft_plugins.bubbles.round_trips import LAST
from ft_plugins.model.pacer import Allowance
from harness.waited_clock import MS, Clock, Stop

Trainer = Callable[[Callable[[Connection], None]], AbstractContextManager[tuple[Callable[[], object], int]]]
WAIT_SECONDS = 90.0  # for anything that takes milliseconds


def grant(bubble, begin, deadline, nbytes, after=0):
    return Grant(bubble, after, begin, deadline, nbytes)


def empty():
    return np.zeros(GATE_BYTES, dtype=np.uint8)


def send(pacer, stop, clock, takes, over=None):
    """Frames go until no more may: how each ended. One of so many bytes `takes` so many nanoseconds. The trainer closes
    its gate at a time, when the bubble is `over`."""
    ended = []
    while (allowed := pacer.take(10**9, stop)).nbytes:
        clock.now += int(takes(allowed.nbytes))
        if over is not None and clock.now > over[1]:
            over[0].close()
        ended.append(pacer.ended(allowed))
    return ended


class Free:
    """Lets everything go at once."""

    def begins(self, nbytes): ...

    def take(self, nbytes, stop):
        return Allowance(nbytes)

    def ended(self, allowed):
        raise AssertionError("who was not allowed by the gate is not counted there")


def test_no_more_goes_than_was_planned_nor_than_gets_through_in_time():
    clock, gate = Clock(), Gate(empty())
    gate.open([grant(1, 0.010, 0.020, 1000)], 0, 0)
    pacer, stop = GatePacer(gate, limits=PacingLimits(least_frame_bytes=10), clock_ns=clock), Stop(clock, 100 * MS)
    assert pacer.take(400, stop) == Allowance(400, 20 * MS) and clock.now == 10 * MS, "it waits for the window"
    clock.now = 15 * MS
    assert pacer.take(10_000, stop).nbytes == 500, "half of the window is left, and so half of its bytes"
    assert pacer.take(10_000, stop).nbytes == 100, "1000 in all"
    assert pacer.take(10_000, stop) == Allowance(0) and stop.is_set()


def test_who_is_late_goes_on_in_the_next_bubble():
    clock, gate = Clock(), Gate(empty())
    gate.open([grant(1, 0, 0.010, 1000)], 0, 0)
    stop = Stop(clock, 200 * MS, {50 * MS: lambda: gate.open([grant(2, 0.001, 0.011, 2000)], 0, 50 * MS)})
    pacer = GatePacer(gate, limits=PacingLimits(least_frame_bytes=10), clock_ns=clock)
    first = pacer.take(900, stop)
    clock.now = 12 * MS  # the frame took longer than it should
    pacer.ended(first)
    second = pacer.take(900, stop)
    assert second.deadline_ns == 61 * MS and 51 * MS <= clock.now < 52 * MS
    assert 540 < second.nbytes <= 562, "at 75 a millisecond, three quarters of what would be through in 10"
    pacer.ended(second)
    assert (pacer.late_bytes, pacer.inside_bytes) == (900, second.nbytes)
    assert pacer.filled() == [(2, second.nbytes)], "what was late was in no bubble"


def test_what_went_in_bubbles_is_told_of_those_of_the_plan_that_stands():
    clock, gate = Clock(), Gate(empty())
    pacer, stop = GatePacer(gate, limits=PacingLimits(least_frame_bytes=1), clock_ns=clock), Stop(clock, 100_000 * MS)
    for turn, bubble in enumerate((7, 3)):
        gate.plan(1, 1.0 + turn, 0.0)
        assert pacer.filled() == []
        gate.open([grant(bubble, 0, 0.5, 10_000)], turn, clock.now)
        pacer.ended(pacer.take(100, stop))
        assert pacer.filled() == [(bubble, 100)]
    assert pacer.inside_bytes == 200


def test_what_went_in_which_bubble_is_told_of_the_fullest_ones():
    clock, gate = Clock(), Gate(empty())
    pacer, stop = GatePacer(gate, limits=PacingLimits(least_frame_bytes=1), clock_ns=clock), Stop(clock, 100_000 * MS)
    for turn in range(2):
        for bubble in range(5):
            begin = 1000 * MS * (5 * turn + bubble)
            clock.now = max(clock.now, begin)
            gate.open([grant(bubble, 0, 0.5, 10_000)], turn, begin)
            pacer.ended(pacer.take(10 + bubble % 3, stop))
    assert pacer.filled() == [(bubble, 2 * (10 + bubble % 3)) for bubble in range(5)]
    assert pacer.filled(2) == [(1, 22), (2, 24)]
    assert pacer.inside_bytes == sum(nbytes for _, nbytes in pacer.filled())


def test_on_a_link_slower_than_planned_frames_end_with_their_window_and_copies_get_slower():
    """100 bytes a millisecond were planned; it is a tenth, and a round trip more for each frame."""
    clock, gate = Clock(), Gate(empty())
    pacer = GatePacer(gate, limits=PacingLimits(least_frame_bytes=10), clock_ns=clock)
    late_by, moved = [], []
    for number in range(30):
        begin = clock.now = 100 * MS * number
        gate.open([grant(1, 0, 0.010, 1000)], 0, begin)
        stop = Stop(clock, begin + 10 * MS)
        before = pacer.inside_bytes + pacer.late_bytes
        send(pacer, stop, clock, lambda nbytes: MS // 20 + nbytes * MS // 10)
        late_by.append(max(0, clock.now - begin - 12 * MS))  # a wait may go on for one poll
        moved.append(pacer.inside_bytes + pacer.late_bytes - before)
    assert late_by[0] > 50 * MS, "nothing is known yet"
    assert not any(late_by[1:]), "a window is met once the link is known"
    assert min(moved[10:]) >= 60, "of 100 that could be through"
    for number in range(30, 60):  # it is as planned again
        begin = clock.now = 100 * MS * number
        gate.open([grant(1, 0, 0.010, 1000)], 0, begin)
        before = pacer.inside_bytes
        send(pacer, Stop(clock, begin + 10 * MS), clock, lambda nbytes: nbytes * MS // 100)
    assert pacer.inside_bytes - before >= 850


def test_a_copy_that_meets_no_window_goes_on_in_a_trickle_of_the_time():
    """A bubble of 10 ms every 500, which is over before its window begins: 100 bytes a millisecond, frames of 1000."""
    clock, gate = Clock(), Gate(empty())
    pacer = GatePacer(gate, Free(), limits=PacingLimits(least_frame_bytes=10), clock_ns=clock)

    def bubbles(first, last):
        """Milliseconds at which frames went."""
        went, end = [], 500 * MS * last
        opened = {500 * MS * number: lambda: gate.open([grant(1, 0.012, 0.022, 9000)], 0, clock.now)
                  for number in range(first, last)}  # fmt: skip
        closed = {at + 10 * MS: gate.close for at in opened}
        stop = Stop(clock, end, {**opened, **closed})
        while (allowed := pacer.take(1000, stop)).nbytes:
            went.append(clock.now // MS)
            assert allowed.deadline_ns == 0
            clock.now += 10 * MS
            stop.wait(1e-9)  # what was due meanwhile has happened
            assert pacer.ended(allowed) is None
        return went

    gate.open([grant(1, 0, 0.001, 1000)], 0, 0)
    assert pacer.take(1000, Stop(clock, MS)).nbytes == 1000, "there is a plan"
    went = bubbles(1, 31)
    assert 5_000 < went[0] < 5_600 and len(went) in (9, 10, 11), "1,000 ms apart, 10 of which it moves"
    assert all(1_000 <= later - sooner < 1_100 for sooner, later in pairwise(went))
    clock.now = 20_000 * MS  # nothing to send for a while
    assert bubbles(41, 50) == [], "it begins to wait anew"
    gate.hold(600.0, clock.now)
    assert pacer.take(1000, Stop(clock, clock.now + 60_000 * MS)) == Allowance(0), "held"


def test_a_trickle_on_a_slow_link_goes_in_frames_that_nobody_waits_for_long():
    """100 bytes a millisecond, and bubbles that are over before their windows begin."""
    clock, gate = Clock(), Gate(empty())
    pacer, went = GatePacer(gate, clock_ns=clock), []
    opened = {500 * MS * number: lambda: gate.open([grant(1, 0.4, 0.5, 10**6)], 0, clock.now) for number in range(500)}
    closed = {at + 10 * MS: gate.close for at in opened}
    stop = Stop(clock, 250_000 * MS, {**opened, **closed})
    while (allowed := pacer.take(10**6, stop)).nbytes:
        went.append(allowed.nbytes)
        clock.now += allowed.nbytes * MS // 100
        pacer.ended(allowed)
    assert went[0] == LIMITS.slow_frame_bytes, "nothing is known yet"
    assert len(went) > 50 and set(went[1:]) == {100 * 16}, "of 16 ms, in a hundredth of the time"


def test_who_waits_for_a_rare_bubble_is_not_starved():
    clock, gate = Clock(), Gate(empty())
    pacer = GatePacer(gate, limits=PacingLimits(least_frame_bytes=10), clock_ns=clock)
    gate.open([grant(1, 0, 0.001, 1000)], 0, 0)
    assert pacer.take(1000, Stop(clock, MS)).nbytes == 1000
    stop = Stop(clock, 40_000 * MS, {30_000 * MS: lambda: gate.open([grant(1, 0, 0.010, 1000)], 0, clock.now)})
    assert pacer.take(1000, stop).deadline_ns >= 30_000 * MS


def test_one_frame_that_was_stuck_does_not_starve_a_copy():
    clock, gate = Clock(), Gate(empty())
    pacer = GatePacer(gate, limits=PacingLimits(least_frame_bytes=10), clock_ns=clock)
    gate.open([grant(1, 0, 0.010, 1000)], 0, 0)
    stuck = pacer.take(1000, Stop(clock, 10 * MS))
    clock.now = 30_000 * MS
    pacer.ended(stuck)
    gate.plan(1, 0.010, 0.0)
    for _ in range(100):
        gate.open([grant(1, 0, 0.010, 1000)], 0, clock.now)
        before = pacer.inside_bytes
        send(pacer, Stop(clock, clock.now + 10 * MS), clock, lambda nbytes: nbytes * MS // 100)
    assert pacer.inside_bytes - before >= 850


@pytest.mark.parametrize("short", [0.003, 0.006, 0.020])
def test_bubbles_in_which_nothing_can_go_do_not_make_a_slow_link_look_faster(short):
    """A tenth of what was planned, and 5 ms besides for each frame. An iteration of a second has a bubble of 100 ms and
    three short ones, of which those of 20 ms can carry a frame. Then a profile is taken: nothing goes for a while."""
    clock, gate, link = Clock(), Gate(empty()), 125 / MS
    pacer = GatePacer(gate, clock_ns=clock)
    gate.plan(1, 1.0, 0.0)
    late, moved = [], []
    for iteration in range(40):
        before = pacer.inside_bytes
        for bubble, length in enumerate((0.1, short, short, short)):
            begin = (1000 * iteration + 200 * bubble) * MS
            clock.now = max(clock.now, begin)
            end = begin + int(length * 1e9)
            if 20 <= iteration < 26:
                gate.hold(1.0, begin)
            else:
                gate.open([grant(bubble, 0, length, int(length * 1_250_000))], iteration, begin)
            stop = Stop(clock, begin + 190 * MS, {end: gate.close})
            send(pacer, stop, clock, lambda nbytes: 5 * MS + nbytes / link, (gate, end))
        late.append(pacer.late_bytes)
        moved.append(pacer.inside_bytes - before)
    # frames of one size tell nothing of what each takes besides its bytes: of each LAST a short one may be late
    moreover = [after - before for before, after in pairwise(late[4:])]
    assert max(moreover) <= 500, "once the link is known, no whole frame is late"
    assert sum(map(bool, moreover)) <= 1 + sum(moved) // 2000 // LAST, f"{moreover}"
    # a frame, and then a rest that is longer than what is left of the window
    assert min(moved[10:20] + moved[27:]) >= 0.9 * LIMITS.slow_frame_seconds * 1e9 * link, "and it is used"


def test_windows_of_another_plan_are_used_whole_though_a_bubble_of_that_number_was_shortened():
    clock, gate, link = Clock(), Gate(empty()), 1000 / MS
    pacer = GatePacer(gate, limits=PacingLimits(least_frame_bytes=10), clock_ns=clock)
    gate.plan(1, 1.0, 0.0)
    for iteration in range(20):  # 5 ms by the plan, 1 ms in fact
        clock.now = begin = 1000 * iteration * MS
        gate.open([grant(3, 0, 0.005, 5_000)], iteration, begin)
        stop = Stop(clock, begin + 900 * MS, {begin + MS: gate.close})
        send(pacer, stop, clock, lambda nbytes: nbytes / link, (gate, begin + MS))
    gate.plan(1, 1.1, 0.0)
    clock.now = begin = 20_000 * MS
    gate.open([grant(3, 0, 0.2, 200_000)], 20, begin)
    before = pacer.inside_bytes
    send(pacer, Stop(clock, begin + 200 * MS), clock, lambda nbytes: nbytes / link)
    assert pacer.inside_bytes - before > 0.9 * 200_000


def test_how_full_windows_were_is_told_of_those_in_which_there_was_something_to_send():
    clock, gate = Clock(), Gate(empty())
    pacer = GatePacer(gate, limits=PacingLimits(least_frame_bytes=1), clock_ns=clock)

    def begins(at):
        return lambda: gate.open([grant(1, 0.001, 0.011, 1000)], 0, at * MS)

    opened = {at * MS: begins(at) for at in range(0, 600, 100)}
    closed = {at * MS: gate.close for at in (12, 112, 212, 306, 412, 512)}  # the fourth one before its time
    stop, went = Stop(clock, 1000 * MS, {**opened, **closed}), [0] * 6

    def frame():
        """Of a tenth of what a bubble may carry, in a tenth of its time."""
        allowed = pacer.take(100, stop)
        went[clock.now // (100 * MS)] += allowed.nbytes
        stop.wait(1e-3)
        pacer.ended(allowed)

    while clock.now < 100 * MS:
        frame()
    frame()
    frame()  # and nothing more, until the third bubble has begun
    stop.wait(0.1)
    assert clock.now > 201 * MS
    while clock.now < 500 * MS:
        frame()
    assert went[1] == 300 and 0 < went[3] < went[0]
    assert pacer.fullness.taken == went[0] + went[1] + went[3] + went[4]
    assert pacer.fullness.offered == 1000 + 300 + 1000 + 1000, "of the second no more was wanted"


def test_a_bubble_with_two_windows_is_not_used_between_them():
    clock, gate = Clock(), Gate(empty())
    gate.open([grant(1, 0, 0.010, 100), grant(1, 0.030, 0.040, 50)], 0, 0)
    pacer, stop = GatePacer(gate, limits=PacingLimits(least_frame_bytes=10), clock_ns=clock), Stop(clock, 100 * MS)
    assert pacer.take(1000, stop) == Allowance(100, 10 * MS)
    assert pacer.take(1000, stop) == Allowance(50, 40 * MS) and clock.now == 30 * MS


def test_the_second_window_of_a_bubble_has_bytes_of_its_own():
    clock, gate = Clock(), Gate(empty())
    gate.open([grant(1, 0, 0.010, 100), grant(1, 0.030, 0.040, 50)], 0, 0)
    pacer, stop = GatePacer(gate, limits=PacingLimits(least_frame_bytes=10), clock_ns=clock), Stop(clock, 100 * MS)
    clock.now = 11 * MS
    assert pacer.take(1000, stop) == Allowance(50, 40 * MS) and clock.now == 30 * MS


def test_less_than_is_worth_a_frame_waits_unless_it_is_all_there_is():
    clock, gate = Clock(), Gate(empty())
    gate.open([grant(1, 0, 0.010, 10_000)], 0, 0)
    pacer = GatePacer(gate, limits=PacingLimits(least_frame_bytes=300), clock_ns=clock)
    clock.now = 10 * MS - MS // 5  # 200 would get through
    assert pacer.take(150, Stop(clock, 9 * MS)).nbytes == 150
    clock.now = 10 * MS - MS // 5
    assert pacer.take(1000, Stop(clock, 20 * MS)).nbytes == 0


def test_on_a_slow_link_less_is_worth_a_frame_and_small_windows_are_filled():
    """Each frame is kept short of the deadline by the margin: what is then left must not be too little for one more."""
    clock, gate, link = Clock(), Gate(empty()), 1000 / (100 * MS)  # bytes per nanosecond
    pacer = GatePacer(gate, limits=PacingLimits(least_frame_bytes=600), clock_ns=clock)
    for bubble in range(10):
        begin = 200 * MS * bubble
        clock.now = begin
        gate.open([grant(bubble, 0, 0.100, 1000)], bubble, begin)
        before = pacer.inside_bytes
        send(pacer, Stop(clock, begin + 150 * MS), clock, lambda nbytes: nbytes / link)
        assert pacer.inside_bytes - before >= 980 and pacer.late_bytes == 0, bubble


def test_a_window_of_less_than_is_worth_a_frame_is_taken_while_half_of_it_gets_through():
    clock, gate = Clock(), Gate(empty())
    pacer = GatePacer(gate, limits=PacingLimits(least_frame_bytes=300), clock_ns=clock)
    gate.open([grant(1, 0, 0.001, 100)], 0, 0)
    clock.now = MS // 10
    assert pacer.take(1000, Stop(clock, 9 * MS)).nbytes == 90, "bubbles that are all so small must not starve a copy"
    gate.open([grant(2, 0, 0.001, 100)], 1, 20 * MS)
    clock.now = 20 * MS + 6 * MS // 10  # 40 would get through
    assert pacer.take(1000, Stop(clock, 40 * MS)).nbytes == 0


def test_what_a_dead_trainer_left_open_does_not_hold_back_what_goes_by_rate():
    clock, gate = Clock(), Gate(empty())
    gate.open([grant(1, 0, 0.010, 1000)], 0, 0)
    clock.now = 50 * MS
    pacer = GatePacer(gate, Free(), limits=PacingLimits(patience_seconds=60.0, least_frame_bytes=1), clock_ns=clock)
    assert pacer.take(70, Stop(clock, 1000 * MS)) == Allowance(70) and clock.now == 50 * MS


def test_a_gate_that_is_closed_early_lets_nothing_more_go():
    clock, gate = Clock(), Gate(empty())
    gate.open([grant(1, 0, 1.0, 1000)], 0, 0)
    pacer = GatePacer(gate, limits=PacingLimits(least_frame_bytes=1), clock_ns=clock)
    assert pacer.take(10, Stop(clock, 5 * MS)).nbytes == 10
    gate.close()
    assert pacer.take(10, Stop(clock, 50 * MS)) == Allowance(0)


def test_where_no_gate_is_opened_for_long_another_pacer_takes_over_until_one_is():
    clock, gate = Clock(), Gate(empty())
    pacer = GatePacer(gate, Free(), limits=PacingLimits(patience_seconds=0.1, least_frame_bytes=1), clock_ns=clock)
    assert pacer.take(70, Stop(clock, 1000 * MS)) == Allowance(70) and clock.now == 0, "there is no plan yet"
    pacer.ended(Allowance(70))
    gate.open([grant(1, 0, 0.010, 50)], 0, clock.now)
    assert pacer.take(70, Stop(clock, 1000 * MS)).nbytes == 50
    began = clock.now
    assert pacer.take(70, Stop(clock, 1000 * MS)) == Allowance(70) and clock.now - began > 99 * MS


def test_who_has_lost_patience_once_goes_on_until_a_gate_is_opened():
    """Frames of the other pacer that take long must not each be followed by as long a wait."""
    clock, gate = Clock(), Gate(empty())
    gate.plan(1, 1.0, 0.0)
    pacer, stop = (
        GatePacer(gate, Free(), limits=PacingLimits(patience_seconds=60.0, least_frame_bytes=1), clock_ns=clock),
        Stop(clock, 10**18),
    )
    gate.open([grant(1, 0, 0.010, 50)], 0, 0)
    assert pacer.take(50, stop).nbytes == 50
    assert pacer.take(70, stop).nbytes == 70 and 60_000 * MS < clock.now < 61_000 * MS
    for pause in (2_000, 5_000, 90_000):
        clock.now += pause * MS
        began = clock.now
        assert pacer.take(70, stop).nbytes == 70 and clock.now == began
    gate.open([grant(1, 0, 0.010, 50)], 0, clock.now)
    assert pacer.take(70, stop).nbytes == 50 and clock.now == began, "there are bubbles again"
    gate.close()
    assert pacer.take(70, Stop(clock, clock.now + 50_000 * MS)) == Allowance(0)


def test_where_a_plan_is_taken_back_or_never_came_nobody_waits_for_bubbles():
    clock, gate = Clock(), Gate(empty())
    pacer = GatePacer(gate, Free(), limits=PacingLimits(patience_seconds=60.0, least_frame_bytes=1), clock_ns=clock)
    for _ in range(3):  # iterations are recorded: closed for a moment between them
        gate.hold(120.0, clock.now)
        assert pacer.take(70, Stop(clock, clock.now + 1000 * MS)) == Allowance(0)
        gate.close()
        assert pacer.take(70, Stop(clock, clock.now + 10 * MS)) == Allowance(0)
    began = clock.now
    assert pacer.take(70, Stop(clock, began + 9000 * MS)).nbytes == 70 and clock.now - began < 1100 * MS
    gate.plan(1, 1.0, 0.0)
    gate.open([grant(1, 0, 0.010, 50)], 0, clock.now)
    assert pacer.take(70, Stop(clock, clock.now + 1000 * MS)).nbytes == 50
    gate.close()
    gate.plan(0, 0.0, 0.0)
    began = clock.now
    assert pacer.take(70, Stop(clock, began + 9000 * MS)).nbytes == 70 and clock.now - began < 1100 * MS


def test_who_comes_when_a_gate_is_closed_that_has_been_opened_waits_for_the_next_bubble():
    clock, gate = Clock(), Gate(empty())
    gate.open([grant(1, 0, 0.010, 50)], 0, 0)  # by a trainer before
    gate.close()
    pacer = GatePacer(gate, Free(), limits=PacingLimits(patience_seconds=10.0, least_frame_bytes=1), clock_ns=clock)
    assert pacer.take(70, Stop(clock, 1000 * MS)) == Allowance(70), "there is no plan yet"
    gate.open([grant(2, 0, 0.010, 50)], 0, 0)
    gate.close()  # nobody has looked meanwhile
    reopened = {30 * MS: lambda: gate.open([grant(3, 0, 0.010, 60)], 0, 30 * MS)}
    assert pacer.take(70, Stop(clock, 1000 * MS, reopened)).nbytes == 60 and clock.now >= 30 * MS


def test_who_has_not_asked_for_long_waits_for_a_bubble_all_the_same():
    clock, gate = Clock(), Gate(empty())
    pacer = GatePacer(gate, Free(), limits=PacingLimits(patience_seconds=60.0, least_frame_bytes=1), clock_ns=clock)
    gate.open([grant(1, 0, 0.010, 50)], 0, 0)
    assert pacer.take(50, Stop(clock, MS)).nbytes == 50
    gate.plan(1, 1.0, 0.0)
    for number in range(70):  # a version every two minutes: bubbles come and go, and nobody looks at them
        clock.now = (number + 1) * 1000 * MS
        gate.open([grant(1, 0, 0.010, 50)], 0, clock.now)
        gate.close()
    clock.now += 500 * MS
    assert pacer.take(70, Stop(clock, clock.now + 400 * MS)) == Allowance(0)
    assert pacer.take(70, Stop(clock, clock.now + 70_000 * MS)) == Allowance(70), "its trainer opens none any more"


def test_bubbles_may_be_further_apart_than_patience_lasts_if_iterations_are_that_long():
    clock, gate = Clock(), Gate(empty())
    gate.plan(1, 40.0, 0.0)
    pacer = GatePacer(gate, Free(), limits=PacingLimits(patience_seconds=60.0, least_frame_bytes=1), clock_ns=clock)
    reopened = {100_000 * MS: lambda: gate.open([grant(1, 0, 0.010, 50)], 0, clock.now)}
    assert pacer.take(70, Stop(clock, 200_000 * MS, reopened)).nbytes == 50 and clock.now >= 100_000 * MS
    gate.close()
    began = clock.now
    assert pacer.take(70, Stop(clock, clock.now + 200_000 * MS)) == Allowance(70)
    assert clock.now - began > 119_000 * MS


def test_who_comes_where_there_is_a_plan_already_waits_for_its_bubbles():
    clock, gate = Clock(), Gate(empty())
    gate.open([grant(1, 0, 0.010, 50)], 0, 0)
    gate.close()
    gate.plan(1, 1.0, 0.0)
    pacer = GatePacer(gate, Free(), limits=PacingLimits(least_frame_bytes=1), clock_ns=clock)
    assert pacer.take(70, Stop(clock, 1000 * MS)) == Allowance(0), "its SMP is a new one, training is not"


def test_a_gate_that_is_held_lets_nothing_go_until_it_is_closed_or_its_time_is_over():
    clock, gate = Clock(), Gate(empty())
    pacer = GatePacer(gate, Free(), limits=PacingLimits(patience_seconds=0.1, least_frame_bytes=1), clock_ns=clock)
    assert pacer.take(70, Stop(clock, MS)).nbytes == 70, "there is no plan yet"
    gate.hold(2.0, clock.now)
    assert pacer.take(70, Stop(clock, 1900 * MS)) == Allowance(0), "longer than it has patience with a closed one"
    assert pacer.take(70, Stop(clock, 9000 * MS)).nbytes == 70 and 2090 * MS < clock.now < 2200 * MS, "a dead trainer"
    gate.hold(2.0, clock.now)
    assert pacer.take(70, Stop(clock, clock.now + 50 * MS)) == Allowance(0)
    gate.close()
    gate.open([grant(1, 0, 0.010, 50)], 0, clock.now)
    assert pacer.take(70, Stop(clock, clock.now + 50 * MS)).nbytes == 50


def test_a_trainer_sees_that_a_frame_has_begun_to_move_and_that_it_is_through():
    clock, memory = Clock(), empty()
    gate, pacer = (
        Gate(memory),
        GatePacer(Gate(memory), Free(), limits=PacingLimits(least_frame_bytes=1), clock_ns=clock),
    )
    seen = [gate.moved]
    by_rate = pacer.take(70, Stop(clock, MS))
    seen.append(gate.moved)
    assert pacer.ended(by_rate) is None
    seen.append(gate.moved)
    gate.open([grant(1, 0, 0.010, 50)], 0, clock.now)
    assert gate.moved == seen[-1], "opening moves nothing"
    first, second = (pacer.take(20, Stop(clock, MS)) for _ in range(2))
    seen.append(gate.moved)
    assert pacer.ended(first) is True
    clock.now += 11 * MS
    assert pacer.ended(second) is False, "late"
    seen.append(gate.moved)
    assert len(set(seen)) == len(seen)
    assert (pacer.inside_bytes, pacer.late_bytes) == (20, 20)
    assert pacer.take(70, Stop(clock, clock.now + MS)) == Allowance(0) and gate.moved == seen[-1]


def test_what_is_through_after_the_bubble_has_ended_early_is_late():
    clock, gate = Clock(), Gate(empty())
    gate.open([grant(1, 0, 1.0, 100_000)], 0, 0)
    pacer, stop = GatePacer(gate, limits=PacingLimits(least_frame_bytes=1), clock_ns=clock), Stop(clock, 100 * MS)
    first, second = pacer.take(10, stop), pacer.take(20, stop)
    pacer.ended(first)
    gate.close()
    pacer.ended(second)
    assert (pacer.inside_bytes, pacer.late_bytes) == (10, 20)
    third = (gate.open([grant(2, 0, 1.0, 100_000)], 0, 0), pacer.take(30, stop))[1]
    gate.open([grant(3, 0.5, 1.5, 100_000)], 0, 5 * MS)
    pacer.ended(third)
    assert (pacer.inside_bytes, pacer.late_bytes) == (10, 50), "another bubble is not the one it was planned for"


@pytest.mark.parametrize(
    ("carried", "frame"),
    [
        (10**9, 10**9 * LIMITS.frame_seconds),
        (2_000_000, LIMITS.slow_frame_bytes),
        (100_000, 100_000 * LIMITS.slow_frame_seconds),
        (10, 1),
    ],
)
def test_a_frame_is_no_longer_than_it_may_outlast_its_bubble(carried, frame):
    clock, gate = Clock(), Gate(empty())
    gate.open([grant(1, 0, 1.0, carried)], 0, 0)
    assert GatePacer(gate, clock_ns=clock).take(10**8, Stop(clock, 2000 * MS)).nbytes == frame


def test_on_a_slower_link_than_planned_less_goes_in_a_window_and_none_of_it_late():
    """A tenth of what was planned with: after a few frames no more is let go than gets through."""
    clock, gate = Clock(), Gate(empty())
    pacer = GatePacer(gate, limits=PacingLimits(least_frame_bytes=10), clock_ns=clock)
    link = 100 / MS / 10  # bytes per nanosecond
    late = []
    for bubble in range(20):
        begin = bubble * 200 * MS
        clock.now = max(clock.now, begin)
        gate.open([grant(bubble, 0, 0.1, 10_000)], bubble, begin)
        end = begin + 100 * MS
        send(pacer, Stop(clock, begin + 150 * MS, {end: gate.close}), clock, lambda nbytes: nbytes / link, (gate, end))
        late.append(pacer.late_bytes)
    assert late[-1] == late[2], "once the link is known, nothing more is late"
    one = LIMITS.slow_frame_seconds * 1e9 * link  # frame; the rest after it is longer than the window
    assert pacer.inside_bytes >= 0.9 * 20 * one, "and it is used"
    assert pacer.inside_bytes <= 1.1 * 20 * one, "but mostly left to training's messages"


def test_where_each_frame_takes_a_while_besides_its_bytes_a_window_goes_in_few_of_them():
    """Ends of windows filled with ever smaller frames would teach that nothing gets through."""
    clock, gate, link = Clock(), Gate(empty()), 10 / MS
    pacer, frames = GatePacer(gate, limits=PacingLimits(least_frame_bytes=1000), clock_ns=clock), 0
    for bubble in range(40):
        begin = bubble * 1000 * MS
        clock.now = max(clock.now, begin)
        gate.open([grant(bubble, 0, 0.1, 10_000)], bubble, begin)
        end = begin + 100 * MS
        stop = Stop(clock, begin + 900 * MS, {end: gate.close})
        frames += len(send(pacer, stop, clock, lambda nbytes: 5 * MS + nbytes / link, (gate, end)))
        if bubble == 9:
            known = pacer.late_bytes, pacer.inside_bytes, frames
    assert pacer.late_bytes == known[0], "once the link is known, nothing more is late"
    # a frame of 16 ms, and 5; the rest after it is longer than the window
    assert pacer.inside_bytes - known[1] >= 30 * 150 and frames - known[2] <= 30


@pytest.mark.parametrize("slower", [1.0, 0.9 * LIMITS.much_slower, 1.1 * LIMITS.much_slower, 10.0, 30.0])
@pytest.mark.parametrize("ranks", [1, 4])
def test_of_a_link_much_slower_than_planned_each_rank_takes_a_part_of_a_rate(slower, ranks):
    clock, gate, link = Clock(), Gate(empty()), 10_000 / MS / slower
    pacer = GatePacer(gate, rate_duty=LARGEST_RATE_DUTY / ranks, clock_ns=clock)
    for bubble in range(12):
        begin = clock.now = bubble * 1000 * MS
        gate.open([grant(bubble, 0, 0.5, 5_000_000)], bubble, begin)
        before = pacer.inside_bytes
        send(pacer, Stop(clock, begin + 500 * MS), clock, lambda nbytes: nbytes / link)
    taken = (pacer.inside_bytes - before) / (500 * MS * link)
    share = LIMITS.slow_link_part * LARGEST_RATE_DUTY / ranks if slower > LIMITS.much_slower else 1.0
    # the end of a window is met with a MARGIN, and a frame less goes, or one more
    assert abs(taken - share) <= 0.1 * share + LIMITS.slow_frame_seconds / 0.5


def test_a_bubble_that_is_over_now_earlier_and_now_later_is_used_as_far_as_it_mostly_lasts():
    """100 ms by the plan, in fact 70 to 130: nobody is made to wait for a frame as often as it ends early."""
    clock, gate, drawn = Clock(), Gate(empty()), random.Random(7)
    pacer, link, waited, early = GatePacer(gate, clock_ns=clock), 1_000_000 / MS, 0, 0
    for bubble in range(400):
        begin, end = bubble * 1000 * MS, (bubble * 1000 + drawn.randint(70, 130)) * MS
        clock.now = begin
        gate.open([grant(3, 0, 0.1, 10**8)], bubble, begin)
        stop = Stop(clock, begin + 900 * MS, {end: gate.close})
        ended = send(pacer, stop, clock, lambda nbytes: nbytes / link, (gate, end))
        waited += ended.count(False) if bubble >= 200 else 0
        early += end < begin + 100 * MS and bubble >= 200
    assert waited < 0.3 * early, f"{waited} of {early}"
    assert pacer.inside_bytes >= 400 * 0.7 * 0.9 * 10**8, "what is there in any case is used"


def test_a_rate_goes_as_time_passes_and_is_in_no_bubble():
    clock, gate = Clock(), Gate(empty())
    gate.open([grant(STEADY, 0, 0.100, 1000)], 0, 0)
    pacer, stop = GatePacer(gate, limits=PacingLimits(least_frame_bytes=100), clock_ns=clock), Stop(clock, 1000 * MS)
    went = []
    while sum(one for _, one in went) < 1000 and not stop.is_set():
        allowed = pacer.take(10_000, stop)
        pacer.ended(allowed)
        went.append((clock.now, allowed.nbytes))
    assert sum(one for _, one in went) == 1000
    for number, (now, _) in enumerate(went):
        passed = sum(one for _, one in went[: number + 1])
        assert passed <= 1000 * now // (100 * MS) + 100, "one frame ahead of its time at most"
    assert (pacer.inside_bytes, pacer.late_bytes, pacer.rate_bytes) == (0, 0, 1000)


@pytest.mark.parametrize("ranks", [1, 4])
def test_by_a_rate_a_slow_link_is_left_to_training_half_of_the_time(ranks):
    """10 bytes a millisecond were planned, and are all that the link carries; a node's ranks share it."""
    clock, gate, share = Clock(), Gate(empty()), LARGEST_RATE_DUTY / ranks
    gate.open([grant(STEADY, 0, 10.0, 100_000)], 0, 0)
    pacer, stop = (
        GatePacer(gate, limits=PacingLimits(least_frame_bytes=100), rate_duty=share, clock_ns=clock),
        Stop(clock, 10_000 * MS),
    )
    send(pacer, stop, clock, lambda nbytes: nbytes * MS / 10)
    assert 0.9 * share * 100_000 <= pacer.rate_bytes <= share * 100_000 + 1024, "and a frame"


@pytest.mark.parametrize("granted", [5, 30_000, 100_000, 150_000, 1_000_000])
def test_all_that_is_granted_as_a_rate_goes_in_frames_that_a_slow_link_carries_soon(granted):
    clock, gate, link, frames = Clock(), Gate(empty()), 500 / MS, []
    pacer = GatePacer(gate, clock_ns=clock)

    def takes(nbytes):
        frames.append(nbytes)
        return nbytes / link

    for iteration in range(3):
        begin = clock.now = 10_000 * MS * iteration
        gate.open([grant(STEADY, 0, 10.0, granted)], iteration, begin)
        send(pacer, Stop(clock, begin + 10_000 * MS), clock, takes)
    assert pacer.rate_bytes == 3 * granted
    assert frames[0] <= LIMITS.slow_frame_bytes and max(frames[1:]) <= 500 * 16, "of 16 ms"


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_fast_link_carries_the_rate_that_was_planned(ranks):
    """Of 1.25 GB/s half are granted to a node's ranks; each frame takes 0.3 ms besides its bytes."""
    clock, gate = Clock(), Gate(empty())
    pacer = GatePacer(gate, rate_duty=LARGEST_RATE_DUTY / ranks, clock_ns=clock)
    granted = 625_000_000 // ranks
    gate.open([grant(STEADY, 0, 1.0, granted)], 0, 0)
    longest = []

    def takes(nbytes):
        longest.append(0.3 * MS + nbytes / 1.25)
        return longest[-1]

    send(pacer, Stop(clock, 1000 * MS), clock, takes)
    # a third of a frame's time is for no bytes, and one poll may pass after each rest
    assert pacer.rate_bytes >= 0.45 * granted
    assert max(longest) <= 1.5 * LIMITS.least_frame_seconds * 1e9, "so long a message may wait for it"


@pytest.mark.parametrize("ranks", [1, 4])
def test_without_a_plan_half_of_any_link_is_left_to_training_but_for_what_is_sent_first(ranks):
    clock, gate, link = Clock(), Gate(empty()), 10_000 / MS
    pacer = GatePacer(gate, Free(), rate_duty=LARGEST_RATE_DUTY / ranks, clock_ns=clock)
    first = pacer.take(10**5, Stop(clock, 10**12))
    assert first == Allowance(10**5) and clock.now == 0, "as soon as can be"
    clock.now = int(first.nbytes / link)
    pacer.ended(first)
    gate.hold(120.0, clock.now)  # a profile is made, and fails
    gate.close()
    before, began = pacer.rate_bytes, clock.now
    send(pacer, Stop(clock, began + 11_000 * MS), clock, lambda nbytes: nbytes / link)
    taken = (pacer.rate_bytes - before) / (10_000 * MS * link)  # after a second's patience
    assert 0.7 * LARGEST_RATE_DUTY / ranks <= taken <= 1.01 * LARGEST_RATE_DUTY / ranks


# the decision alone


def test_the_decision_follows_from_state_opening_and_time_and_changes_nothing():
    gate = Gate(empty())
    closed = GateSight(0, 0, 0, None)
    state = PacingState.start(PacingLimits(least_frame_bytes=10), closed, 0, has_fallback=True)
    assert decide(state, closed, 1000, 0) == AskFallback(1000), "before there is a plan"
    gate.plan(1, 1.0, 0.0)
    gate.open([grant(1, 0.010, 0.020, 1000)], 0, 0)
    opened = GateSight(gate.openings, gate.planned, gate.period_ns, gate.read())
    state.observe(opened, 0, 0)
    before = repr(vars(state))
    for _ in range(2):
        assert decide(state, opened, 400, 0) == WaitFor(0.010)
        assert decide(state, opened, 400, 10 * MS) == SendNow(400, 20 * MS, 0, 1.0)
        assert decide(state, opened, 10_000, 15 * MS) == SendNow(500, 20 * MS, 0, 1.0), "half of the window is left"
        assert decide(state, opened, 400, 20 * MS) == WaitFor(None), "over"
    assert repr(vars(state)) == before


# two processes


def test_what_a_dead_trainer_left_open_ends_by_its_deadline(memory, trainer):
    def act(tell):
        Gate(memory).open([grant(1, 0, 0.3, 1 << 40)], 0, time.monotonic_ns())
        tell.send(time.monotonic_ns())
        signal.pause()

    gate, stop = Gate(memory), threading.Event()
    pacer, count = GatePacer(gate, limits=PacingLimits(least_frame_bytes=1)), 0
    with trainer(act) as (told, pid):
        opened = told()
        assert isinstance(opened, int)
        os.kill(pid, signal.SIGKILL)
        deadline = gate.read().windows[0][1]
        assert opened < deadline <= opened + 300 * MS
        timer = threading.Timer((deadline - time.monotonic_ns()) / 1e9 + 0.2, stop.set)
        timer.start()
        asked = time.monotonic_ns()
        while (allowed := pacer.take(1000, stop)).nbytes:
            assert asked < deadline and allowed.deadline_ns == deadline, "it goes on"
            asked, count = time.monotonic_ns(), count + 1
        timer.join(WAIT_SECONDS)
    assert count > 0 and gate.read() is not None, "nobody has closed it"


def test_the_pacer_of_one_process_follows_the_bubbles_of_another(memory, trainer):
    """Twelve bubbles of 30 ms, of which 1,000 bytes may go each: no more goes, and only while the gate is open."""

    def act(tell):
        gate = Gate(memory)
        for number in range(12):
            begin = time.monotonic_ns()
            gate.open([grant(number, 0, 0.03, 1000)], number, begin)
            time.sleep(0.03)  # the bubble itself
            gate.close()
            tell.send((begin, time.monotonic_ns()))
            time.sleep(0.01)  # compute
        tell.send(None)

    pacer, stop = GatePacer(Gate(memory), limits=PacingLimits(least_frame_bytes=1)), threading.Event()
    taken = []
    with trainer(act) as (told, _):

        def send():
            while True:
                asked = time.monotonic_ns()
                allowed = pacer.take(300, stop)
                if not allowed.nbytes:
                    return
                taken.append((asked, allowed, time.monotonic_ns()))
                pacer.ended(allowed)

        thread = threading.Thread(target=send)
        thread.start()
        bubbles = []
        while (times := told()) is not None:
            assert isinstance(times, tuple)
            bubbles.append(times)
        stop.set()
        thread.join(WAIT_SECONDS)
    assert len(bubbles) == 12 and taken
    for begin, closed in bubbles:
        # by its deadline a frame belongs to one bubble; when it was allowed lies between asking and having it
        mine = [(asked, one, had) for asked, one, had in taken if one.deadline_ns == begin + 30 * MS]
        assert sum(one.nbytes for _, one, _ in mine) <= 1000
        assert all(asked < closed and had > begin for asked, _, had in mine)
    deadlines = {begin + 30 * MS for begin, _ in bubbles}
    assert all(one.deadline_ns in deadlines for _, one, _ in taken)
    total = sum(one.nbytes for _, one, _ in taken)
    assert pacer.inside_bytes + pacer.late_bytes == total and total > 0
