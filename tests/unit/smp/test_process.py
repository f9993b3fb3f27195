"""The daemon, as it really runs: started apart from the tests, asked over its socket, killed, replaced, orphaned."""

import json
import os
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ft_plugins.errors import BudgetError, FencedError, ProtocolError, ResumeError, SegmentError
from ft_plugins.events import Events
from ft_plugins.smp.serve import job_file, process
from ft_plugins.smp.serve.client import Client, ensure
from ft_plugins.smp.serve.process import SnapshotProcess
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.smp.watch import liveness
from ft_plugins.smp.watch.job_history import FtRunNote, FtRunPhase, write_note
from ft_plugins.snapshot.segment import paths
from ft_plugins.snapshot.segment import segment as segments
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Pin, SlotState, Version
from ft_plugins.transport import protocol
from harness.job_control import wait_until

from .node_clusters import capture, write_secret

SHAPE = Shape(nbytes=1000, small_nbytes=200, buckets=1, layout=77)
FINGERPRINT = {"layers": 4, "seed": 1, "data": {"path": "/d", "size": 9}}
SECONDS = 90.0
SOUND = {"shape": asdict(SHAPE), "fingerprint": FINGERPRINT, "pid": 0, "fresh": False}  # by a trainer that is nobody
ATTACH = {"do": "attach", "rank": 0, "token": 0, **SOUND}
RESTORE = {"do": "restore", "rank": 0, "token": 0, "lineage": 1, "base": [1, 2]}

Node = Any  # the fixture's class lives in conftest


def ask(node, name, **fields):
    """One request, field by field as it goes over the wire."""
    with node.client() as client:
        return client._ask(name, **fields)


def attach(node, rank=0, token=0, **other):
    """Attach a rank; a fence kills nobody for it."""
    return Path(ask(node, "attach", rank=rank, token=token, **SOUND | other)["path"])


@pytest.fixture
def daemon(job, tmp_path):
    """An SMP in this process."""
    found = SnapshotProcess(tmp_path, job, "n", Events())
    yield found
    if not found.ended.is_set():
        found.finish_alone("test")


def attached(daemon, **other):
    """As `attach`."""
    reply = daemon.answer(ATTACH | other)
    protocol.raise_refusal(reply)
    return Path(reply["path"])


def write(path, index, version):
    """Put a version into a slot as a trainer does."""
    segment = Segment(path)
    segment.ranges = [(0, SHAPE.nbytes)]
    capture(segment, index, version, token=segment.header.token)
    segment.header.completed = version.iteration
    segment.close()


def versions(path):
    segment = Segment(path)
    found = [slot.version for slot in segment.slots() if slot.state is SlotState.CLEAN and slot.version]
    segment.close()
    return sorted(found)


# ---- what it is ----


def test_it_stands_apart_holds_its_lock_listens_in_private_and_loads_no_torch(node):
    pid = node.start()
    status = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    parent, group, session = (int(word) for word in status[1:4])
    assert parent != os.getpid() and session != os.getsid(0) and group == session
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert liveness.held(node.run_dir / "smp.lock") and int((node.run_dir / "smp.lock").read_text()) == pid
    for name in ("smp.sock", "smp.lock", "events.jsonl"):
        path = node.run_dir / name
        assert not path.exists() or stat.S_IMODE(path.stat().st_mode) == 0o600, name
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    told = node.status()
    assert (told["pid"], told["job"], told["node"], told["token"]) == (pid, node.job, node.name, 0)
    assert told["segments"] == [] and told["watched_pid"] == 0


