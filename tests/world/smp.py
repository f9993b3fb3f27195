"""The snapshot management process of one node of the world: the product's node tier, driver and pins, thin around them.

Of the product: the requests and how they are carried out (`SnapshotProcess`, `Client`), `NodeTier`, `NodeDriver`,
`PinnedVersions`, `TreeMember`, `TreePeers`, `PeerRequests`, `Persister`, the loop. Of the world: connections, memory,
and the sender of an exchange.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

from ft_plugins.errors import ProtectionError, ProtocolError, SegmentError
from ft_plugins.smp.serve.client import Client as ProductClient
from ft_plugins.smp.serve.owner import SnapshotProcess, liveness
from ft_plugins.smp.serve.status import described
from ft_plugins.smp.storage.folder_lease import FolderLease
from ft_plugins.smp.storage.persister import Persister
from ft_plugins.smp.tree import node as node_module
from ft_plugins.smp.tree import tree_messages
from ft_plugins.smp.tree.node import NodeTier
from ft_plugins.smp.watch.job_history import JobHistory
from ft_plugins.snapshot.segment.slots import Version
from ft_plugins.transport import protocol
from ft_plugins.transport.protocol import packed

from . import hub as hubs
from .hub import Signal
from .network import Peer, serve
from .sending import Taking

RETRY, PATIENCE, TRIES = 0.05, 30.0, 4


class Place:
    """A path on a machine; its content is a value."""

    def __init__(self, machine, text):
        self.machine, self.text = machine, text
        self.name = text.rpartition("/")[2]

    def __truediv__(self, name):
        return Place(self.machine, f"{self.text}/{name}")

    def __str__(self):
        return self.text

    def __hash__(self):
        return hash(self.text)

    def __eq__(self, other):
        return isinstance(other, Place) and (self.text, self.machine) == (other.text, other.machine)

    @property
    def parent(self):
        return Place(self.machine, self.text.rpartition("/")[0])

    def stat(self):
        return SimpleNamespace(st_ino=id(self.machine.memory[self.text]))

    def exists(self):
        return self.text in self.machine.files or self.text in self.machine.memory

    def unlink(self, missing_ok=False):
        found = self.machine.files.pop(self.text, None), self.machine.memory.pop(self.text, None)
        if found == (None, None) and not missing_ok:
            raise FileNotFoundError(2, "No such file or directory", self.text)

    def glob(self, pattern):
        begin = f"{self.text}/{pattern.rstrip('*')}"
        return [Place(self.machine, text) for text in sorted(self.machine.files) if text.startswith(begin)]


def write(path, content, **_):
    if path.machine.full:
        raise OSError(28, "No space left on device", str(path))
    path.machine.files[str(path)] = content if isinstance(content, str) else content.decode()


def write_json(path, value):
    write(path, json.dumps(value))


def read_bytes(path, *_):
    try:
        return path.machine.files[str(path)].encode()
    except KeyError:
        raise FileNotFoundError(2, "No such file or directory", str(path)) from None


def read_json(path, adapter, *_):
    try:
        return adapter.validate_json(path.machine.files[str(path)])
    except KeyError:
        raise FileNotFoundError(2, "No such file or directory", str(path)) from None


class Alarms:
    def __init__(self, run_dir):
        self._node = run_dir.name

    def say(self, about, kind, words, node=""):
        hubs.ACTIVE.note(f"{self._node}: {kind.name}: {words}")

    def forget(self, *about):
        pass


class Events:
    def __init__(self, node=""):
        self._node = node

    def emit(self, kind, **fields):
        hubs.ACTIVE.world.event(self._node, kind.name, fields)


class NoPrevious:
    """There is no state of another size."""

    lineage = 0

    def all(self):
        return []

    def find(self, rank, version):
        return None


class Endpoint:
    """As `smp.exchange.peer_endpoint.PeerEndpoint`."""

    def __init__(self, run_dir, job, node, handle, events):
        self._run_dir, self._node, self._handle = run_dir, node, handle
        self._process = hubs.ACTIVE.current.process
        self._network = hubs.ACTIVE.world.network
        self._where = None

    def listen(self, address, secret_file, encrypt):
        if self._where is None:
            self._where = (address, self._network.port())
            self._listen()
            self._run_dir.machine.files[f"{self._run_dir}/endpoint.json"] = self._where
        return self._where

    def resume(self):
        try:
            where = self._run_dir.machine.files[f"{self._run_dir}/endpoint.json"]
        except KeyError:
            raise FileNotFoundError(2, "No such file or directory") from None
        self._where = where
        self._listen()
        return ""

    def _listen(self):
        self._network.listen(self._process, self._where, self._accept)
        self._network.taking[self._where] = Taking(self._process, self._node, self._handle.__self__)

    def _accept(self, end):
        serve(self._process, end, self._handle, self._others)
        return self._node

    def _others(self, message, payload):
        """What the world sends in place of frames."""
        requests = self._handle.__self__
        version = Version(*message["version"]) if "version" in message else None
        if message["do"] == "world-slot":
            return {}, _content(requests.segments, message["rank"], version)
        if message["do"] == "world-parity":
            return {}, requests.memory._parity().read(version)
        return None

    def connect(self, where, timeout, node=""):
        return Peer(where, self._process, self._node, timeout, node)

    def reader(self, where, timeout, memory):
        return Reader(self, where, timeout, memory if where == self._where else None)

    def close(self):
        self._where = None

    def forget(self):
        self._run_dir.machine.files.pop(f"{self._run_dir}/endpoint.json", None)


def _content(segments, rank, version):
    if rank not in segments:
        raise SegmentError(f"rank {rank} has no segment on this node")
    return segments[rank].content(version)


class Reader:
    """As `smp.exchange.readers`: reads from one SMP."""

    def __init__(self, endpoint, where, timeout, memory):
        self._endpoint, self._where, self._timeout, self._memory = endpoint, where, timeout, memory

    def slot(self, rank, version):
        if self._memory is not None:
            return _content(self._memory._segments, rank, version)
        return self._ask("world-slot", version, rank=rank)

    def parity(self, version):
        if self._memory is not None:
            return self._memory._parity().read(version)
        return self._ask("world-parity", version)

    def _ask(self, name, version, **fields):
        peer = self._endpoint.connect(self._where, self._timeout)
        try:
            return peer.ask(name, version=packed(version), **fields)[1]
        finally:
            peer.close()


def packed_summary(summary):
    """What it reports; numbers that cannot be if it lies."""
    if hubs.ACTIVE.current.process.machine.lies:
        last = Version(1 if summary.exchange is None else summary.exchange.lineage, 1 << 30)
        summary = replace(summary, begun=1 << 30, exchange=last, missed=last)
    return tree_messages.packed_summary(summary)


class Smp(SnapshotProcess):
    """The process. Files and memory of its machine make it continue. It carries out requests as the product does."""

    def __init__(self, node):
        self.node = node
        world = node.world
        self.process = world.hub.process(f"{node.name}.smp", node.machine)
        self.ready = Signal(world.hub)
        self.process.spawn(self._begin, "smp")

    def _begin(self):
        node, machine = self.node, self.node.machine
        self._run_dir = run_dir = Place(machine, f"/run/job/{node.name}")
        self._job, self._node, self._events = "job", node.name, Events(node.name)
        self._lock, self.ended = node_module.threading.Lock(), node_module.threading.Event()
        self._token_path, self.watched, self._allocating = run_dir / "token", (0, 0), {}
        self._segments = {
            segment.rank: segment for text, segment in sorted(machine.memory.items()) if text.startswith("/shm/rank")
        }
        self.token = max([self._last_token(), *(one.header.token for one in self._segments.values())])
        self.adopted = len(self._segments)
        self._history = JobHistory(run_dir, self.adopted > 0)
        context = SimpleNamespace(
            run_dir=run_dir, job="job", node=node.name, events=self._events, alarms=Alarms(run_dir),
            segments=self._segments, previous=NoPrevious(),
        )  # fmt: skip
        self._tier = NodeTier(context)
        self.persister = Persister(context, 1.0, lease=FolderLease(context, lambda: self.watched))
        self.persister.adopt({rank: segment.path for rank, segment in self._segments.items()})
        self.ready.set()

    @property
    def committed(self):
        """On this node."""
        return self._tier.committed if self.ready.is_set else None

    def segment(self, rank):
        return self._segments[rank]

    def looks_soon(self):
        """A rank has sealed a version. An SMP sees that when it looks, every few milliseconds; here the world wakes it,
        because looks that see nothing are most of the work."""
        driver = self._tier._driver if self.ready.is_set and self.process.alive else None
        if driver is not None:
            self.process.hub.later(self.process.hub.random.random() * 0.005, driver.wake)

    def _watch(self, request):
        self.watched = request.pid, liveness.started(request.pid)
        return {}

    def _status(self, request):
        self._look(always=True)
        return {
            "token": self.token, "node_tier": self._tier.status(), "history": self._history.report(), "refused": [],
            "previous_sizes": {}, "storage": self.persister.status(),
            "segments": [described(rank, segment) for rank, segment in sorted(self._segments.items())],
        }  # fmt: skip

    def finish(self, reason, keep=False, in_order=False):
        """The job has ended in order."""
        self._tier.close()
        self.persister.stop(in_order)
        self.node.machine.memory.clear()
        self.node.machine.files.clear()
        self.ended.set()


class Client(ProductClient):
    """Requests of one process to the SMP of its machine, again if it dies."""

    def __init__(self, run_dir, timeout=PATIENCE):
        self._run_dir, self._timeout, self._machine = run_dir, timeout, run_dir.machine
        self._smp = self._connect()

    def _connect(self):
        hub = hubs.ACTIVE
        until = hub.now + self._timeout
        while True:
            smp = self._machine.node.smp
            if smp is not None and smp.process.alive and smp.ready.is_set:
                return smp
            if hub.now > until:
                raise ProtectionError(f"no SMP answers on {self._machine.name}")
            hub.current.sleep(RETRY)

    def close(self):
        pass

    def _ask(self, name, *, extra_seconds=0.0, **fields):
        hub = hubs.ACTIVE
        for left in reversed(range(TRIES)):
            smp, over, replies = self._smp, Signal(hub), []

            def work(smp=smp, over=over, replies=replies):
                replies.append(smp.answer({"do": name, **fields}))
                over.set()

            if smp.process.alive:
                smp.process.at_end.append(over.set)
                smp.process.spawn(work, name)
                if not over.wait(self._timeout + extra_seconds):
                    raise ProtocolError(f"the SMP of {self._machine.name} did not answer '{name}' in time")
            if replies:
                protocol.raise_refusal(replies[0])
                return replies[0]
            if left:
                self._smp = self._connect()
        raise ProtocolError(f"the SMP of {self._machine.name} hung up on '{name}'")
