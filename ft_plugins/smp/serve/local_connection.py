"""A connection to the SMP of this node, for one request after another. Imports neither numpy nor a plan of the job.

Invariant: every request is bounded in time; a refusal arrives as the error that the SMP raised.

In: a run directory. Out: replies, as plain values. `client` has the requests.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ...errors import ProtectionError, ProtocolError
from ...transport import protocol

RETRY_SECONDS = 0.05
_SOCKET_PATH_LIMIT = 107  # bytes, of sockaddr_un
_TRIES = 3  # of a request during which the SMP dies

Opened = TypeVar("Opened", bound="LocalConnection")


class LocalConnection:
    """A connection to the SMP of `run_dir`. Use as a context manager."""

    def __init__(self, run_dir: Path, timeout: float = 30.0) -> None:
        """Connect, retrying for `timeout` seconds: a lost SMP is being replaced. Raises ProtectionError."""
        self._run_dir = run_dir
        self._timeout = timeout
        self._connection = self._connect()

    def _connect(self) -> socket.socket:
        path = self._run_dir / "smp.sock"
        if len(str(path).encode()) > _SOCKET_PATH_LIMIT:
            raise ProtectionError(
                f"the socket's path {path} is longer than {_SOCKET_PATH_LIMIT} bytes; give a shorter --ftp-job"
            )
        deadline = time.monotonic() + self._timeout
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(self._timeout)
            try:
                connection.connect(str(path))
                return connection
            except OSError as error:
                connection.close()
                if time.monotonic() >= deadline:
                    raise ProtectionError(
                        f"no SMP answers at {path} ({error.strerror}); start the job with ft-run, "
                        f"and see {self._run_dir / 'smp.log'}"
                    ) from error
                time.sleep(RETRY_SECONDS)

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _ask(self, name: str, *, extra_seconds: float = 0.0, **fields: Any) -> dict[str, Any]:
        """Send one request, again if the SMP dies during it: requests may be carried out twice without harm."""
        for left in reversed(range(_TRIES)):
            if self._connection.fileno() < 0:  # a request before this one was not answered in time
                self._connection = self._connect()
            try:
                self._connection.settimeout(self._timeout + extra_seconds)
                protocol.send(self._connection, {"do": name, **fields})
                reply = protocol.receive(self._connection)
            except TimeoutError as error:
                self._connection.close()  # else its reply would be taken for that of the next request
                raise ProtocolError(f"the SMP of {self._run_dir} did not answer '{name}' in time") from error
            except OSError:
                reply = None
            if reply is not None:
                protocol.raise_refusal(reply)
                return reply
            self._connection.close()
            if name == "end":
                return {"ok": True}  # the SMP ended before it could answer; `end` checks its lock
            if left:
                self._connection = self._connect()
        raise ProtocolError(f"the SMP of {self._run_dir} hung up on '{name}' {_TRIES} times; see its smp.log")

    def status(self) -> dict[str, Any]:
        """pid, job, node, token, watched_pid and the segments with their slots."""
        return self._ask("status")

    def other_nodes(self, each: float, every: float) -> list[dict[str, Any]]:
        """What is known of the job on its other nodes (`other_nodes.ask`); `each` of them is given so many seconds,
        `every` one together."""
        found: list[dict[str, Any]] = []
        first: int | None = 0
        while first is not None:
            reply = self._ask("nodes", extra_seconds=every, first=first, each=each, every=every)
            found += reply["nodes"]
            first = reply["next"]
        return found