def test_several_that_are_started_at_once_are_one(node):
    found = []
    threads = [threading.Thread(target=lambda: found.append(node.start())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(found) == 4 and len(set(found)) == 1
    assert node.start() == found[0] == node.status()["pid"]


# ---- attach, restore, shutdown, end ----


def test_a_segment_is_made_once_found_again_and_told_of(node):
    node.start()
    path = attach(node, rank=3)
    assert path == node.segment(3) and stat.S_IMODE(path.stat().st_mode) == 0o600
    write(path, 0, Version(1, 5))
    inode = path.stat().st_ino

    assert attach(node, rank=3) == path
    assert path.stat().st_ino == inode and versions(path) == [Version(1, 5)]
    (told,) = node.status()["segments"]
    assert told["rank"] == 3 and told["bytes"] == told["resident_bytes"] == SHAPE.total
    assert told["completed"] == 5 and told["owner_pid"] == 0
    assert told["slots"][0] == {"state": "CLEAN", "lineage": 1, "iteration": 5}
    assert told["slots"][1] == {"state": "EMPTY", "lineage": None, "iteration": None}


def test_restore_opens_the_lineage_and_voids_what_is_newer_than_its_base(node):
    node.start()
    path = attach(node)
    for index, iteration in enumerate((4, 5, 6)):
        write(path, index, Version(1, iteration))
    with node.client() as client:
        client.open_lineage(0, 0, 2, Version(1, 5))
        assert versions(path) == [Version(1, 4), Version(1, 5)]
        segment = Segment(path)
        assert (segment.header.opened.lineage, segment.header.completed) == (2, 5)
        client.open_lineage(0, 0, 2, Version(1, 5))  # a retried request
        assert versions(path) == [Version(1, 4), Version(1, 5)]
        client.open_lineage(0, 0, 3, None)
        assert versions(path) == [] and (segment.header.opened.lineage, segment.header.completed) == (3, 0)
        with pytest.raises(ProtocolError, match="rank 1: restore before attach"):
            client.open_lineage(1, 0, 3, None)


def test_a_trainer_that_ends_in_order_owns_nothing_any_more_and_its_segment_stays(node, trainer):
    node.start()
    done = trainer(0, 0)
    assert node.status()["segments"][0]["owner_pid"] == done.pid
    with node.client() as client:
        client.shutdown(0, 0)
    assert node.status()["segments"][0]["owner_pid"] == 0
    node.fence()
    assert os.waitpid(done.pid, os.WNOHANG) == (0, 0), "a fence has no quarrel with it"
    assert node.segment(0).exists()


def test_ranks_are_held_on_request_and_no_later_incarnation_is(node):
    node.start()
    segment = Segment(attach(node, token=node.fence()))
    with node.client() as client:
        client.hold(True)
        assert segment.header.held
        client.hold(False)
        assert not segment.header.held
        client.hold(True)
        segment.header.held_at = 7  # its rank dies while it waits
        assert client.status()["segments"][0]["held_at"] == 7
    node.fence()
    assert not segment.header.held and not segment.header.held_at


def test_the_end_in_order_removes_segments_and_half_made_ones_and_a_later_start_never_repeats_a_token(node):
    first = node.start()
    paths = [attach(node, rank=rank) for rank in range(3)]
    token = node.fence()
    half_made = paths[0].with_name(paths[0].name + ".new")
    half_made.touch()
    with node.client() as client:
        client.end()
    assert not any(path.exists() for path in [*paths, half_made])
    assert not liveness.held(node.run_dir / "smp.lock") and not liveness.started(first)
    assert not (node.run_dir / "smp.sock").exists()
    assert node.events("smp.ended")[-1].fields["reason"] == "in order"
    assert node.start() != first and node.status()["token"] == token and node.fence() > token


# ---- fence ----


def test_a_fence_ends_the_trainers_running_or_stopped_before_it_returns(node, trainer):
    node.start()
    running, stopped = trainer(0, 0), trainer(1, 0, stopped=True)
    assert node.fence() == 1
    for each in (running, stopped):
        assert liveness.started(each.pid) == 0
        assert each.ended_by() == signal.SIGKILL
    assert [Segment(node.segment(rank)).header.token for rank in (0, 1)] == [1, 1]
    assert [(entry["owner_pid"], entry["attached"]) for entry in node.status()["segments"]] == [(0, False)] * 2


def test_the_superseded_incarnation_can_ask_for_nothing_any_more(node):
    node.start()
    path = attach(node)
    write(path, 0, Version(1, 1))
    token = node.fence()
    with node.client() as client:
        for refused in (
            lambda: attach(node),
            lambda: client.open_lineage(0, 0, 9, None),
            lambda: client.shutdown(0, 0),
            lambda: attach(node, token=token + 1),
        ):
            with pytest.raises(FencedError, match=f"superseded by {token}"):
                refused()
    assert versions(path) == [Version(1, 1)]
    assert attach(node, token=token) == path


def test_a_process_that_got_the_number_of_a_dead_trainer_is_spared(node, sleeper):
    node.start()
    path, began = attach(node), liveness.started(sleeper.pid)
    Segment(path).header.owner = (sleeper.pid, began - 1)
    node.fence()
    assert sleeper.poll() is None and liveness.started(sleeper.pid)
    Segment(path).header.owner = (sleeper.pid, began)
    node.fence()
    assert sleeper.wait(SECONDS) == -signal.SIGKILL


def test_a_fence_told_to_skip_the_kill_leaves_the_trainer_without_a_token(node, trainer):
    node.start(armed="fence.kill:skip")
    spared = trainer(0, 0)
    node.fence()
    assert liveness.started(spared.pid) and Segment(node.segment(0)).header.token == 1


# ---- lost and replaced ----


def test_a_lost_one_loses_nothing(node, trainer):
    first = node.start()
    old = trainer(0, 0)
    attach(node, rank=1)
    token_before = node.fence()
    assert old.ended_by() == signal.SIGKILL
    new = trainer(0, token_before)
    write(node.segment(0), 1, Version(3, 8))
    node.kill()

    assert node.start() != first
    told = node.status()
    assert told["token"] == token_before
    assert [(entry["rank"], entry["completed"]) for entry in told["segments"]] == [(0, 8), (1, 0)]
    assert told["segments"][0]["owner_pid"] == new.pid
    assert versions(node.segment(0)) == [Version(3, 8)]
    assert node.events("segments.adopted")[-1].fields == {"segments": 2, "token": token_before}
    assert node.fence() == token_before + 1, "it knows whom to end, and goes on counting"
    assert new.ended_by() == signal.SIGKILL


def test_a_segment_whose_file_was_removed_is_an_alarm_and_the_next_rank_finds_what_it_held(node, trainer):
    node.start()
    old = trainer(0, 0)
    path = node.segment(0)
    write(path, 1, Version(3, 8))
    held = Segment(path)
    path.unlink()
    wait_until(lambda: bool(node.events("segments.removed")), 20, lambda: "no alarm")
    (removed,) = node.events("segments.removed")
    assert removed.fields["paths"] == [str(path)] and path.name in removed.fields["reason"]
    held.header.completed = 9
    held.pin(Version(3, 8), Pin.STORAGE, idle=True)
    token = node.fence()
    assert old.ended_by() == signal.SIGKILL
    assert not path.exists() and trainer(0, token).pid
    assert versions(path) == [Version(3, 8)] and not held.linked
    again = Segment(path)
    assert again.header.completed == 9 and again.small(1) == b"small" and (again.data(1) == 1).all()
    assert not any(slot.pins for slot in again.slots()), "the checkpoint that is being written is of the old memory"
    wait_until(lambda: bool(node.events("segments.recovered")), 20, lambda: "the alarm stays")
    held.close()
    again.close()


def test_a_segment_that_is_written_again_replaces_the_old_one_while_nobody_goes_through_them(daemon, monkeypatch):
    path = attached(daemon)
    path.unlink()
    real, locked = Segment.close, []

    def close(segment):
        locked.append(daemon._lock.locked())
        real(segment)

    monkeypatch.setattr(Segment, "close", close)
    assert attached(daemon).exists() and locked == [True]


def test_a_record_of_removed_files_that_cannot_be_removed_keeps_no_segment(daemon, tmp_path):
    path = attached(daemon)
    (tmp_path / "removed.json").mkdir()
    daemon.finish_alone("test")
    assert not path.exists()


def test_an_smp_that_dies_with_the_memory_of_removed_files_is_an_alarm_of_the_next_one(node):
    node.start()
    attach(node)
    node.segment(0).unlink()
    wait_until(lambda: bool(node.events("segments.removed")), 20, lambda: "no alarm")
    node.kill()
    node.start()
    wait_until(lambda: len(node.events("segments.removed")) == 2, 20, lambda: "no second alarm")
    reason = node.events("segments.removed")[1].fields["reason"]
    assert "the SMP that held their memory died: what they held is lost" in reason
    attach(node)
    wait_until(lambda: bool(node.events("segments.recovered")), 20, lambda: "the alarm stays")


def test_the_alarm_of_lost_memory_ends_when_the_ranks_have_started_without_it(job, tmp_path):
    """Given two removed files, one of a rank that does not come back to this node, and another held by this SMP."""
    SnapshotProcess(tmp_path, job, "n", Events()).answer(ATTACH)
    gone = paths.path_of(job, "n", 1)
    (tmp_path / "removed.json").write_text(json.dumps([str(gone)]))
    said = []
    events = Events()
    events.subscribe(said.append)
    daemon = SnapshotProcess(tmp_path, job, "n", events)

    def look():
        daemon._files_checked = float("-inf")
        daemon.check_files()
        return said[-1].name, said[-1].fields.get("reason", "")

    try:
        paths.path_of(job, "n", 0).unlink()
        assert look() == (
            "segments.removed",
            f"1 files were removed ({paths.path_of(job, 'n', 0).name}), and the SMP holds their memory. "
            f"1 files were removed ({gone.name}), and the SMP that held their memory died: what they held is lost at "
            "the next restart; if you can, have the framework save a checkpoint before it.",
        )
        assert daemon.answer({"do": "status"})["missing"] == [str(gone)]
        token = daemon.answer({"do": "fence"})["token"]
        assert daemon.answer({**ATTACH, "token": token})["ok"]
        assert look()[0] == "segments.removed", "nothing is restored yet"
        assert daemon.answer({**RESTORE, "token": token, "base": None})["ok"]
        assert look()[0] == "segments.recovered" and daemon.answer({"do": "status"})["missing"] == []
        assert json.loads((tmp_path / "removed.json").read_text()) == []
    finally:
        daemon.finish_alone("test")


@pytest.mark.parametrize("kept", ["both", "segments only", "file only"])
def test_the_token_never_goes_back(node, kept):
    node.start()
    path = attach(node)
    node.fence()
    token = node.fence()
    node.kill()
    if kept == "segments only":
        (node.run_dir / "token").unlink()
    if kept == "file only":
        path.unlink()
    node.start()
    assert node.status()["token"] == token and node.fence() == token + 1


REQUESTS = {
    "attach": lambda client: client._ask(
        "attach", rank=0, token=1, shape=asdict(SHAPE), fingerprint=FINGERPRINT, pid=0, fresh=False
    ),
    "restore": lambda client: client.open_lineage(0, 1, 4, Version(1, 1)),
    "fence": lambda client: client.fence(),
    "shutdown": lambda client: client.shutdown(0, 1),
}


@pytest.mark.parametrize("moment", ["before", pytest.param("after", marks=pytest.mark.all_configurations)])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_over_which_it_dies_is_carried_out_by_its_successor(node, name, moment):
    segments.create(node.segment(0), SHAPE, 0, FINGERPRINT)  # as if of an earlier incarnation
    with open(node.run_dir / "token", "w") as file:
        file.write("1")
    Segment(node.segment(0)).header.token = 1
    write(node.segment(0), 0, Version(1, 1))
    write(node.segment(0), 1, Version(1, 2))
    doomed = node.start(armed=f"smp.{name}.{moment}:kill")
    found = []

    def request():
        with node.client() as client:
            found.append(REQUESTS[name](client))

    asking = threading.Thread(target=request)
    asking.start()
    descriptor = os.pidfd_open(doomed)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    assert poller.poll(1000 * SECONDS), "it was to die over the request"
    os.close(descriptor)
    node.start()
    asking.join(SECONDS)

    assert len(found) == 1
    expected = {
        "attach": [Version(1, 1), Version(1, 2)],
        "restore": [Version(1, 1)],
        "fence": [Version(1, 1), Version(1, 2)],
        "shutdown": [Version(1, 1), Version(1, 2)],
    }
    assert versions(node.segment(0)) == expected[name]
    if name == "fence":
        assert found[0] >= 2 and node.status()["token"] == found[0] == Segment(node.segment(0)).header.token


# ---- whose memory ----


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fingerprint": {**FINGERPRINT, "seed": 2}}, "seed: 1 -> 2"),
        ({"fingerprint": {**FINGERPRINT, "new": True}}, "new: None -> True"),
        ({"fingerprint": {"layers": 4, "seed": 1}}, r"data: \{'path': '/d', 'size': 9\} -> None"),
        ({"shape": asdict(replace(SHAPE, nbytes=1001))}, "nbytes: 1000 -> 1001"),
        ({"shape": asdict(replace(SHAPE, buckets=2))}, "buckets: 1 -> 2"),
        ({"shape": asdict(replace(SHAPE, layout=78))}, "layout: 77 -> 78"),
    ],
)
def test_the_memory_of_another_job_or_layout_is_refused_by_what_differs_and_nothing_is_lost(daemon, changed, words):
    path = attached(daemon)
    write(path, 0, Version(1, 5))
    before = path.read_bytes()
    with pytest.raises(ResumeError, match=rf"rank 0: .*\(stored -> now: {words}\).*--ftp-resume fresh") as caught:
        attached(daemon, **changed)
    assert "layers" not in str(caught.value) and path.read_bytes() == before
    assert attached(daemon) == path and versions(path) == [Version(1, 5)]
    assert attached(daemon, fresh=True, **changed) == path and versions(path) == []
    found = Segment(path)
    assert {"fingerprint": found.fingerprint, "shape": asdict(found.shape)}.items() >= changed.items()


