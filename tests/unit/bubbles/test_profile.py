"""How a job comes by a profile, keeps it, and gives it up: all ranks in step, by counting."""

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import msgpack
import pytest

from ft_plugins.bubbles.gate.gate import edge_tolerance
from ft_plugins.bubbles.profile import TRANSITIONS, Profiler, Profiling, ProfilingPhase
from ft_plugins.bubbles.timeline.timeline_exchange import TimelineExchange
from ft_plugins.bubbles.timeline.timeline_values import Packed, pack, unpack
from ft_plugins.errors import ProtocolError
from ft_plugins.model.timeline import Kind, Profile, SenderFacts, Span, Timeline

SETTINGS = Profiling(warmup=2, iterations=3, watch_every=1, ask_every=4, tolerance=0.1, misses=3)


def lasting(rank, seconds):
    """Reduces for a quarter of `seconds`, rank 2 for an eighth."""
    spans = (Span(Kind.FORWARD, 0, seconds, 0), Span(Kind.BACKWARD, seconds, 2 * seconds, 0))
    reduced = seconds / (8 if rank == 2 else 4)
    return Timeline(rank, 3 * seconds, (*spans, Span(Kind.REDUCE, 2 * seconds, 2 * seconds + reduced)))


def facts(rank):
    """What a rank knows of what it sends."""
    return SenderFacts(0.5 + rank, 100 * rank)


@dataclass
class Round:
    """A gather that all ranks have to have started before one reads it."""

    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Place:
    """One rank's part in a gather."""

    round: Round
    ranks: int

    def result(self):
        return [self.round.parts[rank] for rank in range(self.ranks)]


class Collective:
    """Of one rank: its n-th gather is that of the others."""

    def __init__(self, rank, ranks, rounds):
        self.rank, self.ranks, self.rounds = rank, ranks, rounds
        self.started = 0

    def start_gather(self, payload):
        if self.started == len(self.rounds):
            self.rounds.append(Round())
        found = self.rounds[self.started]
        found.parts[self.rank] = payload
        self.started += 1
        return Place(found, self.ranks)


class Recorder:
    """Records what it is given: a timeline, nothing, or an error."""

    def __init__(self):
        self.next = None
        self.recording = False
        self.free = True

    def iteration_begin(self):
        self.recording = True

    def iteration_end(self): ...

    def take(self):
        taken, self.recording = self.recording, False
        if isinstance(self.next, Exception) and taken:
            raise self.next
        return self.next if taken and isinstance(self.next, Timeline) else None


