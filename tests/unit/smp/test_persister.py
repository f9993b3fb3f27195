"""The storage tier of a node: what it writes and when, alone and with other nodes, and what becomes of an error."""

import errno
import json
import os
import threading
import time
from dataclasses import asdict, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path

import pytest

from ft_plugins.base import faults
from ft_plugins.base.files import write_digested
from ft_plugins.errors import ProtocolError
from ft_plugins.events import Events, catalogue, file_sink, read
from ft_plugins.smp.serve import requests
from ft_plugins.smp.serve.client import ensure
from ft_plugins.smp.serve.node_context import NodeContext
from ft_plugins.smp.storage import folder_lease, persister
from ft_plugins.smp.storage.checkpoint_schedule import REQUEST
from ft_plugins.smp.storage.notices import Notices
from ft_plugins.smp.storage.persister import Persister
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.capture.retention import NodeOffer, Storage
from ft_plugins.snapshot.checkpoint import checkpoint, lease, persist
from ft_plugins.snapshot.checkpoint.checkpoint import Origin
from ft_plugins.snapshot.segment import segment as segments
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Mark, Pin, Version, slots_for
from ft_plugins.transport.protocol import ALARM
from harness.job_control import wait_until, wait_until_gone

from .node_clusters import capture, small_of_tensors

SHAPE = Shape(nbytes=1 << 16, small_nbytes=1000, buckets=2, layout=5, slots=slots_for(Pin.STORAGE))
RANGES = [(0, 1 << 15), (1 << 15, 1 << 15)]
FINGERPRINT = {"layers": 4}
SECONDS = 90.0
TOKEN = 3


class Rank:
    """A rank's segment, written as a trainer does."""

    def __init__(self, path, lineage=1):
        self.path = path
        self.segment = Segment(path)
        self.segment.ranges = RANGES
        self.segment.header.token = TOKEN
        self.segment.header.attached = True
        self.segment.open_lineage(lineage, None, ())

    def capture(self, *iterations):
        for iteration in iterations:
            index = min(
                (slot for slot in self.segment.slots() if not slot.pins),
                key=lambda slot: (slot.state == 2, slot.version or Version(0, 0)),
            ).index
            version, small = (
                Version(self.segment.header.opened.lineage, iteration),
                small_of_tensors(self.segment.rank, RANGES, b"small"),
            )
            capture(self.segment, index, version, iteration % 251, small, TOKEN)
            self.segment.header.completed = iteration

    def mark(self, iteration, mark):
        """The verdict on a version; one of an unlike replica is void where nobody keeps it, as a trainer has it."""
        version = Version(self.segment.header.opened.lineage, iteration)
        for slot in self.segment.slots():
            if slot.version == version and mark is Mark.MISMATCHED and not slot.pins:
                self.segment.dirty(slot.index, None, TOKEN)
        self.segment.mark(version, mark)

    def pinned(self):
        return [slot.version for slot in self.segment.slots() if slot.pins]


class Host:
    """A node with a persister and ranks, in this process."""

    def __init__(self, storage, job, name, ranks, patience=300.0):
        self.storage, self.base = storage, Path(storage.folder) / job
        self.run_dir = Path(storage.folder).with_name(name)
        self.run_dir.mkdir()
        self.job, self.name = job, name
        self.events_path = self.run_dir / "events.jsonl"
        events = Events(name)
        events.subscribe(file_sink(self.events_path))
        self.persister = Persister(NodeContext.of(self.run_dir, job, name, events, {}), patience)
        self.ranks = {}
        for rank in ranks:
            path = self.run_dir / f"segment-r{rank}"  # a file for which nobody sweeps
            segments.create(path, SHAPE, rank, FINGERPRINT)
            self.ranks[rank] = Rank(path)

    def told(self, **changes):
        """Its trainers attach, and say where checkpoints go."""
        for number, rank in self.ranks.items():
            self.persister.attached(number, rank.path, replace(self.storage, **changes))

    def complete(self):
        return complete(self.base)

    def capture(self, *iterations):
        for rank in self.ranks.values():
            rank.capture(*iterations)

    def mark(self, iteration, mark):
        for rank in self.ranks.values():
            rank.mark(iteration, mark)

    def train(self):
        """As if this process were the trainer of all ranks."""
        for rank in self.ranks.values():
            rank.segment.header.owner = (os.getpid(), liveness.started(os.getpid()))

    def events(self, name):
        return [event for event in read(self.events_path) if event.name == name]

    def wait(self, name, count=1):
        """The events of a name once there are `count`."""
        until(lambda: len(self.events(name)) >= count, lambda: f"{name}: {list(read(self.events_path))}")
        return self.events(name)


