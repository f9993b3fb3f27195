"""State of a previous size goes to storage when the SMP is orphaned before the state was restored."""

import os
from contextlib import closing
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from ft_plugins.events import Events
from ft_plugins.smp.resize.context import PreviousStorage
from ft_plugins.smp.serve.client import ensure
from ft_plugins.smp.serve.node_context import NodeContext
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.capture.retention import Storage
from ft_plugins.snapshot.checkpoint import checkpoint, persist
from ft_plugins.snapshot.segment.paths import path_of, previous_path_of, previous_segments_of, remove
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Pin, Version, slots_for
from harness.job_control import wait_until

from ..node_clusters import capture, small_of_tensors

SHAPE = Shape(nbytes=1 << 16, small_nbytes=1000, buckets=2, layout=5, slots=slots_for(Pin.STORAGE))
RANGES = [(0, 1 << 15), (1 << 15, 1 << 15)]
FINGERPRINT = {"layers": 4, "parallel": {"dp": 2}}
SECONDS = 90.0
V4, V5 = Version(1, 4), Version(1, 5)


def put(segment, *versions):
    segment.ranges = RANGES
    for index, version in enumerate(versions):
        small = small_of_tensors(segment.rank, RANGES, f"small {segment.rank}".encode())
        capture(segment, index, version, 10 * segment.rank + version.iteration, small)
        segment.header.completed = version.iteration


def until(holds, found=str):
    wait_until(holds, SECONDS, found)


def assert_loads(folder, path, rank, version):
    """A rank of the job at its previous size reads its share of the checkpoint, verified."""
    create(path, SHAPE, rank, FINGERPRINT, 2)
    with closing(Segment(path)) as fresh:
        fresh.ranges = RANGES
        index = persist.read_rank(folder, fresh, version, 0)
        assert (fresh.data(index) == 10 * rank + version.iteration).all()
        assert fresh.small(index) == small_of_tensors(rank, RANGES, f"small {rank}".encode())


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path / "ck"), interval=0, every=1, keep=2, world_size=2)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("patience", [600, 0])
def test_an_orphaned_smp_writes_state_that_was_not_restored(node, storage, tmp_path, sleeper, replaced, patience):
    node.pids.append(ensure(node.run_dir, node.job, node.name, patience, watch=sleeper.pid))
    with node.client() as client:
        for rank in range(2):
            path = client.attach(
                rank, client.status()["token"], SHAPE, FINGERPRINT, fresh=False, world_size=2, storage=storage
            )
            with closing(Segment(path)) as segment:
                put(segment, V4, V5)
                segment.header.owner = (0, 0)
        token = client.fence()
        assert client.resize(0, token, 4), "the job starts again with four ranks, none of which attaches"
    assert [path.name for path in previous_segments_of(node.job, node.name)]
    if replaced:
        node.kill()
        node.pids.append(ensure(node.run_dir, node.job, node.name, patience, watch=sleeper.pid))
    sleeper.kill()
    base = tmp_path / "ck" / node.job
    until(lambda: (base / "v1-5").exists(), lambda: str(node.events()))
    stored = [found for found in checkpoint.listing(base) if found.complete and not found.problem]
    assert [found.version for found in stored] == [V5]
    assert checkpoint.read_manifest(base / "v1-5").world_size == 2
    for rank in range(2):
        assert_loads(base / "v1-5", tmp_path / f"r{rank}", rank, V5)
    if not patience:  # its memory goes when it is in storage
        until(lambda: not liveness.held(node.run_dir / "smp.lock"), lambda: str(node.events()))
        assert not previous_segments_of(node.job, node.name)


