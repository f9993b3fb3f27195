"""The gate between two processes: what is read was written whole, by one opening; closed unless its trainer says so."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.bubbles.bubble_plan import SenderPlan
from ft_plugins.bubbles.filling import Grant, Transfer
from ft_plugins.bubbles.gate.gate import GATE_BYTES, Gate, Gatekeeper, Opening
from ft_plugins.bubbles.windows import WINDOWS
from ft_plugins.model.timeline import Kind
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape

Trainer = Callable[[Callable[[Connection], None]], AbstractContextManager[tuple[Callable[[], object], int]]]
WAIT_SECONDS = 90.0  # for anything that takes milliseconds
MS = 1_000_000  # nanoseconds


def grant(bubble, begin, deadline, nbytes, after=0):
    return Grant(bubble, after, begin, deadline, nbytes)


def empty():
    return np.zeros(GATE_BYTES, dtype=np.uint8)


# what is read


def test_a_gate_is_closed_until_it_is_opened_and_after_it_was_closed():
    gate = Gate(empty())
    assert gate.read() is None
    gate.close()
    assert gate.read() is None
    gate.open([grant(7, 0.001, 0.003, 500), grant(7, 0.004, 0.005, 60)], 2, 10 * MS)
    assert gate.read() == Opening(1, 2, 7, ((11 * MS, 13 * MS, 500), (14 * MS, 15 * MS, 60)))
    gate.close()
    assert gate.read() is None
    gate.open([grant(8, 0, 0.001, 9)], 3, 20 * MS)
    assert gate.read() == Opening(2, 3, 8, ((20 * MS, 21 * MS, 9),))


def test_as_many_windows_fit_as_a_bubble_has():
    gate = Gate(empty())
    gate.open([grant(1, i / 1e3, (i + 1) / 1e3, i) for i in range(WINDOWS)], 0, 0)
    found = gate.read()
    assert found is not None and [window[2] for window in found.windows] == list(range(WINDOWS))


@given(st.integers(0, GATE_BYTES), st.integers(0, GATE_BYTES))
def test_a_mixture_of_two_openings_is_not_read(low, high):
    """A writer that was ended, or whose stores are seen in another order: any bytes old, the others new."""
    memory, later = empty(), empty()
    for buffer, number in ((memory, 1), (later, 2)):
        for _ in range(number):
            Gate(buffer).open([grant(number, number, number + 1, 100 * number)] * number, number, number)
    before, after = Gate(memory).read(), Gate(later).read()
    assert before is not None and after is not None and before != after
    memory[low:high] = later[low:high]
    assert Gate(memory).read() in (before, after, None)
    if bytes(memory) not in (bytes(later),) and low < high and low >= 16:  # within what is sealed
        assert Gate(memory).read() in (before, None)


def test_it_lies_in_a_segment_between_what_else_is_in_the_header(segment_path):
    create(segment_path, Shape(64, 100, 1, 5), 3, {"model": "x" * 2900}, 4)
    segment, other = Segment(segment_path), Segment(segment_path)
    before = segment.bytes.copy()
    Gate(segment.gate).open([grant(1, 0, 1, 2**40)] * WINDOWS, 1, 5)
    segment.header.completed, segment.header.token = 9, 2**63
    found = Gate(other.gate).read()
    assert found is not None and found.windows == ((5, 5 + 10**9, 2**40),) * WINDOWS
    assert segment.fingerprint == {"model": "x" * 2900}
    assert (segment.header.completed, segment.header.token) == (9, 2**63)
    changed = np.nonzero(segment.bytes != before)[0]
    assert all(at < 512 + GATE_BYTES for at in changed)
    segment.close()
    other.close()


def test_a_reader_never_sees_half_an_opening_of_another_process(memory, trainer):
    def act(tell):
        gate, number = Gate(memory), 0
        while True:  # every number of an opening follows from its first
            number += 1
            count = 1 + number % WINDOWS
            gate.open([grant(number, 0, number, number + i) for i in range(count)], number % 1000, number)
            if number % 3 == 0:
                gate.close()

    gate, seen, number = Gate(memory), 0, 0
    with trainer(act):
        until = time.monotonic() + WAIT_SECONDS
        while seen < 20_000 and time.monotonic() < until:
            found = gate.read()
            if found is None:
                continue
            assert found.number >= number, "an older one than before"
            number = found.number
            windows = tuple((number, number + number * 10**9, number + i) for i in range(1 + number % WINDOWS))
            assert found == Opening(number, number % 1000, number, windows)
            seen += 1
    assert seen == 20_000


# the trainer's side: counting spans


def test_a_trainer_that_counts_spans_opens_each_bubble_as_planned_and_closes_it():
    transfer = Transfer(0, 0, 1, 1, 230)
    first = grant(0, 0, 0.010, 100, after=-1), grant(3, 0.002, 0.020, 80, after=2)
    late = first[1]._replace(nbytes=50)
    plan = SenderPlan(transfer, (first, (late,)), first, 1.0, 1.0)
    gate = Gate(empty())
    keeper = Gatekeeper(gate, plan)

    def played(iteration):
        """(bubble, bytes) that the gate says before and after each of three spans."""
        said = []

        def look():
            found = gate.read()
            said.append((found.bubble, found.windows[0][2]) if found else None)

        keeper.iteration_begin(iteration)
        look()
        for kind in (Kind.FORWARD, Kind.SEND, Kind.BACKWARD):
            keeper.begin(kind)
            keeper.begin(Kind.RECV)  # inside it: belongs to it
            keeper.end(Kind.RECV)
            look()
            keeper.end(kind)
            look()
        keeper.iteration_end()
        look()
        return said

    assert played(0) == [(0, 100), None, None, None, None, None, (3, 80), None]
    assert played(1) == [None, None, None, None, None, None, (3, 50), None]
    assert played(2) == played(0), "for what was late"


def test_a_bubble_stays_open_while_messages_are_sent_and_waited_for_in_it():
    plan = SenderPlan(Transfer(0, 0, 1, 1, 9), (), (grant(1, 0, 1.0, 9, after=0),), 1.0, 1.0)
    gate = Gate(empty())
    keeper = Gatekeeper(gate, plan)
    keeper.iteration_begin(0)
    for kind, is_open in ((Kind.FORWARD, False), (Kind.SEND, True), (Kind.RECV, True), (Kind.REDUCE, True)):
        keeper.begin(kind)
        assert (gate.read() is not None) == is_open
        keeper.end(kind)
        assert gate.read() is not None
    keeper.begin(Kind.UPDATE)
    assert gate.read() is None


def test_one_that_no_bubble_carries_is_not_stopped_by_compute():
    plan = SenderPlan(Transfer(0, 0, 1, 1, 9), (), (grant(1, 0, 1.0, 9, after=-1),), 1.0, 1.0)
    gate = Gate(empty())
    keeper = Gatekeeper(gate, plan, steady=True)
    keeper.iteration_begin(0)
    keeper.begin(Kind.FORWARD)
    keeper.end(Kind.FORWARD)
    assert gate.read() is not None
    keeper.iteration_end()
    assert gate.read() is None


@pytest.mark.parametrize(("shift", "used"), [(-0.06, False), (-0.04, True), (0.04, True), (0.06, False)])
def test_a_bubble_that_begins_sooner_or_later_than_planned_is_told_of_and_lets_nothing_go(shift, used):
    opened = []

    class Watched(Gate):
        """What a reader could see at any moment."""

        def open(self, grants, iteration, now_ns):
            super().open(grants, iteration, now_ns)
            found = self.read()
            assert found is not None
            opened.append(sum(nbytes for _, _, nbytes in found.windows))

    now, gate = 7.0, Watched(empty())
    planned = grant(1, 0, 1.0, 9, after=0)._replace(edge=0.2)
    plan = SenderPlan(Transfer(0, 0, 1, 1, 9), (), (planned,), 1.0, 1.0)
    keeper = Gatekeeper(gate, plan, clock_ns=lambda: round(now * 1e9), tolerance=0.05)
    keeper.iteration_begin(0)
    keeper.begin(Kind.FORWARD)
    now += 0.2 + shift
    keeper.end(Kind.FORWARD)
    assert (gate.read() is not None) == used
    assert opened == [9 if used else 0] and gate.openings == 1


def test_a_new_trainer_begins_with_a_closed_gate_whatever_the_one_before_it_left():
    memory = empty()
    Gate(memory).open([grant(1, 0, 10.0, 5)], 0, 0)
    plan = SenderPlan(Transfer(0, 0, 1, 1, 5), (), (), 0, 0)
    Gatekeeper(Gate(memory), plan)
    assert Gate(memory).read() is None
    memory[:] = np.random.default_rng(1).integers(0, 256, GATE_BYTES, dtype=np.uint8)
    keeper = Gatekeeper(Gate(memory), replace(plan, every=(grant(4, 0, 1.0, 77, after=-1),)))
    assert Gate(memory).read() is None
    keeper.iteration_begin(9)
    found = Gate(memory).read()
    assert found is not None and found.bubble == 4
