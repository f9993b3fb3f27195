"""The SMP's callers: bounded in time, told what is wrong; and the sweep, which takes only what nobody owns."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest

from ft_plugins.errors import BudgetError, BusyError, ProtectionError, ProtocolError
from ft_plugins.smp.serve import client as smp
from ft_plugins.smp.serve import leftovers
from ft_plugins.smp.serve.client import Client, ensure
from ft_plugins.smp.serve.leftovers import sweep
from ft_plugins.smp.serve.status import newest_common
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.segment import paths
from ft_plugins.snapshot.segment.paths import lock_of, path_of
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Version
from ft_plugins.transport import protocol

SHAPE = Shape(100, 100, 1, 1)


def serve(run_dir, *replies):
    """A peer in the SMP's place: one connection for each of `replies`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(run_dir / "smp.sock"))
    listener.listen()

    def work():
        with listener:
            for reply in replies:
                connection, _ = listener.accept()
                with connection:
                    reply(connection)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def answer(message):
    def reply(connection):
        protocol.receive(connection)
        protocol.send(connection, message)

    return reply


def test_without_an_smp_the_error_tells_where_it_was_looked_for_and_comes_in_time(tmp_path):
    before = time.monotonic()
    with pytest.raises(ProtectionError, match=f"no SMP answers at {tmp_path}/smp.sock.*ft-run.*smp.log"):
        Client(tmp_path, timeout=0.2)
    assert time.monotonic() - before >= 0.2


def test_a_reply_that_comes_too_late_is_not_taken_for_that_of_the_next_request(tmp_path):
    asked = threading.Event()

    def late(connection):
        protocol.receive(connection)
        asked.wait(300)
        with contextlib.suppress(OSError):
            protocol.send(connection, {"ok": True, "pid": 1})
            answer({"ok": True, "pid": 2})(connection)

    serve(tmp_path, late, answer({"ok": True, "pid": 3}))
    with Client(tmp_path, timeout=0.3) as client:
        with pytest.raises(ProtocolError, match="did not answer 'status' in time"):
            client.status()
        asked.set()
        assert client.status()["pid"] == 3


def test_a_socket_path_that_is_too_long_is_refused_at_once(tmp_path):
    with pytest.raises(ProtectionError, match="longer than 107 bytes; give a shorter --ftp-job"):
        Client(tmp_path / ("x" * 120))


def test_an_smp_that_comes_while_one_waits_is_found(tmp_path):
    found = []

    def call():
        with Client(tmp_path, timeout=20) as client:
            found.append(client.status())

    calling = threading.Thread(target=call)
    calling.start()
    serve(tmp_path, answer({"ok": True, "pid": 5})).join(300)
    calling.join(300)
    assert found == [{"ok": True, "pid": 5}]


def test_a_secret_is_named_by_its_whole_path_because_the_smp_runs_in_another_folder(tmp_path, monkeypatch):
    asked = []

    def reply(connection):
        asked.append(protocol.receive(connection))
        protocol.send(connection, {"ok": True, "host": "127.0.0.1", "port": 7})

    monkeypatch.chdir(tmp_path)
    serving = serve(tmp_path, reply)
    with Client(tmp_path, timeout=20) as client:
        assert client.endpoint("127.0.0.1", "job.secret") == ("127.0.0.1", 7)
    serving.join(300)
    assert asked[0]["secret_file"] == str(tmp_path / "job.secret")


def test_a_stopped_smp_is_an_error_within_the_time_given(node):
    pid = node.start()
    os.kill(pid, signal.SIGSTOP)
    try:
        with node.client(timeout=0.3) as client, pytest.raises(ProtocolError, match="did not answer 'status' in time"):
            client.status()
    finally:
        os.kill(pid, signal.SIGCONT)


def test_an_smp_that_hangs_up_every_time_is_an_error_after_a_few_tries(tmp_path):
    serve(tmp_path, *[protocol.receive] * 3)
    with pytest.raises(ProtocolError, match="hung up on 'fence' 3 times"), Client(tmp_path, timeout=5) as client:
        client.fence()


