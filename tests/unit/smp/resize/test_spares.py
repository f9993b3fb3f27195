"""A spare reports and hands out its state of a previous size, and drops it when the job is safe without it."""

from dataclasses import replace

import numpy as np
import pytest

from ft_plugins.base.intake import parsed
from ft_plugins.errors import FtError, ProtocolError
from ft_plugins.events import Events
from ft_plugins.smp.serve import job_file
from ft_plugins.smp.serve.job_file import ProtectionReference
from ft_plugins.smp.serve.owner import SnapshotProcess
from ft_plugins.smp.storage.checkpoints import Unfinished
from ft_plugins.smp.tree import other_nodes
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.capture import manifest
from ft_plugins.snapshot.capture.manifest import Manifest
from ft_plugins.snapshot.checkpoint.checkpoint import Origin
from ft_plugins.snapshot.segment.paths import (
    parity_path_of,
    path_of,
    previous_path_of,
    previous_segments_of,
    remove,
    segments_of,
)
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Pin, SlotState, Version, slots_for

from ..node_clusters import capture, write_secret

RANGES = ((0, 50_000), (50_000, 40_000))
SHAPE = Shape(90_000, 2000, len(RANGES), 3, slots_for(Pin.NODE, Pin.SOURCE))
NAMES = ("n0", "n0", "n1", "n1", "n2", "n2")  # of the previous job's ranks; n0 and n1 go on, n2 is the spare
V4, V5 = Version(1, 4), Version(1, 5)
SECONDS = 90


def data(rank, version):
    return np.random.default_rng(100 * rank + version.iteration).integers(0, 256, SHAPE.nbytes, dtype=np.uint8)


def put(path, *versions):
    """What captures of a rank leave."""
    found = Segment(path)
    found.ranges = list(RANGES)
    found.open_lineage(versions[0].lineage, Version(0, 0), ())
    for index, version in enumerate(versions):
        small = manifest.join(manifest.write(Manifest(found.rank, 6, (0, 0), RANGES, ())), b"state")
        capture(found, index, version, data(found.rank, version), small)
    found.header.completed = versions[-1].iteration
    found.close()


class Smp:
    """The SMP of one node, in this process."""

    def __init__(self, folder, job, name):
        self.run_dir, self.job, self.name = folder / name, job, name
        self.run_dir.mkdir(exist_ok=True)
        self.seen = []
        events = Events(name)
        events.subscribe(self.seen.append)
        self.process = SnapshotProcess(self.run_dir, job, name, events)

    def ask(self, name, **fields):
        reply = self.process.answer({"do": name, "rank": 0, "token": self.process.token, **fields})
        if not reply["ok"]:
            raise ProtocolError(reply["message"])
        return reply

    def listen(self, secret):
        found = self.ask("endpoint", address="127.0.0.1", secret_file=str(secret), encrypt=False)
        return found["host"], found["port"]

    def names(self):
        return [event.name for event in self.seen]

    def stop(self):
        self.process._tier.suspend()
        self.process._tier._endpoint.close()


class Job:
    """Three nodes of two ranks; `member` goes on in a job of four ranks, `outside` is a spare."""

    def __init__(self, folder, job):
        self.folder, self.job = folder, job
        self.secret = write_secret(folder)
        for rank, name in enumerate(NAMES):
            if name != "n1":
                create(path_of(job, name, rank), SHAPE, rank, {"job": 1}, len(NAMES))
                put(path_of(job, name, rank), V4, V5)
        self.member, self.outside = Smp(folder, job, "n0"), Smp(folder, job, "n2")
        self.where = self.outside.listen(self.secret)
        here = self.member.listen(self.secret)
        self.protection = Protection(
            lineage=1, base=None, nodes=NAMES, groups=((0, 2, 4), (1, 3, 5)), shapes=(SHAPE,) * 6, losses=1, position=0,
            endpoints=(here, ("127.0.0.1", 9), self.where), interval=1, exchange_mbps=0.0, detect_seconds=30.0,
        )  # fmt: skip
        for smp, position in ((self.member, 0), (self.outside, 2)):
            smp.process._tier.protect(replace(self.protection, position=position), smp.process.token)
        self.member.ask("fence")
        self.member.ask("resize", world_size=4)

    def spare(self, node="n2", seconds=5.0):
        reply = self.member.ask("spare", world_size=4, node=node, where=list(self.where), seconds=seconds)
        return dict(reply["report"])

    def fetch(self, rank, version):
        reference = job_file.write(self.folder / "n0", self.protection)
        self.member.ask(
            "rebuild", rank=rank, version=[version.lineage, version.iteration], protection=reference.block(),
            source=list(self.where), holders=[], lost=[], previous=True, fingerprint={"job": 1},
        )  # fmt: skip

    def end(self):
        for smp in (self.member, self.outside):
            smp.stop()
        for name in set(NAMES):
            remove(self.job, name)


