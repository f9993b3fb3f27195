"""Nodes that compute parity from replicas of their own: nothing of those is sent, what differs never counts, what is
lost comes back, and computes the parity that it kept again.

Every node is a `NodeTier` with real segments and sockets; trainers are real captures of tensors, of which most are
replicated over all ranks.
"""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from ft_plugins.errors import ProtocolError
from ft_plugins.events import Events
from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.smp.exchange import replica_checks as checks
from ft_plugins.smp.serve.job_file import refer
from ft_plugins.smp.serve.node_context import NodeContext
from ft_plugins.smp.serve.requests import RebuildSlot
from ft_plugins.smp.tree.node import NodeTier
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.snapshot.capture.capture import Capture
from ft_plugins.snapshot.capture.double import replica_extents, replica_shares, with_parity
from ft_plugins.snapshot.capture.layout import plan_layout
from ft_plugins.snapshot.segment.header import Header
from ft_plugins.snapshot.segment.paths import path_of, remove
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import SLOTS, Pin, SlotState, Version, slots_for
from ft_plugins.transport import protocol

from .node_clusters import wait, write_secret

BUCKET = 64 << 10
NODES = ("n0", "n0", "n1", "n2")  # of each rank
RANKS = tuple(range(len(NODES)))
SECONDS = 90
DETECT = 1.5


class Trainer:
    """One rank: tensors, of which `own` is its own, and the capture of them."""

    def __init__(self, rank, job, node, layout, shape):
        self.rank, self.layout = rank, layout
        path = path_of(job, node, rank)
        create(path, shape, rank, {})
        self.segment = Segment(path)
        self.segment.ranges = layout.ranges
        self.tensors = {item.name: torch.zeros(item.nbytes, dtype=torch.uint8) for item in inventory(rank).items}
        self.capture = Capture(self.segment, layout, lambda: self.tensors, 0)

    def train(self, iteration):
        for name, tensor in self.tensors.items():
            tensor.copy_(torch.from_numpy(value_of(self.rank, name, iteration, tensor.numel())))

    def holds(self, version, expected):
        """Whether the slot of `version` is whole, and every byte of it is `expected`."""
        for slot in self.segment.slots():
            if slot.version == version and slot.state is SlotState.CLEAN:
                self.segment.verify(slot.index)
                return bool((self.segment.data(slot.index) == expected).all())
        return False

    def load(self, version):
        """As a recovery does: the tensors hold `version`, whose parity is computed if it is not here."""
        self.train(version.iteration)
        self.capture.add_parity(version)

    def parity(self, version):
        found = self.segment.parity_of(version)
        assert found is not None
        self.segment.verify(found)
        return self.segment.data(found).copy()

    def data(self, version):
        (index,) = [slot.index for slot in self.segment.slots() if slot.version == version]
        return self.segment.data(index).copy()

    def close(self):
        self.capture.close()
        self.segment.close()


def position_of(rank):
    return list(dict.fromkeys(NODES)).index(NODES[rank])


def inventory(rank):
    sizes = {f"w{number}": 90_001 * number for number in range(1, 7)}
    items = [Item(name, "uint8", (size,), size, Role.PARAMETER, RANKS) for name, size in sizes.items()]
    return Inventory.of(rank, [*items, Item("own", "uint8", (7_000,), 7_000, Role.MOMENT, (rank,))])


