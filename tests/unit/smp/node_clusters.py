"""Nodes that protect each other, each a `NodeTier` of its own with real segments and real sockets, in this process.

Trainers are played by `Node.write`. The exchange of a version is held back by a rate where a test says so.
"""

import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import xxhash

from ft_plugins.events import Events
from ft_plugins.smp.serve.job_file import refer
from ft_plugins.smp.serve.node_context import NodeContext
from ft_plugins.smp.serve.requests import RebuildSlot
from ft_plugins.smp.tree import node_step
from ft_plugins.smp.tree.node import NodeTier
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.snapshot.capture import manifest
from ft_plugins.snapshot.capture.manifest import Manifest, TensorRange
from ft_plugins.snapshot.segment.paths import path_of, remove
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import SLOTS, Pin, SlotState, Version, choose, slots_for

BUCKET = 100_000
PATIENCE = 300  # a bound for waits: a busy machine takes long
DETECT = 1.5


def capture(segment, index, version, data=1, small=b"small", token=1):
    """What a capture leaves in a slot. `data`: bytes, or one value for all of them."""
    segment.dirty(index, version, token)
    segment.write_small(index, small)
    held = segment.data(index)
    held[:] = data
    parts = (held[at : at + nbytes] for at, nbytes in segment.ranges)
    segment.digests(index)[:] = np.array([xxhash.xxh3_64_intdigest(part.tobytes()) for part in parts], dtype=np.uint64)
    segment.seal(index, version, token, small, segment.digests(index).copy())


def wait(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)


def small_of(rank, iteration):
    return f"small state of rank {rank} at {iteration}".encode() * 7


def small_of_tensors(rank, ranges, state):
    """Small state whose manifest has a tensor in each bucket."""
    held = tuple(TensorRange(f"t{at}", "uint8", "parameter", "own", n, 0, n, at, (n,)) for at, n in ranges)
    return manifest.join(manifest.write(Manifest(rank, 1, (0, 0), tuple(ranges), held)), state)


def write_secret(folder):
    path = folder / "secret"
    path.write_text("a secret of this job alone")
    path.chmod(0o600)
    return path


class Node:
    """One node: its ranks' segments, its part of the SMP, its events."""

    def __init__(self, cluster, name, position):
        self.name = name
        self.position = position
        self.cluster = cluster
        self.run_dir = cluster.folder / name
        self.run_dir.mkdir()
        self.segments = {}
        for rank in cluster.ranks[position]:
            path = path_of(cluster.job, name, rank)
            create(path, cluster.shapes[rank], rank, {})
            self.segments[rank] = Segment(path)
            nbytes = cluster.shapes[rank].nbytes
            self.segments[rank].ranges = [(at, min(BUCKET, nbytes - at)) for at in range(0, nbytes, BUCKET)]
        self.seen = []
        self.tier = self._start()
        self.endpoint = self.tier.endpoint("127.0.0.1", str(cluster.secret), cluster.encrypt)

    def _start(self):
        events = Events(self.name)
        events.subscribe(self.seen.append)
        return NodeTier(NodeContext.of(self.run_dir, self.cluster.job, self.name, events, self.segments))

    @property
    def driver(self):
        assert self.tier._driver is not None
        return self.tier._driver

    @property
    def segment(self):
        """That of its only rank."""
        (segment,) = self.segments.values()
        return segment

    def named(self, kind):
        """The fields of its events of a name."""
        return [event.fields for event in self.seen if event.name == kind]

    def status(self, name):
        return self.tier.status()[name]

    def write(self, iteration, lineage=1):
        """What a capture of each rank leaves."""
        for rank, segment in self.segments.items():
            data, small = self.cluster.data(rank, iteration), small_of(rank, iteration)
            capture(segment, choose(segment.slots()), Version(lineage, iteration), data, small)

    def holds(self, rank, version):
        """Whether the rank's slot of `version` is complete, and every byte is right."""
        segment = self.segments[rank]
        for slot in segment.slots():
            if slot.version == version and slot.state is SlotState.CLEAN:
                right = (segment.data(slot.index) == self.cluster.data(rank, version.iteration)).all()
                return bool(right) and segment.small(slot.index) == small_of(rank, version.iteration)
        return False

    def whole(self):
        """What is complete here: slots and parity."""
        slots = {slot.version for slot in self.segment.slots() if slot.state is SlotState.CLEAN and slot.version}
        return slots & {Version(*version) for version in self.tier.inventory()["parity"]}

    def begun(self, version):
        """How often an SMP of this node has begun to send `version`."""
        return self.named("exchange.started").count({"lineage": version.lineage, "iteration": version.iteration})

    def encoded(self):
        """The version of which the node would report now that it is complete on its side."""
        due = node_step.ReportDue(self.driver._observe())
        (sent,) = node_step.step(self.driver._state, due)[1]
        assert isinstance(sent, node_step.SendReport)
        return sent.report.encoded

    def replace_smp(self):
        """The SMP ends where it stands, with all its pins, as SIGKILL leaves them; the watcher starts another one."""
        driver = self.driver
        driver._stop.set()
        assert driver._thread is not None
        driver._thread.join(PATIENCE)
        driver.leave()
        if driver._exchange is not None:
            driver._exchange.stop()
        self.tier._endpoint.close()
        self.tier = self._start()

    def destroy(self):
        """The node is lost, with its memory. Idempotent."""
        if self.segments:
            self.tier.close()
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        remove(self.cluster.job, self.name)


