"""What messages take, found again in schedules that were played with links of known speed."""

from dataclasses import replace

import pytest

from ft_plugins.bubbles.timeline.messages import Traffic, traffic, without_messages
from ft_plugins.bubbles.windows import Reserve
from ft_plugins.model.timeline import Kind, Span, Timeline, bubbles
from workloads.pipelines.pipeline import Pipeline, PipelineSchedule
from workloads.pipelines.simulate import PipelineLink, Times, simulate

STAGES, MICROBATCHES = 4, 8
ONE = (tuple(range(STAGES)),)
PLAIN = [schedule for schedule in PipelineSchedule if schedule is not PipelineSchedule.INTERLEAVED]


def played(schedule, latencies, chunks=1):
    pipeline = Pipeline(schedule, STAGES, MICROBATCHES, chunks)
    times = Times((0.1 / chunks,), (0.2 / chunks,), (0.1 / chunks,), links=tuple(map(PipelineLink, latencies)))
    return simulate(pipeline, times, eager=True)


# not Chimera's, which no framework runs: its messages go both ways
@pytest.mark.parametrize("schedule", [one for one in PLAIN if one is not PipelineSchedule.CHIMERA])
@pytest.mark.parametrize("seconds", [0.002, 0.03])
def test_what_messages_take_is_found_in_every_schedule(schedule, seconds):
    found = traffic(played(schedule, [seconds]), ONE)
    assert sorted(found) == list(range(STAGES)) and all(own.received and own.sent for own in found.values())
    # DeepSpeed's stages send only when they have received, so that two may be on their way one after another
    most = 2 * seconds if schedule is PipelineSchedule.DEEPSPEED else seconds
    for own in found.values():
        for took in (*own.received.values(), *own.sent.values()):
            assert seconds - 1e-9 <= took <= most + 1e-9  # sums are rounded


def test_of_an_interleaved_schedule_too_where_messages_wait_for_other_passes():
    found = traffic(played(PipelineSchedule.INTERLEAVED, [0.01], 2), ONE)
    assert all(own.seconds == pytest.approx(0.01) for own in found.values())


def test_links_are_told_apart_and_pipelines_too():
    quick, slow = (
        played(PipelineSchedule.ONE_F_ONE_B, [0.001]),
        played(PipelineSchedule.ONE_F_ONE_B, [0.001, 0.03, 0.002, 0.0]),
    )
    both = (*quick, *(replace(one, rank=STAGES + one.rank) for one in slow))
    found = traffic(both, (*ONE, tuple(range(STAGES, 2 * STAGES))))
    assert sorted(found) == list(range(2 * STAGES))
    assert all(found[rank].seconds == pytest.approx(0.001) for rank in range(STAGES))
    own = found[STAGES + 2]
    forwards, backwards = (
        {own.received[place] for place, span in enumerate(slow[2].spans) if span.kind is kind and place in own.received}
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    assert [*forwards] == [pytest.approx(0.03)], "from the stage before"
    assert [*backwards] == [pytest.approx(0.002)], "from the stage behind"


def line(rank, *spans):
    return Timeline(rank, 1.0, tuple(Span(kind, begin, end, microbatch) for kind, begin, end, microbatch in spans))


FIRST = line(0, (Kind.FORWARD, 0.0, 0.1, 0), (Kind.FORWARD, 0.1, 0.2, 1), (Kind.FORWARD, 0.2, 0.3, 2))
SECOND = line(1, (Kind.FORWARD, 0.104, 0.25, 0), (Kind.FORWARD, 0.25, 0.5, 1), (Kind.FORWARD, 0.6, 0.9, 2))


def test_what_nobody_has_waited_for_takes_as_long_as_others_on_its_way_and_all_as_the_median_of_them():
    found = traffic((FIRST, SECOND), ((0, 1),))
    assert found[1].received == {0: pytest.approx(0.052), 2: pytest.approx(0.052)}, "4 and 100 ms"
    assert found[0].sent == {span: pytest.approx(0.052) for span in range(3)}
    assert found[1].sent == found[0].received == {}, "what was received in no pass of this rank is not known"


def test_what_would_have_come_before_it_was_sent_took_no_time_and_who_is_alone_has_no_messages():
    assert traffic((FIRST, line(1, (Kind.FORWARD, 0.05, 0.15, 0))), ((0, 1),))[1].received == {0: 0.0}
    assert traffic((FIRST,), ((0,),)) == {0: Traffic()}
    assert traffic((FIRST,), ()) == {}


def test_a_bubble_is_left_free_where_no_message_is_under_way():
    spans = [(Kind.FORWARD, 0.1, 0.2, 0), (Kind.FORWARD, 0.5, 0.6, 1), (Kind.REDUCE, 0.7, 0.8, -1)]
    timeline = line(0, *spans)
    idle = bubbles(timeline)
    assert [(one.begin, one.end) for one in idle] == [(0.0, 0.1), (0.2, 0.5), (0.6, 0.7), (0.8, 1.0)]
    own = Traffic(received={0: 0.025, 1: 0.06}, sent={0: 0.05, 1: 0.2})
    free = without_messages(idle, timeline, own, Reserve(0.01, 0.04))
    # what is reserved in any case is taken off later: at begins 0.01, at ends 0.04
    assert [(one.begin, one.end) for one in free] == [
        (0.0, 0.1), pytest.approx((0.24, 0.48)), pytest.approx((0.615, 0.7)), (0.8, 1.0),
    ], "of the third one no more than a quarter"  # fmt: skip
    assert [(one.index, one.after) for one in free] == [(one.index, one.after) for one in idle]
    assert without_messages(idle, timeline, Traffic(), Reserve(0.01, 0.04)) == idle