def value_of(rank, name, iteration, nbytes):
    seed = [iteration, rank if name == "own" else 99, *name.encode()]
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Cluster:
    """Three nodes, two ranks on the first one."""

    def __init__(self, folder, job, free=SLOTS):
        self.folder, self.job = folder, job
        self.secret = write_secret(folder)
        plain = [plan_layout(inventory(rank), NODES, BUCKET) for rank in RANKS]
        self.layouts = [with_parity(layout, NODES, [RANKS], 1, BUCKET) for layout in plain]
        slots = slots_for(Pin.NODE, Pin.SOURCE, free=free)
        counted = ((la.nbytes, len(la.ranges), la.parity_nbytes, la.source_digest_count) for la in self.layouts)
        self.shapes = [
            Shape(nbytes + parity, 1000, buckets, 7, slots, parity, digests, free)
            for nbytes, buckets, parity, digests in counted
        ]
        self.events = {}
        self.trainers = {}
        self.tiers = []
        self.names = []
        for position, name in enumerate(dict.fromkeys(NODES)):
            self.names.append(name)
            self._make(position)
        self.told = Protection(
            1, None, NODES, (RANKS,), tuple(self.shapes), 1, 0, self._endpoints(), 1, 0.0, DETECT,
            replica_extents([replica_shares(layout) for layout in self.layouts]),
        )  # fmt: skip

    def ranks(self, position):
        return [rank for rank in RANKS if position_of(rank) == position]

    def _nodes(self):
        """Where each rank stands now."""
        return tuple(self.names[position_of(rank)] for rank in RANKS)

    def _make(self, position):
        name = self.names[position]
        (self.folder / name).mkdir()
        for rank in self.ranks(position):
            self.trainers[rank] = Trainer(rank, self.job, name, self.layouts[rank], self.shapes[rank])
        self.events[name] = []
        self.tiers[position : position + 1] = [self._tier(position)]

    def _tier(self, position):
        name = self.names[position]
        events = Events(name)
        events.subscribe(self.events[name].append)
        segments = {rank: self.trainers[rank].segment for rank in self.ranks(position)}
        return NodeTier(NodeContext.of(self.folder / name, self.job, name, events, segments))

    def _endpoints(self):
        return tuple(tier.endpoint("127.0.0.1", str(self.secret)) for tier in self.tiers)

    def protect(self, lineage=1, base=None):
        self.told = replace(self.told, lineage=lineage, base=base, nodes=self._nodes(), endpoints=self._endpoints())
        for position, tier in enumerate(self.tiers):
            tier.protect(replace(self.told, position=position), lineage)
        for trainer in self.trainers.values() if base is not None else ():
            trainer.load(base)

    def until_awaited(self, version):
        named = [version.lineage, version.iteration]
        wait(lambda: all(tier.status()["exchange"] == named for tier in self.tiers))

    def until_counts(self, version):
        named = [version.lineage, version.iteration]
        wait(lambda: all(tier.status()["committed"] == named for tier in self.tiers))

    def train(self, version, flip=None):
        """All ranks capture a version; a bit of the replica that rank `flip` holds flips before."""
        for trainer in self.trainers.values():
            trainer.train(version.iteration)
            if trainer.rank == flip:
                trainer.tensors["w5"][:] ^= 1
            trainer.capture.start(version, f"{trainer.rank} at {version}".encode())
        for trainer in self.trainers.values():
            trainer.capture.wait()

    def counted(self, *versions):
        for version in versions:
            self.until_awaited(version)
            self.train(version)
            self.until_counts(version)

    def events_of(self, kind):
        return [event for found in self.events.values() for event in found if event.name == kind]

    def substitute(self, position):
        """A node is lost with its memory; a fresh one takes its place."""
        self.tiers[position].close()
        for rank in self.ranks(position):
            self.trainers.pop(rank).close()
        remove(self.job, self.names[position])
        for tier in self.tiers[:position] + self.tiers[position + 1 :]:
            tier.suspend()
        self.names[position] += "s"
        self._make(position)

    def rebuild(self, position, version):
        holders = tuple((at, *where) for at, where in enumerate(self._endpoints()) if at != position)
        protection = replace(self.told, nodes=self._nodes())
        reference, _ = refer(protection)
        for rank in self.ranks(position):
            self.tiers[position].rebuild(RebuildSlot(rank, 0, version, reference, holders, (position,)), protection)

    def end(self):
        for tier in self.tiers:
            tier.close()
        for trainer in self.trainers.values():
            trainer.close()
        for name in self.names:
            remove(self.job, name)


@pytest.fixture
def cluster(tmp_path, job):
    made = Cluster(tmp_path, job)
    yield made
    made.end()


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_lost_node_comes_back_with_its_data_and_computes_the_parity_that_it_kept(cluster, position, copies):
    """From parity, or from a copy where there are copies beside it."""
    if copies:
        cluster.told = replace(cluster.told, stages=((0, 1, 2, 3),), both=True)
    cluster.protect()
    cluster.counted(Version(1, 1), Version(1, 2))
    before = {rank: cluster.trainers[rank].data(Version(1, 2)) for rank in RANKS}
    parity = {rank: cluster.trainers[rank].parity(Version(1, 2)) for rank in RANKS}
    cluster.substitute(position)
    cluster.rebuild(position, Version(1, 2))
    plan = cluster.told.plan()
    for rank in cluster.ranks(position):
        trainer = cluster.trainers[rank]
        assert trainer.holds(Version(1, 2), before[rank])
        if copies:
            assert plan.recovery_sections(rank, [position]) == (plan.sections[rank],)
        assert not trainer.segment.has_parity(Version(1, 2))
    cluster.protect(2, Version(1, 2))
    cluster.until_counts(Version(1, 2))
    for rank, kept in parity.items():
        assert (cluster.trainers[rank].parity(Version(1, 2)) == kept).all()
    cluster.counted(Version(2, 3))
    before = {rank: cluster.trainers[rank].data(Version(2, 3)) for rank in RANKS}
    cluster.substitute((position + 1) % 3)  # what the first substitute keeps is of use
    cluster.rebuild((position + 1) % 3, Version(2, 3))
    for rank in cluster.ranks((position + 1) % 3):
        assert cluster.trainers[rank].holds(Version(2, 3), before[rank])
    assert cluster.events_of("replica.mismatched") == []


