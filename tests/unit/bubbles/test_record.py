"""Spans recorded edge by edge."""

from itertools import count

import pytest
import torch

from ft_plugins.bubbles.timeline.record import EdgeFanout, HostClock, Recorder, clock_of, leads
from ft_plugins.model.timeline import Kind, Span, Timeline


class Ticks:
    """A clock that is one second later at each mark, and ready when it is told."""

    def __init__(self, memory=None, ahead=0.0):
        self.ahead = ahead  # of the host, at each mark by so much more
        self.slots = []
        self.over = True
        self._now = count()
        self._memory = memory

    def room(self, slots):
        self.slots = [-1.0] * slots

    def mark(self, slot):
        self.slots[slot] = next(self._now)

    def ready(self, last):
        return self.over and self.slots[last] >= 0

    def seconds(self, slots):
        return [when - self.slots[0] for when in self.slots[:slots]]

    def leads(self, seconds):
        return [self.ahead * when for when in seconds] if self.ahead else []

    def memory(self):
        return -1 if self._memory is None else next(self._memory)


def pass_through(recorder, spans):
    for index in range(spans):
        recorder.begin(Kind.FORWARD, index, 1)
        recorder.end(Kind.FORWARD, index, 1)


def test_what_was_told_is_what_is_taken_and_only_once():
    recorder = Recorder(3, Ticks(iter(range(100, 110))))
    pass_through(recorder, 1)  # of an iteration that is not recorded
    recorder.iteration_begin()
    recorder.begin(Kind.RECV)
    recorder.end(Kind.RECV)
    recorder.begin(Kind.BACKWARD, 2, 1)
    recorder.end(Kind.BACKWARD, 2, 1)
    assert recorder.take() is None, "it is not over"
    recorder.iteration_end()
    assert not recorder.free
    spans = (Span(Kind.RECV, 1, 2), Span(Kind.BACKWARD, 3, 4, 2, 1))
    assert recorder.take() == Timeline(3, 5, spans, memory=(100, 101))
    assert recorder.free
    assert recorder.take() is None


def test_by_how_much_the_host_was_ahead_is_told_of_every_edge():
    recorder = Recorder(0, Ticks(ahead=0.5))
    recorder.iteration_begin()
    pass_through(recorder, 2)
    recorder.iteration_end()
    taken = recorder.take()
    assert taken is not None and [span.end for span in taken.spans] == [2, 4]
    assert taken.leads == (0, 2.5, 0.5, 1, 1.5, 2)
    assert [taken.opens_at(after) for after in (-1, 0, 1)] == [0, 1, 2]
    assert [taken.closes_at(after) for after in (-1, 0, 1)] == [0.5, 1.5, 2.5]


def test_the_clocks_of_host_and_device_meet_where_the_host_is_ahead_by_least():
    host = [0.0, 0.1, 5.0, 5.1, 9.0]  # it waits for the device at 2 and at 4
    device = [0.0, 2.0, 3.0, 4.5, 7.0]
    assert leads(host, device) == pytest.approx([2.0, 3.9, 0.0, 1.4, 0.0])
    later = [when + 3.0 for when in device]
    assert leads(host, later) == pytest.approx(leads(host, device)), "whatever they count from"
    assert leads([], []) == []


def test_a_span_within_another_is_part_of_it():
    recorder = Recorder(0, Ticks())
    recorder.iteration_begin()
    recorder.begin(Kind.FORWARD, 0)
    pass_through(recorder, 2)
    recorder.end(Kind.FORWARD, 0)
    recorder.iteration_end()
    taken = recorder.take()
    assert taken == Timeline(0, 3, (Span(Kind.FORWARD, 1, 2, 0),))


def test_more_spans_than_there_is_room_for_are_recorded_the_next_time():
    recorder = Recorder(0, Ticks(), room=2)
    recorder.iteration_begin()
    pass_through(recorder, 5)
    recorder.iteration_end()
    assert recorder.take() is None
    recorder.iteration_begin()
    pass_through(recorder, 5)
    recorder.iteration_end()
    taken = recorder.take()
    assert taken is not None and len(taken.spans) == 5


def test_an_iteration_that_an_error_has_cut_short_is_not_reported():
    recorder = Recorder(0, Ticks())
    recorder.iteration_begin()
    recorder.begin(Kind.FORWARD, 0)
    recorder.iteration_end()
    assert recorder.take() is None
    assert recorder.free


def test_a_device_that_lags_behind_is_not_waited_for():
    clock = Ticks()
    recorder = Recorder(0, clock)
    recorder.iteration_begin()
    pass_through(recorder, 1)
    recorder.iteration_end()
    clock.over = False
    assert recorder.take() is None
    assert not recorder.free, "its events are still needed"
    clock.over = True
    assert recorder.take() is not None


def test_several_are_told_the_same_in_their_order():
    told = []

    class One:
        def __init__(self, name):
            self.name = name

        def begin(self, *edge):
            told.append((self.name, "begin", *edge))

        def end(self, *edge):
            told.append((self.name, "end", *edge))

    several = EdgeFanout(One("gate"), One("recorder"))
    several.begin(Kind.FORWARD, 3, 1)
    several.end(Kind.UPDATE)
    forward, update = (Kind.FORWARD, 3, 1), (Kind.UPDATE, -1, 0)
    assert told == [
        *(("gate", "begin", *forward), ("recorder", "begin", *forward)),
        *(("gate", "end", *update), ("recorder", "end", *update)),
    ]


def test_the_clock_of_the_host_tells_seconds_since_the_first_mark():
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    clock.room(3)
    for slot, now in ((0, 5.0), (1, 7.5), (2, 6.0)):
        clock.mark(slot, now=lambda now=now: now)
    assert clock.seconds(3) == pytest.approx([0, 2.5, 1.0])
    assert clock.memory() == -1
