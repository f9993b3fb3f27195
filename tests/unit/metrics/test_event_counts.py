"""Events are counted once each, however their files grow, fill up and break off."""

import os
import time

import pytest

from ft_plugins.events import Events, Severity, catalogue, file_sink, stream
from ft_plugins.metrics.event_counts import EventCounts

SUMMED = {"fence.waited": ["seconds"], "snapshot.sealed": ["bytes"]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def rank(path, number):
    events = Events("n", number)
    events.subscribe(file_sink(path))
    return events


def test_events_are_counted_and_summed_by_rank_and_the_next_reading_adds_only_what_is_new(path):
    counts = EventCounts(path, SUMMED)
    assert counts.read().values == {}, "a history that is not there yet"
    zero, one, smp = rank(path, 0), rank(path, 1), rank(path, None)
    zero.emit(catalogue.FENCE_WAITED, iteration=3, seconds=0.25)
    one.emit(catalogue.FENCE_WAITED, iteration=3, seconds=0.5)
    smp.emit(catalogue.SMP_LOST, pid=1)
    assert counts.read().of("fence.waited", "seconds") == {0: 0.25, 1: 0.5}
    one.emit(catalogue.FENCE_WAITED, iteration=4, seconds=1.5)
    later = counts.read()
    assert later.of("fence.waited", "seconds") == {0: 0.25, 1: 2.0}
    assert later.of("fence.waited") == {0: 1, 1: 2} and later.of("smp.lost") == {None: 1}
    assert later.of("slot.lost") == {}


def test_the_alarm_that_stands_is_the_one_that_status_shows_and_is_not_of_an_ended_incarnation(path):
    counts, smp = EventCounts(path, SUMMED), rank(path, None)
    assert counts.read().alarm == ""
    began = time.time()
    story = (
        (catalogue.SMP_LOST, "smp.lost"), (catalogue.EXCHANGE_RECOVERED, "smp.lost"),
        (catalogue.PROTECTION_RESTORED, ""), (catalogue.EXCHANGE_SLOWED, "exchange.slowed"),
        (catalogue.SMP_LOST, "smp.lost"), (catalogue.PROTECTION_RESTORED, ""), (catalogue.JOB_ENDED, ""),
        (catalogue.JOB_HUNG, "job.hung"), (catalogue.RANKS_RESUMED, "job.hung"),
        (catalogue.INCARNATION_FENCED, "job.hung"), (catalogue.JOB_STARTED, "job.hung"),
        (catalogue.RANKS_RESUMED, ""), (catalogue.WORKERS_KILLED, "workers.killed"),
        (catalogue.INCARNATION_FENCED, "workers.killed"), (catalogue.STATE_LOST, "state.lost"),
        (catalogue.RANKS_RESUMED, "state.lost"), (catalogue.RANKS_RESUMED, "state.lost"),
        (catalogue.INCARNATION_FENCED, "state.lost"), (catalogue.INCARNATION_FENCED, "state.lost"),
        (catalogue.RANKS_RESUMED, ""),
    )  # fmt: skip
    for kind, stands in story:
        needed = {name: 1 for name, each in kind.fields.items() if each.needed}
        smp.emit(kind, **needed)
        if kind.severity is Severity.ALARM:
            assert 0 <= counts.read().alarm_ages[kind.name] <= time.time() - began
        shown = stream.standing_alarm(path)
        assert counts.read().alarm == (shown.name if shown else "") == stands


def test_routine_events_are_not_counted_again_by_their_summary(path):
    zero = rank(path, 0)
    for iteration in range(stream.SUMMED):
        zero.emit(catalogue.FENCE_WAITED, iteration=iteration, seconds=1.0)
    assert "routine.summed" in path.read_text()
    assert EventCounts(path, SUMMED).read().of("fence.waited", "seconds") == {0: float(stream.SUMMED)}


def test_no_event_is_lost_or_counted_twice_when_a_full_file_is_renamed(path, monkeypatch):
    monkeypatch.setattr(stream, "RECENT_LIMIT", 1000)
    follows, zero = EventCounts(path, SUMMED), rank(path, 0)
    for iteration in range(40):
        zero.emit(catalogue.FENCE_WAITED, iteration=iteration, seconds=1.0)
        assert follows.read().of("fence.waited", "seconds") == {0: iteration + 1.0}
    assert stream.recent_of(path).with_name("events.recent.jsonl.1").exists()


def test_no_event_is_counted_twice_when_a_file_is_renamed_amid_a_reading(path, monkeypatch):
    smp, before = rank(path, None), stream.rotated_of(path)
    for _ in range(3):
        smp.emit(catalogue.SMP_STARTED, pid=1)
    limit = path.stat().st_size // 2  # one line, and half of the next one
    os.replace(path, before)
    for _ in range(3):
        smp.emit(catalogue.SMP_LOST, pid=1)
    follows = EventCounts(path, SUMMED)
    add = follows._add

    def meanwhile(line):
        add(line)
        if b"smp.started" in line and follows._values[("smp.started", "", None)] == 2:
            os.replace(path, before)
            smp.emit(catalogue.SMP_ORPHANED, seconds=1.0)

    monkeypatch.setattr(follows, "_add", meanwhile)
    for _ in range(8):
        found = follows.read(limit)
    assert [found.of(f"smp.{name}") for name in ("started", "lost", "orphaned")] == [{None: 3}, {None: 3}, {None: 1}]
    follows.close()


def test_one_reading_is_bounded_and_a_line_is_counted_once_it_is_whole(path):
    zero = rank(path, 0)
    for iteration in range(10):
        zero.emit(catalogue.SNAPSHOT_SEALED, lineage=1, iteration=iteration, seconds=1.0, bytes=7, slot=0)
    lines = stream.recent_of(path).read_bytes().splitlines(keepends=True)
    counts = EventCounts(path, SUMMED)
    assert counts.read(limit=len(b"".join(lines[:5])) - 1).of("snapshot.sealed") == {0: 4}
    assert counts.read(limit=None).of("snapshot.sealed", "bytes") == {0: 70}
    with stream.recent_of(path).open("a") as file:
        file.write('{"time": 1, "name": "snapshot.sealed", "node": "n", "rank": 0, "pid": 1, "iteration": 10, ')
    assert counts.read().of("snapshot.sealed") == {0: 10}
    with stream.recent_of(path).open("a") as file:
        file.write('"seconds": 1.0, "bytes": 30}\n')
    assert counts.read().of("snapshot.sealed", "bytes") == {0: 100}


@pytest.mark.parametrize("line", ["", "{", '{"time": 1, "name": "fence.waited", "seconds": ', "\x00\xff", "[]", "7"])
def test_a_damaged_line_is_passed_over(path, line):
    path.write_text(line + "\n")
    rank(path, None).emit(catalogue.SMP_LOST, pid=1)
    assert EventCounts(path, SUMMED).read().of("smp.lost") == {None: 1}


def test_an_event_that_does_not_fit_the_catalogue_is_not_counted(path):
    good = '{"time": 1, "name": "fence.waited", "node": "n", "rank": 0, "pid": 1, "iteration": 4, "seconds": 0.5}\n'
    wrong = (
        good.replace("0.5", '"long"'),
        good.replace('"rank": 0', '"rank": "all"'),
        good.replace(', "seconds": 0.5', ""),
    )
    path.write_text("".join([*wrong, good]))
    counts = EventCounts(path, SUMMED).read()
    assert counts.of("fence.waited") == {0: 1} and counts.of("fence.waited", "seconds") == {0: 0.5}


def test_a_link_or_a_pipe_in_place_of_a_history_is_not_read(path, tmp_path):
    rank(tmp_path / "other.jsonl", None).emit(catalogue.SMP_LOST, pid=1)
    path.symlink_to(tmp_path / "other.jsonl")
    assert EventCounts(path, SUMMED).read().values == {}
    path.unlink()
    os.mkfifo(path)
    assert EventCounts(path, SUMMED).read().values == {}


def test_damaged_lines_are_passed_over_once_and_do_not_stop_the_rest(path):
    begin = '{"time": 1.0, "name": "fence.waited", "node": "n", "rank": 0, "pid": 1, "iteration": 4, "seconds": '
    deep = begin + "[" * 100_000 + "]" * 100_000 + "}"
    huge, unending, unknown = f"{begin}1{'0' * 400}}}", begin + "Infinity}", '{"time": 1.0, "name": "not.known"}'
    path.write_text("\n".join([deep, huge, unending, unknown, begin + "0.5}", ""]))
    counts = EventCounts(path, SUMMED)
    for _ in range(2):
        assert counts.read().of("fence.waited", "seconds") == {0: 0.5}
    assert counts.read().of("not.known") == {}, "names without end would take memory"


def test_a_line_that_is_longer_than_a_reading_does_not_hide_what_follows(path):
    path.write_bytes(b"x" * 5000 + b"\n")
    rank(path, 0).emit(catalogue.SMP_LOST, pid=1)
    counts = EventCounts(path, SUMMED)
    for _ in range(5000 // 1024 + 1):
        counts.read(1024)
    assert counts.read(1024).of("smp.lost") != {}
