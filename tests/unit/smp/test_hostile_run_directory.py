"""Whatever stands in a run directory, in /dev/shm or in a request: the SMP and its callers go on, or say so in the
project's own errors."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ft_plugins.base import faults, files
from ft_plugins.base.intake import within
from ft_plugins.config import Config
from ft_plugins.errors import BusyError, FtError, SegmentError
from ft_plugins.events import Events, catalogue, file_sink
from ft_plugins.launcher.agent.watcher import Job, Watcher
from ft_plugins.recovery.resize import sizes
from ft_plugins.smp.serve import client, job_file, leftovers
from ft_plugins.smp.serve.node_context import NodeContext
from ft_plugins.smp.serve.owner import SnapshotProcess
from ft_plugins.smp.storage.checkpoints import Checkpoints
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.capture import retention
from ft_plugins.snapshot.capture.retention import Storage, StoredCheckpoint
from ft_plugins.snapshot.checkpoint import checkpoint
from ft_plugins.snapshot.checkpoint.checkpoint import Origin
from ft_plugins.snapshot.segment import paths
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Pin, Version, slots_for
from harness.hostile import altered, damaged

SHAPE = Shape(9000, 2000, 2, 3, slots_for(Pin.NODE, Pin.SOURCE))
NODE = "n"
RANDOM = st.randoms(use_true_random=False)
SHARED = [HealthCheck.function_scoped_fixture]  # one SMP, or what one has left, takes all examples
FEW = settings(derandomize=True, max_examples=60, suppress_health_check=SHARED)
MANY = settings(derandomize=True, max_examples=400, suppress_health_check=SHARED)
ANOTHER = 12345  # a user


class Smp:
    """An SMP of two ranks in this process, which protects them with a node that is not there."""

    def __init__(self, job, run_dir, secret):
        self.seen = []
        events = Events(NODE)
        events.subscribe(self.seen.append)
        self.process = SnapshotProcess(run_dir, job, NODE, events)
        self.secret = secret

    def ask(self, name, **fields):
        return self.process.answer({"do": name, "rank": 0, "token": self.process.token, **fields})

    def listen(self):
        return self.ask("endpoint", address="127.0.0.1", secret_file=str(self.secret), encrypt=False)

    def protection(self, where):
        return Protection(
            1, None, (NODE, "m"), ((0, 1),), (SHAPE, SHAPE), 1, 0,
            ((where["host"], where["port"]), ("127.0.0.1", 9)), 1, 0.0, 600.0,
        )  # fmt: skip

    def described(self, protection):
        """The reference to a protection whose job file is in the run directory."""
        return job_file.write(self.process._run_dir, protection).block()

    def close(self):
        self.process._tier.suspend()
        self.process._tier._endpoint.close()
        self.process.persister.stop()


def attach(folder):
    storage = {"folder": str(folder), "interval": 0, "every": 1, "keep": 1, "world_size": 2, "audits": 0}
    facts = {"shape": asdict(SHAPE), "fingerprint": {"job": 1}, "pid": 1, "fresh": False}
    return {**facts, "world_size": 2, "storage": storage}


@pytest.fixture
def segments(job):
    for rank in range(2):
        create(paths.path_of(job, NODE, rank), SHAPE, rank, {"job": 1}, 2)
        found = Segment(paths.path_of(job, NODE, rank))
        found.ranges = [(0, 5000), (5000, 4000)]
        found.close()
    faults.arm("fence.kill:skip")
    yield
    paths.remove(job, NODE)


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("a secret of this job alone")
    path.chmod(0o600)
    return path


@pytest.fixture
def left(job, tmp_path, segments, secret):
    """What an SMP has left in its run directory, and what others have."""
    run_dir = tmp_path / "left"
    run_dir.mkdir()
    smp = Smp(job, run_dir, secret)
    protection = smp.protection(smp.listen())
    assert smp.ask("fence")["ok"] and smp.ask("attach", **attach(tmp_path / "ck"))["ok"]
    assert smp.ask("protect", protection=smp.described(protection))["ok"]
    files.write_json(run_dir / "lost.json", {"token": 1, "lost": ["node m"]})
    for name, value in (("committed", [1, 4]), ("released", 3)):
        files.write_json(run_dir / f"{name}.json", value)
    sizes.write(run_dir, sizes.SizeReport((2, 4), True))
    for name in ("smp.lock", "lock", paths.PATIENCE_FILE):
        (run_dir / name).write_text("12")
    smp.close()
    return run_dir


@pytest.fixture
def smp(job, tmp_path, segments, secret):
    """One that protects its ranks."""
    (tmp_path / "run").mkdir()
    found = Smp(job, tmp_path / "run", secret)
    assert found.ask("protect", protection=found.described(found.protection(found.listen())))["ok"]
    yield found
    found.close()


def use_everything(job, run_dir, secret):
    """Each reader of a run directory. Raises what is none of the project's own errors."""
    smp = Smp(job, run_dir, secret)
    try:
        where = smp.listen()
        assert smp.ask("fence")["ok"]
        for name in ("inventory", "status", "previous_sizes"):
            smp.ask(name)
        if where["ok"]:
            with suppress(FtError):  # its job file cannot be written
                smp.ask("protect", protection=smp.described(smp.protection(where)))
        smp.process._spare_server._release(1)
    finally:
        smp.close()
    Watcher(Job(Config(), job, NODE, run_dir), Events()).lost(1)
    assert all(type(size) is int for size in sizes.read(run_dir).sizes)
    for lock in ("lock", "smp.lock"):
        assert liveness.pid_in(run_dir / lock) >= 0 and not liveness.held(run_dir / lock)
    leftovers.sweep(run_dir.parent.parent, 1e9, patient=True, job=job)