def until(holds, found=str):
    wait_until(holds, SECONDS, found)


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path / "ck"), interval=10, every=1, keep=2, world_size=2)


@pytest.fixture
def base(storage, job):
    return Path(storage.folder) / job


@pytest.fixture
def host(storage, job):
    made = []

    def make(name="n", ranks=range(2), patience=300.0):
        made.append(Host(storage, job, name, ranks, patience))
        return made[-1]

    yield make
    for each in made:
        each.persister.stop()


@pytest.fixture
def alone(host):
    """The only node of a job."""
    return host()


@pytest.fixture
def pair(host):
    """Two nodes with a rank each."""
    return host("a", range(0, 1)), host("b", range(1, 2))


def complete(base):
    return sorted(each.name for each in checkpoint.listing(base) if each.complete)


def left(base):
    """What is in a job's folder besides the lease of its last run."""
    return [name for name in os.listdir(base) if not name.startswith("lease-")]


def assert_filled(base, iteration, host):
    """The checkpoint holds that iteration on every rank of `host`, read back through its digests."""
    version = Version(next(iter(host.ranks.values())).segment.header.opened.lineage, iteration)
    for rank in host.ranks.values():
        index = persist.read_rank(checkpoint.folder_of(base, version), rank.segment, version, TOKEN)
        assert (rank.segment.data(index) == iteration % 251).all()


# ---- alone ----


def test_a_version_is_written_when_its_turn_comes_and_every_rank_has_it(alone):
    alone.told()
    alone.capture(8, 9)
    alone.ranks[0].capture(10)
    time.sleep(0.3)  # three looks and more: nothing may happen, which no event tells
    assert alone.complete() == [] and not alone.events("checkpoint.started")
    alone.ranks[1].capture(10)
    (done,) = alone.wait("checkpoint.completed")
    assert alone.complete() == ["v1-10"]
    assert (done.fields["iteration"], done.fields["path"]) == (10, str(alone.base / "v1-10"))
    assert done.fields["bytes"] == sum(path.stat().st_size for path in (alone.base / "v1-10").glob("*.safetensors"))
    assert 0 < done.fields["seconds"] < SECONDS
    assert [event.fields["ranks"] for event in alone.events("checkpoint.started")] == [[0, 1]]
    assert_filled(alone.base, 10, alone)
    until(lambda: not any(rank.pinned() for rank in alone.ranks.values()))


def test_a_rank_that_attaches_while_the_others_are_looked_at_takes_part(alone, storage, monkeypatch):
    """Given a thread that pauses after it has seen that rank 0 alone has attached, until rank 0 holds a due version."""
    paused, go_on = threading.Event(), threading.Event()
    before = persister.taking_part

    def slow(*arguments):
        ranks = before(*arguments)
        if list(ranks) == [0] and not paused.is_set():
            paused.set()
            assert go_on.wait(SECONDS)
        return ranks

    monkeypatch.setattr(persister, "taking_part", slow)
    alone.persister.attached(0, alone.ranks[0].path, storage)
    assert paused.wait(SECONDS)
    alone.persister.attached(1, alone.ranks[1].path, storage)
    alone.ranks[0].capture(8, 9, 10)
    go_on.set()
    alone.ranks[1].capture(8, 9, 10)
    alone.wait("checkpoint.completed")
    assert [event.fields["ranks"] for event in alone.events("checkpoint.started")] == [[0, 1]]
    assert_filled(alone.base, 10, alone)


