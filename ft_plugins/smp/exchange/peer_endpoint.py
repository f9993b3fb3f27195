"""Where this node's SMP listens for those of other nodes, and how it connects to theirs: address, secret, encryption.

Invariant: it is recorded in the run directory, so an SMP that replaces this one listens at the same address and, unless
another process has it now, at the same port: the kernel chose that one, so it is no error if it is taken.

In: an address and a secret file from a trainer, or the record. Out: a `wire.Server`; connections and readers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from ...base import files
from ...base.intake import Address, Flag, Port, Text, read_json
from ...errors import ConfigError
from ...events import Events
from ...transport import wire
from ...transport.channel import Party
from ...transport.wire import Handler, Peer, Server
from .readers import LocalReader, RemoteReader
from .rebuild import Reader

_FILE = "endpoint.json"  # in the run directory


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
        self._me = Party(wire.PURPOSE, job, node)
        self._secret = b""
        self._server: Server | None = None

    def listen(self, address: str, secret_file: str, encrypt: bool) -> tuple[str, int]:
        """Listen on `address`, at the recorded port if there is one; returns where. Raises ConfigError."""
        same = self._secret == wire.read_secret(Path(secret_file)) and self._me.encrypt == encrypt
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
        self._secret = wire.read_secret(Path(secret_file))
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
        if self._server is not None:
            self._server.close()

    def forget(self) -> None:
        """Remove the record."""
        self._path.unlink(missing_ok=True)
