"""Schedules against the frameworks' own: every pass, send, receive and wait of every rank, in order."""

import json
import select
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from workloads.pipelines.interleaved import schedule_table
from workloads.pipelines.pipeline import Compute, MessagePost, Pass, Pipeline, PipelineSchedule, Wait
from workloads.pipelines.schedules import program

ANSWER_SECONDS = 240  # the first answer waits for the imports of the frameworks


@st.composite
def interleaved(draw):
    ranks, chunks = draw(st.integers(2, 6)), draw(st.integers(2, 4))
    group = draw(st.integers(ranks, ranks + 4))
    rest = draw(st.sampled_from([0, *range(ranks, group)]))
    microbatches = group * draw(st.integers(1, 3)) + rest
    given_group = 0 if group == ranks and draw(st.booleans()) else group
    return Pipeline(PipelineSchedule.INTERLEAVED, ranks, microbatches, chunks, given_group, draw(st.booleans()))


def plain(schedule):
    ranks = st.sampled_from([2, 4, 6, 8]) if schedule is PipelineSchedule.CHIMERA else st.integers(1, 9)
    return st.builds(Pipeline, st.just(schedule), ranks, st.integers(1, 24))


pipelines = st.one_of(
    interleaved(), *(plain(one) for one in PipelineSchedule if one is not PipelineSchedule.INTERLEAVED)
)


@pytest.fixture(scope="module")
def ask():
    """Asks a process in which the frameworks are imported."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("framework_orders.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout

        def answer(framework, pipeline):
            assert process.stdin and process.stdout
            names = ("ranks", "microbatches", "chunks", "group", "overlap")
            case = {"framework": framework} | {name: getattr(pipeline, name) for name in names}
            process.stdin.write(json.dumps(case).encode() + b"\n")
            process.stdin.flush()
            assert select.select([process.stdout], [], [], ANSWER_SECONDS)[0], "no answer"
            found = json.loads(process.stdout.readline())
            return found

        yield answer
        process.stdin.close()
        assert process.wait(ANSWER_SECONDS) == 0


def words(pipeline, rank, buffers=None):
    """A program as the frameworks' calls: `buffers` stands where those name a buffer instead of a microbatch."""

    def told(message):
        at, microbatch = divmod(message, pipeline.microbatches)
        return at % 2, microbatch % (buffers or pipeline.microbatches), at // 2 // pipeline.ranks

    def parts(sends, receives):
        found = [("send_prev B", "send_next F")[not told(one)[0]] + "{1}.{2}".format(*told(one)) for one in sends]
        found += [("recv_next", "recv_prev")[not told(one)[0]] for one in receives]
        order = ("send_next", "send_prev", "recv_prev", "recv_next")
        return ", ".join(sorted(found, key=lambda part: order.index(part.split()[0])))

    def word(operation):
        match operation:
            case Compute(what, microbatch, chunk):
                return f"{what.value} {microbatch % (buffers or pipeline.microbatches)}.{chunk}"
            case MessagePost(sends, receives, blocking):
                return ("block " if blocking else "begin ") + parts(sends, receives)
            case Wait(sends, receives):
                return "wait " + parts(sends, receives)

    return [word(operation) for operation in program(pipeline, rank)]


# ------------------------------------------------------------------------------------------------ frameworks


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra [megatron]")
@settings(max_examples=300)
@given(pipeline=st.one_of(plain(PipelineSchedule.ONE_F_ONE_B), interleaved()))
def test_1f1b_and_interleaved_are_what_megatron_core_does(ask, pipeline):
    assert [words(pipeline, rank) for rank in range(pipeline.ranks)] == ask("megatron", pipeline)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")
@settings(max_examples=150)
@given(pipeline=plain(PipelineSchedule.DEEPSPEED))
def test_deepspeed_is_what_its_train_schedule_does(ask, pipeline):
    def buffers(rank):
        return max(2, min(pipeline.ranks - rank, pipeline.microbatches))  # TrainSchedule.num_pipe_buffers

    assert [words(pipeline, rank, buffers(rank)) for rank in range(pipeline.ranks)] == ask("deepspeed", pipeline)


# ------------------------------------------------------------------------------------------------ every schedule


@given(pipelines)
def test_every_pass_is_there_once_and_every_message_has_two_ends(pipeline):
    sent = Counter()
    received = Counter()
    parts = [Pass.FORWARD, Pass.BACKWARD] + [Pass.WEIGHT] * (pipeline.schedule is PipelineSchedule.ZERO_BUBBLE)
    for rank in range(pipeline.ranks):
        passes = []
        posted = set()
        for operation in program(pipeline, rank):
            match operation:
                case Compute():
                    passes.append(operation)
                case MessagePost(sends, receives, _):
                    sent.update(sends)
                    received.update(receives)
                    posted |= {("send", one) for one in sends} | {("receive", one) for one in receives}
                case Wait(sends, receives):
                    assert {("send", one) for one in sends} | {("receive", one) for one in receives} <= posted
        everything = [
            Compute(part, microbatch, chunk)
            for part in parts
            for microbatch in range(pipeline.microbatches)
            for chunk in range(pipeline.chunks)
        ]
        assert sorted(passes, key=repr) == sorted(everything, key=repr)
    expected = {
        message(stage, microbatch)
        for microbatch in range(pipeline.microbatches)
        for message, stages in (
            (pipeline.activation, range(pipeline.virtual_stages - 1)),
            (pipeline.gradient, range(1, pipeline.virtual_stages)),
        )
        for stage in stages
    }
    assert set(sent) == set(received) == expected
    assert set(sent.values()) | set(received.values()) <= {1}


@given(plain(PipelineSchedule.ZERO_BUBBLE))
def test_zero_bubble_holds_no_more_activations_than_the_first_rank_of_1f1b(pipeline):
    for rank in range(pipeline.ranks):
        held = most = 0
        for operation in program(pipeline, rank):
            if isinstance(operation, Compute):
                held += {Pass.FORWARD: 1, Pass.BACKWARD: 0, Pass.WEIGHT: -1}[operation.what]
                most = max(most, held)
        assert held == 0 and most <= min(pipeline.ranks, pipeline.microbatches)


def test_the_table_of_passes_by_hand():
    # the example in megatron-core's own comment: PP2 N3M5 with VP2
    table = schedule_table(Pipeline(PipelineSchedule.INTERLEAVED, 2, 5, 2, 3))
    assert [microbatch for microbatch, _ in table] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [chunk for _, chunk in table] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((PipelineSchedule.ONE_F_ONE_B, 0, 4), "ranks: expected an integer >= 1, found 0"),
        ((PipelineSchedule.ONE_F_ONE_B, 4, True), "microbatches: expected an integer >= 1, found True"),
        ((PipelineSchedule.CHIMERA, 3, 4), "chimera: expected an even number of ranks, found 3"),
        ((PipelineSchedule.GPIPE, 4, 4, 2), "chunks, group, overlap: without effect in the schedule gpipe"),
        ((PipelineSchedule.INTERLEAVED, 4, 4, 1), "interleaved: expected at least 2 chunks and 2 ranks, found 1 and 4"),
        ((PipelineSchedule.INTERLEAVED, 4, 3, 2), r"group: expected from ranks \(4\) to microbatches \(3\), found 4"),
        ((PipelineSchedule.INTERLEAVED, 3, 7, 2), r"a rest of at least ranks \(3\), found 7, rest 1"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(sizes, said):
    with pytest.raises(ConfigError, match=said):
        Pipeline(*sizes)