def test_without_storage_or_at_the_orderly_end_nothing_is_written(node, storage):
    node.start()
    with node.client() as client:
        for rank, told in ((0, None), (1, storage)):
            path = client.attach(
                rank, client.status()["token"], SHAPE, FINGERPRINT, fresh=False, world_size=2, storage=told
            )
            with closing(Segment(path)) as segment:
                put(segment, V4, V5)
                segment.header.owner = (0, 0)
        client.resize(0, client.fence(), 4)
        assert client.checkpoint("the job ends", 5.0, only_due=True)["state"] == "nothing"
        found = client.checkpoint("ft-run was told to end", SECONDS)
        assert (found["state"], found["iteration"]) == ("done", 5)
        client._ask(
            "attach", rank=0, token=client.status()["token"], shape=asdict(SHAPE), fingerprint=FINGERPRINT, pid=0,
            fresh=False, world_size=4, storage=None,
        )  # fmt: skip
        assert client.checkpoint("ft-run was told to end", SECONDS) == {"ok": True, "state": "off"}


class ResizedNode:
    """A node with segments of a two-rank job; the job has four ranks now."""

    def __init__(self, folder, job, name, rank, storage, *versions):
        self.run_dir = folder / name
        self.run_dir.mkdir()
        self.seen = []
        events = Events(name)
        events.subscribe(self.seen.append)
        create(path_of(job, name, rank), SHAPE, rank, FINGERPRINT, 2)
        segment = Segment(path_of(job, name, rank))
        put(segment, *versions)
        smp = NodeContext.of(self.run_dir, job, name, events, {})
        self.previous = smp.previous
        self.previous.switch({rank: segment}, 4)
        self.path = previous_path_of(job, name, rank, 2)
        persister = SimpleNamespace(lease=None, storage=storage)
        self.storage = PreviousStorage(smp, persister)


@pytest.fixture
def pair(tmp_path, job, storage):
    told = replace(storage, world_size=4)
    found = [
        ResizedNode(tmp_path, job, "a", 0, told, V4, V5), ResizedNode(tmp_path, job, "b", 1, told, Version(1, 3), V4),
    ]  # fmt: skip
    yield found
    for node in found:
        node.storage.stop()
    for name in "ab":
        remove(job, name)


def test_several_nodes_write_the_newest_version_that_all_of_them_have(pair, tmp_path, job):
    for node in pair:
        node.storage.request("orphaned", 0.0)
    base = tmp_path / "ck" / job
    until(lambda: (base / "v1-4").exists(), lambda: str([node.seen for node in pair]))
    for rank in range(2):
        assert_loads(base / "v1-4", tmp_path / f"r{rank}", rank, V4)
    until(lambda: not any(node.storage.busy for node in pair))
    until(
        lambda: sorted(os.listdir(base)) == ["lease-0.json", "v1-4"],
        lambda: f"a notice, or a part of another version: {os.listdir(base)}",
    )
    pins = [slot.pins for node in pair for slot in Segment(node.path).slots()]
    assert not any(pins)


def test_a_size_that_cannot_be_read_is_an_event_and_the_others_go_to_storage(pair, tmp_path, job):
    """The file of one size was removed; a rebuilt segment of another size is there."""
    node = pair[0]
    node.path.unlink()
    put(node.previous.create(1, 0, SHAPE, FINGERPRINT), V4)
    found = node.storage.request("orphaned", SECONDS)
    assert (found["state"], found["iteration"]) == ("done", 4), found
    assert checkpoint.read_manifest(tmp_path / "ck" / job / "v1-4").world_size == 1
    [failed] = [event.fields["reason"] for event in node.seen if event.name == "checkpoint.failed"]
    assert "state of 2 ranks cannot be read" in failed and node.path.name in failed


def test_writing_is_abandoned_before_the_segments_change(pair, tmp_path, job):
    pair[0].storage.request("orphaned", 0.0)  # the other node is silent: it is waited for
    assert pair[0].storage.busy
    pair[0].storage.stop()
    assert not pair[0].storage.busy
    pair[0].previous.drop()
    assert pair[0].storage.request("orphaned", 0.0) == {"state": "nothing"}
    assert not (tmp_path / "ck" / job / "v1-5").exists()
