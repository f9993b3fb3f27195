"""What SMPs of different nodes know of each other: the one that decides, readers of each other's memory, messages.

Invariant: a node counts as lost when nothing was heard of it for `detect_seconds`, be it killed, stopped or cut off;
all other timeouts derive from that one. What was decided once is not taken back by a report that came late.

In: reports and requests. Out: directives; bytes, digests checked.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from ..errors import ProtocolError, SegmentError
from ..snapshot.segment import Segment
from ..snapshot.slots import Version
from .exchange import copy_of, slot_of
from .pins import Directive, Epoch, Report, decide
from .vault import Vault
from .wire import Bytes, Peer

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

    def __init__(self, segments: Mapping[int, Segment], vault: Callable[[], Vault | None]) -> None:
        self._segments = segments
        self._vault = vault

    def _segment(self, rank: int) -> Segment:
        found = self._segments.get(rank)
        if found is None:
            raise SegmentError(f"rank {rank} has no segment on this node")
        return found

    def _kept(self) -> Vault:
        found = self._vault()
        if found is None:
            raise SegmentError("this node keeps no parity")
        return found

    def data(self, rank: int, version: Version, offset: int, nbytes: int) -> Bytes:
        """Bytes of a slot's data."""
        segment = self._segment(rank)
        return segment.data(slot_of(segment, version))[offset : offset + nbytes]

    def parity(self, key: tuple[int, int, int], version: Version, at: int, nbytes: int) -> Bytes:
        """Bytes of a parity block, digests checked."""
        return self._kept().read(version, key, at, nbytes)

    def copy(self, rank: int, version: Version) -> bytes:
        """The copy that this node keeps of another node's rank."""
        return self._kept().copy(version, rank)

    def slot(self, rank: int, version: Version) -> bytes:
        """Small state and digest table of a rank of this node."""
        return copy_of(self._segment(rank), version)


class Remote:
    """Another node's memory, as `rebuild.Reader`. A connection per thread that reads."""

    def __init__(self, where: tuple[str, int], job: str, secret: bytes, timeout: float) -> None:
        self._make = lambda: Peer(where, job, secret, timeout)
        self._of_thread = threading.local()

    def _ask(self, **fields: Any) -> tuple[dict[str, Any], Bytes]:
        if not hasattr(self._of_thread, "peer"):
            self._of_thread.peer = self._make()
        peer: Peer = self._of_thread.peer
        return peer.ask("read", **fields)

    def data(self, rank: int, version: Version, offset: int, nbytes: int) -> Bytes:
        """Bytes of a slot's data."""
        return self._ask(what="data", rank=rank, version=told(version), offset=offset, nbytes=nbytes)[1]

    def parity(self, key: tuple[int, int, int], version: Version, at: int, nbytes: int) -> Bytes:
        """Bytes of a parity block."""
        return self._ask(what="parity", key=list(key), version=told(version), at=at, nbytes=nbytes)[1]

    def copy(self, rank: int, version: Version) -> bytes:
        """The copy that the node keeps of another node's rank."""
        return self._whole("copy", rank, version)

    def slot(self, rank: int, version: Version) -> bytes:
        """Small state and digest table of a rank of that node."""
        return self._whole("slot", rank, version)

    def _whole(self, what: str, rank: int, version: Version) -> bytes:
        found = bytearray()
        while True:
            reply, part = self._ask(what=what, rank=rank, version=told(version), offset=len(found))
            found += part.tobytes()
            if len(found) >= reply["total"] or not len(part):
                return bytes(found)


def told(value: Version | Report | None) -> list[Any] | None:
    """A version or a report as plain values."""
    if isinstance(value, Report):
        versions = (value.exchange, value.missed, value.encoded, value.counted)
        return [value.begun, *map(told, versions)]
    return list(astuple(value)) if value is not None else None


def read_version(value: Any) -> Version:
    """A version from plain values. Raises ProtocolError."""
    if not (isinstance(value, list) and len(value) == 2 and all(type(part) is int and part >= 0 for part in value)):
        raise ProtocolError(f"{value!r} is no version; expected a lineage and an iteration")
    return Version(*value)


def read_maybe(value: Any) -> Version | None:
    """A version or None from plain values. Raises ProtocolError."""
    return None if value is None else read_version(value)


def read_report(value: Any) -> Report:
    """A report from plain values. Raises ProtocolError."""
    if not (isinstance(value, list) and len(value) == 5 and type(value[0]) is int):
        raise ProtocolError(f"{value!r} is no report of a node")
    return Report(value[0], *map(read_maybe, value[1:]))


def written(path: Path, value: Any) -> None:
    """Write a small file whole or not at all, for its owner alone."""
    building = path.with_name(path.name + ".new")
    fd = os.open(building, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(value, file)
    building.replace(path)