def test_of_what_is_replicated_only_digests_are_sent(cluster):
    cluster.protect()
    cluster.counted(Version(1, 1))
    wait(lambda: len(cluster.events_of("exchange.sent")) == 3)
    sent = {event.node: event.fields["bytes"] for event in cluster.events_of("exchange.sent")}
    compared = sum(event.fields["compared"] for event in cluster.events_of("exchange.sent"))
    assert compared == sum(layout.source_digest_count for layout in cluster.layouts)
    replicated = sum(layout.nbytes for layout in cluster.layouts) - 7_000 * len(RANKS)
    tables = sum(8 * shape.digests + 100 for shape in cluster.shapes)
    assert 7_000 * len(RANKS) <= sum(sent.values()) <= 7_000 * len(RANKS) + 2 * tables + 32 * compared + 1000
    assert sum(sent.values()) < replicated / 20
    plan = cluster.told.plan()
    assert sum(send.stop - send.start for sends in plan.sends for send in sends) < 7_100 * len(RANKS)


@pytest.mark.parametrize("flipped", RANKS)
def test_a_version_whose_replicas_differ_never_counts_and_says_whose_they_are(cluster, flipped):
    cluster.protect()
    cluster.counted(Version(1, 1))
    cluster.until_awaited(Version(1, 2))
    cluster.train(Version(1, 2), flip=flipped)
    wait(lambda: bool(cluster.events_of("replica.mismatched")))
    for event in cluster.events_of("replica.mismatched"):
        keeps = cluster.tiers[cluster.names.index(event.node)].inventory()["parity"]
        assert (1, 2) not in keeps, "a recovery would take what never counted"
    cluster.counted(Version(1, 3))  # a later one is tried, and its replicas are equal
    assert Version(1, 2) not in {
        Version(event.fields["lineage"], event.fields["iteration"]) for event in cluster.events_of("version.committed")
    }
    found = cluster.events_of("replica.mismatched")
    for event in found:
        fields = event.fields
        assert (fields["lineage"], fields["iteration"]) == (1, 2) and flipped in fields["ranks"]
        keeper, holder = fields["ranks"]
        assert event.node == cluster.names[position_of(keeper)]
        layout = cluster.layouts[keeper]
        bucket = layout.parity[fields["bucket"] - len(layout.buckets)]
        (source,) = [source for source in bucket.sources if source.rank == holder]
        assert "w5" in {piece.item for piece in source.pieces} and source.nbytes == fields["bytes"]
    alarms = [path.read_text() for path in cluster.folder.glob(f"*/{protocol.ALARM}")]
    told = [json.loads(alarm)["replicas"] for alarm in alarms]
    assert told and all(alarm.startswith("replica.mismatched: ") and f"{flipped}" in alarm for alarm in told)
    assert all("one of the two replicas is corrupt" in alarm for alarm in told)
    lost = 2 if flipped != 3 else 1
    before = {rank: cluster.trainers[rank].data(Version(1, 3)) for rank in RANKS}
    cluster.substitute(lost)
    cluster.rebuild(lost, Version(1, 3))
    for rank in cluster.ranks(lost):
        assert cluster.trainers[rank].holds(Version(1, 3), before[rank])


@pytest.mark.parametrize("free", [0, 1, 2])
def test_with_fewer_slots_what_is_committed_stays_newer_versions_come_to_count_and_training_never_waits(
    tmp_path, job, free
):
    """Two, three and four slots in all; iterations do not wait for the exchange, and a node is lost in the end."""
    cluster = Cluster(tmp_path, job, free)
    try:
        cluster.protect()
        iteration, counted = 0, list[Version]()
        while len(counted) < 4:
            iteration += 1
            assert iteration < 600, f"only {counted} count"
            cluster.train(Version(1, iteration))
            time.sleep(0.01)
            for position, tier in enumerate(cluster.tiers):
                committed = tier.committed
                if committed is None or committed != tier.committed:
                    continue
                for rank in cluster.ranks(position):
                    segment = cluster.trainers[rank].segment
                    held = {slot.version for slot in segment.slots() if slot.state is SlotState.CLEAN}
                    assert committed != tier.committed or (committed in held and segment.has_parity(committed))
            newest = min(tier.committed or Version(0, 0) for tier in cluster.tiers)
            if newest > max(counted, default=Version(0, 0)):
                counted.append(newest)
        for tier in cluster.tiers:
            tier.suspend()
        last = max(tier.committed for tier in cluster.tiers if tier.committed)
        before = {rank: cluster.trainers[rank].data(last) for rank in RANKS}
        cluster.substitute(1)
        cluster.rebuild(1, last)
        for rank in cluster.ranks(1):
            assert cluster.trainers[rank].holds(last, before[rank])
        cluster.protect(2, last)
        cluster.until_counts(last)
        assert cluster.events_of("replica.mismatched") == []
    finally:
        cluster.end()


