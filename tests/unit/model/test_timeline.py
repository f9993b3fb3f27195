"""Spans of an iteration, their median, the bubbles between them, and when a profile no longer fits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import FtError
from ft_plugins.model.timeline import (
    COMPUTE,
    Bubble,
    Kind,
    Misses,
    Profile,
    Span,
    Timeline,
    bubbles,
    busy_share,
    largest_deviation,
    median,
    reduce_work,
    reductions,
    strays,
    table,
)

F, B, S, R, D, U = Kind.FORWARD, Kind.BACKWARD, Kind.SEND, Kind.RECV, Kind.REDUCE, Kind.UPDATE


def timeline(*spans, seconds, rank=0):
    return Timeline(rank, seconds, tuple(Span(*span) for span in spans))


LAST = timeline(  # the last of two stages: it waits for the first activation, and in the reduction for the first stage
    (R, 0, 1), (F, 1, 2, 0), (B, 2, 4, 0), (S, 4, 4.25), (R, 4.25, 4.5), (F, 4.5, 5.5, 1), (B, 5.5, 7.5, 1),
    (D, 7.5, 10.5), (D, 10.5, 11), (U, 11, 12), seconds=12.5, rank=1,
)  # fmt: skip
FIRST = timeline(
    (F, 0, 1, 0), (F, 1, 2, 1), (R, 2, 4), (B, 4, 6, 0), (R, 6, 8), (B, 8, 9.5, 1),
    (D, 9.5, 10.5), (D, 10.5, 11), (U, 11, 12), seconds=12.5,
)  # fmt: skip


def test_bubbles_are_what_no_compute_covers_each_after_the_compute_before_it():
    assert bubbles(FIRST) == (Bubble(0, 2, 4, 1), Bubble(1, 6, 8, 3), Bubble(2, 12, 12.5, 8))
    assert bubbles(FIRST, least=1) == (Bubble(0, 2, 4, 1), Bubble(1, 6, 8, 3)), "numbered as they are found"
    assert bubbles(LAST) == (Bubble(0, 0, 1, -1), Bubble(1, 4, 4.5, 2), Bubble(2, 12, 12.5, 9))
    assert bubbles(timeline(seconds=3)) == (Bubble(0, 0, 3, -1),)


def test_a_reduction_is_a_bubble_as_long_as_it_waits():
    work = reduce_work([reductions(FIRST), reductions(LAST)])
    assert work == (1, 0.5), "of each reduction the shortest"
    assert bubbles(LAST, 1, work) == (Bubble(0, 0, 1, -1), Bubble(1, 7.5, 9.5, 6)), "until the last second, its work"
    assert bubbles(FIRST, 1, work) == bubbles(FIRST, 1), "it waits for nobody"
    assert bubbles(LAST, 1, (0.0,)) == (Bubble(0, 0, 1, -1), Bubble(1, 7.5, 10.5, 6)), "no work: one bubble, not two"
    assert bubbles(LAST, 1, (9.0,)) == bubbles(LAST, 1), "no work is longer than the span"


def test_how_busy_a_rank_is():
    assert busy_share(FIRST) == pytest.approx(1 - 4.5 / 12.5)
    assert busy_share(LAST, (1, 0.5)) == pytest.approx(1 - 4 / 12.5)
    assert busy_share(timeline(seconds=0)) == 0


@st.composite
def timelines(draw):
    """Spans one after another, with and without time between."""
    pieces = draw(st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 50), st.integers(0, 50)), max_size=30))
    spans, now = [], 0
    for index, (kind, idle, length) in enumerate(pieces):
        spans.append(Span(kind, now + idle, now + idle + length, index))
        now += idle + length
    return Timeline(0, now + draw(st.integers(0, 50)), tuple(spans))


@given(timelines(), st.lists(st.integers(0, 50), max_size=5), st.integers(1, 20))
def test_every_moment_is_either_computed_or_reduced_in_or_in_a_bubble(one, work, least):
    found = bubbles(one, 0, work)
    reductions = [span for span in one.spans if span.kind is D]
    busy = sum(span.end - span.begin for span in one.spans if span.kind in COMPUTE)
    for index, span in enumerate(reductions):
        busy += min(span.end - span.begin, work[index]) if index < len(work) else span.end - span.begin
    assert sum(bubble.seconds for bubble in found) + busy == one.seconds
    for before, after in zip(found, found[1:], strict=False):
        assert before.end <= after.begin
    for bubble in found:
        assert bubble.after == -1 or one.spans[bubble.after].end <= bubble.begin
        between = one.spans[bubble.after + 1 :]
        assert all(span.end <= span.begin or span.begin >= bubble.end for span in between if span.kind in COMPUTE)
    longer = [(bubble.begin, bubble.end) for bubble in found if bubble.seconds >= least]
    assert [(bubble.begin, bubble.end) for bubble in bubbles(one, least, work)] == longer


def moved(one, by):
    return replace(one, spans=tuple(replace(span, begin=span.begin + by, end=span.end + by) for span in one.spans))


def test_the_median_leaves_out_an_iteration_of_another_shape_and_a_slow_one_does_not_move_it():
    skipped = replace(FIRST, spans=FIRST.spans[:-1], seconds=99)
    iterations = [skipped, FIRST, moved(FIRST, 40), moved(FIRST, 0.25), FIRST]
    assert strays(iterations) == (0,)
    found = median([skipped, FIRST, moved(FIRST, 40), FIRST])
    assert found == FIRST, "the slow one is no stray, and not the middle"
    assert strays([FIRST, skipped]) == (1,), "the earlier one, of two as common"
    assert strays([]) == ()


def test_of_memory_the_most_counts():
    first, second = replace(FIRST, memory=(5,) * 9), replace(FIRST, memory=(1,) * 8 + (9,))
    assert median([first, second, FIRST]).memory == (5,) * 8 + (9,)


def test_a_median_is_of_one_rank():
    with pytest.raises(FtError, match=r"ranks \[0, 1\]"):
        median([FIRST, LAST])
    with pytest.raises(FtError, match=r"ranks \[\]"):
        median([])


def delayed(one, delay):
    """Each span takes so much longer, and all that comes later is later."""
    late, spans = 0, []
    for span, more in zip(one.spans, delay, strict=False):
        spans.append(replace(span, begin=span.begin + late, end=span.end + late + more))
        late += more
    return Timeline(0, one.seconds + late, tuple(spans))


@given(timelines(), st.lists(st.lists(st.integers(0, 40), min_size=30, max_size=30), min_size=1, max_size=6))
def test_the_spans_of_a_median_are_in_order_like_those_that_it_is_of(one, delays):
    found = median([delayed(one, delay) for delay in delays])
    edges = [edge for span in found.spans for edge in (span.begin, span.end)]
    assert edges == sorted(edges)
    assert found.shape == one.shape
    assert not edges or edges[-1] <= found.seconds


@given(timelines(), st.permutations(range(30)))
def test_delays_that_fall_on_different_spans_of_each_iteration_leave_no_trace(one, places):
    hit = [[400 if index in places[turn::5] else 0 for index in range(30)] for turn in range(5)]
    assert median([delayed(one, delay) for delay in hit]) == one


def test_a_profile_tells_the_bubbles_of_each_rank_and_prints():
    profile = Profile((FIRST, LAST))
    assert profile.bubbles(1, 1) == bubbles(LAST, 1, (1, 0.5))
    lines = profile.table(least=1).splitlines()
    assert lines[0].split() == "rank iteration forward backward update busy idle bubbles longest memory".split()
    expected = "1 12500.0 ms 2000.0 ms 4000.0 ms 1000.0 ms 68% 3000.0 ms 2 2000.0 ms unknown"
    assert lines[2].split() == expected.split()
    assert len(lines) == 3


def test_of_very_many_ranks_the_first_are_shown():
    many = [replace(FIRST, rank=rank, memory=(2**30,) * 9) for rank in range(4096)]
    lines = table(many).splitlines()
    assert len(lines) == 1 + 16 + 1
    assert lines[-1] == "and 4080 more ranks"
    assert lines[1].endswith("1.00 GiB")


def test_a_profile_is_given_up_when_more_iterations_miss_it_than_fit():
    misses = Misses(tolerance=0.1, limit=3)
    slow, fits = moved(FIRST, 1.26), moved(FIRST, 1.24)
    for _ in range(10):  # one slow iteration of two is noise
        misses = misses.seen(FIRST, slow).seen(FIRST, fits)
        assert not misses.limit_reached
    for expected in (False, False, True, True):
        misses = misses.seen(FIRST, slow)
        assert misses.limit_reached == expected
    misses = misses.seen(FIRST, fits)
    assert not misses.limit_reached, "counted no further than the limit"


def test_an_edge_that_is_off_counts_and_another_shape_is_never_near():
    assert largest_deviation(FIRST, FIRST) == 0
    late = replace(FIRST, spans=(*FIRST.spans[:-1], replace(FIRST.spans[-1], end=15)))
    assert largest_deviation(FIRST, late) == 3
    assert largest_deviation(FIRST, replace(FIRST, spans=FIRST.spans[:-1])) == float("inf")
    assert largest_deviation(timeline(seconds=1), timeline(seconds=9)) == 0, "how long evaluation takes is no edge"


def test_the_work_of_a_job_s_reductions_is_found_once_for_all_of_its_ranks():
    profile = Profile((FIRST, LAST))
    assert profile.reduce_work is profile.reduce_work, "over 512 ranks it takes as long as all of the rest"
    assert profile.bubbles(0) == bubbles(FIRST, reduce_work=reduce_work([reductions(FIRST), reductions(LAST)]))