@given(RANDOM)
@FEW
def test_a_damaged_file_of_a_run_directory_stops_nobody(job, left, secret, tmp_path_factory, source):
    run_dir = tmp_path_factory.mktemp("root") / job / NODE
    shutil.copytree(left, run_dir, ignore=shutil.ignore_patterns("*.sock", "events.jsonl"))
    path = source.choice(sorted(run_dir.iterdir()))
    content = path.read_bytes()
    if source.random() < 0.5:
        with suppress(UnicodeEncodeError, ValueError):
            path.write_text(json.dumps(altered(json.loads(content), source)))
    elif source.random() < 0.1:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(damaged(content, source))
    use_everything(job, run_dir, secret)
    shutil.rmtree(run_dir.parent.parent)


@pytest.mark.parametrize("content", ["", "x", "²", "[]", "9" * 6000, "-1", "\0" * 8])
def test_a_damaged_token_is_said_and_no_earlier_one_is_given_out_again(job, tmp_path, segments, secret, content):
    (tmp_path / "token").write_text("41")
    smp = Smp(job, tmp_path, secret)
    assert smp.ask("fence")["token"] == 42
    smp.close()
    (tmp_path / "token").write_text(content)
    smp = Smp(job, tmp_path, secret)
    assert smp.ask("fence")["token"] > 42
    assert [event.fields["path"] for event in smp.seen if event.name == "file.rejected"] == [str(tmp_path / "token")]
    smp.close()


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_an_event_is_lost_where_its_file_is_none_of_ours(tmp_path, kind):
    foreign, path = tmp_path / "foreign", tmp_path / "events.jsonl"
    foreign.write_text("precious")
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(foreign)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    events = Events(NODE)
    events.subscribe(file_sink(path))
    within(10.0, lambda: events.emit(catalogue.SMP_ENDED), "the writer")
    os.set_blocking(reader, True)
    assert os.read(reader, 100) == (b"" if kind == "pipe" else b"precious")
    os.close(reader)
    within(10.0, lambda: events.emit(catalogue.SMP_ENDED), "the writer")
    assert foreign.read_text() == "precious"


# ---- requests ----