def test_small_state_of_another_size_or_slots_claimed_in_another_way_are_still_the_same_job(daemon):
    """Its room is claimed from what it measures at start, which differs by a few bytes from one start to the next; the
    slots as with --reft-slots 5, and then without it."""
    path = attached(daemon)
    write(path, 0, Version(1, 5))
    for changed in ({"small_nbytes": 190}, {"small_nbytes": 210}, {"first": 2}):
        assert attached(daemon, shape=asdict(replace(SHAPE, **changed))) == path
        assert versions(path) == [Version(1, 5)]
    with pytest.raises(ResumeError, match="small state"):
        attached(daemon, shape=asdict(replace(SHAPE, small_nbytes=5000)))
    assert versions(path) == [Version(1, 5)]


def test_a_foreign_file_in_the_segments_place_is_refused_until_asked_to_start_afresh(node):
    node.segment(0).write_bytes(b"not a segment")
    node.start()
    with pytest.raises(SegmentError, match=f"rank 0: {node.segment(0)} cannot be used .*: not a segment"):
        attach(node)
    assert node.segment(0).read_bytes() == b"not a segment"
    attach(node, fresh=True)
    assert Segment(node.segment(0)).shape == SHAPE


@pytest.mark.parametrize("replaced", [False, True])
def test_a_segment_whose_fingerprint_is_damaged_is_lost_and_another_one_says_so(node, replaced):
    node.start()
    path = attach(node)
    Segment(path).bytes[1024 + 8] ^= 0xFF
    if replaced:
        node.kill()
        node.start()
    assert attach(node) == path
    found = Segment(path)
    assert found.fingerprint == FINGERPRINT and found.header.opened.lost, "until a lineage is opened"
    assert all(slot.state is SlotState.EMPTY for slot in found.slots())
    reasons = [event.fields["reason"] for event in node.events("segment.corrupted")]
    assert reasons and all(str(path) in reason for reason in reasons)
    with node.client() as client:
        client.open_lineage(0, 0, 1, None)
    assert not found.header.opened.lost and not Segment(attach(node)).header.opened.lost