def test_a_refusal_arrives_as_its_error_and_the_connection_serves_on(tmp_path):
    def reply(connection):
        answer({"ok": False, "error": "BudgetError", "message": "12 bytes are missing"})(connection)
        answer({"ok": True, "token": 4})(connection)

    serve(tmp_path, reply)
    with Client(tmp_path, timeout=5) as client:
        with pytest.raises(BudgetError, match="12 bytes are missing"):
            client.attach(0, 0, SHAPE, {}, fresh=False)
        assert client.fence() == 4


def test_an_smp_that_cannot_start_is_an_error_that_names_its_log(node):
    (node.run_dir / "smp.sock").mkdir()
    with pytest.raises(ProtectionError, match=f"the SMP of node n did not start; see {node.run_dir}/smp.log"):
        node.start()
    assert "Error" in (node.run_dir / "smp.log").read_text()
    assert not liveness.held(node.run_dir / "smp.lock")
    (node.run_dir / "smp.sock").rmdir()


def test_starting_one_that_is_there_starts_nothing(node, monkeypatch):
    pid = node.start()
    monkeypatch.setattr(smp.subprocess, "run", lambda *command, **how: pytest.fail("a process was started"))
    assert node.start() == pid


def test_the_memory_of_a_job_has_one_smp_whatever_its_run_directory(node, tmp_path):
    """A login and a batch system give one user two run directories, and both see one /dev/shm."""
    pid = node.start()
    with node.client() as client:
        path = client.attach(0, 0, SHAPE, {}, fresh=False)
    inode = path.stat().st_ino
    with pytest.raises(BusyError, match=f"pid {pid} of another run directory .*{lock_of(node.job, 'n')}.*--ftp-job"):
        ensure(tmp_path, node.job, node.name, 60)
    assert node.status()["token"] == 0 and path.stat().st_ino == inode
    assert not liveness.held(tmp_path / "smp.lock")
    node.kill()  # its memory is free, and another run directory's SMP adopts it
    ensure(tmp_path, node.job, node.name, 60)
    with Client(tmp_path) as client:
        assert [entry["path"] for entry in client.status()["segments"]] == [str(path)]
        client.end()
    assert not path.exists() and not lock_of(node.job, "n").exists()


# ---- the newest version ----

AHEAD = [("CLEAN", 1, 6), ("CLEAN", 1, 4), ("CLEAN", 1, 5)]


def status(attached, others=()):
    """Segments of ranks that have attached in this incarnation, and of others."""
    return {
        "segments": [
            {
                "attached": index < len(attached),
                "slots": [{"state": state, "lineage": lineage, "iteration": k} for state, lineage, k in slots],
            }
            for index, slots in enumerate([*attached, *others])
        ]
    }


@pytest.mark.parametrize(
    ("told", "newest"),
    [
        (status([AHEAD, [("DIRTY", 1, 6), *AHEAD[1:]]]), Version(1, 5)),
        (status([AHEAD]), Version(1, 6)),
        (status([[("CLEAN", 1, 6), ("CLEAN", 1, 5)], [("CLEAN", 2, 6), ("CLEAN", 1, 5)]]), Version(1, 5)),
        (status([]), None),
        (status([[("EMPTY", 0, 0)], [("CLEAN", 1, 1)]]), None),
        (status([[("CLEAN", 2, 9)]], [[("CLEAN", 1, 3)]]), Version(2, 9)),  # others: of a wider earlier run
        (status([], [[("CLEAN", 1, 3)]] * 2), Version(1, 3)),  # before any has attached
    ],
)
def test_the_newest_version_is_one_that_every_rank_holds_complete(told, newest):
    assert newest_common(told) == newest


def test_the_newest_version_is_the_one_that_a_recovery_would_take():
    told = status([[("CLEAN", 1, 4), ("CLEAN", 1, 5), ("CLEAN", 1, 6)]] * 2)
    told["segments"][1]["slots"][2]["mark"] = "mismatched"
    assert newest_common(told) == Version(1, 5)
    told["segments"][0]["slots"][0]["mark"] = "certified"
    assert newest_common(told) == Version(1, 4)


# ---- sweep ----


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """In place of /dev/shm, which other tests use at the same time: a sweep takes all that nobody owns."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(paths, "SHM", folder)
    return folder


def abandoned(base, job, node):
    """A run directory without SMP or ft-run, with a segment; its segment's path."""
    run_dir = base / job / node
    run_dir.mkdir(parents=True)
    (run_dir / "smp.lock").touch(0o600)
    (run_dir / "events.jsonl").touch(0o600)
    path = path_of(job, node, 0)
    create(path, SHAPE, 0, {})
    return path


