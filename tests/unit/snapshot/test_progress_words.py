"""The progress words of a rank in the header page of its segment."""

import numpy as np
import pytest

from ft_plugins.bubbles.gate.gate import GATE_BYTES
from ft_plugins.model.progress import LONG, ProgressEdges, WorkPhase
from ft_plugins.model.timeline import Kind
from ft_plugins.snapshot.segment import header, progress_words
from ft_plugins.snapshot.segment.progress_words import KEPT, NoProgress, ProgressFacts, ProgressWriter
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape

FACTS = ProgressFacts(token=3, limit_seconds=None, stage=2, ranks=16, ranks_of_node=8)
SECOND = 10**9


class Clock:
    """The time, in seconds."""

    def __init__(self):
        self.now = 100.0

    def monotonic_ns(self):
        return round(self.now * SECOND)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress_words, "time", clock)
    return clock


@pytest.fixture
def segment(tmp_path):
    create(tmp_path / "segment", Shape(1 << 12, 1 << 10, 1, 5, 3, 0, 0), 4, {"some": "job"})
    segment = Segment(tmp_path / "segment")
    yield segment
    segment.close()


def words(segment, token=3):
    return progress_words.read(segment.rank, token, segment.bytes)


def known(segment):
    found = words(segment)
    assert found is not None
    return found


def test_the_words_lie_between_gate_and_fingerprint():
    assert header.GATE + GATE_BYTES <= header.PROGRESS and header.PROGRESS % 8 == 0
    assert header.PROGRESS + 8 * progress_words.WORDS <= header._FINGERPRINT


def test_a_segment_without_words_has_none(segment):
    assert words(segment) is None


def test_words_of_another_incarnation_are_none(segment):
    ProgressWriter(segment.path, FACTS)
    assert known(segment).done == 0
    assert words(segment, token=4) is None


def test_words_damage_nothing_in_the_header(segment):
    segment.header.token, segment.header.owner, segment.header.completed = 3, (7, 8), 9
    writer = ProgressWriter(segment.path, FACTS)
    for step in range(1, 40):
        writer.begin(step)
        writer.end(step)
    segment.check()
    assert segment.damaged == ()
    assert (segment.header.token, segment.header.owner, segment.header.completed) == (3, (7, 8), 9)
    assert segment.fingerprint == {"some": "job"}
    assert not segment.gate.any()


def test_what_a_rank_does_is_read_at_every_edge(segment, clock):
    writer = ProgressWriter(segment.path, FACTS)
    found = known(segment)
    assert (found.phase, found.stage, found.ranks, found.ranks_of_node) == (WorkPhase.STARTING, 2, 16, 8)
    assert found.limit_seconds is None and not found.shared and found.since == found.edge_at == 100.0
    clock.now = 101.0
    writer.begin(6)
    found = known(segment)
    assert (found.iteration, found.edges, found.phase, found.edge_at, found.since) == (
        6,
        1,
        WorkPhase.DATA,
        101.0,
        100.0,
    )
    writer.edge(WorkPhase.FORWARD)
    assert not known(segment).waits
    writer.shares_forward()
    assert known(segment).waits
    clock.now = 103.0
    writer.end(6)
    found = known(segment)
    assert (found.iteration, found.edges, found.phase, found.done, found.since) == (6, 3, WorkPhase.BETWEEN, 1, 103.0)
    assert found.first == 2.0 and found.seconds == () and found.longest == 0.0
    writer.close()
    assert known(segment).phase is WorkPhase.ENDED
    writer.edge(WorkPhase.DATA)  # does not raise, and changes nothing
    writer.close()
    assert known(segment).phase is WorkPhase.ENDED


@pytest.mark.parametrize(("seconds", "limit"), [(None, None), (0.0, 0.0), (2.5, 2.5), (1e30, 18446744073.709553)])
def test_the_limit_of_the_job_is_in_the_words(segment, seconds, limit):
    ProgressWriter(segment.path, ProgressFacts(3, seconds, 0, 2, 2))
    assert known(segment).limit_seconds == limit


