"""Carry out the requests of other nodes' SMPs: joining the tree, frames and copies to store, bytes to read.

Invariant: a request of another epoch than the one protected here changes nothing. A repeated request has no further
effect: a peer whose connection was closed sends its request again. `requests.peer` parses the messages.

In: a message with its payload, from `wire.Server`. Out: the reply with its payload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import Version
from ...transport.frame_codec import PAYLOAD_LIMIT
from ...transport.wire import Bytes, Handover
from ..serve import requests
from . import replica_checks
from .frames import Data, Parity
from .parity_store import ParityStore
from .readers import LocalReader
from .traffic import step_back

Reply = tuple[dict[str, Any], Bytes | None]


class PeerRequests:
    """The requests to one node. Holds no state."""

    def __init__(
        self,
        memory: LocalReader,
        segments: Mapping[int, Segment],
        storing: Callable[[int], ParityStore],
        join: Callable[[int, int], Handover],
        received: Callable[[], None],
        as_spare: Callable[[requests.SpareState | requests.ReleaseSpare], dict[str, Any]],
        job_file: Callable[[str], bytes],
    ) -> None:
        """`storing(epoch)` is the parity store that receives frames of that epoch; `join(epoch, position)` takes over
        the connection of a position that reports to this node in that epoch. Both raise ProtocolError if this node
        cannot. `received` is called once everything of a version is here; `as_spare` answers if this node has no part
        in the job. `job_file(digest)` is the content of a job file here; it raises ProtocolError."""
        self._memory = memory
        self._segments = segments
        self._storing = storing
        self._join = join
        self._received = received
        self._as_spare = as_spare
        self._job_file = job_file

    def handle(self, message: dict[str, Any], payload: Bytes) -> Reply | Handover:
        """The reply to a request. Raises ProtocolError, SegmentError."""
        match request := requests.peer(message):
            case requests.Probe():
                return {}, None
            case requests.SpareState() | requests.ReleaseSpare():
                return self._as_spare(request), None
            case requests.Join(position=position):
                return self._join(request.epoch, position)
            case requests.BeginLane():  # this connection carries data, which is not urgent
                step_back()
                return self.begin(self._storing(request.epoch), request), None
            case requests.TakeFrame(version=version, key=key, node=node, at=at, exponent=exponent):
                step_back()  # the lane may have connected again since its `begin`
                store = self._storing(request.epoch)
                return self._taken(store, version, store.take(version, key, node, at, exponent, payload))
            case requests.TakeCopy(version=version, rank=rank, at=at, total=total):
                store = self._storing(request.epoch)
                return self._taken(store, version, store.take_copy(version, rank, at, total, payload))
            case requests.CompareReplicas():
                self._storing(request.epoch)
                mismatched = replica_checks.mismatched(self._segments, request.version, payload)
                return ({"wait": True} if mismatched is None else {"differ": mismatched}), None
            case requests.ReadData(version=version, rank=rank, at=at, nbytes=nbytes):
                return {}, self._memory.read(Data(rank, version, at, nbytes))
            case requests.ReadParity(version=version, key=key, at=at, nbytes=nbytes):
                return {}, self._memory.read(Parity(key, version, at, nbytes))
            case requests.ReadCopy(version=version, rank=rank, offset=offset):
                return _part(self._memory.copy(rank, version), offset)
            case requests.ReadSlot(version=version, rank=rank, offset=offset):
                return _part(self._memory.slot(rank, version), offset)
            case requests.ReadJob(job=digest, offset=offset):
                return _part(self._job_file(digest), offset)
        raise AssertionError(f"no answer to {request}")

    def _taken(self, store: ParityStore, version: Version, nbytes: int) -> Reply:
        if store.receiving is None:
            self._received()
        return {"taken": nbytes}, None

    def begin(self, store: ParityStore, request: requests.BeginLane) -> dict[str, Any]:
        """How much of a sender's part is here already; `wait` while this node does not expect its version."""
        taken = store.taken(request.version, request.nodes)
        if taken is None:
            return {"wait": True}
        return {"taken": taken, "copies": store.copied(request.version, request.ranks)}


def _part(whole: bytes, offset: int) -> Reply:
    part = np.frombuffer(whole, dtype=np.uint8)[offset : offset + PAYLOAD_LIMIT]
    return {"total": len(whole)}, part
