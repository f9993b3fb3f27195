"""Each rank receives the timelines that its plan reads, each once, and all ranks agree on who sends what to whom."""

import math
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.bubbles.profile import Profiler, Profiling, ProfilingPhase
from ft_plugins.bubbles.timeline.timeline_exchange import RankSummary, TimelineExchange
from ft_plugins.bubbles.timeline.timeline_readers import TimelineReaders, receivers, sources
from ft_plugins.collective import Collective
from ft_plugins.errors import ConfigError, FtError, ProtocolError
from ft_plugins.model.timeline import Kind, SenderFacts, Span, Timeline
from ft_plugins.redundancy.neighbour import plan_neighbours


def job(stages, wide, per_node):
    """`wide` pipelines, with `per_node` ranks of them on a node, stage by stage."""
    pipelines = [tuple(range(first, stages * wide, wide)) for first in range(wide)]
    nodes = [f"n{rank // per_node}" for rank in range(stages * wide)]
    copies = plan_neighbours(nodes, pipelines, [1] * len(nodes))
    return TimelineReaders(copies, pipelines), copies, pipelines


SHAPES = st.tuples(st.integers(2, 7), st.integers(1, 8), st.integers(1, 4)).filter(lambda one: one[1] >= one[2])


@settings(max_examples=60, deadline=None)
@given(SHAPES)
def test_who_reads_is_known_by_those_that_are_read(shape):
    readers, copies, pipelines = job(*shape)
    ranks = range(math.prod(shape[:2]))
    for rank in ranks:
        linked = {copy.rank for copy in copies.linked_copies(rank)}
        near = {line[(line.index(one) + step) % len(line)] for line in pipelines for one in linked & {*line}
                for step in (-1, 1)}  # fmt: skip
        first = set(ranks[:16]) if rank == 0 else set()
        assert readers.reads(rank) == linked | near | first, "rank 0 prints the first of them"
        assert readers.read_by(rank) == {other for other in ranks if rank in readers.reads(other)}


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.data())
def test_what_one_expects_another_sends_and_equal_timelines_are_sent_once(shape, data):
    readers, *_ = job(*shape)
    ranks = range(math.prod(shape[:2]))
    digests = data.draw(st.lists(st.integers(1, 6), min_size=len(ranks), max_size=len(ranks)))
    expected = {rank: sources(rank, readers.reads(rank), digests) for rank in ranks}
    for rank, by_digest in expected.items():
        assert set(by_digest) | {digests[rank]} == {digests[other] for other in readers.reads(rank)}
        assert all(digests[sender] == digest != digests[rank] for digest, sender in by_digest.items())
    for sender in ranks:
        wanted = [rank for rank in ranks if sender in expected[rank].values()]
        assert list(receivers(sender, readers, digests)) == wanted


def test_in_a_large_job_a_rank_reads_the_timelines_of_a_few_nodes():
    readers, *_ = job(stages=16, wide=1024, per_node=8)  # 16,384 ranks
    assert max(len(readers.reads(rank)) for rank in range(1, 16384, 97)) == 32
    assert max(len(readers.read_by(rank)) for rank in range(16, 16384, 97)) == 32


# ---- on real ranks ----


def timeline(rank, equal):
    seconds = 1.0 if equal else 1.0 + rank
    return Timeline(rank if not equal else 0, seconds, (Span(Kind.FORWARD, 0.0, seconds, 0),))


class Recorded:
    """Records the same timeline in each iteration."""

    free = True

    def __init__(self, recorded):
        self.recorded, self.recording = recorded, False

    def iteration_begin(self):
        self.recording = True

    def iteration_end(self): ...

    def take(self):
        taken, self.recording = self.recording, False
        return self.recorded if taken else None