@given(RANDOM)
@MANY
def test_a_request_that_lacks_a_field_or_holds_another_kind_is_refused(smp, tmp_path, source):
    where = smp.listen()
    block = smp.described(smp.protection(where))
    version, own = [1, 2], ["127.0.0.1", where["port"]]
    asked = [
        {"do": "attach", **attach(tmp_path / "ck")},
        {"do": "restore", "lineage": 1, "base": version},
        {"do": "watch", "pid": 1, "detect_seconds": 5.0, "orphan_seconds": 5.0},
        {"do": "rebuild", "version": version, "protection": block, "source": own, "holders": [], "lost": [1],
         "previous": False, "fingerprint": {}},
        {"do": "rebuild", "version": version, "protection": block, "source": None, "holders": [[0, *own]], "lost": [1],
         "previous": True, "fingerprint": {"job": 1}},
        {"do": "spare", "world_size": 2, "node": "m", "where": own, "seconds": 0.0},
        {"do": "settle", "world_size": 2, "version": version},
        {"do": "resize", "world_size": 2},
        {"do": "checkpoint", "reason": "x", "seconds": 0.0, "only_due": True},
        {"do": "protect", "protection": block},
    ]  # fmt: skip
    request = altered({"rank": 0, "token": smp.process.token, **source.choice(asked)}, source)
    reply = smp.process.answer(request)
    assert reply["ok"] or reply["message"].isprintable()


@given(RANDOM)
@MANY
def test_what_another_node_sends_is_answered_or_refused(smp, source):
    version = {"epoch": 1, "version": [1, 2]}
    sent = [
        {"do": "read", "what": "data", **version, "rank": 0, "at": 0, "nbytes": 10},
        {"do": "read", "what": "parity", **version, "key": [0, 0, 0], "at": 0, "nbytes": 10},
        {"do": "read", "what": "slot", **version, "rank": 0, "offset": 0},
        {"do": "join", "epoch": 1, "position": 0},
        {"do": "begin", **version, "nodes": [[0, 0]], "ranks": [0]},
        {"do": "take", **version, "key": [0, 0, 0], "node": 0, "at": 0, "exponent": 0},
        {"do": "copy", **version, "rank": 0, "at": 0, "total": 10},
        {"do": "check", **version},
        {"do": "spare", "node": NODE, "world_size": 3},
    ]
    with suppress(FtError):
        smp.process._tier._requests.handle(altered(source.choice(sent), source), np.zeros(16, dtype=np.uint8))


# ---- shared memory that others can write to ----


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of other users")
def test_another_users_lock_is_refused_by_name_and_stops_no_sweep(job, tmp_path):
    lock = paths.lock_of(job, NODE)
    lock.touch(mode=0o600)
    os.chown(lock, ANOTHER, ANOTHER)
    run_dir = tmp_path / job / NODE
    run_dir.mkdir(parents=True)
    try:
        with pytest.raises(BusyError, match=rf"{lock} \(user {ANOTHER}\).*expected a file of user 0; .*--ftp-job"):
            client.ensure(run_dir, job, NODE, 0.0)
        with pytest.raises(BusyError, match=f"belongs to user {ANOTHER}"):
            liveness.acquire(lock)
        assert not liveness.held(lock)
        assert leftovers.sweep(tmp_path, 0.0, job=job) == [] and lock.exists()
        assert paths.remove(job, NODE) == 0 and lock.exists()
    finally:
        lock.unlink()


def test_names_in_shared_memory_say_whose_they_are(job):
    assert paths.path_of(job, NODE, 3).name == f"ftp-{job}@{NODE}@{os.getuid()}-r3"


def test_what_is_removed_of_a_job_is_of_that_job_alone(job, tmp_path):
    """Given jobs and nodes whose names begin like each other's, or hold what patterns are made of."""
    pairs = [(job, "n"), (f"{job}-a", "n"), (job, "n-r1"), (job, "n.lock"), (job, "n-parity"), (f"{job}.b", "n")]
    made = {}
    for name, node in pairs:
        own = [paths.path_of(name, node, 0), paths.previous_path_of(name, node, 1, 4), paths.parity_path_of(name, node)]
        made[name, node] = {*own, own[0].with_name(f"{own[0].name}.new"), paths.lock_of(name, node)}
        for path in made[name, node]:
            path.touch(mode=0o600)
    everything = set().union(*made.values())
    assert len(everything) == 5 * len(pairs) and set(pairs) <= set(paths.jobs())
    for pair in pairs:
        assert paths.segments_of(*pair) == [paths.path_of(*pair, 0)]
        assert leftovers.sweep(tmp_path, 0.0, job="*") == []
        assert leftovers.sweep(tmp_path, 3600.0, job=pair[0]) == []
        assert paths.remove(*pair) == 4
        everything -= made[pair]
        assert {path for files in made.values() for path in files if path.exists()} == everything


