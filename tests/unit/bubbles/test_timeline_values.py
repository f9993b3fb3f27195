"""What an event says of a rank's iteration: everything of a short schedule, a bounded part of a long one."""

import json
from dataclasses import replace

from ft_plugins.bubbles.bubble_plan import SenderPlan
from ft_plugins.bubbles.filling import Grant, Transfer
from ft_plugins.bubbles.timeline.timeline_values import MOST, Row, Window, shown
from ft_plugins.model.timeline import Kind, Span, Timeline, bubbles

PASSES = (Kind.FORWARD, Kind.BACKWARD)


def iteration(microbatches):
    """A pass, then a receive that waits, again and again; 10 ms each; then the update."""
    spans = []
    for number in range(2 * microbatches):
        begin = 0.02 * number
        spans.append(Span(PASSES[number % 2], begin, begin + 0.01, number // 2))
        spans.append(Span(Kind.RECV, begin + 0.01, begin + 0.02))
    end = spans[-1].end
    return Timeline(3, end + 0.01, (*spans, Span(Kind.UPDATE, end, end + 0.01)))


def planned(timeline):
    """A window of a bubble's inner half, in each bubble."""
    every = tuple(Grant(one.index, one.after, 0.0025, 0.0075, 100 + one.index) for one in bubbles(timeline))
    return SenderPlan(Transfer(3, 1, 7, 0, 5000), (every,), every, 0.1, 0.05)


def test_what_is_told_can_be_read_back():
    timeline = iteration(2)
    told = json.loads(json.dumps(shown(timeline, bubbles(timeline), planned(timeline))))
    row = Row.read(3, told)
    assert [kind for kind, _, _ in row.spans] == [*PASSES, *PASSES, Kind.UPDATE], "what waits is no span of it"
    assert row.bubbles == ((0, 0.01, 0.02), (1, 0.03, 0.04), (2, 0.05, 0.06), (3, 0.07, 0.08))
    assert row.windows[1] == Window(1, 0.0325, 0.0375, 101), "since the iteration began"
    assert all(begin < one.begin < one.end < end for one, (_, begin, end) in zip(row.windows, row.bubbles, strict=True))
    assert (row.nbytes, row.receiver, row.reason, told["left_out"]) == (5000, 7, "", 0)


def test_where_the_host_is_ahead_windows_are_shown_when_they_are():
    timeline = iteration(2)
    ahead = replace(timeline, leads=(0.004,) * (2 + 2 * len(timeline.spans)))
    plan = planned(timeline)
    later = tuple(one._replace(begin=one.begin + 0.004, deadline=one.deadline + 0.004) for one in plan.every)
    told = shown(ahead, bubbles(timeline), replace(plan, every=later))
    assert told == shown(timeline, bubbles(timeline), plan)


def test_windows_after_one_span_are_told_under_the_bubble_that_the_gate_counts_them_by():
    """A reduction lies between two bubbles after the same pass: the host opens the gate for both at once."""
    timeline = iteration(2)
    plan = planned(timeline)
    first, *_, last = plan.every
    both = (*plan.every, last._replace(bubble=9, begin=0.009, deadline=0.0095))
    told = shown(timeline, bubbles(timeline), replace(plan, every=both))
    assert [window[0] for window in told["windows"]] == [0, 1, 2, 3, 3]
    assert [first.bubble, told["windows"][4][1]] == [0, 0.079]


def test_a_long_schedule_is_told_in_part():
    timeline = iteration(MOST)
    told = shown(timeline, bubbles(timeline), planned(timeline))
    assert [len(told[key]) for key in ("spans", "bubbles", "windows")] == [MOST] * 3
    assert told["left_out"] == (2 * MOST + 1 - MOST) + 2 * (2 * MOST - MOST)
    assert len(json.dumps(told)) < 100_000