def test_it_is_pinned_in_every_rank_before_the_first_byte_and_training_goes_on_meanwhile(alone):
    held = threading.Event()
    before = persist.write_rank

    def slow(*arguments, **facts):
        assert held.wait(SECONDS)
        return before(*arguments, **facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(persist, "write_rank", slow)
        alone.told()
        alone.capture(9, 10)
        until(lambda: all(rank.pinned() == [Version(1, 10)] for rank in alone.ranks.values()))
        alone.capture(*range(11, 18))  # overwrites every other slot more than once
        assert all(rank.pinned() == [Version(1, 10)] for rank in alone.ranks.values())
        held.set()
        alone.wait("checkpoint.completed")
    assert_filled(alone.base, 10, alone)


def test_a_turn_that_was_overwritten_before_it_was_seen_is_made_up_for(alone):
    alone.capture(9, 10, 11, 12, 13, 14)
    alone.told()
    alone.wait("checkpoint.completed")
    assert alone.complete() == ["v1-14"]
    alone.persister.stop()  # long after, too
    alone.capture(*range(15, 30))
    later = Persister(NodeContext.of(alone.run_dir, alone.job, alone.name, Events(), {}))
    later.adopt({number: rank.path for number, rank in alone.ranks.items()})
    until(lambda: alone.complete() == ["v1-14", "v1-29"])
    later.stop()


def test_the_newest_are_kept_and_older_ones_and_leftovers_removed_after_the_new_one_is_complete(alone):
    checkpoint.partial_of(alone.base, Version(1, 5)).mkdir(parents=True)
    alone.told()
    for count, iteration in enumerate((10, 20, 30, 40), start=1):
        alone.capture(iteration)
        alone.wait("checkpoint.completed", count)
    removed = [name for event in alone.wait("checkpoint.pruned", 3) for name in event.fields["removed"]]
    assert removed == ["v1-5.partial", "v1-10", "v1-20"]
    assert sorted(left(alone.base)) == ["v1-30", "v1-40"]
    assert_filled(alone.base, 30, alone)


def test_on_request_the_newest_version_is_written_and_asked_again_is_there_already(alone):
    assert alone.persister.request("request", 0) == {"state": "off"}
    alone.told(interval=0)
    assert alone.persister.request("request", SECONDS) == {"state": "nothing"}
    alone.capture(20, 21, 22)
    alone.ranks[0].capture(23)
    expected = {"state": "done", "lineage": 1, "iteration": 22, "path": str(alone.base / "v1-22")}
    assert alone.persister.request("request", SECONDS) == expected
    assert alone.persister.request("request", SECONDS) == expected
    assert alone.complete() == ["v1-22"] and len(alone.events("checkpoint.started")) == 1
    assert alone.persister.status() == {
        "path": str(alone.base),
        "newest": [1, 22],
        "writing": None,
        "failed": "",
        "kept": [],
    }


def test_only_what_was_due_is_written_when_a_job_ends(alone):
    alone.told()
    alone.capture(10)
    assert alone.persister.request("end", SECONDS, only_due=True)["state"] == "done"
    alone.capture(11, 12)
    assert alone.persister.request("end", SECONDS, only_due=True)["iteration"] == 10
    assert alone.complete() == ["v1-10"]


def test_before_the_lineage_is_open_nothing_is_due(alone):
    """What a new incarnation finds may be void in a moment."""
    alone.capture(10)
    for rank in alone.ranks.values():
        rank.segment.header.token = TOKEN + 1
    alone.told()
    time.sleep(0.3)
    assert alone.complete() == []
    for rank in alone.ranks.values():
        rank.segment.open_lineage(2, Version(1, 10), ())
    alone.wait("checkpoint.completed")
    assert alone.complete() == ["v1-10"]


def test_the_ranks_of_a_wider_earlier_job_do_not_count(host, base):
    node = host(ranks=range(3))
    node.ranks[2].segment.header.attached = False
    node.ranks[2].capture(3)
    node.told()
    for number in (0, 1):
        node.ranks[number].capture(10)
    node.wait("checkpoint.completed")
    assert complete(base) == ["v1-10"] and not (base / "v1-10" / "rank-00002.json").exists()


# ---- where replicas are compared ----


def test_a_turn_waits_for_the_verdict_of_every_rank(alone):
    alone.told(audits=1)
    alone.capture(9, 10, 11)
    alone.ranks[0].mark(10, Mark.CERTIFIED)
    time.sleep(0.3)  # three looks and more: nothing may happen, which no event tells
    assert not alone.events("checkpoint.started")
    alone.ranks[1].mark(10, Mark.CERTIFIED)
    alone.wait("checkpoint.completed")
    assert alone.complete() == ["v1-10"] and checkpoint.read_manifest(alone.base / "v1-10").certified
    until(lambda: not any(rank.pinned() for rank in alone.ranks.values()))


def test_a_version_whose_replicas_differ_gives_its_turn_to_the_next_that_agrees(alone):
    alone.told(audits=1)
    alone.capture(10)
    alone.mark(10, Mark.MISMATCHED)
    alone.capture(11)
    alone.mark(11, Mark.CERTIFIED)
    alone.wait("checkpoint.completed")
    assert alone.complete() == ["v1-11"]


def test_a_verdict_that_comes_while_it_is_written_withdraws_it_and_says_why(alone, monkeypatch):
    """Asked for where no trainer lives, so that it is begun without its verdict."""
    before = persist.write_rank

    def late(folder, segment, *arguments, **facts):
        found = before(folder, segment, *arguments, **facts)
        if segment.rank == 1:
            alone.ranks[0].mark(7, Mark.MISMATCHED)
        return found

    monkeypatch.setattr(persist, "write_rank", late)
    alone.told(audits=1)
    alone.capture(7)
    found = alone.persister.request("signal", SECONDS)
    assert found["state"] == "failed" and "differ on ranks 0" in found["reason"], found
    (failed,) = alone.wait("checkpoint.failed")
    assert failed.fields["iteration"] == 7 and "audit.failed" in failed.fields["reason"]
    assert left(alone.base) == []
    assert not any(rank.pinned() for rank in alone.ranks.values())


def test_a_verdict_on_another_node_before_its_manifest_withdraws_a_checkpoint(host, base):
    first, second = host("a", range(0, 1), 1.0), host("b", range(1, 2), 1.0)
    for node in (first, second):
        node.told(audits=1)
        node.capture(10)
    second.mark(10, Mark.CERTIFIED)
    second.wait("checkpoint.started")
    until(lambda: (checkpoint.partial_of(base, Version(1, 10)) / "rank-00001.json").exists())
    assert second.ranks[1].pinned() == [Version(1, 10)], "watched until it is complete"
    second.mark(10, Mark.MISMATCHED)
    (failed,) = second.wait("checkpoint.failed")
    assert "differ on ranks 1" in failed.fields["reason"]
    first.mark(10, Mark.CERTIFIED)
    gave_up = first.wait("checkpoint.failed")[0].sentence()
    assert "no file of ranks 1 has appeared" in gave_up and "; see the events of their nodes, and" in gave_up
    assert "fix the storage" not in gave_up.lower(), "it works"
    assert complete(base) == []
    assert not second.ranks[1].pinned()


def test_a_checkpoint_that_another_node_gives_up_while_it_is_completed_costs_no_older_one(alone, monkeypatch):
    alone.told(keep=1)
    alone.capture(10)
    alone.wait("checkpoint.completed")
    write = checkpoint.write_digested

    def late(path, content, **_):
        checkpoint.withdraw(path.parent, [1])
        write(path, content)

    monkeypatch.setattr(checkpoint, "write_digested", late)
    alone.capture(20)
    until(lambda: len(alone.events("checkpoint.completed") + alone.events("checkpoint.failed")) == 2)
    (failed,) = alone.events("checkpoint.failed")
    assert "files of ranks [1] were removed" in failed.fields["reason"]
    assert left(alone.base) == ["v1-10"] and len(alone.events("checkpoint.completed")) == 1


def test_on_request_what_is_certified_is_written_before_what_is_newer(alone):
    alone.told(interval=0, audits=5)
    alone.capture(5)
    alone.mark(5, Mark.CERTIFIED)
    for rank in alone.ranks.values():  # it lies in the slot that is kept for it, behind newer ones
        rank.capture(6, 7)
    alone.train()
    assert alone.persister.request("signal", SECONDS)["iteration"] == 5
    assert alone.complete() == ["v1-5"]


@pytest.mark.parametrize("verdict", [Mark.CERTIFIED, None])
def test_a_request_waits_for_a_verdict_within_its_time_and_then_takes_what_is_not_known_to_differ(alone, verdict):
    alone.told(interval=0, audits=1)
    alone.capture(5, 6)
    for rank in alone.ranks.values():
        rank.segment.mark(Version(1, 6), Mark.MISMATCHED)  # kept, as it is while it is sent to another node
    alone.train()
    outcome = {}
    seconds = 3600.0 if verdict else 20.0  # half of it to wait, the other to write on a slow machine
    asking = threading.Thread(target=lambda: outcome.update(alone.persister.request(REQUEST, seconds)), daemon=True)
    begun = time.monotonic()
    asking.start()
    if verdict:
        until(lambda: bool(alone.persister._calls))
        alone.mark(5, verdict)
    asking.join(SECONDS)
    assert outcome["iteration"] == 5
    assert checkpoint.read_manifest(alone.base / "v1-5").certified is bool(verdict)
    assert verdict or time.monotonic() - begun > 9.0, "half of its time, and less where it is known"


@pytest.mark.parametrize("differs", [False, True])
def test_at_the_end_of_a_job_what_was_due_is_written_though_no_verdict_will_come(alone, storage, differs):
    alone.told(audits=1)
    alone.capture(10, 11)
    if differs:
        alone.ranks[1].segment.mark(Version(1, 10), Mark.MISMATCHED)  # kept for another purpose
    expected = 11 if differs else 10
    assert alone.persister.request("end", SECONDS, only_due=True)["iteration"] == expected
    assert checkpoint.read_manifest(alone.base / f"v1-{expected}").certified is False


# ---- errors of a storage ----


def test_a_full_disk_is_an_event_leaves_the_last_good_one_and_the_next_turn_is_tried(alone):
    """A trainer prints it once, and that there is room again."""
    alone.told()
    alone.capture(10)
    alone.wait("checkpoint.completed")
    assert not (alone.run_dir / ALARM).exists()
    faults.arm("persist.write@rank=1:enospc")
    for count in (1, 2):
        alone.capture(10 + 10 * count)
        failed = alone.wait("checkpoint.failed", count)[0].fields
        assert "No space left on device" in failed["reason"] and failed["iteration"] == 20
        assert failed["newest_complete"] == str(alone.base / "v1-10")
        assert sorted(left(alone.base)) == ["v1-10"], "what was begun is removed"
        assert "No space left" in alone.persister.status()["failed"]
        (first,) = json.loads((alone.run_dir / ALARM).read_text()).values()
        assert first.startswith("checkpoint.failed: node n: iteration 20 was not written: No space left on device")
        assert "; fix the storage; training continues" in first
        assert first.endswith(f"the newest checkpoint is {alone.base / 'v1-10'}. {catalogue.CHECKPOINT_FAILED.action}")
    until(lambda: not any(rank.pinned() for rank in alone.ranks.values()))  # after the event
    faults.arm("")
    alone.capture(31, 32, 33, 40)
    alone.wait("checkpoint.completed", 2)
    assert alone.complete() == ["v1-10", "v1-40"] and len(alone.events("checkpoint.failed")) == 2
    said = f"checkpoint.completed: node n: iteration 40 is in {alone.base / 'v1-40'}, after 2 failed attempts"
    until(lambda: list(json.loads((alone.run_dir / ALARM).read_text()).values()) == [said])
    assert alone.persister.status()["failed"] == ""


def test_a_checkpoint_that_is_asked_for_to_be_kept_is_not_pruned_also_by_another_smp(alone):
    alone.told(keep=1)
    alone.capture(10)
    alone.wait("checkpoint.completed")
    assert alone.persister.request("request", SECONDS, keep=True)["path"] == str(alone.base / "v1-10"), (
        "it was there already"
    )
    alone.capture(11)
    assert alone.persister.request("request", SECONDS, keep=True)["iteration"] == 11
    assert [event.fields["iteration"] for event in alone.events("checkpoint.kept")] == [10, 11]
    alone.capture(20)
    alone.wait("checkpoint.completed", 3)
    alone.persister.stop()

    again = Persister(NodeContext.of(alone.run_dir, alone.job, alone.name, Events(), {}))
    again.adopt({number: rank.path for number, rank in alone.ranks.items()})
    alone.capture(30)
    until(lambda: alone.complete() == ["v1-10", "v1-11", "v1-30"], lambda: str(alone.complete()))
    assert again.status()["kept"] == [[1, 10], [1, 11]]
    again.stop()


def test_a_checkpoint_that_cannot_be_kept_says_so_and_is_there(alone, monkeypatch):
    def full(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "keep"))

    monkeypatch.setattr("ft_plugins.snapshot.checkpoint.checkpoint.keep", full)
    alone.told()
    alone.capture(7)
    found = alone.persister.request("request", SECONDS, keep=True)
    assert found["state"] == "failed"
    assert "is written, but cannot be marked as kept: No space left on device" in found["reason"]
    assert alone.complete() == ["v1-7"] and alone.persister.status()["kept"] == []


