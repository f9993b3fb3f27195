"""A node in one word: the worse one goes first."""

from types import SimpleNamespace

import pytest

from ft_plugins.events import Events
from ft_plugins.smp.serve import owner
from ft_plugins.smp.serve.node_facts import facts_of
from ft_plugins.smp.serve.owner import SnapshotProcess
from ft_plugins.smp.serve.status import Signal, progress_of, signal_of
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Version

from .node_clusters import capture

SHAPE = Shape(nbytes=100, small_nbytes=10, buckets=1, layout=1)


@pytest.mark.parametrize(
    ("trainers_work", "exchange", "committed", "expected"),
    [
        (False, [1, 2], [1, 1], Signal.UNHEALTHY),
        (True, [1, 2], [1, 1], Signal.SNAP),
        (True, None, [1, 1], Signal.CLEAN),
        (True, None, None, Signal.HEALTHY),
    ],
)
def test_the_worst_is_said(trainers_work, exchange, committed, expected):
    tier = {"nodes": ["n0", "n1"], "exchange": exchange, "committed": committed}
    assert signal_of([], tier, trainers_work) is expected


def test_a_node_whose_smp_does_not_answer_is_offline(tmp_path):
    assert facts_of(tmp_path, {}, "it hangs")["signal"] == Signal.OFFLINE.value


def test_an_smp_says_it_of_its_node(node, sleeper):
    node.start()
    token = node.fence()
    with node.client() as client:
        segment = Segment(client.attach(0, token, SHAPE, {}, fresh=False))
        segment.header.owner = (sleeper.pid, liveness.started(sleeper.pid))
        segment.ranges = [(0, 100)]
        assert client.status()["signal"] == "HEALTHY"
        segment.dirty(0, Version(1, 1), token)
        assert client.status()["signal"] == "SNAP"
        capture(segment, 0, Version(1, 1), token=token)
        assert client.status()["signal"] == "CLEAN"
        sleeper.kill()
        sleeper.wait(300)
        assert client.status()["signal"] == "UNHEALTHY"


def test_a_lost_trainer_is_declared_when_there_is_room_for_it_and_one_that_moves_away_is_no_error(
    job, tmp_path, monkeypatch
):
    process, room, declared = SnapshotProcess(tmp_path, job, "n0", Events("n0")), [False], list[list[str]]()
    process._detect_seconds = -1.0
    process._segments = {0: SimpleNamespace(header=SimpleNamespace(owner=(4, 4))), 1: SimpleNamespace()}

    def declare(token, lost):
        if not room[0]:
            raise OSError("no space left on device")
        declared.append(lost)

    monkeypatch.setattr(process._tier, "declare_lost", declare)
    monkeypatch.setattr(process._transition, "drop_if_safe", lambda: None)
    monkeypatch.setattr(process._hangs, "look", lambda *args: None)
    monkeypatch.setattr(liveness, "is_stopped", lambda pid, began: True)
    process.check_trainers()
    room[0] = True
    process.check_trainers()
    process.check_trainers()
    assert declared == [["rank 0"]]


def test_a_trainer_is_not_lost_because_its_whole_node_was_suspended(job, tmp_path, monkeypatch):
    """It was stopped before its SMP was, and goes on after it."""
    process, now, declared = SnapshotProcess(tmp_path, job, "n0", Events("n0")), [100.0], list[list[str]]()
    process._detect_seconds, process._segments = 10.0, {0: SimpleNamespace(header=SimpleNamespace(owner=(4, 4)))}
    monkeypatch.setattr(process._tier, "declare_lost", lambda token, lost: declared.append(lost))
    monkeypatch.setattr(process._transition, "drop_if_safe", lambda: None)
    monkeypatch.setattr(liveness, "is_stopped", lambda pid, began: True)
    monkeypatch.setattr(owner, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def look(seconds):
        for _ in range(round(seconds / 0.2)):
            now[0] += 0.2
            process.check_trainers()

    process._checked = now[0]
    look(1.0)
    now[0] += 3600.0
    look(9.0)
    assert not declared
    look(2.0)
    assert declared == [["rank 0"]], "it does not go on"


@pytest.mark.parametrize(
    ("base", "segments", "expected"),
    [
        (6, [(7, 8), (7, 9)], (6, 8)),  # the least advanced rank
        (0, [(7, 3)], (0, 3)),  # from the beginning
        (13, [(7, 0)], (13, 13)),  # the framework's own checkpoint, before the first iteration is completed
        (6, [(7, 8), (6, 8)], None),  # a rank has not opened the lineage of this incarnation
        (None, [(7, 8)], None),
        (6, [], None),
    ],
)
def test_how_far_an_incarnation_came_from_where(base, segments, expected):
    known = [{"attached": True, "lineage_token": token, "completed": done} for token, done in segments]
    left = {"attached": False, "lineage_token": 2, "completed": 99}  # of an earlier, larger incarnation
    assert progress_of({"segments": [*known, left], "history": {"base": base}}, 7) == expected