def test_memory_that_is_not_there_is_refused_with_mount_and_bytes_and_it_serves_on(daemon):
    shape = Shape(nbytes=2**50, small_nbytes=1, buckets=1, layout=1)
    said = "rank 0: protection .*needs 3145728.0 GiB of host memory, but /dev/shm has only"
    with pytest.raises(BudgetError, match=said):
        attached(daemon, shape=asdict(shape))
    assert daemon.answer({"do": "status"})["segments"] == [] and attached(daemon).exists()


# ---- malformed ----

MALFORMED = {
    "an oversized length": struct.pack(">I", 2**31),
    "half a length": b"\0\0",
    "half a frame": struct.pack(">I", 100) + b"\x81",
    "no msgpack": struct.pack(">I", 1) + b"\xc1",
    "no map": struct.pack(">I", 1) + b"\x90",
    "a pickle": struct.pack(">I", 4) + b"\x80\x04N.",
}


class Fine:
    """A process whose requests all succeed; `hold` waits, `fail` raises `error`."""

    error = None

    def __init__(self):
        self.ended = threading.Event()
        self.go_on, self.begun = threading.Event(), threading.Event()

    def answer(self, request):
        if self.error is not None and request["do"] == "fail":
            raise self.error
        if request["do"] == "hold":
            self.begun.set()
            assert self.go_on.wait(SECONDS)
        return {"ok": True, "did": request["do"]}