def test_a_sweep_of_one_job_leaves_the_others(job, tmp_path):
    other = f"{job}-a"
    for name in (job, other):
        create(paths.path_of(name, NODE, 0), SHAPE, 0, {}, 1)
        (tmp_path / name / NODE).mkdir(parents=True)
    try:
        assert leftovers.sweep(tmp_path, 0.0, job=job) == [paths.path_of(job, NODE, 0)]
        assert paths.path_of(other, NODE, 0).exists()
    finally:
        paths.remove(other, NODE)


@pytest.mark.parametrize("kind", [socket.AF_UNIX, None])
def test_a_segments_place_that_something_else_has_is_refused_by_name(job, kind):
    path = paths.path_of(job, NODE, 0)
    path.mkdir() if kind is None else socket.socket(kind).bind(str(path))
    try:
        with pytest.raises(SegmentError, match=str(path)):
            Segment(path)
        assert not liveness.held(path)
    finally:
        path.rmdir() if kind is None else path.unlink()


def test_what_cannot_be_removed_keeps_neither_the_rest_nor_the_smps_end(smp, job):
    in_the_way = paths.path_of(job, NODE, 0)
    in_the_way.unlink()
    in_the_way.mkdir()
    try:
        with suppress(OSError):
            smp.process.finish("in order")
        assert smp.process.ended.is_set()
        assert paths.segments_of(job, NODE) == [in_the_way]
    finally:
        in_the_way.rmdir()


def test_an_old_checkpoint_that_cannot_be_removed_does_not_keep_the_others(tmp_path, monkeypatch):
    seen = []
    events = Events(NODE)
    events.subscribe(seen.append)
    old = [StoredCheckpoint(Version(1, at), f"v1-{at}", complete=True, fingerprint="f") for at in (1, 2, 3)]
    (tmp_path / "v1-1").write_text("no folder")
    for name in ("v1-2", "v1-3"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(checkpoint, "listing", lambda base: old)
    monkeypatch.setattr(retention, "surplus", lambda *given: old)
    found = Checkpoints(NodeContext.of(tmp_path, "job", NODE, events, {}), 1.0, threading.Event())
    found._prune(Storage(str(tmp_path), 0, 1, 1, 2), tmp_path, Origin("job", 2, {}))
    told = {event.name: event.fields for event in seen}
    assert told["checkpoint.pruned"] == {"removed": ["v1-2", "v1-3"]}
    assert "v1-1" in told["checkpoint.failed"]["reason"]


# ---- what the SMP imports ----


def test_nothing_in_the_working_directory_takes_the_place_of_what_the_smp_imports(node, tmp_path, monkeypatch):
    """Given a working directory, on PYTHONPATH too, with folders and files of the names of modules."""
    for name in ("llvmlite", "msgpack", "numpy"):
        (tmp_path / name).mkdir()
    for name in ("xxhash", "json", "ft_plugins", "pydantic"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert node.start() > 0
    assert node.status()["pid"] == node.pids[0]
    log = (node.run_dir / "smp.log").read_text()
    assert log == "", log


def test_an_smp_is_the_package_of_whoever_starts_it_though_it_is_not_installed(tmp_path):
    """Given a copy of the package on PYTHONPATH alone: its SMP loads that copy."""
    import ft_plugins

    shutil.copytree(Path(ft_plugins.__file__).parent, tmp_path / "ft_plugins", ignore=shutil.ignore_patterns("*.pyc"))
    program = "from ft_plugins.smp.serve import isolated; print('\\n'.join(isolated.command()))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    command = found.stdout.splitlines()
    assert command[2] == str((tmp_path / "ft_plugins" / "smp" / "serve" / "isolated.py").resolve())
    helped = subprocess.run([*command, "--help"], cwd="/", env=environment, capture_output=True, text=True, check=True)
    assert "--run-dir" in helped.stdout
