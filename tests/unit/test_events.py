"""The event stream: whole lines from many processes at once, and a full disk that costs lines only."""

import ctypes
import json
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.events import (
    SUMMED,
    Damage,
    Event,
    Events,
    EventType,
    Severity,
    catalogue,
    file_sink,
    log_sink,
    read,
    recent_of,
    standing_alarm,
    stream,
)
from ft_plugins.events.declaration import Field
from ft_plugins.events.stream import event_of
from harness.job_control import entries

HAPPENED = EventType(
    "a.b", Severity.NOTICE, "It happened.", number=Field("int", "which"), filler=Field("str", "of some length")
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.text(min_size=1).filter(lambda name: name not in ("name", "time", "node", "rank", "pid"))


unknown = st.text().filter(lambda name: name not in catalogue.EVENTS)


@given(unknown, st.floats(0, 2e9), st.text(), st.none() | st.integers(0, 4096), st.dictionaries(names, plain))
def test_an_event_is_one_line_and_is_read_back_as_it_was(name, time, node, rank, fields):
    event = Event(name, time, node, rank, 5, fields)
    assert "\n" not in event.line()
    path = Path(f"/tmp/ftu-events-{os.getpid()}")
    path.write_text(event.line() + "\n")
    try:
        assert list(read(path)) == [event]
    finally:
        path.unlink()


def test_an_event_tells_who_speaks_and_reaches_every_sink_in_order(tmp_path):
    seen = []
    events = Events("node7", rank=3)
    events.subscribe(lambda event: seen.append((1, event)))
    events.subscribe(file_sink(tmp_path / "events.jsonl"))
    events.subscribe(lambda event: seen.append((2, event)))
    event = events.emit(catalogue.SNAPSHOT_SEALED, iteration=5, seconds=0.5, bytes=7)
    assert seen == [(1, event), (2, event)]
    assert (event.name, event.node, event.rank, event.pid) == ("snapshot.sealed", "node7", 3, os.getpid())
    (found,) = read(tmp_path / "events.jsonl")  # a routine event stands in the file of recent ones
    assert found.fields == {"iteration": 5, "seconds": 0.5, "bytes": 7} and found.time == event.time
    assert stat.S_IMODE(recent_of(tmp_path / "events.jsonl").stat().st_mode) == 0o600


def test_a_field_that_says_whom_it_is_about_stands_in_the_speakers_place(tmp_path):
    events = Events("n")
    events.subscribe(file_sink(tmp_path / "e"))
    events.emit(catalogue.WORKER_FAILED, rank=9, exitcode=1)
    (found,) = read(tmp_path / "e")
    assert found.rank == 9 and found.fields == {"exitcode": 1}


def test_lines_of_many_processes_never_interleave(tmp_path):
    path = tmp_path / "events.jsonl"
    children = []
    for writer in range(4):
        pid = os.fork()
        if pid == 0:
            events = Events("n", writer)
            events.subscribe(file_sink(path))
            for number in range(200):
                events.emit(HAPPENED, number=number, filler="z" * (number * 40))
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    found = list(read(path))
    assert len(found) == 800
    for writer in range(4):
        assert [event.fields["number"] for event in found if event.rank == writer] == list(range(200))


def test_a_last_line_cut_short_is_left_out_and_a_missing_file_is_empty(tmp_path):
    assert list(read(tmp_path / "none")) == []
    whole = [Event("a.b", 1.0, fields={"n": number}) for number in range(2)]
    text = "".join(event.line() + "\n" for event in whole)
    for cut in range(1, len(whole[1].line()) + 1):
        (tmp_path / "e").write_text(text[:-cut])
        assert list(read(tmp_path / "e")) == whole[:1]


def test_a_device_that_is_full_costs_the_line_not_the_job():
    events = Events("n")
    events.subscribe(file_sink(Path("/dev/full")))
    assert events.emit(HAPPENED).name == "a.b"


def test_an_event_file_that_cannot_be_opened_loses_the_event_and_nothing_else(tmp_path):
    events, heard = Events("n"), []
    events.subscribe(file_sink(tmp_path / "missing" / "events.jsonl"))
    events.subscribe(heard.append)
    events.emit(HAPPENED)
    assert [event.name for event in heard] == ["a.b"]


def test_an_event_file_that_is_full_makes_room_and_the_one_before_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("ft_plugins.events.stream.FILE_LIMIT", 400)
    path = tmp_path / "events.jsonl"
    events = Events("n")
    events.subscribe(file_sink(path))
    for number in range(20):
        events.emit(HAPPENED, number=number)
    kept = [event.fields["number"] for event in read(path)]
    assert kept == list(range(20))[-len(kept) :] and len(kept) >= 4
    assert {found.name for found in tmp_path.iterdir()} <= {"events.jsonl", "events.jsonl.1"}
    assert all(found.stat().st_size < 600 for found in tmp_path.iterdir())


@pytest.mark.parametrize("iterations", [24_000, pytest.param(100_000, marks=pytest.mark.all_configurations)])
def test_a_recovery_stays_in_the_history_however_many_iterations_follow(tmp_path, monkeypatch, iterations):
    """One rank, with a thirty-second of the room that the ranks of a node share."""
    monkeypatch.setattr("ft_plugins.events.stream.FILE_LIMIT", 1 << 20)
    monkeypatch.setattr("ft_plugins.events.stream.RECENT_LIMIT", 1 << 20, raising=False)
    path = tmp_path / "events.jsonl"
    events = Events("n", 0)
    events.subscribe(file_sink(path))
    events.emit(catalogue.STATE_RESTORED, iteration=7)
    for iteration in range(8, 8 + iterations):
        events.emit(catalogue.FENCE_WAITED, iteration=iteration, seconds=0.001)
        events.emit(
            catalogue.SNAPSHOT_SEALED, lineage=2, iteration=iteration, seconds=0.25, bytes=1 << 30, slot=iteration % 3
        )
    events.emit(catalogue.RANK_ENDED)
    history = [event for place in (tmp_path / "events.jsonl.1", path) for event in read(place)]
    assert [event.name for event in history].count("state.restored") == 1
    summed = [event.fields for event in history if event.name == "routine.summed"]
    commits = [fields for fields in summed if fields["of"] == "snapshot.sealed"]
    assert sum(fields["count"] for fields in commits) == iterations
    assert sum(fields["count"] for fields in summed) == 2 * iterations
    assert (commits[0]["first"], commits[-1]["last"]) == (8, 7 + iterations)
    assert sum(found.stat().st_size for found in tmp_path.iterdir()) < 4 * (1 << 20)


def test_a_summary_says_how_often_from_when_to_when_and_which_was_the_longest(tmp_path):
    events = Events("n", 3)
    events.subscribe(file_sink(tmp_path / "events.jsonl"))
    for iteration in range(1, 2 * SUMMED + 1):
        seconds = 9.0 if iteration == 5 else 0.5
        events.emit(catalogue.SNAPSHOT_SEALED, lineage=1, iteration=iteration, seconds=seconds, bytes=10, slot=0)
    first, second = (e for e in read(tmp_path / "events.jsonl") if e.name == "routine.summed")
    assert first.rank == 3 and first.fields == {
        "of": "snapshot.sealed", "count": SUMMED, "first": 1, "last": SUMMED, "seconds": 0.5 * (SUMMED - 1) + 9.0,
        "longest": 9.0, "longest_at": 5, "bytes": 10 * SUMMED,
    }  # fmt: skip
    assert (second.fields["first"], second.fields["last"], second.fields["longest"]) == (SUMMED + 1, 2 * SUMMED, 0.5)


def test_what_came_before_an_event_of_note_stands_before_it_and_every_recent_event_can_be_read(tmp_path):
    path = tmp_path / "events.jsonl"
    events = Events("n", 0)
    events.subscribe(file_sink(path))
    events.emit(catalogue.RANK_ATTACHED)
    for iteration in (1, 2, 3):
        events.emit(catalogue.FENCE_WAITED, iteration=iteration, seconds=0.5)
    events.emit(catalogue.PROTECTION_LOST, reason="no SMP")
    events.emit(catalogue.FENCE_WAITED, iteration=4, seconds=0.5)
    names = [json.loads(line)["name"] for line in path.read_text().splitlines()]
    assert names == ["rank.attached", "routine.summed", "protection.lost"]
    assert stat.S_IMODE(recent_of(path).stat().st_mode) == 0o600
    both = ["rank.attached", *["fence.waited"] * 3, "routine.summed", "protection.lost", "fence.waited"]
    assert [event.name for event in read(path)] == both == [entry["name"] for entry in entries(path)]


def test_threads_of_one_process_share_a_summary(tmp_path):
    events = Events("n", 0)
    events.subscribe(file_sink(tmp_path / "events.jsonl"))
    threads = [
        threading.Thread(
            target=lambda: [events.emit(catalogue.FENCE_WAITED, iteration=i, seconds=1.0) for i in range(500)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events.emit(catalogue.RANK_ENDED)
    summed = [event.fields["count"] for event in read(tmp_path / "events.jsonl") if event.name == "routine.summed"]
    assert sum(summed) == 2000 and max(summed) <= SUMMED


@pytest.fixture
def small_mount(tmp_path):
    """A tmpfs of two pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(tmp_path), b"tmpfs", 0, b"size=8192") != 0:
        pytest.skip(f"no tmpfs can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield tmp_path
    assert libc.umount(bytes(tmp_path)) == 0


def test_what_was_written_before_and_after_a_disk_was_full_can_be_read(small_mount):
    """Given a disk that fills up in the middle of a line, and has room again later."""
    path, ballast = small_mount / "events.jsonl", small_mount / "ballast"
    ballast.write_bytes(b"x" * 4096)
    events = Events("n")
    events.subscribe(file_sink(path))
    for number in range(60):
        events.emit(HAPPENED, number=number, filler="y" * 50)
    ballast.unlink()
    for number in range(60, 70):
        events.emit(HAPPENED, number=number)
    found = [event.fields["number"] for event in read(path)]
    assert found == sorted(found) and found[:10] == list(range(10)) and found[-8:] == list(range(62, 70))
    assert len(found) < 70, "some were lost"
    assert all(json.loads(event.line())["name"] == "a.b" for event in read(path))


def test_what_was_not_declared_is_refused_in_tests_and_written_all_the_same_in_production(tmp_path, monkeypatch):
    events = Events("n")
    events.subscribe(file_sink(tmp_path / "e"))
    with pytest.raises(ValueError, match=r"event smp\.lost declares no field color, shape"):
        events.emit(catalogue.SMP_LOST, pid=3, shape="round", color="red")
    for wrong in ("3", None, True, 3.0):
        with pytest.raises(ValueError, match=r"event smp\.lost: not of the declared type: pid="):
            events.emit(catalogue.SMP_LOST, pid=wrong)
    events.emit(catalogue.STATE_RESTORED, lineage=None, seconds=3)
    monkeypatch.setattr(Events, "strict", False)
    events.emit(catalogue.SMP_LOST, pid=3, color="red")
    assert [event.fields for event in read(tmp_path / "e")] == [{"lineage": None, "seconds": 3}, {"color": "red"}]
    events.emit(catalogue.SMP_LOST, pid="3")
    assert len((tmp_path / "e").read_text().splitlines()) == 3
    assert len([*read(tmp_path / "e", damage := Damage())]) == 2 and str(damage) == "1 damaged event left out"


def test_the_log_has_alarms_and_their_end_from_one_rank_where_all_report_the_same(capsys):
    for rank in (0, 1):
        events = Events("b", rank)
        events.subscribe(log_sink())
        events.emit(catalogue.RANK_ENDED)
        events.emit(catalogue.FENCE_WAITED, iteration=1, seconds=1.0)
        events.emit(catalogue.STATE_LOST, reason="no version", completed=0, lost=4)
        events.emit(catalogue.PROTECTION_LOST, reason="rank 0 stopped.", echo=rank == 1)
        events.emit(catalogue.PROTECTION_RESTORED, reason="all is well")
    agent = Events("b")
    agent.subscribe(log_sink("ft-run: "))
    agent.emit(catalogue.SMP_LOST, pid=7)
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines() == [
        f"ft_plugins: state.lost: rank 0 (node b): no version. {catalogue.STATE_LOST.action}",
        f"ft_plugins: protection.lost: rank 0 (node b): rank 0 stopped. {catalogue.PROTECTION_LOST.action}",
        "ft_plugins: protection.restored: rank 0 (node b): all is well",
        "ft_plugins: protection.restored: rank 1 (node b): all is well",
        "ft-run: smp.lost: node b: The SMP of this node died; another one is started and adopts its snapshots (pid 7). "
        + catalogue.SMP_LOST.action,
    ]


def test_an_alarm_stands_until_an_event_ends_it(tmp_path):
    path = tmp_path / "events.jsonl"
    events = Events("n")
    events.subscribe(file_sink(path))
    assert standing_alarm(path) is None
    steps = [
        (catalogue.SMP_STARTED, None),
        (catalogue.CHECKPOINT_FAILED, "checkpoint.failed"),
        (catalogue.PROTECTION_RESTORED, "checkpoint.failed"),
        (catalogue.SMP_LOST, "smp.lost"),
        (catalogue.CHECKPOINT_COMPLETED, "smp.lost"),
        (catalogue.PROTECTION_RESTORED, None),
    ]
    for kind, expected in steps:
        events.emit(kind)
        alarm = standing_alarm(path)
        assert (alarm and alarm.name) == expected


@pytest.mark.parametrize("block", [1, 7, 100, 1 << 16])
def test_the_newest_alarm_is_found_whatever_is_read_at_once(tmp_path, block, monkeypatch):
    monkeypatch.setattr(stream, "_BLOCK", block)
    path = tmp_path / "events.jsonl"
    events = Events("n")
    events.subscribe(file_sink(path))
    events.emit(catalogue.SMP_LOST, pid=7)
    first = standing_alarm(path)
    assert first is not None and (first.name, first.fields) == ("smp.lost", {}) and first.pid == 7
    events.emit(catalogue.SMP_STARTED)
    events.emit(catalogue.CHECKPOINT_FAILED, reason="\u00fc" * 50)
    with open(path, "ab") as file:
        file.write(b'{"time": 1.0, "name": "smp.lost", "rank": nothing}\n{"time": 2.0, "name": "smp.lo')  # disk full
    last = standing_alarm(path)
    assert last is not None and last.fields == {"reason": "\u00fc" * 50}


@pytest.mark.parametrize("wrong", [
    {"name": {}}, {"time": "1"}, {"time": float("inf")}, {"time": 10**400}, {"node": []}, {"rank": "0"}, {"pid": []},
])  # fmt: skip
def test_a_line_with_values_of_another_type_is_passed_over(tmp_path, wrong):
    path, good = tmp_path / "events.jsonl", Event("smp.lost", 1.0, "n", None, 2)
    line = json.dumps({**json.loads(good.line()), **wrong})
    path.write_text(f"{good.line()}\n{line}\na\rb\n{'[' * 100_000}\n{good.line()}\n")
    assert [*read(path)] == [good, good]


def test_a_pipe_in_the_place_of_a_history_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    assert [*read(tmp_path / "events.jsonl")] == []


def test_a_nodes_kill_is_read_although_no_rank_sends_it(tmp_path):
    events = Events("n1", None)
    events.subscribe(file_sink(tmp_path / "events.jsonl"))
    events.emit(catalogue.SIGNAL_SENT, lost="n1", ranks=[2, 3], signal="SIGKILL", iteration=4)
    events.emit(catalogue.SIGNAL_SENT, rank=2, signal="SIGKILL", iteration=4, killed_pid=7)
    read = [event_of(line) for line in (tmp_path / "events.jsonl").read_bytes().splitlines()]
    assert [(one.rank, one.fields.get("lost")) for one in read if one is not None] == [(None, "n1"), (2, None)]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"iteration": 4}, "lacks seconds, bytes"),
        ({"iteration": 4, "seconds": float("nan"), "bytes": 1}, "seconds=nan"),
    ],
)
def test_in_tests_an_event_that_no_reader_could_use_is_refused(fields, problem):
    assert problem in catalogue.SNAPSHOT_SEALED.problem({"lineage": 1, **fields})
