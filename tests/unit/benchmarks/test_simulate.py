"""The simulator against closed forms, against what a pipeline must keep, and by hand."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from ft_plugins.model.timeline import Kind
from workloads.pipelines import simulate as simulator
from workloads.pipelines.pipeline import Compute, MessagePost, Pass, Pipeline, PipelineSchedule
from workloads.pipelines.simulate import PipelineLink, Times, simulate

PASSES = (Kind.FORWARD, Kind.BACKWARD)
BUSY = (*PASSES, Kind.REDUCE, Kind.UPDATE)
ROUNDING = 1e-9  # relative: sums of some hundred doubles
PLAIN = [
    each for each in PipelineSchedule if each not in (PipelineSchedule.INTERLEAVED, PipelineSchedule.CHIMERA)
]  # of any sizes
NOT_SPLIT = [PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.DEEPSPEED]

seconds = st.floats(0.01, 10)
some_pipelines = st.one_of(
    st.builds(Pipeline, st.sampled_from(PLAIN), st.integers(1, 7), st.integers(1, 12)),
    st.builds(Pipeline, st.just(PipelineSchedule.CHIMERA), st.sampled_from([2, 4, 6]), st.integers(1, 12)),
    st.builds(
        lambda ranks, groups, chunks, overlap: Pipeline(
            PipelineSchedule.INTERLEAVED, ranks, ranks * groups, chunks, overlap=overlap
        ),
        *(st.integers(2, 5), st.integers(1, 3), st.integers(2, 3), st.booleans()),
    ),
)


@st.composite
def uneven(draw):
    """A pipeline whose stages, ranks and links all differ."""
    pipeline = draw(some_pipelines)

    def several(least, count):
        return tuple(draw(st.lists(st.floats(least, 5), min_size=count, max_size=count)))

    backward = several(0.1, pipeline.virtual_stages)
    times = Times(
        forward=several(0.1, pipeline.virtual_stages),
        backward=backward,
        weight=tuple(draw(st.floats(0, 1)) * whole for whole in backward),
        reduce=several(0, pipeline.ranks),
        update=several(0, pipeline.ranks),
        links=tuple(PipelineLink(latency, 10.0) for latency in several(0, pipeline.ranks)),
        message_bytes=draw(st.floats(0, 10)),
        joint=draw(st.booleans()),
    )
    return pipeline, times


def idle_shares(timelines):
    return [
        1 - sum(span.end - span.begin for span in one.spans if span.kind in BUSY) / one.seconds for one in timelines
    ]


# ------------------------------------------------------------------------------------------------ closed forms


@given(st.sampled_from(NOT_SPLIT), st.integers(1, 12), st.integers(1, 40), seconds, seconds, st.booleans())
def test_the_bubble_share_of_gpipe_and_1f1b(schedule, ranks, count, forward, backward, eager):
    found = simulate(Pipeline(schedule, ranks, count), Times((forward,), (backward,)), eager=eager)
    expected = (ranks - 1) / (count + ranks - 1)
    assert idle_shares(found) == pytest.approx([expected] * ranks, rel=ROUNDING, abs=ROUNDING)


@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 4), seconds, seconds, st.booleans(), st.booleans())
def test_the_bubble_share_of_interleaved(ranks, groups, chunks, forward, backward, overlap, eager):
    pipeline = Pipeline(PipelineSchedule.INTERLEAVED, ranks, ranks * groups, chunks, overlap=overlap)
    found = simulate(pipeline, Times((forward,), (backward,)), eager=eager)
    expected = (ranks - 1) / (chunks * pipeline.microbatches + ranks - 1)
    assert idle_shares(found) == pytest.approx([expected] * ranks, rel=ROUNDING)


@given(st.integers(1, 8), st.integers(0, 30), seconds, st.booleans())
def test_zero_bubble_idles_for_forward_plus_backward_minus_weight(ranks, more, unit, eager):
    # Qi et al., table 1: (p-1)(T_F + T_B - T_W), for passes of one length and at least p microbatches
    count = ranks + more
    found = simulate(
        Pipeline(PipelineSchedule.ZERO_BUBBLE, ranks, count), Times((unit,), (2 * unit,), (unit,)), eager=eager
    )
    assert found[0].seconds == pytest.approx((3 * count + ranks - 1) * unit, rel=ROUNDING)


@given(st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_the_bubble_share_of_chimera(half, units, eager):
    # Li and Hoefler, table 2: (D-2)/(2N+D-2) for passes of one length; (D-2)/(3N/2+D-2) if the backward takes twice
    ranks, count = 2 * half, 2 * half * units
    pipeline = Pipeline(PipelineSchedule.CHIMERA, ranks, count)
    even, usual = (simulate(pipeline, Times((1.0,), (backward,)), eager=eager) for backward in (1.0, 2.0))
    expected = (ranks - 2) / (2 * count + ranks - 2)
    assert idle_shares(even) == pytest.approx([expected] * ranks, rel=ROUNDING, abs=ROUNDING)
    if units == 1:
        expected = (ranks - 2) / (3 * count / 2 + ranks - 2)
        assert idle_shares(usual) == pytest.approx([expected] * ranks, rel=ROUNDING, abs=ROUNDING)


@given(st.integers(2, 10), st.integers(1, 40), seconds, seconds, st.floats(0.05, 1))
def test_zero_bubble_idles_less_than_1f1b(ranks, count, forward, backward, part):
    times = Times((forward,), (backward,), (part * min(backward / 2, forward),))
    least = simulate(Pipeline(PipelineSchedule.ZERO_BUBBLE, ranks, count), times)
    usual = simulate(Pipeline(PipelineSchedule.ONE_F_ONE_B, ranks, count), times)
    assert least[0].seconds < usual[0].seconds
    assert max(idle_shares(least)) < min(idle_shares(usual))


# ------------------------------------------------------------------------------------------------ what must hold


@given(uneven(), st.booleans())
def test_no_pass_begins_before_its_input_is_there_and_no_rank_does_two_things(case, eager):
    pipeline, times = case
    found = simulate(pipeline, times, eager=eager)
    at = defaultdict(list)
    for one in found:
        assert all(before.end <= after.begin for before, after in zip(one.spans, one.spans[1:], strict=False))
        assert one.spans[0].begin >= 0 and one.spans[-1].end <= one.seconds
        for span in one.spans:
            if span.kind in PASSES:
                place = pipeline.ranks - 1 - one.rank if pipeline.upward(span.microbatch) else one.rank
                at[span.kind, span.microbatch, span.chunk * pipeline.ranks + place].append(span)
    hops = [link.seconds(times.message_bytes) for link in times.links]
    for (kind, microbatch, stage), spans in at.items():
        before_stage, after_stage = stage - 1, stage
        if pipeline.upward(microbatch):  # its links are counted from the other end
            before_stage, after_stage = pipeline.ranks - 1 - stage, pipeline.ranks - 2 - stage
        if kind is Kind.FORWARD and stage:
            (before,) = at[Kind.FORWARD, microbatch, stage - 1]
            assert spans[0].begin >= before.end + hops[before_stage % pipeline.ranks]
        if kind is Kind.BACKWARD and stage < pipeline.virtual_stages - 1:
            before = at[Kind.BACKWARD, microbatch, stage + 1][0]
            assert spans[0].begin >= before.end + hops[after_stage % pipeline.ranks]
        if kind is Kind.BACKWARD:
            assert spans[0].begin >= at[Kind.FORWARD, microbatch, stage][0].end
            whole = sum(span.end - span.begin for span in spans)
            assert whole == pytest.approx(times.backward[stage], rel=ROUNDING)


@given(uneven())
def test_a_sender_that_need_not_wait_makes_nothing_later(case):
    waiting, eager = simulate(*case), simulate(*case, eager=True)
    assert eager[0].seconds <= waiting[0].seconds
    assert not [span for one in eager for span in one.spans if span.kind is Kind.SEND]


@given(uneven(), st.booleans())
def test_slower_links_make_nothing_earlier_and_the_same_again_is_the_same(case, eager):
    pipeline, times = case
    slower = replace(times, links=tuple(PipelineLink(2 * link.latency, link.bandwidth / 2) for link in times.links))
    found = simulate(pipeline, times, eager=eager)
    assert found == simulate(pipeline, times, eager=eager)
    assert found[0].seconds <= simulate(pipeline, slower, eager=eager)[0].seconds


# ------------------------------------------------------------------------------------------------ by hand


def test_two_ranks_of_1f1b_by_hand():
    times = Times(
        (1.0,), (2.0,), reduce=(0.25, 1.0), update=(0.5,), links=(PipelineLink(0.1, 10.0),), message_bytes=1.0
    )
    first, last = simulate(Pipeline(PipelineSchedule.ONE_F_ONE_B, 2, 2), times)  # a message takes 0.2 s

    def shown(one):
        return [(span.kind.value, round(span.begin, 9), round(span.end, 9), span.microbatch) for span in one.spans]

    assert shown(first) == [
        ("forward", 0, 1, 0),
        ("send", 1, 1.2, 0),
        ("forward", 1.2, 2.2, 1),
        ("recv", 2.2, 4.4, 0),  # sends activation 1 as well: in one call that blocks
        ("backward", 4.4, 6.4, 0),
        ("recv", 6.4, 7.6, 1),
        ("backward", 7.6, 9.6, 1),
        ("reduce", 9.6, 9.85, -1),
        ("update", 9.85, 10.35, -1),
    ]
    assert shown(last) == [
        ("recv", 0, 1.2, 0),
        ("forward", 1.2, 2.2, 0),
        ("backward", 2.2, 4.2, 0),
        ("recv", 4.2, 4.4, 1),
        ("forward", 4.4, 5.4, 1),
        ("backward", 5.4, 7.4, 1),
        ("send", 7.4, 7.6, 1),
        ("reduce", 7.6, 8.6, -1),
        ("update", 9.85, 10.35, -1),  # waits for the norm of all gradients: the bubble of the flush
    ]
    assert first.seconds == last.seconds == pytest.approx(10.35)
    apart = simulate(Pipeline(PipelineSchedule.ONE_F_ONE_B, 2, 2), replace(times, joint=False))[1]
    assert apart.spans[-1].begin == pytest.approx(8.6) and apart.seconds == pytest.approx(10.35)


def test_deepspeed_sends_an_activation_only_after_the_gradient_that_it_waits_for():
    times = Times((1.0,), (1.0,), links=(PipelineLink(0.5),))
    pairs = simulate(Pipeline(PipelineSchedule.ONE_F_ONE_B, 4, 8), times)[0].seconds
    apart = simulate(Pipeline(PipelineSchedule.DEEPSPEED, 4, 8), times)[0].seconds
    assert apart > pairs


def test_overlapped_messages_hide_behind_passes_in_the_steady_part():
    times = Times((1.0,), (2.0,), links=(PipelineLink(0.05),))
    blocking, overlapped = (
        simulate(Pipeline(PipelineSchedule.INTERLEAVED, 4, 32, 2, overlap=overlap), times)[0].seconds
        for overlap in (False, True)
    )
    assert overlapped < blocking


def test_a_program_that_cannot_end_is_told_of(monkeypatch):
    pipeline = Pipeline(PipelineSchedule.ONE_F_ONE_B, 2, 1)
    one_sided = [MessagePost((), (pipeline.activation(0, 0),), True)], [Compute(Pass.FORWARD, 0, 0)]
    monkeypatch.setattr(simulator, "program", lambda pipeline, rank: one_sided[rank])
    with pytest.raises(ConfigError, match=r"schedule 1f1b: rank 0 waits forever at MessagePost\(sends=\(\)"):
        simulate(pipeline, Times())


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({"forward": (1.0, 1.0)}, "forward: expected 1 value or 3, found 2"),
        ({"backward": (-1.0,)}, "backward: expected seconds >= 0, found -1.0"),
        ({"weight": (float("nan"),)}, "weight: expected seconds >= 0, found nan"),
        ({"weight": (3.0,)}, "weight: expected at most backward"),
        ({"links": (PipelineLink(0, 0),)}, "links: expected latency >= 0 and bandwidth > 0"),
    ],
)
def test_times_that_do_not_fit_are_refused(times, said):
    with pytest.raises(ConfigError, match=said):
        simulate(Pipeline(PipelineSchedule.ZERO_BUBBLE, 3, 4), Times(**times))