@pytest.mark.parametrize("what", ["folder is a file", "it vanishes"])
def test_a_storage_that_cannot_be_used_is_an_event_and_is_used_again_when_it_is_back(alone, storage, what):
    folder = Path(storage.folder)
    if what == "folder is a file":
        folder.write_text("")
        alone.told()
        alone.capture(10)
    else:
        alone.told()
        before = persist.write_rank

        def gone(target, segment, *arguments, **facts):
            found = before(target, segment, *arguments, **facts)
            if segment.rank == 1:
                folder.rename(folder.with_name("away"))
                folder.write_text("")
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(persist, "write_rank", gone)
            alone.capture(10)
            alone.wait("checkpoint.failed")
    (failed,) = alone.wait("checkpoint.failed")
    reason = failed.fields["reason"]
    assert ("Not a directory" in reason or "File exists" in reason) and str(folder) in reason
    folder.unlink()
    alone.capture(20)
    alone.wait("checkpoint.completed")
    assert alone.complete() == ["v1-20"]
    assert_filled(alone.base, 20, alone)


def test_a_slot_that_is_corrupt_is_not_written_and_told(alone):
    alone.capture(9)
    for slot in alone.ranks[1].segment.slots():
        if slot.version:
            alone.ranks[1].segment.data(slot.index)[70] ^= 1
    alone.told()
    found = alone.persister.request("request", SECONDS)
    assert found["state"] == "failed" and "rank 1: bucket 0" in found["reason"]
    assert alone.complete() == []


