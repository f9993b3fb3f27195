"""A file of events is followed while it grows, is renamed, or is not there yet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ft_plugins.events import Event, Events, catalogue, file_sink
from ft_plugins.events.tail import Tail


def line(number: int) -> str:
    return Event("job.started", float(number), "a").line() + "\n"


def numbers(tail: Tail) -> list[int]:
    return [int(event.time) for event in tail.look()]


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_each_event_is_seen_once_and_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert numbers(tail) == []
    append(path, line(1) + line(2)[:20])
    assert numbers(tail) == [1]
    append(path, line(2)[20:] + "damaged\n" + line(3))
    assert numbers(tail) == [2, 3] and numbers(tail) == []
    tail.close()


def test_nothing_is_lost_when_the_file_is_renamed_and_a_new_one_begins(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path.with_name("events.jsonl.1"), line(1))
    append(path, line(2))
    tail = Tail(path)
    assert numbers(tail) == [1, 2]
    append(path, line(3))
    os.replace(path, path.with_name("events.jsonl.1"))
    append(path, line(4))
    assert numbers(tail) == [3, 4]
    path.unlink()
    assert numbers(tail) == []
    append(path, line(5))
    assert numbers(tail) == [5]
    tail.close()


def test_a_file_that_was_cut_is_read_from_its_begin(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, line(1) + line(2))
    tail = Tail(path)
    assert numbers(tail) == [1, 2]
    path.write_text(line(3))
    assert numbers(tail) == [3]
    tail.close()


def test_a_stream_that_makes_room_for_itself_is_followed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_plugins.events.stream.FILE_LIMIT", 400)
    path, events = tmp_path / "events.jsonl", Events("n")
    events.subscribe(file_sink(path))
    tail, seen = Tail(path), []
    for number in range(20):
        events.emit(catalogue.JOB_STARTED, nproc=number, script="")
        seen += [event.fields["nproc"] for event in tail.look()]
    assert seen == list(range(20))
    tail.close()