@pytest.fixture
def pair(tmp_path, job):
    found = Job(tmp_path, job)
    yield found
    found.end()


def _protects(smp):
    driver = smp._tier._driver
    return driver is not None and not driver.stopped


def commit(pair, version):
    """A version of the job at its current size is committed on the member."""
    tier = pair.member.process._tier
    tier._protection, tier.token = replace(pair.protection, nodes=("n0", "n0", "n1", "n1")), pair.member.process.token
    tier._pinned.committed, pair.member.process._transition._world_size = version, 4
    pair.member.process.check_trainers()


def look(pair):
    """The spare asks each of the other nodes, of which n1 does not answer."""
    for _ in range(2):
        pair.outside.process._spare_server._looked = -SECONDS
        pair.outside.process.check_trainers()


def test_it_reports_its_state_of_the_previous_size_and_protects_nothing_more(pair):
    assert _protects(pair.outside.process)
    told = pair.spare()
    assert told["sizes"] == [[6, [[rank, [0, 0], 1, 5, False, [[1, 4], [1, 5]]] for rank in (4, 5)]]]
    assert (told["fingerprints"], told["position"], told["lineage"]) == ([[6, {"job": 1}]], 2, 1)
    assert told["plan"] == pair.protection.digest and told["protection"]["ranks"] == len(NAMES)
    assert not _protects(pair.outside.process), "nothing of that incarnation is committed from now on"
    assert len(segments_of(pair.job, "n2")) == 2, "and nothing is lost"


def test_what_it_says_of_the_whole_job_is_copied_once_and_checked(pair, monkeypatch):
    run_dir = pair.folder / "n0"
    job_file.forget(run_dir)
    reference = parsed(ProtectionReference, pair.spare()["protection"])
    assert job_file.read(run_dir, reference) == replace(pair.protection, position=2)
    monkeypatch.setattr(job_file, "write_content", lambda *_: pytest.fail("it is here already"))
    pair.spare()
    monkeypatch.undo()
    job_file.forget(run_dir)
    (path,) = (pair.folder / "n2").glob("job-*.json")
    path.write_bytes(path.read_bytes().replace(b'"n2"', b'"n9"'))
    with pytest.raises(ProtocolError, match="does not match its digest"):
        pair.spare()


def test_its_slot_is_fetched_into_a_previous_segment_and_verified_bit_for_bit(pair):
    pair.spare()
    pair.fetch(4, V5)
    found = Segment(previous_path_of(pair.job, "n0", 4, 6))
    [slot] = [slot for slot in found.slots() if slot.state is SlotState.CLEAN]
    assert slot.version == V5 and (found.data(slot.index) == data(4, V5)).all()
    assert [4, [0, 0], 0, 0, False, [[1, 5]]] in pair.member.ask("previous_sizes")["sizes"][0][1]


def test_a_damaged_slot_is_refused_and_leaves_no_partial_version(pair):
    pair.spare()
    damaged = Segment(path_of(pair.job, "n2", 5))
    damaged.data(1)[60_000] ^= 1
    with pytest.raises(FtError, match="does not match its digest"):
        pair.fetch(5, V5)
    assert 5 not in [entry[0] for entry in pair.member.ask("previous_sizes")["sizes"][0][1] if entry[5]]


def test_a_node_whose_trainers_live_is_no_spare(pair):
    busy = pair.outside.process._segments[5]
    busy.header.owner = (1, liveness.started(1))
    assert pair.spare() == {"busy": [5]} and _protects(pair.outside.process)
    commit(pair, Version(2, 6))
    look(pair)
    assert len(segments_of(pair.job, "n2")) == 2


def test_another_node_at_that_endpoint_is_refused(pair):
    with pytest.raises(ProtocolError, match="expected the SMP of node n7 there, found that of node n2"):
        pair.spare("n7")