def test_ranks_that_were_past_a_version_when_it_was_announced_have_no_parity_of_it_and_a_later_one_counts(
    cluster, monkeypatch
):
    """What is exchanged next reaches ranks three iterations later: it is announced further ahead, until they know."""
    under_way = []
    iteration = 0
    tell = Header.await_version
    monkeypatch.setattr(Header, "await_version", lambda header, version: under_way.append((iteration, header, version)))
    cluster.protect()
    announced = []
    while not any(tier.status()["committed"] for tier in cluster.tiers):
        iteration += 1
        assert iteration < 100, f"announced {announced}, none counts"
        for entry in [entry for entry in under_way if entry[0] + 3 <= iteration]:
            under_way.remove(entry)
            tell(entry[1], entry[2])
        cluster.train(Version(1, iteration))
        time.sleep(0.15)
        exchange = cluster.tiers[0].status()["exchange"]
        if exchange is not None and exchange[1] not in announced:
            announced.append(exchange[1])
    assert len(announced) > 2, "the first ones are missed"
    assert cluster.events_of("replica.mismatched") == []


@pytest.mark.parametrize("position", [0, 1])
def test_an_smp_that_is_replaced_compares_anew_what_it_had_not_sealed(cluster, position):
    cluster.protect()
    cluster.counted(Version(1, 1))
    cluster.until_awaited(Version(1, 2))
    old = cluster.tiers[position]
    old.suspend()
    old._endpoint.close()
    cluster.tiers[position] = cluster._tier(position)
    cluster.train(Version(1, 2))
    cluster.until_counts(Version(1, 2))
    cluster.counted(Version(1, 3))


def test_slots_that_are_laid_out_otherwise_than_the_plan_has_it_are_refused(cluster):
    with pytest.raises(ProtocolError, match="disagree about the nodes of the job"):
        cluster.tiers[0].protect(replace(cluster.told, replicated=()), 1)


def test_checks_are_bounded_and_answered_of_what_is_kept_only(cluster):
    for trainer in cluster.trainers.values():
        trainer.segment.header.await_version(Version(1, 1))
    cluster.train(Version(1, 1))
    plan, segments = cluster.told.plan(), {rank: trainer.segment for rank, trainer in cluster.trainers.items()}
    asked = [check for rank in RANKS for check in plan.checks(rank, segments[rank].ranges)]
    tables = {rank: segment.digests(segment.parity_of(Version(1, 1)) or 0) for rank, segment in segments.items()}
    payload = checks.payload(asked, tables)
    assert checks.mismatched(segments, Version(1, 1), payload) is None, "it may be overwritten meanwhile"
    for segment in segments.values():
        segment.pin(Version(1, 1), Pin.SOURCE)
    assert checks.mismatched(segments, Version(1, 1), payload) == []
    assert checks.mismatched(segments, Version(1, 2), payload) is None
    wrong = payload.copy().view("<u8").reshape(-1, 4)
    wrong[3, 3] ^= 1
    assert checks.mismatched(segments, Version(1, 1), wrong.reshape(-1).view(np.uint8)) == [3]
    for column, value in ((0, 17), (1, 1 << 40), (2, 1 << 63), (2, 80 << 20)):
        wrong = payload.copy().view("<u8").reshape(-1, 4)
        wrong[2, column] = value
        with pytest.raises(ProtocolError):
            checks.mismatched(segments, Version(1, 1), wrong.reshape(-1).view(np.uint8))
    for bad in (payload[:-8], np.zeros(32 * (checks.CHECKS + 1), dtype=np.uint8)):
        with pytest.raises(ProtocolError):
            checks.mismatched(segments, Version(1, 1), bad)
    with pytest.raises(ProtocolError):
        checks.mismatched({0: segments[0]}, Version(1, 1), payload)


def test_batches_hold_every_check_once_and_no_more_than_their_receiver_may_digest(cluster, monkeypatch):
    plan = cluster.told.plan()
    asked = [check for rank in RANKS for check in plan.checks(rank, cluster.layouts[rank].ranges)]
    for count, nbytes in ((3, 1 << 30), (100, 70_000), (100, 10), (1000, 1 << 30)):
        monkeypatch.setattr(checks, "CHECKS", count)
        monkeypatch.setattr(checks, "SOURCE_BYTES", nbytes)
        batches = [list(batch) for batch in checks.batches(asked)]
        assert [check for batch in batches for check in batch] == asked
        for batch in batches:
            assert 1 <= len(batch) <= count
            assert len(batch) == 1 or sum(check.source.nbytes for check in batch) <= nbytes
    assert list(checks.batches([])) == []
