"""Nodes guard each other's slots: what counts can be rebuilt from any nodes that parity makes up for, bit for bit.

Every node here is a `NodeTier` of its own with real segments and real sockets; trainers are played by `Node.write`.
"""

from __future__ import annotations

import errno
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from ft_plugins.base import files
from ft_plugins.bubbles.bubble_plan import LARGEST_RATE_DUTY
from ft_plugins.bubbles.filling import Grant
from ft_plugins.bubbles.gate.gate import Gate
from ft_plugins.bubbles.gate.gate_pacer import GatePacer
from ft_plugins.errors import ConfigError, FtError, ProtocolError, ResumeError
from ft_plugins.events import Event, Events, catalogue
from ft_plugins.model.pacer import Allowance
from ft_plugins.smp.exchange.traffic import RatePacer
from ft_plugins.smp.serve.context import NodeContext
from ft_plugins.smp.serve.job_file import refer
from ft_plugins.smp.serve.requests import RebuildSlot
from ft_plugins.smp.tree.node import NodeTier
from ft_plugins.smp.tree.node_driver import NodeDriver
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.snapshot.segment import segment as segment_module
from ft_plugins.snapshot.segment.paths import parity_path_of, path_of, remove
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Pin, SlotState, Version, choose, slots_for
from ft_plugins.transport import protocol
from ft_plugins.transport.channel import Party
from ft_plugins.transport.wire import PURPOSE, Peer

BUCKET = 100_000
PER_NODE = 2
SECONDS = 20
PATIENCE = 90  # a bound for waits: a busy machine takes long
DETECT = 1.5


def small_of(rank: int, iteration: int) -> bytes:
    return f"small state of rank {rank} at {iteration}".encode() * 7


class Node:
    """One node: its ranks' segments, its part of the SMP, its events."""

    def __init__(self, cluster: Cluster, name: str, position: int) -> None:
        self.name = name
        self.position = position
        self.cluster = cluster
        self.run_dir = cluster.folder / name
        self.run_dir.mkdir()
        self.segments: dict[int, Segment] = {}
        for rank in cluster.ranks[position]:
            path = path_of(cluster.job, name, rank)
            create(path, cluster.shapes[rank], rank, {})
            self.segments[rank] = Segment(path)
            nbytes = cluster.shapes[rank].nbytes
            self.segments[rank].ranges = [(at, min(BUCKET, nbytes - at)) for at in range(0, nbytes, BUCKET)]
        self.seen: list[Event] = []
        self.tier = self._start()
        self.endpoint = self.tier.endpoint("127.0.0.1", str(cluster.secret), cluster.encrypt)

    def _start(self) -> NodeTier:
        events = Events(self.name)
        events.subscribe(self.seen.append)
        return NodeTier(NodeContext.of(self.run_dir, self.cluster.job, self.name, events, self.segments))

    def write(self, iteration: int, lineage: int = 1) -> None:
        """What a capture of each rank leaves."""
        version = Version(lineage, iteration)
        for rank, segment in self.segments.items():
            index = choose(segment.slots())
            segment.dirty(index, version, 1)
            segment.data(index)[:] = data = self.cluster.data(rank, iteration)
            small = small_of(rank, iteration)
            segment.write_small(index, small)
            digests = [xxhash.xxh3_64_intdigest(data[at : at + size].tobytes()) for at, size in segment.ranges]
            segment.digests(index)[:] = np.array(digests, dtype=np.uint64)
            segment.seal(index, version, 1, small, segment.digests(index).copy())

    def holds(self, rank: int, version: Version) -> bool:
        """Whether the rank's slot of `version` is complete, and every byte is right."""
        segment = self.segments[rank]
        for slot in segment.slots():
            if slot.version == version and slot.state is SlotState.CLEAN:
                right = (segment.data(slot.index) == self.cluster.data(rank, version.iteration)).all()
                return bool(right) and segment.small(slot.index) == small_of(rank, version.iteration)
        return False

    def sends(self, version: Version) -> bool:
        """Whether the exchange of `version` has begun."""
        begun = [event.fields for event in self.seen if event.name == "exchange.started"]
        return {"lineage": version.lineage, "iteration": version.iteration} in begun

    def replace_smp(self) -> None:
        """The SMP dies and another one takes its place."""
        self.tier.suspend()
        self.tier._endpoint.close()
        self.tier = self._start()

    def destroy(self) -> None:
        """The node is lost, with its memory. Idempotent."""
        if self.segments:
            self.tier.close()
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        remove(self.cluster.job, self.name)


