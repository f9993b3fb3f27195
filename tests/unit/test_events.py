"""The event stream: whole lines from many processes at once, and a full disk that costs lines only."""

from __future__ import annotations

import ctypes
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.events import Event, Events, file_sink, read

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.text(min_size=1).filter(lambda name: name not in ("name", "time", "node", "rank", "pid"))


@given(st.text(), st.floats(0, 2e9), st.text(), st.none() | st.integers(0, 4096), st.dictionaries(names, plain))
def test_an_event_is_one_line_and_is_read_back_as_it_was(
    name: str, time: float, node: str, rank: int | None, fields: dict[str, object]
) -> None:
    event = Event(name, time, node, rank, 5, fields)
    assert "\n" not in event.line()
    path = Path(f"/tmp/ftu-events-{os.getpid()}")
    path.write_text(event.line() + "\n")
    try:
        assert list(read(path)) == [event]
    finally:
        path.unlink()


def test_an_event_tells_who_speaks_and_reaches_every_sink_in_order(tmp_path: Path) -> None:
    seen: list[tuple[int, Event]] = []
    events = Events("node7", rank=3)
    events.subscribe(lambda event: seen.append((1, event)))
    events.subscribe(file_sink(tmp_path / "events.jsonl"))
    events.subscribe(lambda event: seen.append((2, event)))
    event = events.emit("capture.commit", iteration=5, path=tmp_path)
    assert seen == [(1, event), (2, event)]
    assert (event.name, event.node, event.rank, event.pid) == ("capture.commit", "node7", 3, os.getpid())
    (found,) = read(tmp_path / "events.jsonl")
    assert found.fields == {"iteration": 5, "path": str(tmp_path)} and found.time == event.time
    assert stat.S_IMODE((tmp_path / "events.jsonl").stat().st_mode) == 0o600


def test_a_field_that_says_whom_it_is_about_stands_in_the_speakers_place(tmp_path: Path) -> None:
    events = Events("n")
    events.subscribe(file_sink(tmp_path / "e"))
    events.emit("worker.failed", rank=9, exitcode=1)
    (found,) = read(tmp_path / "e")
    assert found.rank == 9 and found.fields == {"exitcode": 1}


def test_lines_of_many_processes_never_interleave(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    children = []
    for writer in range(4):
        pid = os.fork()
        if pid == 0:
            events = Events("n", writer)
            events.subscribe(file_sink(path))
            for number in range(200):
                events.emit("x.y", number=number, filler="z" * (number * 40))
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    found = list(read(path))
    assert len(found) == 800
    for writer in range(4):
        assert [event.fields["number"] for event in found if event.rank == writer] == list(range(200))


def test_a_last_line_cut_short_is_left_out_and_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert list(read(tmp_path / "none")) == []
    whole = [Event("a.b", 1.0, fields={"n": number}) for number in range(2)]
    text = "".join(event.line() + "\n" for event in whole)
    for cut in range(1, len(whole[1].line()) + 1):
        (tmp_path / "e").write_text(text[:-cut])
        assert list(read(tmp_path / "e")) == whole[:1]


def test_a_device_that_is_full_costs_the_line_not_the_job() -> None:
    events = Events("n")
    events.subscribe(file_sink(Path("/dev/full")))
    assert events.emit("a.b").name == "a.b"


def test_an_event_file_that_cannot_be_opened_loses_the_event_and_nothing_else(tmp_path: Path) -> None:
    events, heard = Events("n"), []
    events.subscribe(file_sink(tmp_path / "missing" / "events.jsonl"))
    events.subscribe(heard.append)
    events.emit("a.b")
    assert [event.name for event in heard] == ["a.b"]


def test_an_event_file_that_is_full_makes_room_and_the_one_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_plugins.events.FILE_LIMIT", 400)
    path = tmp_path / "events.jsonl"
    events = Events("n")
    events.subscribe(file_sink(path))
    for number in range(20):
        events.emit("a.b", number=number)
    kept = [event.fields["number"] for place in (tmp_path / "events.jsonl.1", path) for event in read(place)]
    assert kept == list(range(20))[-len(kept) :] and len(kept) >= 4
    assert {found.name for found in tmp_path.iterdir()} <= {"events.jsonl", "events.jsonl.1"}
    assert all(found.stat().st_size < 600 for found in tmp_path.iterdir())


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of two pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(tmp_path), b"tmpfs", 0, b"size=8192") != 0:
        pytest.skip(f"no tmpfs can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield tmp_path
    assert libc.umount(bytes(tmp_path)) == 0


def test_what_was_written_before_and_after_a_disk_was_full_can_be_read(small_mount: Path) -> None:
    """Given a disk that fills up in the middle of a line, and has room again later."""
    path, ballast = small_mount / "events.jsonl", small_mount / "ballast"
    ballast.write_bytes(b"x" * 4096)
    events = Events("n")
    events.subscribe(file_sink(path))
    for number in range(60):
        events.emit("a.b", number=number, filler="y" * 50)
    ballast.unlink()
    for number in range(60, 70):
        events.emit("a.b", number=number)
    found = [event.fields["number"] for event in read(path)]
    assert found == sorted(found) and found[:10] == list(range(10)) and found[-8:] == list(range(62, 70))
    assert len(found) < 70, "some were lost"
    assert all(json.loads(event.line())["name"] == "a.b" for event in read(path))