class Job:
    """Some ranks, driven iteration by iteration."""

    def __init__(self, ranks=3, settings=SETTINGS):
        rounds = []
        self.profiles = [[] for _ in range(ranks)]
        self.agreed = [[] for _ in range(ranks)]
        self.failures = [[] for _ in range(ranks)]
        self.recorders = [Recorder() for _ in range(ranks)]
        self.moved = [0] * ranks
        self.profilers = [
            Profiler(
                rank, self.recorders[rank], Collective(rank, ranks, rounds), settings,
                partial(self.make_of, rank), self.agreed[rank].append, self.failures[rank].append,
                partial(self.knows, rank), partial(self.moved.__getitem__, rank),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        self.step = self.made = 0
        self.broken = None
        self.sending = set()  # ranks whose copies go
        self.phases = []

    def make_of(self, rank, profile):
        """What a rank makes of a profile: another number of each one."""
        self.profiles[rank].append(profile)
        return self.made or 100 * len(self.profiles[rank]) + rank

    def knows(self, rank):
        if isinstance(self.broken, Exception):
            raise self.broken
        return facts(rank)

    def iterate(self, times, seconds=1.0, **unlike):
        """`times` iterations in which all ranks measure `seconds`; rank `r` measures `unlike['r<r>']`."""
        for _ in range(times):
            self.step += 1
            for rank, profiler in enumerate(self.profilers):
                measured = unlike.get(f"r{rank}", seconds)
                number = isinstance(measured, (int, float))
                self.recorders[rank].next = lasting(rank, measured) if number else measured
                profiler.iteration_begin(self.step)
            for rank in self.sending:
                self.moved[rank] += 1
            for profiler in self.profilers:
                profiler.iteration_end(self.step)
            phases = {profiler.phase for profiler in self.profilers}
            assert len(phases) == 1, f"ranks are apart in iteration {self.step}: {phases}"
            self.phases.append(phases.pop())


def test_after_warming_up_and_two_messages_all_ranks_have_the_same_profile():
    job = Job()
    job.iterate(2, 50.0)  # warming up: not recorded
    job.iterate(3, 1.0, r2=2.0)
    job.iterate(1, 70.0)
    assert job.profilers[0].profile is None, "sizes are told, timelines under way"
    job.iterate(1)
    expected = Profile((lasting(0, 1), lasting(1, 1), lasting(2, 2)), (facts(0), facts(1), facts(2)))
    assert [profiler.profile for profiler in job.profilers] == [expected] * 3
    assert job.profiles == [[expected]] * 3, "told once"
    warming, recording = [ProfilingPhase.WARMING], [ProfilingPhase.RECORDING] * 3
    assert job.phases == [*warming, *recording, ProfilingPhase.SIZING, ProfilingPhase.SHARING, ProfilingPhase.AGREEING]
    assert job.agreed == [[]] * 3
    job.iterate(1)
    assert job.agreed == [[[100, 101, 102]]] * 3, "what each has made of it"
    assert job.phases[-1] is ProfilingPhase.WATCHING


def test_what_reductions_take_is_known_and_no_timeline_unpacked_but_the_own_one():
    job = Job()
    job.iterate(8)
    for rank, profiler in enumerate(job.profilers):
        found = profiler.profile
        assert found is not None and isinstance(found.timelines, Packed)
        assert found.reduce_work == (0.125,), "of 0.25, 0.25 and 0.125 seconds"
        assert set(found.timelines.unpacked) == {rank}


def test_a_number_beyond_all_bounds_ends_nothing():
    job = Job()
    job.made = 1 << 70
    job.iterate(8)
    assert job.agreed == [[[(1 << 63) - 1] * 3]] * 3


def test_every_step_of_a_profile_is_one_of_the_table():
    job = Job()
    job.iterate(30)
    job.iterate(30, 2.0)
    job.iterate(10, None, r0=OSError("gone"))
    pairs = {(before, after) for before, after in pairwise(job.phases) if before is not after}
    assert all(after in TRANSITIONS[before] for before, after in pairs)
    assert job.phases[-1] is ProfilingPhase.OFF


def test_iterations_of_another_shape_are_named():
    job = Job()
    job.iterate(3)
    cut = Timeline(1, 9, lasting(1, 9).spans[:1])
    job.iterate(1, r1=cut)
    job.iterate(3)
    assert [profiler.left_out for profiler in job.profilers] == [{1: (4,)}] * 3
    assert job.profilers[2].profile == Profile(
        tuple(lasting(rank, 1) for rank in range(3)), tuple(facts(rank) for rank in range(3))
    )


def test_an_iteration_in_which_copies_went_is_left_out_and_named():
    job = Job()
    job.iterate(2)
    job.sending = {1}
    job.iterate(1, 50.0)
    job.sending = set()
    job.iterate(4)
    assert [profiler.left_out for profiler in job.profilers] == [{1: (3,)}] * 3
    found = job.profilers[2].profile
    assert found is not None and found.timelines[1] == lasting(1, 1.0)
    assert found.timelines[0].seconds == 3.0, "a median: of 150, 3 and 3"


def test_where_copies_went_in_all_iterations_others_are_recorded():
    job = Job()
    job.sending = {0, 1, 2}
    job.iterate(7, 50.0)
    assert job.phases[-1] is ProfilingPhase.RECORDING and not job.failures[0]
    job.sending = set()
    job.iterate(5)
    assert job.profiles[0] and job.profiles[0][0].timelines[0] == lasting(0, 1.0)


def test_copies_that_go_while_a_profile_is_watched_do_not_matter():
    job = Job()
    job.iterate(8)
    job.sending = {0, 1, 2}
    job.iterate(9, 2.0)
    assert ProfilingPhase.RECORDING in job.phases[8:], "it is missed all the same"


def test_a_rank_that_cannot_say_what_it_sends_ends_the_profile_on_all():
    job = Job()
    job.broken = OSError("gone")
    job.iterate(8)
    assert [profiler.phase for profiler in job.profilers] == [ProfilingPhase.OFF] * 3
    assert job.failures == [["rank 0: OSError: gone"]] * 3


def test_when_one_rank_misses_the_profile_too_often_all_record_again():
    job = Job()
    job.iterate(8)
    job.iterate(2, 1.0, r1=1.5)  # slow now and then
    job.iterate(8)
    assert ProfilingPhase.RECORDING not in job.phases[8:]
    job.iterate(20, 1.0, r1=1.5)
    assert [len(told) for told in job.profiles] == [2] * 3
    assert [told[-1] for told in job.agreed] == [[200, 201, 202]] * 3
    assert all(profiler.profile == job.profiles[0][-1] for profiler in job.profilers)
    assert job.profiles[0][-1].timelines[1] == lasting(1, 1.5)
    assert job.phases[-1] in (ProfilingPhase.WATCHING, ProfilingPhase.ASKING)
    recorded = job.phases.count(ProfilingPhase.RECORDING)
    job.iterate(20, 1.0, r1=1.5)
    assert job.phases.count(ProfilingPhase.RECORDING) == recorded, "the new one fits"


@pytest.mark.parametrize(("slower", "again"), [(1.08, True), (1.06, False)])
def test_where_iterations_are_long_a_profile_is_taken_anew_as_soon_as_bubbles_are_left_alone(slower, again):
    """An iteration of 15 s with an edge after 11.25 s: 0.9 s off are more than a twentieth of it, 0.68 s are not."""
    job = Job()
    job.iterate(8, 5.0)
    assert 2.25 * 5.0 * 0.08 > edge_tolerance(15.0) > 2.25 * 5.0 * 0.06
    job.iterate(20, 5.0 * slower)
    assert len(job.profiles[0]) == (2 if again else 1)


def test_what_missed_an_old_profile_does_not_count_against_the_new_one():
    job = Job()
    job.iterate(8)
    while len(job.agreed[0]) < 2:
        job.iterate(1, 2.0)
    recorded = job.phases.count(ProfilingPhase.RECORDING)
    for seconds in (3.0, 2.0, 3.0, 3.0, 2.0):
        job.iterate(1, seconds)
    assert job.phases[-2] is ProfilingPhase.ASKING
    assert job.phases.count(ProfilingPhase.RECORDING) == recorded


def test_while_another_profile_is_made_the_old_one_holds():
    job = Job()
    job.iterate(8)
    while job.phases[-1] is not ProfilingPhase.SHARING:
        job.iterate(1, 2.0)
    assert job.profilers[0].profile == job.profiles[0][0]


@pytest.mark.parametrize("when", [4, 12])
def test_an_error_on_one_rank_ends_the_profile_of_all_and_nothing_else(when):
    job = Job()
    job.iterate(when)
    job.iterate(1, r1=OSError("the clock has gone"))
    job.iterate(20)
    assert job.phases[-1] is ProfilingPhase.OFF
    assert [profiler.profile for profiler in job.profilers] == [None] * 3
    assert all(len(told) == 1 and "rank 1" in told[0] for told in job.failures)
    assert "OSError: the clock has gone" in job.failures[1][0], "the rank itself knows why"


@pytest.mark.parametrize("when", [1, 2, 5, 6, 7, 8, 12])  # the end of each phase: 5 SIZING, 6 SHARING, 7 AGREEING
def test_where_ranks_can_no_longer_gather_the_profile_ends_and_nothing_else(when, monkeypatch):
    reason = "rank 1: the connection to rank 2 is lost"
    closed = []

    def lost(place):
        raise ProtocolError(reason)

    job = Job()
    job.iterate(when)
    monkeypatch.setattr(Place, "result", lost)
    monkeypatch.setattr(TimelineExchange, "close", lambda exchange: closed.append(exchange))
    job.iterate(20)
    assert job.phases[-1] is ProfilingPhase.OFF
    assert [profiler.profile for profiler in job.profilers] == [None] * 3
    assert job.failures == [[reason]] * 3
    assert len(closed) == (3 if when <= 5 else 0), "a rank that listens for timelines no longer does"


def test_a_rank_that_never_gets_a_recording_ends_it_after_some_attempts():
    job = Job()
    job.iterate(2 + 2 * 5, r2=None)
    assert job.phases[-1] is ProfilingPhase.RECORDING, "tried again"
    job.iterate(5, r2=None)
    assert job.phases[-1] is ProfilingPhase.OFF
    assert job.failures[0] == ["rank 2 recorded no iteration in 3 attempts of 3 iterations"]


def test_a_timeline_is_unpacked_as_it_was_packed():
    spans = (Span(Kind.RECV, 0.1, 0.2), Span(Kind.BACKWARD, 0.3, 0.4, 5, 1))
    one = Timeline(7, 3.5, spans, (10, 2**40), (0.0, 0.1, 0.2))
    assert unpack(pack(one)) == one


def test_of_a_job_only_those_timelines_are_unpacked_that_are_asked_for():
    each = [lasting(rank, 1.0 + rank) for rank in range(6)]
    packed = Packed([msgpack.packb(pack(one)) for one in each])
    assert len(packed) == 6 and packed[4] is packed[4] and packed[1:3] == (each[1], each[2])
    assert packed[-2] == each[4] and packed.unpacked == {rank: each[rank] for rank in (1, 2, 4)}
    with pytest.raises(IndexError):
        packed[6]
    assert packed == tuple(each) and packed != tuple(each[:5]) and packed != tuple(reversed(each))
