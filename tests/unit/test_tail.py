"""A file of events is followed while it grows, is renamed, or is not there yet."""

import json
import os

import pytest

from ft_plugins.events import Event, Events, catalogue, file_sink
from ft_plugins.events import tail as tails
from ft_plugins.events.tail import LineTail, Tail


def line(number):
    return Event("job.started", float(number), "a").line() + "\n"


def numbers(tail):
    return [int(event.time) for event in tail.look()]


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_each_event_is_seen_once_and_half_a_line_waits_for_its_end(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert numbers(tail) == []
    append(path, line(1) + line(2)[:20])
    assert numbers(tail) == [1]
    append(path, line(2)[20:] + "damaged\n" + line(3))
    assert numbers(tail) == [2, 3] and numbers(tail) == []
    tail.close()


def test_nothing_is_lost_when_the_file_is_renamed_and_a_new_one_begins(tmp_path):
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


def lines_of(file, limit=None):
    return [int(json.loads(each)["time"]) for each in file.look(limit)]


def renamed(path):
    os.replace(path, path.with_name("events.jsonl.1"))


@pytest.mark.parametrize("moment", range(10))
def test_each_line_comes_once_whenever_the_file_is_renamed(tmp_path, monkeypatch, moment):
    path, passed = tmp_path / "events.jsonl", 0
    append(path.with_name("events.jsonl.1"), line(1))
    append(path, line(2))

    def hooked(name):
        real = getattr(tails, name)

        def then(*given):
            meanwhile()
            found = real(*given)
            meanwhile()
            return found

        monkeypatch.setattr(tails, name, then)

    def meanwhile():
        nonlocal passed
        if passed == moment:
            append(path, line(3))
            renamed(path)
            append(path, line(4))
        passed += 1

    hooked("_opened")
    hooked("_same")
    file = LineTail(path)
    seen = [number for _ in range(4) for number in lines_of(file)]
    append(path, line(5))
    seen += [number for _ in range(2) for number in lines_of(file)]
    assert passed > moment
    assert seen == ([2, 3, 4, 5] if moment < 3 else [1, 2, 3, 4, 5]), "the oldest one is replaced before it was opened"
    file.close()


def test_a_look_is_bounded_and_files_that_are_renamed_meanwhile_are_read_all_the_same(tmp_path):
    path, limit, seen = tmp_path / "events.jsonl", 2 * len(line(1)), []
    append(path, "".join(map(line, range(8))))
    file = LineTail(path)
    for number in (8, 9, 10):
        seen.append(lines_of(file, limit))
        renamed(path)
        append(path, line(number))
    while found := lines_of(file, limit):
        seen.append(found)
    assert [number for each in seen for number in each] == list(range(11)) and max(map(len, seen)) <= 2
    file.close()


def test_a_line_that_is_longer_than_a_look_comes_in_pieces_and_takes_no_more_memory(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 25 + b"\n" + b"y\n")
    file = LineTail(path)
    assert [file.look(10) for _ in range(4)] == [[b"x" * 10], [b"x" * 10], [b"x" * 5, b"y"], []]
    file.close()


def test_a_link_and_a_pipe_are_not_read(tmp_path):
    path = tmp_path / "events.jsonl"
    append(tmp_path / "other", line(1))
    path.symlink_to(tmp_path / "other")
    os.mkfifo(path.with_name("events.jsonl.1"))
    tail = Tail(path)
    assert numbers(tail) == []
    os.replace(tmp_path / "other", path)
    assert numbers(tail) == [1]
    tail.close()


def test_a_file_that_was_cut_is_read_from_its_begin(tmp_path):
    path = tmp_path / "events.jsonl"
    append(path, line(1) + line(2))
    tail = Tail(path)
    assert numbers(tail) == [1, 2]
    path.write_text(line(3))
    assert numbers(tail) == [3]
    tail.close()


def test_a_stream_that_makes_room_for_itself_is_followed_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("ft_plugins.events.stream.FILE_LIMIT", 400)
    path, events = tmp_path / "events.jsonl", Events("n")
    events.subscribe(file_sink(path))
    tail, seen = Tail(path), []
    for number in range(20):
        events.emit(catalogue.JOB_STARTED, nproc=number, script="")
        seen += [event.fields["nproc"] for event in tail.look()]
    assert seen == list(range(20))
    tail.close()