@pytest.fixture
def fine(tmp_path):
    """A server in this process, its socket and its events."""
    served, seen, events = Fine(), [], Events()
    events.subscribe(seen.append)
    server = process._Server(tmp_path / "smp.sock", served, events)
    yield served, tmp_path, seen
    served.go_on.set()
    server.close()


def test_a_flood_of_malformed_frames_is_answered_by_closes_and_one_event(fine):
    _, run_dir, seen = fine
    for raw in [*MALFORMED.values(), *[MALFORMED["an oversized length"]] * 200]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SECONDS)
            connection.connect(str(run_dir / "smp.sock"))
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    (event,) = seen  # the others are counted for the next one, a minute later
    assert (event.name, event.fields["addresses"]) == ("peer.rejected", {"local": 1})
    assert "exceeds" in str(event.fields["reasons"]) or "limit" in str(event.fields["reasons"])
    with Client(run_dir, SECONDS) as client:
        assert client._ask("status")["did"] == "status", "it serves on"


def test_idle_connections_keep_no_request_out_and_one_that_works_is_never_closed(tmp_path, monkeypatch, request):
    """Given places for three, one of them at work, when five more connect and then the oldest asks again."""
    monkeypatch.setattr(process, "_CONNECTIONS", 3)
    served, run_dir, seen = request.getfixturevalue("fine")
    with ExitStack() as stack:
        working = stack.enter_context(Client(run_dir, SECONDS))
        replies = []
        thread = threading.Thread(target=lambda: replies.append(working._ask("hold")))
        thread.start()
        assert served.begun.wait(SECONDS)
        idle = [stack.enter_context(Client(run_dir, SECONDS)) for _ in range(5)]
        with Client(run_dir, SECONDS) as newest:
            assert newest._ask("status")["did"] == "status"
        assert idle[0]._ask("status")["did"] == "status", "it connects again"
        served.go_on.set()
        thread.join(SECONDS)
    assert replies == [{"ok": True, "did": "hold"}] and not seen