def test_a_segment_that_is_being_made_is_young_although_it_is_no_segment_yet(memory, tmp_path):
    unfinished = path_of("new", "a", 0).with_name(path_of("new", "a", 0).name + ".new")
    unfinished.touch(mode=0o600)
    assert sweep(tmp_path, 3600) == [] and unfinished.exists()
    os.utime(unfinished, (0, 0))
    sweep(tmp_path, 3600)
    assert not unfinished.exists()


def test_the_sweep_takes_segments_that_nobody_owns_and_says_which(memory, job, tmp_path):
    left = [abandoned(tmp_path, job, node) for node in ("a", "b")]
    assert sweep(tmp_path, 0) == left
    assert not any(path.exists() for path in left)
    assert sweep(tmp_path, 0) == []


def test_the_sweep_leaves_what_was_touched_lately(memory, job, tmp_path):
    path = abandoned(tmp_path, job, "a")
    assert sweep(tmp_path, 3600) == [] and path.exists()
    long_ago = time.time() - 7200
    for entry in [*(tmp_path / job / "a").iterdir(), tmp_path / job / "a"]:
        os.utime(entry, (long_ago, long_ago))
    assert sweep(tmp_path, 3600) == [path]


@pytest.mark.parametrize("gone", ["", "run directory"])
@pytest.mark.parametrize("days", [1, -1])
def test_a_clock_that_has_jumped_makes_nothing_old(memory, job, tmp_path, monkeypatch, days, gone):
    path = abandoned(tmp_path / gone, job, "a")
    trainer = Segment(path)
    trainer.header.owner = (1 << 22, liveness.started(os.getpid()))  # it has died
    trainer.close()
    leftovers.stamp(tmp_path / gone / job / "a")
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + days * 86400)
    assert leftovers.sweep(tmp_path, 3600) == [] and path.exists()
    assert leftovers.sweep(tmp_path, 0) == [path], "of any age"


@pytest.mark.parametrize("name", ["smp.lock", "lock"])
def test_the_sweep_leaves_what_an_smp_or_an_ft_run_owns(memory, job, tmp_path, name):
    owned, free = abandoned(tmp_path, job, "a"), abandoned(tmp_path, job, "b")
    held = liveness.acquire(tmp_path / job / "a" / name)
    assert held is not None
    assert sweep(tmp_path, 0) == [free] and owned.exists()
    os.close(held)
    assert sweep(tmp_path, 0) == [owned]


def test_the_sweep_takes_what_is_left_of_a_job_whose_run_directory_is_gone(memory, job, tmp_path):
    """A logout removes the run directory, and shared memory stays."""
    old, owned, young, own, used = (abandoned(tmp_path / "gone", job, node) for node in "abcde")
    long_ago = time.time() - 7200
    for path in (old, owned, own, used):
        os.utime(path, (long_ago, long_ago))
    held = liveness.acquire(lock_of(job, "b"))
    lock_of(job, "a").touch()
    os.utime(lock_of(job, "a"), (long_ago, long_ago))
    trainer = Segment(used)
    trainer.header.owner = (os.getpid(), liveness.started(os.getpid()))
    assert held is not None
    assert sweep(tmp_path / "new", 3600, keep=(job, "d")) == [old]
    assert not lock_of(job, "a").exists() and all(path.exists() for path in (owned, young, own, used))
    os.close(held)
    trainer.header.owner = (0, 0)
    os.utime(used, (long_ago, long_ago))
    os.utime(lock_of(job, "b"))  # as an SMP does now and then, which died just now
    assert sweep(tmp_path / "new", 3600, keep=(job, "d")) == [used] and owned.exists()


def test_the_sweep_is_not_stopped_by_a_stray_file_or_an_empty_folder(memory, job, tmp_path):
    path = abandoned(tmp_path, job, "z")
    (tmp_path / job / "a").write_text("not a folder")
    (tmp_path / job / "b").mkdir()
    (tmp_path / "stray").touch()
    assert sweep(tmp_path, 0) == [path]
    assert sweep(tmp_path / "missing", 0) == []