def test_a_checkpoint_of_another_job_in_its_place_is_left_alone(alone):
    folder = checkpoint.partial_of(alone.base, Version(1, 10))
    folder.mkdir(parents=True)
    checkpoint.commit(alone.base, Version(1, 10), Origin("other", 0, {"layers": 5}))
    alone.told()
    alone.capture(10)
    (failed,) = alone.wait("checkpoint.failed")
    assert "another job" in failed.fields["reason"]
    assert os.listdir(alone.base / "v1-10") == ["manifest.json"]


@pytest.mark.parametrize(
    "fields",
    [
        {"folder": "relative"},
        {"every": 0},
        {"keep": 0},
        {"world_size": 0},
        {"interval": -1},
        {"interval": "1"},
        {"folder": None},
    ],
)
def test_a_trainer_s_malformed_description_of_its_storage_is_refused(storage, fields):
    shape = {each.name: 1 for each in dataclass_fields(Shape)}
    attach = {"rank": 0, "token": 1, "shape": shape, "fingerprint": {}, "pid": 1, "fresh": False}
    assert requests.local({"do": "attach", **attach, "storage": asdict(storage)}).storage == storage
    with pytest.raises(ProtocolError, match="attach: storage"):
        requests.local({"do": "attach", **attach, "storage": {**asdict(storage), **fields}})