def test_half_a_request_is_hung_up_on(fine, monkeypatch):
    monkeypatch.setattr(process, "_FRAME_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(str(fine[1] / "smp.sock"))
        connection.sendall(b"\0\0")
        assert connection.recv(1) == b""
    until = time.monotonic() + SECONDS
    while not fine[2] and time.monotonic() < until:  # the event comes after the connection is closed
        time.sleep(0.01)
    assert list(fine[2][0].fields["reasons"]) == ["timed out"]


def test_a_connection_for_which_there_is_no_thread_is_closed_and_the_next_one_is_served(fine, monkeypatch):
    _, run_dir, seen = fine
    real, failed = threading.Thread.start, []

    def start(thread):
        if thread.name == "smp-serve" and not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with Client(run_dir, SECONDS) as client:
        assert client._ask("status")["did"] == "status", "by its second connection"
    assert failed and list(seen[0].fields["reasons"]) == ["no thread for its connection (can't start new thread)"]


def test_without_a_file_to_spare_it_lets_nobody_in_and_serves_on_once_there_is_one(node):
    pid = node.start()
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = 1 + max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    with ExitStack() as stack:
        stack.callback(resource.prlimit, pid, resource.RLIMIT_NOFILE, before)
        for _ in range(limit + 1):
            waiting = stack.enter_context(node.client())._connection
            waiting.settimeout(0.5)
            protocol.send(waiting, {"do": "status"})
            try:
                protocol.receive(waiting)
            except TimeoutError:
                break
        else:
            pytest.fail(f"more connections than {limit} files")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        waiting.settimeout(SECONDS)
        answered = protocol.receive(waiting)
        assert answered is not None and answered["pid"] == pid


def test_a_path_that_the_system_does_not_give_is_refused_by_name_and_it_serves_on(daemon, segment_path):
    segment_path.mkdir()
    with pytest.raises(SegmentError, match=f"rank 0: cannot create its segment .*directory: {segment_path}"):
        attached(daemon, fresh=True)
    segment_path.rmdir()
    assert attached(daemon, fresh=True) == segment_path


@pytest.mark.parametrize(
    "error", [KeyError("holders"), RecursionError("too deep"), MemoryError(), OverflowError("x"), UnicodeError("y")]
)
def test_a_request_that_fails_otherwise_than_foreseen_is_refused_in_a_line_and_the_connection_goes_on(
    fine, capfd, error
):
    served, run_dir, seen = fine
    served.error = error
    with Client(run_dir, SECONDS) as client:
        with pytest.raises(ProtocolError, match=rf"^{type(error).__name__}.*\(test_process.py:"):
            client._ask("fail", more="\x1b[2J")
        assert client._ask("status")["did"] == "status"
    assert [(event.name, event.fields["request"]) for event in seen] == [("request.rejected", "fail")]
    assert "Traceback" not in capfd.readouterr().err


# ---- orphaned ----


def ended(pid, seconds):
    """Whether the process ends within that time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(1000 * seconds))
    finally:
        os.close(descriptor)


def test_an_orphan_that_is_found_in_time_stays_and_ends_after_its_time_once_it_is_not(job, tmp_path, sleeper):
    """Given a second of patience: a first ft-run dies, a second comes; when that dies too, nobody comes."""
    orphaned = threading.Event()
    events = Events()
    events.subscribe(lambda event: orphaned.set() if event.name == "smp.orphaned" else None)
    daemon = SnapshotProcess(tmp_path, job, "n", events)

    def watch(pid):
        daemon.answer({"do": "watch", "pid": pid, "detect_seconds": 600})

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as first:
        watch(first.pid)
        daemon.answer(ATTACH)
        waiting = threading.Thread(target=process._run_until_end, args=(daemon, events, 1.0, tmp_path))
        waiting.start()
        first.kill()
    assert orphaned.wait(SECONDS)
    watch(sleeper.pid)
    assert not daemon.ended.wait(1.4) and paths.segments_of(job, "n")
    sleeper.kill()
    waiting.join(SECONDS)
    assert daemon.ended.is_set() and not waiting.is_alive()
    assert paths.segments_of(job, "n") == []


@pytest.mark.parametrize("status", ["drained", "signalled"])
def test_the_smp_of_a_drained_node_takes_no_part_in_the_job_any_more(status, job, tmp_path, sleeper, monkeypatch):
    events, seen, asked = Events(), list[str](), list[str]()
    events.subscribe(lambda event: seen.append(event.name))
    daemon = SnapshotProcess(tmp_path, job, "n", events)
    monkeypatch.setattr(daemon, "to_storage", lambda reason: asked.append(reason))
    daemon.answer({"do": "watch", "pid": sleeper.pid, "detect_seconds": 600})
    write_note(tmp_path, FtRunNote(FtRunPhase.ENDED, "it is over", status))
    sleeper.kill()
    sleeper.wait(SECONDS)
    daemon.orphan_seconds = 0.0
    daemon._tier.declare_lost(daemon.token, ["node m"])
    process._run_until_end(daemon, events, 0.0, tmp_path)
    assert asked == ([] if status == "drained" else ["orphaned", "before removal"])
    assert ("node.lost" in seen) == (status != "drained")


def test_an_orphan_whose_run_directory_is_gone_ends_at_once_and_another_smp_adopts_its_segments(node, sleeper):
    pid = ensure(node.run_dir, node.job, node.name, 1e6, watch=sleeper.pid)
    path = attach(node)
    write(path, 0, Version(1, 5))
    shutil.rmtree(node.run_dir)
    assert not ended(pid, 1.0), "ft-run is alive"
    sleeper.kill()
    assert ended(pid, SECONDS)
    node.run_dir.mkdir()
    node.start()
    assert node.status()["pid"] != pid and versions(path) == [Version(1, 5)]
    assert len(node.status()["segments"]) == 1


def test_one_that_nobody_ever_watched_ends_too(node):
    command = [sys.executable, "-m", "ft_plugins.smp.serve.process", "--orphan-seconds", "0", "--job", node.job]
    subprocess.run([*command, "--node", node.name, "--run-dir", str(node.run_dir)], check=True, timeout=SECONDS)
    assert ended(int((node.run_dir / "smp.lock").read_text()), SECONDS)
    assert node.events("smp.ended")[-1].fields["reason"] == "orphaned for 0 s"


def test_one_without_patience_that_replaces_another_waits_for_whom_it_was_started_for(node, sleeper):
    """Orphans end at once, and the one that was started is asked for nothing: the segments stay while ft-run lives."""
    node.start()
    path = attach(node)
    node.kill()
    pid = ensure(node.run_dir, node.job, node.name, 0, watch=sleeper.pid)
    assert not ended(pid, 1.0) and path.exists()
    assert node.status()["watched_pid"] == sleeper.pid
    sleeper.kill()
    assert ended(pid, SECONDS) and not path.exists()


# ---- superseded while its memory is being allocated ----


def test_an_incarnation_superseded_while_it_allocates_leaves_the_next_one_free_to_attach(daemon, monkeypatch):
    """Given an attach of incarnation 0 whose pages are still being allocated, when a fence passes and incarnation 1
    attaches the same rank: the first is refused, the second gets a whole segment which both sides map."""
    allocating, go_on = threading.Event(), threading.Event()
    real, calls = segments.create, []

    def create(path, *shape, **more):
        calls.append(path)
        if len(calls) == 1:
            allocating.set()
            assert go_on.wait(SECONDS)
        real(path, *shape, **more)

    monkeypatch.setattr(segments, "create", create)
    replies = {}

    def attaching(name, token):
        def work():
            replies[name] = daemon.answer({**ATTACH, "token": token})

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    old = attaching("old", 0)
    assert allocating.wait(SECONDS)
    assert daemon.answer({"do": "fence"})["token"] == 1
    new = attaching("new", 1)
    go_on.set()
    old.join(SECONDS)
    new.join(SECONDS)
    with pytest.raises(FencedError):
        protocol.raise_refusal(replies["old"])
    assert replies["new"]["ok"] is True, replies["new"]
    trainers = Segment(Path(replies["new"]["path"]))
    assert trainers.header.token == 1 and trainers.shape == SHAPE
    daemon.answer({"do": "fence"})
    assert trainers.header.token == 2, "the SMP maps the same file as the trainer"


def test_the_memory_of_a_rank_that_has_moved_to_another_node_is_given_back(daemon, tmp_path):
    """Given a node of two ranks that writes checkpoints, when one of them is restored on another node."""
    storage = {"folder": str(tmp_path / "ck"), "interval": 0, "every": 1, "keep": 1, "world_size": 2}
    paths = [attached(daemon, rank=rank, storage=storage) for rank in (0, 1)]
    secret = str(write_secret(tmp_path))
    where = daemon.answer({"do": "endpoint", "address": "127.0.0.1", "secret_file": secret, "encrypt": False})
    told = Protection(
        2, None, ("n", "other"), ((0, 1),), (SHAPE, SHAPE), 1, 0, ((where["host"], where["port"]), ("127.0.0.1", 1)), 1,
        0.0, 600.0,
    )  # fmt: skip
    reference = job_file.write(tmp_path, told)
    assert daemon.answer({"do": "protect", "rank": 0, "token": 0, "protection": reference.block()})["ok"]
    deadline = time.monotonic() + SECONDS
    while any(line.endswith(f"{paths[1]} (deleted)") for line in Path("/proc/self/maps").read_text().splitlines()):
        assert time.monotonic() < deadline, "it is still mapped"
        time.sleep(0.01)  # while the persister's thread looks at it
    assert paths[0].exists() and not paths[1].exists()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_segment_that_is_replaced_gives_its_memory_back_before_the_new_one_takes_it(daemon, monkeypatch, damaged):
    path, mapped = attached(daemon), list[bool]()
    create = segments.create

    def checked(*args, **more):
        mapped.append(f"{path} (deleted)" in Path("/proc/self/maps").read_text())
        create(*args, **more)

    monkeypatch.setattr(segments, "create", checked)
    if damaged:
        daemon._segments[0].bytes[0] ^= 1
        assert attached(daemon) == path
    else:
        assert attached(daemon, fresh=True, fingerprint={"layers": 5}) == path
    assert mapped == [False]
