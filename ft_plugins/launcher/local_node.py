"""This node of a rendezvous: its port, the service behind it, the search for a leader, and the link to the leader.

In: `RendezvousSettings`, requests to the leader. Out: an open port, replies. A reply that the job is over closes this
node's service.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from ..events import Events
from ..intake import parsed
from ..recovery.resize.sizes import SizeReport
from . import endpoint, peer_client
from .endpoint import Endpoint
from .leader_search import LeaderSearch
from .node_messages import Answered, Leader, Message, RoundView
from .node_service import NodeIdentity, NodeService
from .peer_client import Credentials, PeerConnection
from .peer_server import PeerServer
from .rendezvous_settings import RendezvousSettings
from .roster_file import RosterFile

_LONGEST_REACH = 3.0  # for one request, including one retransmission of TCP
_REST_SECONDS = 1.0  # between two looks at a complete round; as torch


class LeaderLink:
    """Sends requests to the leader that this node follows, or to its own service if it leads. For one thread."""

    def __init__(self, service: NodeService, reach: float, silence: float, credentials: Credentials) -> None:
        """`reach`: seconds for one reply. `silence`: seconds without one after which the leader is lost."""
        self.leader: Leader | None = None
        self._service = service
        self._reach = reach
        self._silence = silence
        self._credentials = credentials
        self._connection: PeerConnection | None = None
        self._last_reply = 0.0  # monotonic

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last reply."""
        return time.monotonic() - self._last_reply

    def follow(self, leader: Leader) -> None:
        """Send requests to `leader` from now on."""
        self.leader = leader
        self.note_reply()
        self._service.follow(leader)

    def note_reply(self) -> None:
        """The leader is alive now."""
        self._last_reply = time.monotonic()

    def ask(self, name: str, **fields: Any) -> Message:
        """The leader's reply. Raises ConnectionError if it cannot be reached or no longer leads."""
        leader, me = self.leader, self._service.me
        if leader is None:
            raise ConnectionError("there is no leader")
        message = {"do": name, "token": me.token, **fields}
        if leader.token == me.token:
            reply = self._service.answer(message)
        else:
            if self._connection is None:
                self._connection = PeerConnection(leader.endpoint, self._reach, self._credentials)
            try:
                reply = self._connection.ask(message)
            except ConnectionError:
                self.close()
                raise
        answered = parsed(Answered, reply)
        if answered.closed:
            self._service.close(answered.closed, answered.in_order)
        if answered.moved:
            self.close()
            raise ConnectionError("it resigned")
        return reply

    def ask_patiently(self, check: Callable[[], None], name: str, **fields: Any) -> Message:
        """The leader's reply to a request that may be repeated: again while it is only slow. `check` is called before
        each repetition, and raises what ends the wait."""
        while True:
            try:
                reply = self.ask(name, **fields)
            except ConnectionError as error:
                if not self.is_only_slow(error):
                    raise
                check()
                continue
            self.note_reply()
            return reply

    def look(self, known: int) -> RoundView:
        """The state of the round; `known` is the newest one that this node knows to be complete. If the connection has
        ended, asks again on a new one. Raises ConnectionError, ProtocolError."""
        had_connection = self._connection is not None
        try:
            return parsed(RoundView, self.ask("look", round=known))
        except ConnectionError:
            if not had_connection:
                raise
            return parsed(RoundView, self.ask("look", round=known))

    def is_only_slow(self, error: Exception) -> bool:
        """Whether a request timed out, but the leader replied to another one recently."""
        return isinstance(error.__cause__, TimeoutError) and self.silent_seconds < self._silence

    def close(self) -> None:
        """Close the connection; the next request makes a new one."""
        if self._connection:
            self._connection.close()
            self._connection = None


class LocalNode:
    """This node of a job. `reach`: seconds for one request. `rest`: seconds between two looks at a complete round."""

    def __init__(self, settings: RendezvousSettings) -> None:
        self.settings = settings
        self.reach = min(_LONGEST_REACH, settings.silence / 3)
        self.rest = min(_REST_SECONDS, settings.silence / 10)
        self.events = Events(settings.node)  # rejected connections
        self.listener, self.host = endpoint.open_port(
            settings.endpoints, settings.address, settings.loopback_only, peer_client.node_answers
        )
        own = str(Endpoint(self.host, int(self.listener.getsockname()[1])))
        given = [str(each) for each in settings.endpoints if each.port] or [own]
        self.credentials = Credentials(settings.secret, settings.run, settings.node, settings.encrypt)
        self.me = NodeIdentity(settings.run, settings.node, secrets.token_hex(8), own)
        self.service = service = NodeService(self.me, settings.rules, settings.silence)
        self.roster_file = RosterFile(settings.run, settings.run_dir)
        self.search = LeaderSearch(service, self.roster_file, given, self.reach, self.credentials)
        self.link = LeaderLink(service, self.reach, settings.silence, self.credentials)
        self.server = PeerServer(
            self.listener, self.credentials, service.answer, service.gone, service.tick, self.events
        )
        self._sizes = SizeReport()

    def read_sizes(self) -> None:
        """Read with how many nodes the job can be trained, as ranks of this node report."""
        sizes = self.roster_file.sizes()
        if sizes != self._sizes:
            self._sizes = sizes
            self.service.allow(sizes)

    def close(self) -> None:
        """Close the port and the connection to the leader."""
        self.link.close()
        self.server.close()
