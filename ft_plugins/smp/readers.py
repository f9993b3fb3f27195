"""What SMPs of different nodes know of each other: the one that decides, readers of each other's memory, messages.

Invariant: a node counts as lost when nothing was heard of it for `detect_seconds`, be it killed, stopped or cut off;
all other timeouts derive from that one. What was decided once is not taken back by a report that came late.

In: reports and requests. Out: directives; bytes, digests checked.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

from ..errors import ProtocolError, SegmentError
from ..intake import open_new, shown
from ..snapshot.segment import Segment
from ..snapshot.slots import SlotState, Version
from . import protocol
from .agreement import Directive, Epoch, Report, decide
from .channel import Who
from .exchange import copy_of, slot_of
from .former import Former
from .frames import Data, Parity
from .parity_store import Vault
from .wire import Bytes, Peer, limit_in_kernel

_BEATS_PER_DETECTION = 5
_FASTEST_SECONDS = 0.05
_NODES_PER_SECOND = 1000  # beats that position 0 takes


def beat_seconds(nodes: int, detect_seconds: float) -> float:
    """How often a node reports: several times within `detect_seconds`, no more often than position 0 can take."""
    return min(detect_seconds / _BEATS_PER_DETECTION, max(_FASTEST_SECONDS, nodes / _NODES_PER_SECOND))


class Coordinator:
    """The agreement at position 0: reports by position, and when each was heard last."""

    def __init__(self, epoch: Epoch, detect_seconds: float) -> None:
        self._epoch = epoch
        self._detect_seconds = detect_seconds
        self._lock = threading.Lock()
        self._reports: dict[int, Report] = {}
        self._heard = dict.fromkeys(range(epoch.nodes), time.monotonic())
        self._directive = Directive()

    def beat(self, position: int, report: Report) -> Directive:
        """Take a report; the directive for everyone. Raises ProtocolError for a position that the job does not have."""
        if position not in self._heard:
            raise ProtocolError(f"position {position} is not in this job of {self._epoch.nodes} nodes")
        with self._lock:
            self._reports[position] = report
            self._heard[position] = time.monotonic()
            self._directive = decide(self._epoch, self._directive, self._reports)
            return self._directive

    def lost(self) -> list[int]:
        """The positions of which nothing was heard for too long."""
        now = time.monotonic()
        with self._lock:
            return [position for position, heard in self._heard.items() if now - heard > self._detect_seconds]


class Local:
    """This node's own memory, as `rebuild.Reader`."""

    over_wire = False

    def __init__(self, segments: Mapping[int, Segment], former: Former, vault: Callable[[], Vault | None]) -> None:
        """`former` is looked at for what `segments` do not have: no version is of two sizes of the job."""
        self._segments = segments
        self._former = former
        self._vault = vault
        # the slot that was read last, looked at first; it keeps no mapping of a segment that has left
        self._found: tuple[int, Version, weakref.ref[Segment], int] | None = None

    def _kept(self) -> Vault:
        found = self._vault()
        if found is None:
            raise SegmentError("this node keeps no parity")
        return found

    def read(self, wanted: Data | Parity) -> Bytes:
        """Bytes of a slot's data, or of a parity block, the digests of which are checked. A view."""
        if isinstance(wanted, Parity):
            return self._kept().read(wanted.version, wanted.key, wanted.at, wanted.nbytes)
        segment, index = self._slot(wanted.rank, wanted.version)
        if wanted.at + wanted.nbytes > segment.shape.nbytes:
            raise ProtocolError(f"{wanted.nbytes} bytes at {wanted.at} are not in the slots of rank {wanted.rank}")
        return segment.data(index)[wanted.at : wanted.at + wanted.nbytes]

    def _slot(self, rank: int, version: Version) -> tuple[Segment, int]:
        """Where `version` lies CLEAN now. Each look at a slot costs a digest of its table and small state.

        Raises SegmentError, CorruptSlotError.
        """
        if self._found is not None and self._found[:2] == (rank, version):
            segment, known = self._found[2](), self._found[3]
            slot = segment.slot(known) if segment is not None else None
            if segment is not None and slot and slot.version == version and slot.state is SlotState.CLEAN:
                return segment, known
        own = self._segments.get(rank)
        try:
            if own is None:
                raise SegmentError(f"rank {rank} has no segment on this node")
            found = own, slot_of(own, version)
        except SegmentError:
            aside = self._former.find(rank, version)
            if aside is None:
                raise
            found = aside, slot_of(aside, version)
        self._found = (rank, version, weakref.ref(found[0]), found[1])
        return found

    def copy(self, rank: int, version: Version) -> bytes:
        """The copy that this node keeps of another node's rank."""
        return self._kept().copy(version, rank)

    def slot(self, rank: int, version: Version) -> bytes:
        """Small state and digest table of a rank of this node."""
        return copy_of(self._slot(rank, version)[0], version)

    def line(self) -> _Within:
        """For one thread that rebuilds."""
        return _Within(self)


