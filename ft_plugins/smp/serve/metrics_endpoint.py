"""Serve the metrics of this node over HTTP, from the SMP.

Invariant: read only: `GET /metrics`, nothing else, and nothing secret. A scrape never holds what the SMP needs for its
work for longer than a status request does, waits for that a bounded time, and a few are served at once; training is
not involved. A whole request has a bounded time, however slowly its bytes arrive, and so has the reading of its reply.
A few connections of one peer are open; one more ends its oldest, so a peer that is slow keeps no other one out, nor its
own next scrape. A port that cannot be had costs the metrics, never the job: it is an event, a line in the job's log and
one in `status`.

In: an address and a port. Out: text.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6, SHUT_RDWR
from socketserver import TCPServer
from typing import Any

from ...events import Events, catalogue
from ...metrics.exposition import CONTENT_TYPE, counts_of, node_of, text_of
from ...transport.door import crowd_of

_AT_ONCE = 8  # connections
_OF_ONE_PEER = 2  # of these
_SECONDS = 10.0  # for a request and its reply; Prometheus waits as long by default
_POLL_SECONDS = 0.2  # until the thread sees that it shall end
LOCK_SECONDS = 1.0  # for another scrape to be over

Status = Callable[[], Mapping[str, Any] | None]  # None: not in time
Place = tuple[str, int]


class MetricsEndpoint:
    """The metrics of one run directory. `become`, `again` and `close` are called under the SMP's lock, and
    never wait for a scrape."""

    def __init__(self, run_dir: Path, status: Status, events: Events) -> None:
        self._run_dir, self._status, self._events = run_dir, status, events
        self._server: _Server | None = None
        self._place: Place | None = None  # as asked for
        self.failure = ""  # why nothing is served there, '' if it is
        self._counts = counts_of(run_dir)
        self._counting = threading.Lock()

    @property
    def port(self) -> int | None:
        """Where it is served; None if it is not."""
        return self._server.server_address[1] if self._server else None

    def become(self, place: Place | None) -> None:
        """Serve at this place from now on; None: nowhere. The same one again changes nothing, unless it failed."""
        if place == self._place and (self._server is not None or place is None):
            return
        self.close()
        self._place, before, self.failure = place, self.failure, ""
        if place is not None:
            try:
                self._server = _Server(place, self.text)
            except (OSError, RuntimeError) as error:  # RuntimeError: no more threads
                self.failure = f"{place[0]}, port {place[1]}: {getattr(error, 'strerror', None) or error}"
        if self.failure not in ("", before):
            self._events.emit(catalogue.METRICS_FAILED, reason=self.failure)

    def again(self) -> None:
        """Try again if it failed, as while the SMP of an ended job has the port."""
        self.become(self._place)

    def text(self) -> str | None:
        """What a scrape gets; None if another one is not over in time."""
        if not self._counting.acquire(timeout=LOCK_SECONDS):
            return None
        try:
            return text_of([node_of(self._run_dir, self._status(), self._counts)])
        finally:
            self._counting.release()

    def close(self) -> None:
        """Serve no more."""
        if self._server is not None:
            self._server.end()
            self._server = None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, place: Place, text: Callable[[], str | None]) -> None:
        self.address_family = AF_INET6 if ":" in place[0] else AF_INET
        self.text = text
        self._room = threading.BoundedSemaphore(_AT_ONCE)
        self._open: dict[Any, tuple[str, float]] = {}  # peer and begin (monotonic) of each connection, oldest first
        super().__init__(place, _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_SECONDS,), name="smp-metrics", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            self.server_close()
            raise

    def server_bind(self) -> None:
        """Not that of HTTPServer, which looks the host's name up and may wait for a name server."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        own = [each for each, (peer, _) in list(self._open.items()) if peer == crowd_of(str(client_address[0]))]
        for oldest in own[: 1 - _OF_ONE_PEER]:
            _hang_up(oldest)
        if not self._room.acquire(timeout=_POLL_SECONDS):  # theirs, as soon as their threads have seen it
            self.shutdown_request(request)
            return
        self._open[request] = crowd_of(str(client_address[0])), time.monotonic()  # not in its thread, which begins late
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads
            del self._open[request]
            self._room.release()
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Called by the thread at each look: end what takes too long."""
        for request, (_, began) in list(self._open.items()):
            if time.monotonic() - began > _SECONDS:
                _hang_up(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._open[request]
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or was silent for too long, is no news; another error is, in the SMP's log."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def end(self) -> None:
        """Stop the thread; takes `_POLL_SECONDS` at most."""
        self.shutdown()
        self.server_close()
        for request in list(self._open):
            _hang_up(request)


def _hang_up(request: Any) -> None:
    """End a connection; what its thread reads or writes next fails."""
    with suppress(OSError):  # it has ended already
        request.shutdown(SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer one scrape."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is served")
            return
        text = self.server.text()
        if text is None:
            self.send_error(503, "another scrape is not over")
            return
        content = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """The SMP's log is not for requests."""