def test_told_of_no_storage_any_more_it_stops(alone):
    alone.told()
    for number, rank in alone.ranks.items():
        alone.persister.attached(number, rank.path, None)
    alone.capture(10)
    assert alone.persister.request("request", 0) == {"state": "off"} and not alone.base.exists()
    assert not (alone.run_dir / "storage.json").exists()


# ---- several nodes ----


def test_the_files_of_two_nodes_become_one_checkpoint_and_both_know_it(pair, base):
    first, second = pair
    for node in (first, second):
        node.told()
    second.capture(10)
    second.wait("checkpoint.started")
    assert complete(base) == []
    first.capture(10)
    for node in (first, second):
        node.wait("checkpoint.completed")
        assert_filled(base, 10, node)
    assert complete(base) == ["v1-10"]


def test_storage_that_only_one_node_sees_is_reported_with_the_remedy(host, base, tmp_path):
    first, second = host("a", range(0, 1), 0.5), host("b", range(1, 2), 0.5)
    first.told()
    second.told(folder=str(tmp_path / "local"))
    for node in (first, second):
        node.capture(10)
    reason = first.wait("checkpoint.failed")[0].fields["reason"]
    assert "no file of ranks 1 has appeared" in reason and "--reft-checkpoint-dir" in reason
    reason = second.wait("checkpoint.failed")[0].fields["reason"]
    assert "rank 0 did not complete it" in reason and "--reft-checkpoint-dir" in reason
    until(lambda: left(base) == [] == left(tmp_path / "local" / base.name))


