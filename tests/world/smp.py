"""The snapshot management process of one node of the world: the product's node tier, driver and pins, thin around them.

Of the product: `NodeTier`, `NodeDriver`, `PinnedVersions`, `TreeMember`, `TreePeers`, `PeerRequests`, the loop. Of the
world: connections, memory, and the sender of an exchange. Requests are carried out as `smp.serve.owner` does.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

from ft_plugins.errors import FencedError, FtError, ProtectionError, ProtocolError, SegmentError
from ft_plugins.smp.exchange.peer_endpoint import PeerRequests
from ft_plugins.smp.storage.folder_lease import FolderLease
from ft_plugins.smp.storage.persister import Persister
from ft_plugins.smp.tree import node as node_module
from ft_plugins.smp.tree import tree_messages
from ft_plugins.snapshot.segment.slots import SlotState, Version, voided_slots
from ft_plugins.transport.protocol import packed

from . import hub as hubs
from .hub import Signal
from .memory import WorldSegment
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


def write_json(path, value):
    if path.machine.full:
        raise OSError(28, "No space left on device", str(path))
    path.machine.files[str(path)] = json.dumps(value)


def read_json(path, adapter, *_):
    try:
        return adapter.validate_json(path.machine.files[str(path)])
    except KeyError:
        raise FileNotFoundError(2, "No such file or directory", str(path)) from None


class JobFiles:
    """As `smp.serve.job_file`: what is protected, in a file of the run directory."""

    PROTECTION_FILE = "protection.json"

    @staticmethod
    def write(run_dir, protection):
        return protection

    read = staticmethod(lambda run_dir, reference: reference)

    @staticmethod
    def record(run_dir, reference, token):
        if run_dir.machine.full:
            raise OSError(28, "No space left on device")
        run_dir.machine.files[f"{run_dir}/protection.json"] = (reference, token)

    @staticmethod
    def read_record(run_dir):
        try:
            return run_dir.machine.files[f"{run_dir}/protection.json"]
        except KeyError:
            raise FileNotFoundError(2, "No such file or directory") from None

    @staticmethod
    def refer(protection):
        return SimpleNamespace(block=lambda: {"job": protection.digest}), b""

    @staticmethod
    def forget(run_dir, kept=()):
        pass


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
        requests: PeerRequests = self._handle.__self__
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


class Smp:
    """The process. Files and memory of its machine make it continue."""

    def __init__(self, node):
        self.node = node
        world = node.world
        self.process = world.hub.process(f"{node.name}.smp", node.machine)
        self.ready = Signal(world.hub)
        self.process.spawn(self._begin, "smp")

    def _begin(self):
        node, machine = self.node, self.node.machine
        self.segments = {
            segment.rank: segment for text, segment in sorted(machine.memory.items()) if text.startswith("/shm/rank")
        }
        token = json.loads(machine.files.get("token", "0"))
        self.token = max([token, *(one.header.token for one in self.segments.values())])
        run_dir = Place(machine, f"/run/job/{node.name}")
        context = SimpleNamespace(
            run_dir=run_dir, job="job", node=node.name, events=Events(node.name), alarms=Alarms(run_dir),
            segments=self.segments, previous=NoPrevious(),
        )  # fmt: skip
        self.run_dir, self.context = run_dir, context
        self.tier = node_module.NodeTier(context)
        self.persister = Persister(context, 1.0, lease=FolderLease(context, self._watched))
        self.persister.adopt({rank: segment.path for rank, segment in self.segments.items()})
        self.lock = node_module.threading.Lock()
        self.ready.set()

    def _watched(self):
        agent = self.node.agent
        return (agent.process.pid, 1) if agent is not None else (0, 0)

    def looks_soon(self):
        """A rank has sealed a version. An SMP sees that when it looks, every few milliseconds; here the world wakes it,
        because looks that see nothing are most of the work."""
        driver = self.tier._driver if self.ready.is_set and self.process.alive else None
        if driver is not None:
            self.process.hub.later(self.process.hub.random.random() * 0.005, driver.wake)

    def require(self, rank, token):
        if token != self.token:
            raise FencedError(f"rank {rank}: token {token} was superseded by {self.token}")

    # ---- requests, as `owner` carries them out ----

    def fence(self):
        with self.lock:
            self.tier.suspend()
            self.token += 1
            write_json(Place(self.node.machine, "token"), self.token)
            for segment in self.segments.values():
                segment.header.token = self.token
                segment.header.held = segment.header.held_at = 0
            for segment in self.segments.values():
                self.node.world.kill(segment.header.owner[0])
            self.process.hub.current.sleep(0.01)
            for segment in self.segments.values():
                segment.header.owner, segment.header.attached = (0, 0), False
            return self.token

    def attach(self, rank, token, shape, pid, storage=None):
        self.require(rank, token)
        path = Place(self.node.machine, f"/shm/rank{rank}")
        segment = self.segments.get(rank)
        if segment is None or segment.shape != shape:
            self.process.hub.current.sleep(0.02)
            segment = WorldSegment(path, shape, rank, self.node.world.size)
        self.segments[rank] = segment
        self.require(rank, token)
        segment.header.token, segment.header.owner, segment.header.attached = self.token, (pid, 1), True
        self.persister.attached(rank, path, storage)
        return segment

    def open_lineage(self, rank, token, lineage, base, loaded=0, run=""):
        with self.lock:
            self.require(rank, token)
            segment = self.segments[rank]
            segment.open_lineage(lineage, base, voided_slots(segment.slots(), base), run)

    def shutdown(self, rank, token):
        self.require(rank, token)
        self.tier.suspend()
        if rank in self.segments:
            self.segments[rank].header.owner = (0, 0)

    def endpoint(self, address, secret_file, encrypt=False):
        return self.tier.endpoint(address, secret_file, encrypt)

    def inventory(self):
        return self.tier.inventory()

    def rebuild(self, rank, token, version, protection, source, holders, lost, previous=None):
        self.require(rank, token)
        needed = protection.plan().nodes_for(rank)
        request = SimpleNamespace(
            rank=rank, version=version, source=tuple(source) if source else None, token=token,
            holders=[(at, *where) for at, where in sorted(holders.items()) if at in needed],
            lost=sorted(needed.intersection(lost)),
        )  # fmt: skip
        self.tier.rebuild(request, protection)

    def claim(self, rank, token, protection):
        self._drop_moved(rank, token, protection)
        self.tier.claim(protection, self.token)

    def protect(self, rank, token, protection):
        self._drop_moved(rank, token, protection)
        return self.tier.protect(protection, self.token)

    def _drop_moved(self, rank, token, protection):
        self.require(rank, token)
        here = {one for one, node in enumerate(protection.nodes) if node == self.node.name}
        for moved in set(self.segments) - here:
            self.segments.pop(moved).path.unlink(missing_ok=True)
            self.persister.release([moved])

    def newest(self):
        """The newest version that all ranks of this node hold."""
        clean = (
            {slot.version for slot in segment.slots() if slot.state is SlotState.CLEAN}
            for segment in self.segments.values()
        )
        return max(set.intersection(*clean), default=None) if self.segments else None

    def begun(self):
        return self.newest() is not None or any(one.header.completed for one in self.segments.values())

    def opened(self, since):
        return any(one.header.opened.token >= since for one in self.segments.values())

    def replaceable(self):
        status = self.tier.status()
        return bool(status["losses"] and status["committed"])

    def end(self):
        """The job has ended in order."""
        self.tier.close()
        self.persister.stop(in_order=True)
        for segment in self.segments.values():
            segment.path.unlink(missing_ok=True)
        self.node.machine.memory.clear()
        self.node.machine.files.clear()
        self.node.ended = True


class Client:
    """As `smp.serve.client.Client`: requests of one process to the SMP of its machine, again if it dies."""

    def __init__(self, run_dir, timeout=PATIENCE):
        self._node = run_dir.machine.node
        self._timeout = timeout

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __getattr__(self, name):
        return lambda *given, **named: self._ask(name, given, named)

    def _ask(self, name, given, named):
        hub = hubs.ACTIVE
        for _ in range(TRIES):
            smp = self._connect(hub)
            over, result = Signal(hub), []

            def work(smp=smp, over=over, result=result):
                try:
                    result.append((True, getattr(smp, name)(*given, **named)))
                except (FtError, OSError) as error:
                    refusal = error if isinstance(error, FtError) else ProtocolError(f"{name}: {error}")
                    result.append((False, refusal))
                over.set()

            smp.process.at_end.append(over.set)
            smp.process.spawn(work, name)
            if not over.wait(self._timeout):
                raise ProtocolError(f"the SMP of {self._node.name} did not answer '{name}' in time")
            if result:
                well, value = result[0]
                if well:
                    return value
                raise value
        raise ProtocolError(f"the SMP of {self._node.name} hung up on '{name}'")

    def _connect(self, hub):
        until = hub.now + self._timeout
        while True:
            smp = self._node.smp
            if smp is not None and smp.process.alive and smp.ready.is_set:
                return smp
            if hub.now > until:
                raise ProtectionError(f"no SMP answers on {self._node.name}")
            hub.current.sleep(RETRY)