class Counted(Collective):
    """Counts the bytes that this rank sends to others, or cannot listen."""

    sent = 0
    deaf = broken = False

    def listen(self, purpose):
        if self.deaf:
            raise ConfigError("no port is left")
        return super().listen(purpose)

    def through(self, door, endpoints, most_seconds=math.inf):
        transfers = super().through(door, endpoints, min(most_seconds, 2.0) if most_seconds < math.inf else math.inf)
        swap = transfers.swap

        def counted(send, receive):
            if self.broken:
                raise ProtocolError("cut off")
            self.sent += len(send)
            swap(send, receive)

        transfers.swap = counted
        return transfers


def _profile(rank, world, equal, deaf, broken):
    """Four stages of two ranks, a rank on a node: the seconds of each timeline that is here, how often it was sent."""
    readers, *_ = job(4, 2, 1)
    failures = []
    profiles = []
    with Counted() as collective:
        collective.deaf, collective.broken = rank == deaf, rank == broken
        profiler = Profiler(
            rank, Recorded(timeline(rank, equal)), collective, Profiling(1, 2),
            lambda profile: profiles.append(profile) or 1, on_failure=failures.append, sender=lambda: SenderFacts(rank),
            readers=lambda: readers,
        )  # fmt: skip
        for step in range(1, 7):
            profiler.iteration_begin(step)
            profiler.iteration_end(step)
        collective.barrier()
        seconds = {}
        for other in range(world):
            with suppress(FtError, IndexError):
                seconds[other] = profiles[0].timelines[other].seconds
        if profiles:
            assert [one.ready_seconds for one in profiles[0].senders] == list(range(world)), "facts go to all"
        return seconds, collective.sent, profiler.phase.value, "; ".join(failures)


def test_ranks_have_the_timelines_that_they_read_and_no_others(ranks):
    readers, *_ = job(4, 2, 1)
    for rank, (seconds, sent, phase, _) in enumerate(ranks(_profile, 8, False, -1, -1)):
        assert seconds == {other: 1.0 + other for other in readers.reads(rank)}
        assert sent == len(readers.read_by(rank)) - 1 and phase == ProfilingPhase.WATCHING.value
    assert len(readers.reads(3)) == 4, "of eight"


def test_equal_timelines_are_not_sent(ranks):
    readers, *_ = job(4, 2, 1)
    for rank, (seconds, sent, _, _) in enumerate(ranks(_profile, 8, True, -1, -1)):
        assert seconds == dict.fromkeys(readers.reads(rank), 1.0) and sent == 0


def test_if_a_rank_cannot_listen_all_have_all(ranks):
    for seconds, sent, phase, _ in ranks(_profile, 8, False, 5, -1):
        assert seconds == {other: 1.0 + other for other in range(8)} and sent == 0
        assert phase == ProfilingPhase.WATCHING.value


def test_a_rank_that_does_not_receive_them_ends_the_profile_of_all(ranks):
    found = ranks(_profile, 8, False, -1, 3)
    assert {phase for *_, phase, _ in found} == {ProfilingPhase.OFF.value}
    assert "cut off" in found[3][3] and all(said for *_, said in found)


def test_an_altered_timeline_is_refused():
    readers, *_ = job(2, 1, 1)

    class Altering:
        def __enter__(self):
            return self

        def __exit__(self, *_): ...

        def swap(self, send, receive):
            for into in receive.values():
                into[:] = np.frombuffer(b"altered!", dtype=np.uint8)

    class Two:
        def listen(self, purpose):
            return type("Door", (), {"endpoint": ("h", 1), "close": lambda self: None})()

        def through(self, door, endpoints, most_seconds):
            assert most_seconds <= 60, "training waits"
            return Altering()

        def start_gather(self, payload): ...

    exchange = TimelineExchange(0, Two(), readers)
    own = exchange.summary(RankSummary(), b"timeline")
    exchange.start([own, own._replace(digest=1)])
    with pytest.raises(ProtocolError, match="the timeline of rank 1 was altered"):
        exchange.result()