@pytest.mark.parametrize("ahead", [0, 1])
def test_nodes_whose_training_has_ended_write_the_newest_version_that_both_hold(pair, base, ahead):
    first, second = pair
    for node in (first, second):
        node.told()
        node.capture(6, 7)
    (first, second)[ahead].capture(8)
    outcomes = {}
    threads = [
        threading.Thread(target=lambda n=node: outcomes.update({n.name: n.persister.request("signal", SECONDS)}))
        for node in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    assert [outcomes[name]["path"] for name in ("a", "b")] == [str(base / "v1-7")] * 2
    assert left(base) == ["v1-7"], "no notice is left"
    assert_filled(base, 7, first)


def test_while_a_job_trains_on_two_nodes_a_request_names_a_version_ahead_and_both_write_it(pair, base):
    first, second = pair
    own = (os.getpid(), liveness.started(os.getpid()))
    outcome = {}
    for node in (first, second):
        for rank in node.ranks.values():
            rank.segment.header.owner = own
        node.told(interval=0)
        node.capture(3, 4)
    asking = threading.Thread(target=lambda: outcome.update(second.persister.request(REQUEST, 3 * SECONDS)))
    asking.start()
    iteration, deadline = 4, time.monotonic() + 2 * SECONDS
    while not outcome and time.monotonic() < deadline:
        iteration += 1
        first.capture(iteration)
        second.capture(iteration)
        time.sleep(0.05)  # the length of an iteration
    asking.join(SECONDS)
    assert outcome["state"] == "done", (outcome, iteration)
    assert outcome["iteration"] > 5 and complete(base) == [f"v1-{outcome['iteration']}"]
    until(lambda: left(base) == complete(base), lambda: str(left(base)))


def test_a_notice_that_is_damaged_or_of_another_time_says_nothing(tmp_path):
    ours, theirs = Notices(tmp_path, "a"), Notices(tmp_path, "b")
    ours.offer([0], {Version(1, 7)}, 2)
    theirs.offer([1], {Version(1, 8), Version(1, 7)}, 2)
    Notices(tmp_path, "a.of4").offer([0], {Version(2, 9)}, 4)
    assert sorted(offer.ranks for offer in ours.offers(2)) == [(0,), (1,)]
    assert NodeOffer((1,), (Version(1, 7), Version(1, 8))) in ours.offers(2)
    assert ours.offers(4) == [NodeOffer((0,), (Version(2, 9),))], "of another size of the job"
    os.utime(tmp_path / "offer-b.json", (1, 1))
    assert ours.offers(2) == [NodeOffer((0,), (Version(1, 7),))]
    write_digested(tmp_path / "offer-c.json", {"ranks": [2], "versions": [[1, 7]]})
    assert ours.offers(2) == [NodeOffer((0,), (Version(1, 7),))], "that of an older version names no size"
    theirs.want(Version(1, 9))
    assert ours.wanted() == Version(1, 9)
    ours.have(Version(1, 8))
    assert ours.wanted() == Version(1, 9)
    (tmp_path / "wanted.json").write_text(json.dumps({"lineage": 1, "iteration": 10}))
    assert ours.wanted() is None


# ---- lost and replaced ----


def start(node, faults="", orphan_seconds=600, watch=0):
    node.pids.append(ensure(node.run_dir, node.job, node.name, orphan_seconds, faults, watch=watch))


def smp(node, storage, faults="", orphan_seconds=600, watch=0):
    """A real SMP with two ranks that have attached and opened their lineage."""
    start(node, faults, orphan_seconds, watch)
    found = []
    with node.client() as client:
        for number in range(storage.world_size):
            path = client._ask(
                "attach", rank=number, token=node.status()["token"], shape=asdict(SHAPE), fingerprint=FINGERPRINT,
                pid=0, fresh=False, storage=asdict(storage),
            )["path"]  # fmt: skip
            found.append(Rank(Path(path)))
    return found


def test_whatever_the_umask_files_and_folders_of_a_node_and_of_checkpoints_are_their_owners_alone(node, storage, base):
    before = os.umask(0)
    try:
        for rank in smp(node, replace(storage, folder=str(Path(storage.folder) / "deep"))):
            rank.capture(10)
    finally:
        os.umask(before)
    folder = Path(storage.folder) / "deep" / node.job
    until(lambda: complete(folder) == ["v1-10"])
    made = [Path(storage.folder), *Path(storage.folder).rglob("*"), *node.run_dir.rglob("*")]
    assert {folder / "v1-10" / "manifest.json", node.run_dir / "smp.log"} <= set(made)
    wrong = {str(path): f"{path.lstat().st_mode:o}" for path in made if path.lstat().st_mode & 0o077}
    assert not wrong


POINTS = ["persist.rank.before@rank=1", "persist.write@rank=1", "persist.file@rank=0", "persist.file@rank=1"]
POINTS += ["persist.rename@rank=1", "persist.manifest.before", "persist.manifest.after"]


@pytest.mark.parametrize("point", POINTS)
def test_an_smp_killed_at_any_point_loses_no_checkpoint_and_its_successor_writes_the_new_one(
    node, storage, base, point
):
    doomed = f"{point}{',' if '@' in point else '@'}iteration=20,adopted=0:kill"
    ranks = smp(node, storage, doomed)
    for rank in ranks:
        rank.capture(10)
    until(lambda: complete(base) == ["v1-10"])
    for rank in ranks:
        rank.capture(20)
    wait_until_gone(node.pids[-1], SECONDS)
    assert "v1-10" in complete(base)
    assert complete(base) == (["v1-10", "v1-20.partial"] if point.endswith("after") else ["v1-10"])
    for rank in ranks:
        rank.capture(21, 22)  # training goes on without an SMP
    node.start(armed=doomed)
    if not point.endswith("after"):  # the version of that turn has been made up for
        until(lambda: any(each.fields["iteration"] > 10 for each in node.events("checkpoint.completed")))
    until(lambda: len(complete(base)) == 2 and sorted(left(base)) == complete(base), lambda: str(left(base)))
    newest = max(each.version for each in checkpoint.listing(base) if each.complete)
    for rank in ranks:
        index = persist.read_rank(checkpoint.folder_of(base, newest), rank.segment, newest, TOKEN)
        assert (rank.segment.data(index) == newest.iteration).all()
    assert not any(rank.pinned() for rank in ranks)


def test_an_smp_that_is_orphaned_writes_the_newest_version_also_after_it_was_replaced(node, storage, base, sleeper):
    ranks = smp(node, replace(storage, interval=0), watch=sleeper.pid)
    for rank in ranks:
        rank.capture(3, 4, 5)
    node.kill()
    start(node, watch=sleeper.pid)
    sleeper.kill()
    until(lambda: complete(base) == ["v1-5"], lambda: str(node.events()))
    assert [event.fields["reason"] for event in node.events("checkpoint.started")] == ["orphaned"]
    assert all(rank.path.exists() for rank in ranks)


@pytest.mark.parametrize("seconds", [0, 1])
def test_an_smp_whose_time_is_over_removes_the_memory_only_when_it_is_in_storage(node, storage, base, sleeper, seconds):
    """Where it was orphaned the disk is full, when its time is over there is room again; or both at once."""
    full = "persist.write@hit=1:enospc" if seconds else ""
    ranks = smp(node, replace(storage, interval=0), full, orphan_seconds=seconds, watch=sleeper.pid)
    for rank in ranks:
        rank.capture(7)
    sleeper.kill()
    wait_until_gone(node.pids[-1], SECONDS)
    assert complete(base) == ["v1-7"] and not any(rank.path.exists() for rank in ranks)
    assert [event.fields["reason"] for event in node.events("smp.ended")] == [f"orphaned for {seconds} s"]
    assert len(node.events("checkpoint.failed")) == (1 if seconds else 0)


def test_the_end_leaves_off_what_is_being_written_at_its_next_piece(alone, monkeypatch):
    begun, left_off = threading.Event(), threading.Event()

    def endless(folder, segment, version, origin, proceed, **facts):
        begun.set()
        try:
            while True:
                proceed(1)
                time.sleep(0.001)
        finally:
            left_off.set()

    monkeypatch.setattr(persist, "write_rank", endless)
    monkeypatch.setattr(persister, "_STOP_SECONDS", SECONDS)  # the limit for a disk that hangs
    alone.told()
    alone.capture(10)
    assert begun.wait(SECONDS)
    alone.persister.stop()
    assert left_off.is_set(), "it did not end because it was no longer waited for"
    assert not any(rank.pinned() for rank in alone.ranks.values()) and not alone.events("checkpoint.failed")


def test_the_lease_is_renewed_while_a_write_takes_longer_than_it_holds(alone, monkeypatch):
    """Given a write that is over only once the lease was renewed twice meanwhile."""
    monkeypatch.setattr(lease, "HOLD_SECONDS", 0.3)
    monkeypatch.setattr(folder_lease, "LOOK_SECONDS", 0.05)
    before, renewals = persist.write_rank, set[float]()

    def seen_renewed():
        if (found := lease.newest(alone.base)) is not None and found.renewed:
            renewals.add(found.renewed)
        return len(renewals)

    def slow(*arguments, **more):
        until(lambda: seen_renewed() > 2)
        return before(*arguments, **more)

    monkeypatch.setattr(persist, "write_rank", slow)
    alone.train()
    alone.told()
    alone.capture(10)
    alone.wait("checkpoint.completed")
    assert not alone.persister.lease.lost


def test_a_folder_that_stalls_holds_up_neither_requests_nor_the_end(alone, monkeypatch):
    stalled, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(persister, "_STOP_SECONDS", 0.05)

    def stall(*arguments):
        stalled.set()
        assert goes_on.wait(SECONDS)

    monkeypatch.setattr(lease, "newest", stall)
    try:
        alone.train()
        alone.told()
        assert stalled.wait(SECONDS)
        assert alone.persister.request("request", SECONDS) == {"state": "nothing"}, "the writing thread goes on"
        alone.persister.stop(in_order=True)
    finally:
        goes_on.set()