class _Within:
    """A `rebuild.Line` that leads no further than this node."""

    def __init__(self, memory: Local) -> None:
        self._memory = memory
        self._asked: deque[Data | Parity] = deque()

    def ask_for(self, wanted: Data | Parity) -> None:
        self._asked.append(wanted)

    def take(self, into: Bytes) -> None:
        into[:] = self._memory.read(self._asked.popleft())

    def close(self) -> None:
        """There is nobody to hang up on."""

    def release(self) -> None:
        self._asked.clear()


class Remote:
    """Another node's memory, as `rebuild.Reader`."""

    over_wire = True

    def __init__(self, where: tuple[str, int], me: Who, secret: bytes, timeout: float) -> None:
        self._peer = (where, me, secret, timeout)

    def copy(self, rank: int, version: Version) -> bytes:
        """The copy that the node keeps of another node's rank."""
        return self._whole("copy", rank, version)

    def slot(self, rank: int, version: Version) -> bytes:
        """Small state and digest table of a rank of that node."""
        return self._whole("slot", rank, version)

    def _whole(self, what: str, rank: int, version: Version) -> bytes:
        found = bytearray()
        with closing(Peer(*self._peer)) as peer:
            while True:
                reply, part = peer.ask("read", what=what, rank=rank, version=told(version), offset=len(found))
                found += part.tobytes()
                if len(found) >= reply["total"] or not len(part):
                    return bytes(found)

    def line(self) -> Ahead:
        """For one thread that rebuilds."""
        return Ahead(*self._peer)


class Ahead(Peer):
    """A connection on which several requests are under way: a `rebuild.Line`, for one thread but for `close`.

    The socket blocks, its timeout is the kernel's: one call of the system for a payload that is there. Where the peer
    has hung up while no request was under way, the next one goes on a new connection.
    """

    _under_way = 0  # requests

    def ask_for(self, wanted: Data | Parity) -> None:
        """Send a request to read. Raises ProtocolError."""
        fields: dict[str, Any] = {"version": told(wanted.version), "at": wanted.at, "nbytes": wanted.nbytes}
        if isinstance(wanted, Parity):
            fields |= {"what": "parity", "key": list(wanted.key)}
        else:
            fields |= {"what": "data", "rank": wanted.rank}
        with self._named():
            if self._closed:
                raise ProtocolError("this side has hung up")
            if not self._under_way and self._hung_up():
                self._drop()
            if self._link is None:
                self._link = self._connect()
                assert self._connection is not None
                self._connection.settimeout(None)
                limit_in_kernel(self._connection, self._timeout)
            self._link.send({"do": "read", **fields})
            self._under_way += 1

    def take(self, into: Bytes) -> None:
        """Receive the next reply's payload. Raises ProtocolError, also when it was changed on the way, or what the peer
        refused with."""
        with self._named():
            if self._closed or self._link is None:
                raise ProtocolError("this side has hung up")
            reply = self._link.message()
            if reply is None:
                raise ProtocolError("it hung up")
            if reply.get("ok") is True:
                announced = protocol.number({"bytes": 0, **reply}, "bytes")
                if announced != len(into):
                    raise ProtocolError(f"it sends {announced} bytes where {len(into)} were asked for")
                if announced:
                    self._link.payload(into)
            self._under_way -= 1
        protocol.raise_refusal(reply)

    def _hung_up(self) -> bool:
        """Whether the peer has closed a connection on which nothing is expected."""
        if self._connection is None:
            return False
        try:
            return self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the connection name the peer; what was asked for is void then."""
        try:
            yield
        except (OSError, ProtocolError) as error:
            self.close()
            reason = f"no answer in {self._timeout:.0f} s" if isinstance(error, BlockingIOError) else str(error)
            host, port = self.endpoint
            raise ProtocolError(f"the SMP at {host}:{port} cannot be read: {reason}") from error

    def release(self) -> None:
        """The thread that asked is done."""
        self._drop()


def told(value: Version | Report | None) -> list[Any] | None:
    """A version or a report as plain values."""
    if isinstance(value, Report):
        versions = (value.exchange, value.missed, value.encoded, value.counted)
        return [value.begun, *map(told, versions)]
    return list(astuple(value)) if value is not None else None


def read_version(value: Any) -> Version:
    """A version from plain values. Raises ProtocolError."""
    if not (isinstance(value, list) and len(value) == 2 and all(type(p) is int and 0 <= p < 1 << 63 for p in value)):
        raise ProtocolError(f"{shown(value)} is no version; expected a lineage and an iteration")
    return Version(*value)


def read_maybe(value: Any) -> Version | None:
    """A version or None from plain values. Raises ProtocolError."""
    return None if value is None else read_version(value)


def read_report(value: Any) -> Report:
    """A report from plain values. Raises ProtocolError."""
    if not (isinstance(value, list) and len(value) == 5 and type(value[0]) is int):
        raise ProtocolError(f"{shown(value)} is no report of a node")
    return Report(value[0], *map(read_maybe, value[1:]))


def written(path: Path, value: Any) -> None:
    """Write a small file whole or not at all, for its owner alone."""
    building = path.with_name(path.name + ".new")
    with open(open_new(building), "w") as file:
        json.dump(value, file)
    building.replace(path)