def test_the_last_iterations_after_the_first_are_kept_with_what_was_computed_in_them(segment, clock):
    writer = ProgressWriter(segment.path, FACTS)
    for step in range(1, KEPT + 5):
        writer.begin(step)
        clock.now += 1  # reads data
        writer.edge(WorkPhase.FORWARD)
        clock.now += step
        writer.edge(WorkPhase.AFTER_FORWARD)
        clock.now += 4
        writer.edge(WorkPhase.AFTER_UPDATE)
        writer.end(step)
        if step == 3:
            assert known(segment).seconds == (7.0, 8.0)
    found = known(segment)
    assert found.seconds == tuple(5.0 + step for step in range(5, KEPT + 5))
    assert found.computed == tuple(1.0 + step for step in range(5, KEPT + 5))
    assert (found.first, found.longest, found.done) == (6.0, 5.0 + KEPT + 4, KEPT + 4)


@pytest.mark.parametrize("phase", [WorkPhase.EVALUATION, WorkPhase.SAVING])
def test_long_phases_are_left_out_and_are_progress_when_they_end(segment, clock, phase):
    writer = ProgressWriter(segment.path, FACTS)
    for step in (1, 2):
        writer.begin(step)
        clock.now += 2
        writer.edge(phase)
        clock.now += 500
        assert known(segment).since == 100.0 + (step - 1) * 502
        writer.edge(WorkPhase.AFTER_UPDATE)
        assert known(segment).since == clock.now
        writer.end(step)
    assert known(segment).seconds == (2.0,) and known(segment).longest == 2.0


@pytest.mark.parametrize(
    "only", [(WorkPhase.SAVING, WorkPhase.AFTER_UPDATE), (WorkPhase.EVALUATION, WorkPhase.EVALUATION)]
)
def test_what_one_rank_alone_saves_or_evaluates_does_not_put_it_ahead_of_the_others(segment, only):
    """Ranks of a stage are compared by their edges: rank 0 alone saves, then all go on."""
    writer = ProgressWriter(segment.path, FACTS)
    writer.begin(4)
    for phase in only:
        writer.edge(phase)
    assert known(segment).phase is only[-1]
    writer.edge(WorkPhase.FORWARD)
    assert known(segment).edges == 2, "those of a rank that did nothing else"


def test_an_iteration_of_hours_still_fits(segment, clock):
    writer = ProgressWriter(segment.path, FACTS)
    for step in (1, 2):
        writer.begin(step)
        clock.now += 10_000
        writer.edge(WorkPhase.FENCE)
        clock.now += 10_000
        writer.end(step)
    [seconds], [computed] = known(segment).seconds, known(segment).computed
    assert seconds == pytest.approx(4294.97, abs=0.01) and computed == pytest.approx(seconds / 2, rel=1e-3)
    assert known(segment).longest == 20_000.0


def test_spans_are_phases(segment):
    writer = ProgressWriter(segment.path, FACTS)
    edges = ProgressEdges(writer)
    for kind in Kind:
        edges.begin(kind, 1, 0)
        assert known(segment).phase.name == kind.name
        edges.end(kind, 1, 0)
        assert known(segment).phase is WorkPhase.SCHEDULE


def test_an_unknown_phase_is_of_another_version(segment):
    ProgressWriter(segment.path, FACTS)
    segment.bytes[header.PROGRESS : header.PROGRESS + 8].view(np.uint64)[0] = 200
    assert words(segment) is None


def test_every_phase_has_words_and_long_ones_have_large_numbers():
    assert all(phase.words and phase.long == (phase >= LONG) for phase in WorkPhase)
    assert {phase for phase in WorkPhase if phase.long} == {WorkPhase.EVALUATION, WorkPhase.SAVING, WorkPhase.ENDED}


def test_without_a_segment_edges_go_nowhere():
    silent = NoProgress()
    silent.begin(1)
    silent.edge(WorkPhase.FORWARD)
    silent.end(1)
    silent.shares_forward()
    silent.close()