class Cluster:
    """A job of two sharding groups over `count` nodes with two ranks each, uneven shares."""

    def __init__(
        self, folder: Path, job: str, count: int, losses: int, mbps: float = 0.0, encrypt: bool = False
    ) -> None:
        self.folder = folder
        self.encrypt = encrypt
        self.job = job
        self.secret = folder / "secret"
        self.secret.write_text("a secret of this job alone")
        self.secret.chmod(0o600)
        self.ranks = [range(at * PER_NODE, (at + 1) * PER_NODE) for at in range(count)]
        world = count * PER_NODE
        sizes = [1_500_000 + 70_001 * rank for rank in range(world)]
        slots = slots_for(Pin.NODE, Pin.SOURCE)
        self.shapes = [Shape(size, 100_000, -(-size // BUCKET), 77, slots) for size in sizes]
        self.nodes = [Node(self, f"n{position}", position) for position in range(count)]
        names = tuple(self.nodes[rank // PER_NODE].name for rank in range(world))
        groups = (tuple(range(0, world, 2)), tuple(range(1, world, 2)))
        self.protection = Protection(
            1, None, names, groups, tuple(self.shapes), losses, 0, tuple(node.endpoint for node in self.nodes), 1, mbps,
            DETECT,
        )  # fmt: skip
        self._data: dict[tuple[int, int], np.ndarray] = {}
        self.made = list(self.nodes)

    def data(self, rank: int, iteration: int) -> np.ndarray:
        if (rank, iteration) not in self._data:
            rng = np.random.default_rng(1000 * rank + iteration)
            self._data[rank, iteration] = rng.integers(0, 256, self.shapes[rank].nbytes, dtype=np.uint8)
        return self._data[rank, iteration]

    def protect(self, lineage: int = 1, base: Version | None = None) -> None:
        names = tuple(self.nodes[rank // PER_NODE].name for rank in range(len(self.shapes)))
        endpoints = tuple(node.endpoint for node in self.nodes)
        heard = [node.tier.inventory()["committed"] for node in self.nodes]
        committed = max((Version(*version) for version in heard if version and base), default=None)
        self.protection = replace(
            self.protection, lineage=lineage, base=base, nodes=names, endpoints=endpoints, committed=committed
        )
        for node in self.nodes:
            node.tier.protect(replace(self.protection, position=node.position), lineage)

    def train(self, first: int, last: int, lineage: int = 1) -> None:
        """All nodes seal version after version, each when all nodes wait for it, and go on when it counts."""
        for iteration in range(first, last + 1):
            wait(lambda k=iteration: all(n.tier.status()["exchange"] == [lineage, k] for n in self.nodes))
            for node in self.nodes:
                node.write(iteration, lineage)
            wait(lambda k=iteration: all(n.tier.status()["committed"] == [lineage, k] for n in self.nodes))

    def substitute(self, *positions: int) -> list[Node]:
        """Destroy the nodes at `positions`; fresh ones take their places."""
        for position in positions:
            self.nodes[position].destroy()
        for node in self.nodes:
            if node.position not in positions:
                node.tier.suspend()
        fresh = [Node(self, f"f{len(self.made)}-{position}", position) for position in positions]
        for node in fresh:
            self.nodes[node.position] = node
        self.made += fresh
        return fresh

    def rebuild(self, node: Node, rank: int, version: Version, lost: tuple[int, ...]) -> None:
        names = tuple(self.nodes[r // PER_NODE].name for r in range(len(self.shapes)))
        told = replace(self.protection, nodes=names, endpoints=tuple(n.endpoint for n in self.nodes))
        holders = tuple((n.position, *n.endpoint) for n in self.nodes if n.position not in lost)
        node.tier.rebuild(RebuildSlot(rank, 7, version, refer(told)[0], holders, tuple(lost)), told)


def driver_of(node: Node) -> NodeDriver:
    assert node.tier._driver is not None
    return node.tier._driver


def wait(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)


@pytest.fixture
def cluster(tmp_path: Path, job: str) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(count: int, losses: int = 1, mbps: float = 0.0, encrypt: bool = False) -> Cluster:
        made.append(Cluster(tmp_path, job, count, losses, mbps, encrypt))
        return made[-1]

    yield make
    for each in made:
        for node in each.made:
            node.destroy()


@pytest.mark.parametrize(
    ("count", "losses", "lost"),
    [(2, 1, (0,)), (2, 1, (1,)), (3, 1, (1,)), (4, 1, (3,)), (4, 2, (0, 1)), (4, 2, (1, 3)), (5, 2, (4,))],
)
def test_what_counts_is_rebuilt_on_fresh_nodes_and_protected_again(
    cluster: Callable[..., Cluster], count: int, losses: int, lost: tuple[int, ...]
) -> None:
    job = cluster(count, losses)
    job.protect()
    job.train(1, 3)
    version = Version(1, 3)
    for node in job.substitute(*lost):
        for rank in job.ranks[node.position]:
            job.rebuild(node, rank, version, lost)
            assert node.holds(rank, version)
    job.protect(2, version)
    wait(lambda: all(node.tier.status()["committed"] == [1, 3] for node in job.nodes))
    wait(lambda: all(node.tier.inventory()["parity"] == [(1, 3)] for node in job.nodes))  # the fresh ones keep it too
    job.train(4, 5, lineage=2)
    again = (lost[0] + 1) % count
    (node,) = job.substitute(again)
    for rank in job.ranks[again]:
        job.rebuild(node, rank, Version(2, 5), (again,))
        assert node.holds(rank, Version(2, 5))


def test_the_end_of_an_exchange_does_not_wait_until_large_slots_are_verified(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's reports wait for it: for longer than a node may be silent, it would seem lost."""
    job = cluster(2)
    verifying = threading.Event()
    digest_of = xxhash.xxh3_64_intdigest

    def slow(data: object) -> int:
        verifying.set()
        time.sleep(1.0)  # for each of 15 buckets
        return digest_of(data)  # type: ignore[arg-type]

    job.protect()
    wait(lambda: all(node.tier.status()["exchange"] == [1, 1] for node in job.nodes))
    monkeypatch.setattr(segment_module, "xxhash", SimpleNamespace(xxh3_64_intdigest=slow))
    job.nodes[0].write(1)
    assert verifying.wait(SECONDS)
    began = time.monotonic()
    job.nodes[0].tier.suspend()
    assert time.monotonic() - began < 10, "all buckets take 15 s"


def test_what_takes_time_is_done_before_any_node_begins_to_miss_another(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2)
    job.protect()
    job.train(1, 2)
    claimed = [replace(job.protection, lineage=2, base=Version(1, 2), position=node.position) for node in job.nodes]
    for node, protection in zip(job.nodes, claimed, strict=True):
        node.tier.claim(protection, 2)
    stores = [parity_path_of(job.job, node.name).stat().st_ino for node in job.nodes]
    time.sleep(2 * DETECT)
    assert not any(event.name == "node.lost" for node in job.nodes for event in node.seen), "none watches yet"
    assert all(node.tier.inventory()["parity"] for node in job.nodes), "what protects the job is kept"
    job.protect(2, Version(1, 2))
    assert stores == [parity_path_of(job.job, node.name).stat().st_ino for node in job.nodes], "the same memory"
    wait(lambda: all(node.tier.status()["committed"] == [1, 2] for node in job.nodes))
    job.train(3, 3, lineage=2)


def test_a_version_that_is_only_half_sent_leaves_the_one_before_to_be_rebuilt(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(3, mbps=0)
    job.protect()
    job.train(1, 2)
    job.protection = replace(job.protection, exchange_mbps=0.8)  # ten seconds for each MB: not done meanwhile
    job.protect(2, Version(1, 2))
    wait(lambda: all(node.tier.status()["exchange"] == [2, 3] for node in job.nodes))
    for node in job.nodes:
        node.write(3, lineage=2)
    wait(lambda: all(node.sends(Version(2, 3)) for node in job.nodes))
    for iteration in range(4, 14):  # ten iterations go by while it is being sent: neither version is overwritten
        for node in job.nodes:
            node.write(iteration, lineage=2)
    for node in job.nodes:
        for rank in job.ranks[node.position]:
            assert node.holds(rank, Version(1, 2)) and node.holds(rank, Version(2, 3))
            assert node.holds(rank, Version(2, 13)) and node.holds(rank, Version(2, 12))
    assert all(node.tier.status()["committed"] == [1, 2] for node in job.nodes)
    (fresh,) = job.substitute(2)
    with pytest.raises(FtError, match="is not here"):
        job.rebuild(fresh, 4, Version(2, 3), (2,))
    job.rebuild(fresh, 4, Version(1, 2), (2,))
    assert fresh.holds(4, Version(1, 2))


def test_more_nodes_than_parity_makes_up_for_are_refused(cluster: Callable[..., Cluster]) -> None:
    job = cluster(3)
    job.protect()
    job.train(1, 1)
    fresh = job.substitute(0, 1)
    with pytest.raises(ResumeError, match="lost"):
        job.rebuild(fresh[0], 0, Version(1, 1), (0, 1))
    assert not fresh[0].holds(0, Version(1, 1))


def test_an_smp_that_is_replaced_in_the_middle_gathers_anew_and_loses_nothing(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = cluster(3)
    job.protect()
    job.train(1, 2)
    version = Version(1, 2)
    sending, take = threading.Event(), RatePacer.take

    def held(pacer: RatePacer, nbytes: int, stop: threading.Event) -> Allowance:
        while not (stop.is_set() or sending.wait(0.01)):
            pass
        return take(pacer, nbytes, stop)

    monkeypatch.setattr(RatePacer, "take", held)  # nothing is through before the SMP is replaced
    for position in (1, 0):  # position 0 takes the decisions
        lineage = version.lineage + 1
        job.protect(lineage, version)
        version = Version(lineage, version.iteration + 1)
        named = [lineage, version.iteration]
        sending.clear()
        wait(lambda value=named: all(node.tier.status()["exchange"] == value for node in job.nodes))
        for node in job.nodes:
            node.write(version.iteration, lineage)
        wait(lambda value=version: all(node.sends(value) for node in job.nodes))
        job.nodes[position].replace_smp()
        sending.set()
        assert job.nodes[position].tier.inventory()["parity"] == [(version.lineage - 1, version.iteration - 1)]
        wait(lambda value=named: all(node.tier.status()["committed"] == value for node in job.nodes))
    (fresh,) = job.substitute(2)
    for rank in job.ranks[2]:
        job.rebuild(fresh, rank, version, (2,))
        assert fresh.holds(rank, version)


@pytest.mark.parametrize("silent", [0, 2])
def test_a_silent_node_is_declared_lost_by_the_others_and_by_them_only(
    cluster: Callable[..., Cluster], silent: int
) -> None:
    job = cluster(3)
    job.protect(4)
    driver_of(job.nodes[silent])._stop.set()  # nothing is heard of it any more; its connections stay open
    others = [node for node in job.nodes if node.position != silent]
    files = [node.run_dir / "lost.json" for node in others]
    wait(lambda: all(file.exists() for file in files), 10 * DETECT)
    for file in files:
        assert file.read_text() == f'{{"token": 4, "lost": ["node n{silent}"]}}'
    for node in others:
        node.tier.suspend()
        assert not (node.run_dir / "lost.json").exists(), "a new incarnation starts with a clean slate"


def test_a_stranger_on_the_port_of_a_dead_smp_costs_the_next_one_only_the_port(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2)
    job.protect()
    job.train(1, 2)
    moved, other = job.nodes
    moved.tier.suspend()
    moved.tier._endpoint.close()
    with socket.create_server(moved.endpoint):
        moved.tier = moved._start()
    [event] = [event for event in moved.seen if event.name == "exchange.interrupted"]
    assert f"another process has port {moved.endpoint[1]} of 127.0.0.1" in str(event.fields["reason"])
    wait((other.run_dir / "lost.json").exists)  # so its workers end, and all are started again

    former, moved.endpoint = moved.endpoint, moved.tier.endpoint("127.0.0.1", str(job.secret))
    assert moved.endpoint[1] != former[1]
    assert json.loads((moved.run_dir / "endpoint.json").read_text())["port"] == moved.endpoint[1]
    assert moved.tier.inventory()["parity"] == [(1, 2)], "what the SMP before held is kept"
    job.protect(2, Version(1, 2))
    job.train(3, 3, 2)


def test_what_a_full_disk_did_not_take_of_a_loss_is_told_again(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = cluster(2)
    refused, write = [], files.write_json

    def full(path: Path, value: object) -> None:
        if path.name == "lost.json" and len(refused) < 2:
            refused.append(path)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, value)

    monkeypatch.setattr(files, "write_json", full)
    job.protect(4)
    driver_of(job.nodes[1])._stop.set()
    wait((job.nodes[0].run_dir / "lost.json").exists, 10 * DETECT)
    assert len(refused) == 2
    assert [event.fields["lost"] for event in job.nodes[0].seen if event.name == "node.lost"] == [["node n1"]]


def test_corrupt_bytes_are_never_sent_nor_loaded(cluster: Callable[..., Cluster]) -> None:
    job = cluster(3)
    job.protect()
    job.train(1, 1)
    victim = job.nodes[1].segments[2]
    job.nodes[0].write(2)
    job.nodes[2].write(2)
    target = choose(victim.slots())
    job.nodes[1].tier._lock.acquire()  # nothing of it is looked at until the byte is flipped
    job.nodes[1].write(2)
    victim.data(target)[12345] ^= 1
    job.nodes[1].tier._lock.release()
    wait(lambda: any(event.name == "slot.corrupted" for event in job.nodes[1].seen))
    assert all(node.tier.status()["committed"] == [1, 1] for node in job.nodes), "the version never counts"
    wait(lambda: all(node.tier.status()["exchange"] == [1, 3] for node in job.nodes))  # nobody waits for it for ever
    (fresh,) = job.substitute(0)
    index = next(s.index for s in victim.slots() if s.version == Version(1, 1))
    victim.data(index)[54321] ^= 1  # and one of the version that counts, on a node that is needed
    with pytest.raises(FtError, match="does not match its digest"):
        job.rebuild(fresh, 0, Version(1, 1), (0,))
    assert not fresh.holds(0, Version(1, 1))
    assert all(slot.state is not SlotState.CLEAN for slot in fresh.segments[0].slots())


def test_parity_that_is_damaged_is_an_alarm_when_a_recovery_asks_for_it(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2)
    job.protect()
    job.train(1, 1)
    node = job.nodes[1]
    node.tier.suspend()
    store = Segment(parity_path_of(job.job, node.name))
    (index,) = [slot.index for slot in store.slots() if slot.state is SlotState.CLEAN]
    store.digests(index)[0] ^= np.uint64(1)
    assert node.tier.inventory()["parity"] == []
    (event,) = [event for event in node.seen if event.name == "slot.corrupted"]
    assert event.fields["reason"].startswith(f"node n1: the parity in slot {index} is damaged")
    assert event.fields["reason"] in json.loads((node.run_dir / protocol.ALARM).read_text())["parity"]
    store.digests(index)[0] ^= np.uint64(1)
    assert node.tier.inventory()["parity"] == [(1, 1)] and not (node.run_dir / protocol.ALARM).exists()
    store.close()


def test_strangers_get_no_answer(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2)
    job.protect()
    where = job.nodes[0].endpoint
    with pytest.raises(ProtocolError, match="secret"):
        Peer(where, Party(PURPOSE, job.job, "n1"), b"another secret, of somebody else", 5).ask("read", what="copy")
    with pytest.raises(ProtocolError):
        Peer(where, Party(PURPOSE, "another-job", "n1"), job.secret.read_bytes(), 0.05).ask("read", what="copy")
    wait(lambda: any(event.name == "peer.rejected" for event in job.nodes[0].seen))
    job.secret.chmod(0o640)
    with pytest.raises(ConfigError, match="0600"):
        job.nodes[0].tier.endpoint("127.0.0.2", str(job.secret))


def test_what_is_encrypted_on_the_way_is_gathered_and_rebuilt_the_same(cluster: Callable[..., Cluster]) -> None:
    job = cluster(3, encrypt=True)
    job.protect()
    job.train(1, 2)
    (fresh,) = job.substitute(1)
    for rank in job.ranks[1]:
        job.rebuild(fresh, rank, Version(1, 2), (1,))
        assert fresh.holds(rank, Version(1, 2))


def test_another_secret_or_encryption_takes_effect_at_the_same_endpoint(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2)
    tier, where = job.nodes[0].tier, job.nodes[0].endpoint
    job.secret.write_text("another secret of this job")
    assert tier.endpoint("127.0.0.1", str(job.secret)) == where
    me = Party(PURPOSE, job.job, "n1")
    with closing(Peer(where, me, b"another secret of this job", 5)) as peer, pytest.raises(ProtocolError, match="beat"):
        peer.ask("beat me")
    assert tier.endpoint("127.0.0.1", str(job.secret), True) == where
    differs = pytest.raises(ProtocolError, match="--ftp-encrypt: expected False as on this node, found True")
    with closing(Peer(where, me, b"another secret of this job", 5)) as peer, differs:
        peer.ask("beat me")


def test_what_belongs_to_another_incarnation_or_to_no_plan_is_refused(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2)
    job.protect(5)
    peer = Peer(job.nodes[0].endpoint, Party(PURPOSE, job.job, "n1"), job.secret.read_bytes(), 5)
    with pytest.raises(ProtocolError, match="lineage 4"):
        peer.ask("begin", version=[4, 1], epoch=4, nodes=[], ranks=[])
    frame = np.ones(10, dtype=np.uint8)
    with pytest.raises(ProtocolError, match="do not belong"):
        peer.ask("take", frame, version=[5, 1], epoch=5, key=[0, 9, 0], node=1, at=0, exponent=0)
    with pytest.raises(ProtocolError, match="unknown request"):
        peer.ask("format-the-disk")
    job.nodes[0].tier.suspend()
    with pytest.raises(ProtocolError, match="does not store parity now"):
        peer.ask("begin", version=[5, 1], epoch=5, nodes=[], ranks=[])
    peer.close()
    assert parity_path_of(job.job, "n0").exists(), "and what was kept is still there"


# copies on pipeline neighbours, by the same SMPs


@pytest.mark.parametrize("lost", [(0,), (2,), (0, 2)])
def test_a_copy_on_a_neighbour_counts_and_puts_a_lost_node_s_slots_together(
    cluster: Callable[..., Cluster], lost: tuple[int, ...]
) -> None:
    """Four nodes, a stage each: 0 and 2 are no neighbours, and may be lost together."""
    job = cluster(4)
    job.protection = replace(job.protection, stages=((0, 2, 4, 6), (1, 3, 5, 7)))
    job.protect()
    job.train(1, 3)
    version = Version(1, 3)
    for node in job.substitute(*lost):
        for rank in job.ranks[node.position]:
            job.rebuild(node, rank, version, lost)
            assert node.holds(rank, version)
    job.protect(2, version)
    wait(lambda: all(node.tier.status()["committed"] == [1, 3] for node in job.nodes))
    job.train(4, 5, lineage=2)
    (node,) = job.substitute(1)
    job.rebuild(node, 3, Version(2, 5), (1,))
    assert node.holds(3, Version(2, 5))


@pytest.mark.parametrize("lost", [(0,), (0, 1), (0, 2), (1, 3)])
def test_with_parity_beside_copies_what_is_lost_with_its_copy_comes_from_parity(
    cluster: Callable[..., Cluster], lost: tuple[int, ...]
) -> None:
    """Two stages of two nodes each, data-parallel groups over both: 0 and 2 keep each other's copies, 1 and 3 too."""
    job = cluster(4)
    stages, groups = ((0, 4), (1, 5), (2, 6), (3, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))
    job.protection = replace(job.protection, stages=stages, groups=groups, both=True)
    plan = job.protection.plan()
    job.protect()
    job.train(1, 3)
    version = Version(1, 3)
    for node in job.substitute(*lost):
        for rank in job.ranks[node.position]:
            assert plan.recovery_sections(rank, lost) is not None
            job.rebuild(node, rank, version, lost)
            assert node.holds(rank, version)
            from_parity = plan.recovery_sections(rank, lost)[0].index >= len(job.shapes)  # type: ignore[index]
            assert from_parity == (lost in ((0, 2), (1, 3)))
    job.protect(2, version)
    wait(lambda: all(node.tier.status()["committed"] == [1, 3] for node in job.nodes))
    job.train(4, 4, lineage=2)


def test_neighbours_that_are_lost_together_are_refused(cluster: Callable[..., Cluster]) -> None:
    job = cluster(4)
    job.protection = replace(job.protection, stages=((0, 2, 4, 6), (1, 3, 5, 7)))
    job.protect()
    job.train(1, 1)
    fresh = job.substitute(0, 1)
    with pytest.raises(ResumeError, match="lost"):
        job.rebuild(fresh[1], 2, Version(1, 1), (0, 1))
    assert not fresh[1].holds(2, Version(1, 1))


def test_capture_finds_a_slot_however_long_a_copy_takes(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2)
    job.protection = replace(job.protection, stages=((0, 2), (1, 3)))
    job.protect()
    job.train(1, 1)
    gates = [Gate(segment.gate) for node in job.nodes for segment in node.segments.values()]
    for gate in gates:
        gate.hold(SECONDS, time.monotonic_ns())
    for node in job.nodes:
        node.write(2)
    wait(lambda: all(node.sends(Version(1, 2)) for node in job.nodes))
    for iteration in range(3, 30):  # `choose` refuses where all slots are pinned
        for node in job.nodes:
            node.write(iteration)
    assert all(node.tier.status()["committed"] == [1, 1] for node in job.nodes)
    for gate in gates:
        gate.open([Grant(0, -1, 0.0, SECONDS, 1 << 30)], 0, time.monotonic_ns())
    wait(lambda: all(node.tier.status()["committed"] == [1, 2] for node in job.nodes))
    assert all(node.holds(rank, Version(1, 2)) for node in job.nodes for rank in node.segments)


def test_what_the_links_carry_is_measured_where_it_is_wanted(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2)
    job.protection = replace(job.protection, stages=((0, 2), (1, 3)))
    first, second = job.nodes
    assert first.tier.protect(replace(job.protection, position=0), 1)["links"] == []
    wanted = replace(job.protection, measure=True)
    assert Protection.read(wanted.block()) == wanted
    ((target, rate),) = first.tier.protect(replace(wanted, position=0), 1)["links"]
    assert target == 1 and 1e6 < rate < 1e12, "a loopback"
    assert second.tier.status()["committed"] is None and not second.tier.inventory()["parity"], "nothing of it is kept"
    second.tier._endpoint.close()
    gone = replace(wanted, position=0, endpoints=(first.endpoint, ("127.0.0.1", 1)))
    assert first.tier.protect(gone, 1)["links"] == []
    (event,) = [event for event in first.seen if event.name == "probe.failed"]
    assert "127.0.0.1" in event.fields["reason"]


def test_whatever_fails_while_a_copy_is_sent_is_said_and_tried_again(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane that ended of it would be missed by nobody, and no version would count any more."""
    take, failures = GatePacer.take, iter([ZeroDivisionError("by no time")])

    def fails_once(pacer: GatePacer, nbytes: int, stop: threading.Event) -> Allowance:
        for failure in failures:
            raise failure
        return take(pacer, nbytes, stop)

    monkeypatch.setattr(GatePacer, "take", fails_once)
    job = cluster(2)
    job.protection = replace(job.protection, stages=((0, 2), (1, 3)))
    job.protect()
    job.train(1, 1)  # until it counts
    (said,) = [event for node in job.nodes for event in node.seen if event.name == "exchange.retried"]
    assert said.fields["reason"] == "ZeroDivisionError: by no time"


def test_that_checkpoints_get_rarer_is_left_for_the_trainers_to_print_on_one_node(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(2)
    job.protection = replace(job.protection, stages=((0, 2), (1, 3)))
    job.protect()
    job.train(1, 1)
    for node in job.nodes:
        for segment in node.segments.values():
            Gate(segment.gate).plan(1, 1.0)
            Gate(segment.gate).hold(SECONDS, time.monotonic_ns())
    for iteration in range(2, 40):  # captured, but nothing may go
        for node in job.nodes:
            node.write(iteration)
    first, second = (node.run_dir / protocol.ALARM for node in job.nodes)
    wait(first.exists)
    (alarm,) = json.loads(first.read_text()).values()
    assert re.match(r"exchange\.slowed: node n0: none in (2[6-9]|3\d) iterations, planned 1: ", alarm), alarm
    assert not second.exists() and job.nodes[0].tier.status()["rarer"]


def test_that_a_lost_node_is_survived_again_after_a_recovery_is_left_for_one_trainer_to_print(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(2)
    job.protect()
    job.train(1, 1)
    first, second = (node.run_dir / protocol.ALARM for node in job.nodes)
    assert not first.exists(), "at a first start nothing was lost"
    job.protect(2, Version(1, 1))
    job.train(2, 3, lineage=2)
    words = "iteration 2 is protected on all nodes: a lost node is survived again"
    said = {"protection": f"protection.restored: node {first.parent.name}: {words}"}
    assert json.loads(first.read_text()) == said, "the first one alone"
    assert not second.exists()


def test_a_disk_that_is_full_of_something_else_costs_an_alarm_and_no_node(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = cluster(2)
    job.protect()

    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(files, "write_json", full)
    job.nodes[0].tier._alarms.say("replicas", catalogue.REPLICA_MISMATCHED, "ranks 0 and 2")
    job.train(1, 2)
    assert not [event for node in job.nodes for event in node.seen if event.name in ("coordinator.lost", "node.lost")]


def test_what_goes_by_a_rate_is_divided_among_ranks_by_what_they_send(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2)
    job.protection = replace(job.protection, stages=((0, 2), (1, 3)))
    job.protect()
    job.train(1, 1)
    for node in job.nodes:
        sizes = {rank: job.shapes[rank].nbytes for rank in node.segments}
        duties = {rank: pacer._state.rate_duty for rank, pacer in driver_of(node).pace.pacers.items()}
        assert duties == {rank: LARGEST_RATE_DUTY * size / sum(sizes.values()) for rank, size in sizes.items()}


def test_copies_go_out_while_their_rank_s_gate_is_open_and_not_otherwise(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2)
    job.protection = replace(job.protection, stages=((0, 2), (1, 3)))
    job.protect()
    job.train(1, 1)  # without a plan yet, by the rate
    assert all(node.tier.status()["in_bubbles"] == node.tier.status()["late"] == 0 for node in job.nodes)

    def bubbles(ranks: tuple[int, ...], nbytes: int) -> None:
        """The trainers of `ranks` wait for a long time, in which so much may go."""
        for node in job.nodes:
            for rank in set(node.segments) & set(ranks):
                grant = Grant(0, -1, 0.0, SECONDS, nbytes)
                Gate(node.segments[rank].gate).open([grant], 0, time.monotonic_ns())

    bubbles((0, 1, 2, 3), 0)  # from now on there is a plan, by which nothing may go now
    for node in job.nodes:
        for segment in node.segments.values():
            Gate(segment.gate).plan(2, 1.0)
    for node in job.nodes:
        node.write(2)
    wait(lambda: all(node.sends(Version(1, 2)) for node in job.nodes))
    bubbles((2,), 300_000)  # less than the copy; the last frame has to be through before it is opened anew
    wait(lambda: job.nodes[1].tier.status()["in_bubbles"] == 300_000)
    bubbles((0, 1, 2), 1 << 30)
    lanes = {0: (0, 1), 1: (2, 3)}
    sent = {at: sum(job.shapes[rank].nbytes for rank in ranks if rank != 3) for at, ranks in lanes.items()}
    wait(lambda: all(job.nodes[at].tier.status()["in_bubbles"] > nbytes for at, nbytes in sent.items()))
    assert all(node.tier.status()["committed"] == [1, 1] for node in job.nodes), "rank 3 has not been allowed anything"
    assert job.nodes[1].tier.status()["in_bubbles"] < sent[1] + job.shapes[3].nbytes
    bubbles((3,), 1 << 30)
    wait(lambda: all(node.tier.status()["committed"] == [1, 2] for node in job.nodes))
    assert all(node.tier.status()["late"] == 0 for node in job.nodes)
    for node, ranks in zip(job.nodes, lanes.values(), strict=True):
        told = next(event.fields for event in reversed(node.seen) if event.name == "version.committed")
        assert [(rank, bubble) for rank, bubble, _ in told["filled"]] == [(rank, 0) for rank in ranks]
        assert sum(nbytes for _, _, nbytes in told["filled"]) == told["in_bubbles"]
    for node in job.nodes:
        by_rate, sent_now = (event.fields for event in node.seen if event.name == "exchange.sent")
        assert by_rate["in_bubbles"] == by_rate["late"] == 0 < by_rate["bytes"]
        assert sent_now["in_bubbles"] == sent_now["bytes"] and sent_now["late"] == 0
        counts = [event.fields for event in node.seen if event.name == "version.committed"]
        assert [(one["iterations"], one["planned"]) for one in counts] == [(None, None), (1, 2)]
        status = node.tier.status()
        assert (status["iterations"], status["planned"], status["rarer"]) == (1, 2, False)
        assert [one["rank"] for one in status["copies"]] == sorted(node.segments)
        assert sum(one["in_bubbles"] for one in status["copies"]) == status["in_bubbles"] == sent_now["in_bubbles"]
    (fresh,) = job.substitute(1)
    job.rebuild(fresh, 3, Version(1, 2), (1,))
    assert fresh.holds(3, Version(1, 2)), "put together from frames of any length"
