"""Where this node's SMP listens for those of other nodes, how it connects to theirs, and how it answers their requests.

Invariant: the endpoint is recorded in the run directory, so an SMP that replaces this one listens at the same address
and, unless another process has it now, at the same port: the kernel chose that one, so it is no error if it is taken. A
request of another epoch than the one protected here changes nothing. A repeated request has no further effect: a peer
whose connection was closed sends its request again. `requests.peer` parses the messages.

In: an address and a secret file from a trainer, or the record; messages with payloads. Out: a `calls.Server`;
connections and readers; replies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from ...base import files
from ...base.intake import Address, Flag, Port, Text, read_json
from ...errors import ConfigError
from ...events import Events
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import Version
from ...transport import calls
from ...transport.calls import Bytes, Handler, Handover, Peer, Server
from ...transport.channel import Party
from ...transport.frame_codec import PAYLOAD_LIMIT
from ..serve import requests
from . import replica_checks
from .frames import Data, Parity
from .parity_store import ParityStore
from .readers import LocalReader, RemoteReader
from .rebuild import Reader
from .traffic import step_back

_FILE = "endpoint.json"  # in the run directory
Reply = tuple[dict[str, Any], Bytes | None]


@dataclass(frozen=True)
class _Listening:
    """Where an SMP listens for other nodes' SMPs, and the secret that they share."""

    address: Address
    port: Port
    secret_file: Text
    encrypt: Flag


_RECORD = TypeAdapter(_Listening)


class PeerEndpoint:
    """The endpoint of one node. Call `listen` under a lock."""

    def __init__(self, run_dir: Path, job: str, node: str, handle: Handler, events: Events) -> None:
        """`handle` answers the requests of other nodes' SMPs."""
        self._path = run_dir / _FILE
        self._handle = handle
        self._events = events
        self._me = Party(calls.PURPOSE, job, node)
        self._secret = b""
        self._server: Server | None = None

    def listen(self, address: str, secret_file: str, encrypt: bool) -> tuple[str, int]:
        """Listen on `address`, at the recorded port if there is one; returns where. Raises ConfigError."""
        same = self._secret == calls.read_secret(Path(secret_file)) and self._me.encrypt == encrypt
        if self._server is None or self._server.endpoint[0] != address or not same:
            port = 0
            with suppress(OSError, ValueError):
                recorded = read_json(self._path, _RECORD)
                port = recorded.port if recorded.address == address else 0
            self._start(address, port, secret_file, encrypt)
        assert self._server is not None
        return self._server.endpoint

    def resume(self) -> str:
        """Listen as recorded by a previous SMP. '' if other SMPs find this one there; else for people: where it is, as
        they learn when workers start again. Raises FileNotFoundError if there is no record; ConfigError, OSError,
        ValueError."""
        recorded = read_json(self._path, _RECORD)
        self._start(recorded.address, recorded.port, recorded.secret_file, recorded.encrypt)
        assert self._server is not None
        host, port = self._server.endpoint
        return "" if port == recorded.port else f"another process has port {recorded.port} of {host}; now at {port}"

    def _start(self, address: str, port: int, secret_file: str, encrypt: bool) -> None:
        self._secret = calls.read_secret(Path(secret_file))
        self._me = replace(self._me, encrypt=encrypt)
        self.close()
        try:
            self._server = Server(address, port, self._me, self._secret, self._handle, self._events)
        except ConfigError:
            if not port:
                raise
            self._server = Server(address, 0, self._me, self._secret, self._handle, self._events)
        files.write_json(self._path, asdict(_Listening(address, self._server.endpoint[1], secret_file, encrypt)))

    def connect(self, where: tuple[str, int], timeout: float, node: str = "") -> Peer:
        """A connection to the SMP of another node; `node` is its name, if that is known."""
        return Peer(where, self._me, self._secret, timeout, node)

    def reader(self, where: tuple[str, int], timeout: float, memory: LocalReader) -> Reader:
        """Reads from the SMP at `where`; from `memory` if that is this one."""
        if self._server is not None and where == self._server.endpoint:
            return memory
        return RemoteReader(where, self._me, self._secret, timeout)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def forget(self) -> None:
        """Remove the record."""
        self._path.unlink(missing_ok=True)


# ---- requests of other nodes ----


@dataclass(frozen=True, eq=False)
class PeerRequests:
    """The requests to one node. Holds no state.

    `storing(epoch)` is the parity store that receives frames of that epoch; `join(epoch, position)` takes over the
    connection of a position that reports to this node in that epoch. Both raise ProtocolError if this node cannot.
    `received` is called once everything of a version is here; `as_spare` answers if this node has no part in the job.
    `job_file(digest)` is the content of a job file here, `status` what is known of the job here; both raise
    ProtocolError."""

    memory: LocalReader
    segments: Mapping[int, Segment]
    storing: Callable[[int], ParityStore]
    join: Callable[[int, int], Handover]
    received: Callable[[], None]
    as_spare: Callable[[requests.SpareState], dict[str, Any]]
    job_file: Callable[[str], bytes]
    status: Callable[[], dict[str, Any]]

    def handle(self, message: dict[str, Any], payload: Bytes) -> Reply | Handover:
        """The reply to a request. Raises ProtocolError, SegmentError."""
        match request := requests.peer(message):
            case requests.Probe():
                return {}, None
            case requests.NodeStatus():
                return {"facts": self.status()}, None
            case requests.SpareState():
                return self.as_spare(request), None
            case requests.Join(position=position):
                return self.join(request.epoch, position)
            case requests.BeginLane():  # this connection carries data, which is not urgent
                step_back()
                return self.begin(self.storing(request.epoch), request), None
            case requests.TakeFrame(version=version, key=key, node=node, at=at, exponent=exponent):
                step_back()  # the lane may have connected again since its `begin`
                store = self.storing(request.epoch)
                return self._taken(store, version, store.take(version, key, node, at, exponent, payload))
            case requests.TakeCopy(version=version, rank=rank, at=at, total=total):
                store = self.storing(request.epoch)
                return self._taken(store, version, store.take_copy(version, rank, at, total, payload))
            case requests.CompareReplicas():
                self.storing(request.epoch)
                mismatched = replica_checks.mismatched(self.segments, request.version, payload)
                return ({"wait": True} if mismatched is None else {"differ": mismatched}), None
            case requests.ReadData(version=version, rank=rank, at=at, nbytes=nbytes):
                return {}, self.memory.read(Data(rank, version, at, nbytes))
            case requests.ReadParity(version=version, key=key, at=at, nbytes=nbytes):
                return {}, self.memory.read(Parity(key, version, at, nbytes))
            case requests.ReadCopy(version=version, rank=rank, offset=offset):
                return _part(self.memory.copy(rank, version), offset)
            case requests.ReadSlot(version=version, rank=rank, offset=offset):
                return _part(self.memory.slot(rank, version), offset)
            case requests.ReadJob(job=digest, offset=offset):
                return _part(self.job_file(digest), offset)
        raise AssertionError(f"no answer to {request}")

    def _taken(self, store: ParityStore, version: Version, nbytes: int) -> Reply:
        if store.receiving is None:
            self.received()
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