@pytest.mark.parametrize("asked", [True, False], ids=["after a resize", "another node has its place"])
def test_it_drops_its_state_when_a_newer_lineage_is_committed_without_it_and_not_before(pair, asked):
    if asked:
        pair.spare()
    pair.member.ask("settle", world_size=6, version=[1, 5])
    commit(pair, Version(1, 6))
    look(pair)
    assert len(segments_of(pair.job, "n2")) == 2 and parity_path_of(pair.job, "n2").exists()
    commit(pair, Version(3, 6))
    look(pair)
    assert "spare.released" in pair.outside.names()
    assert not segments_of(pair.job, "n2") and not parity_path_of(pair.job, "n2").exists()
    assert not previous_segments_of(pair.job, "n0")
    inventory = pair.outside.ask("inventory")
    assert (inventory["slots"], inventory["released"], inventory["lineage"]) == ([], 3, 3)
    pair.outside.stop()
    pair.outside = Smp(pair.folder, pair.job, "n2")
    assert pair.outside.ask("inventory")["released"] == 3, "its replacement knows it too"
    assert pair.outside.ask("status")["node_tier"]["released"] == 3


@pytest.mark.parametrize("ranks", [[0, 1], [4, 5]])
def test_a_checkpoint_that_waits_for_other_nodes_keeps_its_state_only_if_it_completes_it(pair, ranks):
    item = Unfinished(V5, Origin(pair.job, 6, {}), ranks, 0.0, 0.0, 0, [])
    pair.outside.process.persister._checkpoints.unfinished.append(item)
    commit(pair, Version(2, 6))
    look(pair)
    assert bool(segments_of(pair.job, "n2")) == (0 in ranks)


def test_for_a_lineage_that_cannot_be_nothing_is_dropped(pair):
    commit(pair, Version(1 << 40, 6))
    look(pair)
    assert len(segments_of(pair.job, "n2")) == 2 and "spare.released" not in pair.outside.names()


def test_a_spare_whose_smp_was_replaced_drops_its_state_too(pair):
    pair.spare()
    pair.outside.stop()
    pair.outside = Smp(pair.folder, pair.job, "n2")
    commit(pair, Version(2, 6))
    look(pair)
    assert "spare.released" in pair.outside.names() and not segments_of(pair.job, "n2")


def test_writing_to_storage_is_abandoned_before_the_state_is_dropped(pair):
    class Running:
        busy = False
        files = None

        def stop(self):
            self.files = previous_segments_of(pair.job, "n2")

    running, process = Running(), pair.outside.process
    process._previous.create(8, 4, SHAPE, {"job": 1})
    process._previous_storage._running[8] = running
    commit(pair, Version(2, 6))
    look(pair)
    assert "spare.released" in pair.outside.names() and not process._previous_storage._running
    assert running.files == [previous_path_of(pair.job, "n2", 4, 8)] and not previous_segments_of(pair.job, "n2")


@pytest.mark.parametrize("since", ["begun", "restored"])
def test_a_node_that_takes_part_again_drops_nothing(pair, since, monkeypatch):
    ask = other_nodes.ask

    def asked(peers, seconds):
        if since == "begun":
            pair.outside.ask("fence")
        return ask(peers, seconds)

    monkeypatch.setattr(other_nodes, "ask", asked)
    for found in pair.outside.process._segments.values() if since == "restored" else ():
        found.open_lineage(3, V5, ())
    commit(pair, Version(3, 6))
    look(pair)
    assert len(segments_of(pair.job, "n2")) == 2 and "spare.released" not in pair.outside.names()


def test_a_spare_whose_smp_is_being_replaced_is_asked_again(pair, monkeypatch):
    tier, calls = pair.member.process._tier, []
    peer = tier.peer
    pair.outside.stop()

    def replaced_at_the_second_call(where, timeout, node=""):
        calls.append(where)
        if len(calls) == 2:
            pair.outside = Smp(pair.folder, pair.job, "n2")
        return peer(where, timeout)

    monkeypatch.setattr(tier, "peer", replaced_at_the_second_call)
    assert [size for size, _ in pair.spare()["sizes"]] == [6] and calls == [pair.where] * 2


def test_a_spare_that_is_gone_is_reported(pair):
    pair.outside.stop()
    with pytest.raises(ProtocolError, match="did not answer 'spare'"):
        pair.spare(seconds=0.5)
