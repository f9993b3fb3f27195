"""What messages take, found again in schedules that were played with links of known speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ft_plugins.bubbles.messages import message_seconds
from ft_plugins.model.timeline import Kind, Span, Timeline
from ft_plugins.planner.pipeline import Pipeline, Schedule
from ft_plugins.planner.simulate import Link, Times, simulate

STAGES, MICROBATCHES = 4, 8
ONE = (tuple(range(STAGES)),)
PLAIN = [schedule for schedule in Schedule if schedule is not Schedule.INTERLEAVED]


def played(schedule: Schedule, latencies: Sequence[float], chunks: int = 1) -> tuple[Timeline, ...]:
    pipeline = Pipeline(schedule, STAGES, MICROBATCHES, chunks)
    times = Times((0.1 / chunks,), (0.2 / chunks,), (0.1 / chunks,), links=tuple(map(Link, latencies)))
    return simulate(pipeline, times, eager=True)


@pytest.mark.parametrize("schedule", PLAIN)
@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.03])
def test_what_a_message_takes_is_found_in_every_schedule(schedule: Schedule, seconds: float) -> None:
    # DeepSpeed's stages send only when they have received, so that two are on their way one after another
    expected = 2 * seconds if schedule is Schedule.DEEPSPEED else seconds
    assert message_seconds(played(schedule, [seconds]), ONE) == pytest.approx(expected)  # sums are rounded


def test_of_an_interleaved_schedule_too_where_messages_wait_for_other_passes() -> None:
    assert message_seconds(played(Schedule.INTERLEAVED, [0.01], 2), ONE) == pytest.approx(0.01)


def test_of_links_that_differ_the_slowest_decides() -> None:
    found = message_seconds(played(Schedule.ONE_F_ONE_B, [0.001, 0.03, 0.002, 0.0]), ONE)
    assert found == pytest.approx(0.03)


def test_of_several_pipelines_too() -> None:
    quick, slow = (played(Schedule.ONE_F_ONE_B, [seconds]) for seconds in (0.001, 0.02))
    both = (*quick, *(replace(one, rank=STAGES + one.rank) for one in slow))
    assert message_seconds(both, (*ONE, tuple(range(STAGES, 2 * STAGES)))) == pytest.approx(0.02)
    assert message_seconds(both, ONE) == pytest.approx(0.001)


def line(rank: int, *spans: tuple[Kind, float, float, int]) -> Timeline:
    return Timeline(rank, 1.0, tuple(Span(kind, begin, end, microbatch) for kind, begin, end, microbatch in spans))


def test_who_has_not_waited_tells_nothing_nor_does_what_came_before_it_was_sent() -> None:
    first = line(0, (Kind.FORWARD, 0.0, 0.1, 0), (Kind.FORWARD, 0.1, 0.2, 1))
    assert message_seconds((first, line(1, (Kind.FORWARD, 0.104, 0.2, 0), (Kind.FORWARD, 0.2, 0.3, 1))), ((0, 1),)) == (
        pytest.approx(0.004)
    )
    assert message_seconds((first, line(1, (Kind.FORWARD, 0.05, 0.15, 0))), ((0, 1),)) == 0
    assert message_seconds((first,), ((0,),)) == message_seconds((first,), ()) == 0
