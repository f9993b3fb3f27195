"""Requests of this node to the leader of the rendezvous: over the network, or to its own service if it leads.

In: requests by name. Out: replies. A reply that the job is over closes this node's service.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..intake import parsed
from .node_messages import Answered, Leader, Message, RoundView
from .node_service import NodeService
from .peer_client import Credentials, PeerConnection


class LeaderLink:
    """The leader that this node follows. To be used from one thread."""

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