class Cluster:
    """A job of `count` nodes of `per_node` ranks, whose shares are of uneven `sizes`; a sharding group of each local
    rank, unless `groups` are given."""

    def __init__(
        self,
        folder,
        job,
        count,
        losses=1,
        *,
        per_node=2,
        encrypt=False,
        sizes=lambda rank: 1_500_000 + 70_001 * rank,
        detect=DETECT,
        groups=None,
    ):
        self.folder, self.job, self.encrypt = folder, job, encrypt
        self.secret = write_secret(folder)
        self.ranks = [range(at * per_node, (at + 1) * per_node) for at in range(count)]
        self.world = count * per_node
        slots = slots_for(Pin.NODE, Pin.SOURCE)
        self.shapes = [Shape(sizes(rank), 100_000, -(-sizes(rank) // BUCKET), 77, slots) for rank in range(self.world)]
        self.nodes = [Node(self, f"n{position}", position) for position in range(count)]
        self.made = list(self.nodes)
        groups = groups or tuple(tuple(range(at, self.world, per_node)) for at in range(per_node))
        self.protection = Protection(
            1, None, self.names(), groups, tuple(self.shapes), losses, 0, self.endpoints(), 1, 0.0, detect
        )
        self._data = {}

    def names(self):
        return tuple(node.name for node in self.nodes for _ in self.ranks[node.position])

    def endpoints(self):
        return tuple(node.endpoint for node in self.nodes)

    def data(self, rank, iteration):
        if (rank, iteration) not in self._data:
            rng = np.random.default_rng(1000 * rank + iteration)
            self._data[rank, iteration] = rng.integers(0, 256, self.shapes[rank].nbytes, dtype=np.uint8)
        return self._data[rank, iteration]

    def suspend(self):
        """Training has died."""
        for node in self.nodes:
            node.tier.suspend()

    def protect(self, lineage=1, base=None, mbps=0.0, **how):
        """A new incarnation, which sends no faster than `mbps`, 0: no limit; `how`: other fields of its `Protection`,
        from now on."""
        self.suspend()
        heard = [node.tier.inventory()["committed"] for node in self.nodes]
        committed = max((Version(*version) for version in heard if version), default=None)
        self.protection = replace(
            self.protection, lineage=lineage, base=base, nodes=self.names(), endpoints=self.endpoints(),
            committed=committed, exchange_mbps=mbps, **how,
        )  # fmt: skip
        for node in self.nodes:
            node.tier.protect(replace(self.protection, position=node.position), lineage)

    def write(self, first, last, lineage=1):
        """All ranks capture version after version, without waiting for the exchange."""
        for iteration in range(first, last + 1):
            for node in self.nodes:
                node.write(iteration, lineage)

    def until_exchanged(self, iteration, lineage=1):
        """Wait until every node waits for that version, or sends it."""
        wait(lambda: all(node.status("exchange") == [lineage, iteration] for node in self.nodes))

    def until_committed(self, iteration, lineage=1):
        wait(lambda: all(node.status("committed") == [lineage, iteration] for node in self.nodes))

    def begin(self, iteration, lineage=1):
        """The version is captured, and every node has begun to send it."""
        self.until_exchanged(iteration, lineage)
        self.write(iteration, iteration, lineage)
        wait(lambda: all(node.begun(Version(lineage, iteration)) for node in self.nodes))

    def train(self, first, last, lineage=1):
        """All nodes seal version after version, each when all nodes wait for it, and go on when it counts."""
        for iteration in range(first, last + 1):
            self.until_exchanged(iteration, lineage)
            self.write(iteration, iteration, lineage)
            self.until_committed(iteration, lineage)

    def whole(self):
        """What every node has whole: a lost node can be rebuilt from these."""
        return set.intersection(*(node.whole() for node in self.nodes))

    def leaves_room(self):
        """Whether enough slots of each node are left for capture."""
        return all(sum(not slot.pins for slot in node.segment.slots()) >= SLOTS for node in self.nodes)

    def substitute(self, *positions):
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

    def rebuild(self, node, rank, version, lost):
        told = replace(self.protection, nodes=self.names(), endpoints=self.endpoints())
        holders = tuple((n.position, *n.endpoint) for n in self.nodes if n.position not in lost)
        node.tier.rebuild(RebuildSlot(rank, 7, version, refer(told)[0], holders, tuple(lost)), told)

    def rebuilds(self, version, *lost):
        """Lose these nodes; whether fresh ones get every slot of `version` back."""
        fresh = self.substitute(*lost)
        for node in fresh:
            for rank in self.ranks[node.position]:
                self.rebuild(node, rank, version, lost)
        return all(node.holds(rank, version) for node in fresh for rank in self.ranks[node.position])


@contextmanager
def clusters(folder, job):
    """Makes clusters; their nodes are destroyed at the end."""
    made = []

    def make(count, losses=1, **more):
        made.append(Cluster(folder, job, count, losses, **more))
        return made[-1]

    yield make
    for each in made:
        for node in each.made:
            node.destroy()
