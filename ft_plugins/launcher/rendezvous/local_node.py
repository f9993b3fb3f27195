"""This node of a rendezvous: its port, the service behind it, the search for a leader, and the link to the leader.

In: `RendezvousSettings`, requests to the leader. Out: an open port, replies. A reply that the job is over closes this
node's service.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from typing import Any

from ...base.intake import parsed
from ...events import Events
from ...recovery.resize.sizes import SizeReport
from ...transport import door
from ..rounds.held_looks import longest_hold
from ..rounds.node_messages import Answered, Leader, Message, RosterReply, RoundView
from ..rounds.node_service import NodeIdentity, NodeService
from ..rounds.roster import Roster, RosterPage, assembled
from ..rounds.roster_file import RosterFile
from . import control, endpoint, peers
from .endpoint import Endpoint
from .leader_search import LeaderSearch
from .peers import Credentials, PeerConnection, PeerServer
from .rendezvous_settings import RendezvousSettings

_REST_SECONDS = 1.0  # between two looks at a complete round; as torch


class LeaderLink:
    """Sends requests to the leader that this node follows, or to its own service if it leads. For one thread.

    The leader holds the reply to a look back until something changes (`watch`). So a node learns of a change at once,
    and sends a look only every quarter of the silence after which it would be lost.
    """

    def __init__(self, service: NodeService, reach: float, silence: float, credentials: Credentials) -> None:
        """`reach`: seconds for one reply. `silence`: seconds without one after which the leader is lost."""
        self.leader: Leader | None = None
        self._service = service
        self._reach = reach
        self._silence = silence
        self._credentials = credentials
        self._connection: PeerConnection | None = None
        self._last_reply = 0.0  # monotonic
        self._looks_until: float | None = None  # monotonic: when the reply to a look is overdue; None: none is awaited
        self._seen = 0  # `RoundView.changes` of the last reply

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last reply."""
        return time.monotonic() - self._last_reply

    def follow(self, leader: Leader) -> None:
        """Send requests to `leader` from now on."""
        self.leader = leader
        self._seen = 0
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
            self._looks_until = None  # its reply is dropped
            try:
                reply = self._connected(leader).ask(message)
            except ConnectionError:
                self.close()
                raise
        return self._checked(reply)

    def _connected(self, leader: Leader) -> PeerConnection:
        if self._connection is None:
            self._connection = PeerConnection(leader.endpoint, self._reach, self._credentials)
        return self._connection

    def _checked(self, reply: Message) -> Message:
        """Raises ConnectionError if the leader no longer leads."""
        answered = parsed(Answered, reply)
        if answered.closed:
            self._service.close(answered.closed, answered.status)
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

    def watch(self, known: int, seconds: float, base: Roster | None = None, ready: bool = True) -> RoundView | None:
        """The state of the round; None if there is no news within `seconds`. Returns at once if this node leads.

        `known`: the newest round that this node knows to be complete. `base`: its roster, if it wants that of a newer
        round. `ready`: see `Look`. If the connection has ended, looks again on a new one. Raises ConnectionError,
        ProtocolError.
        """
        look: Message = {"round": known, "roster": base is not None, "base": base.digest if base else ""}
        look["ready"] = ready
        leader = self.leader
        if leader is None or leader.token == self._service.me.token:
            return parsed(RoundView, self.ask("look", **look))
        had_connection = self._connection is not None
        try:
            view = self._watch(leader, look, seconds)
        except ConnectionError as error:
            if not had_connection or isinstance(error.__cause__, TimeoutError) or self._connection:
                raise
            view = parsed(RoundView, self.ask("look", **look))
        if view:
            self.note_reply()
            self._seen = view.changes
        return view

    def watch_patiently(
        self, check: Callable[[], None], known: int, seconds: float, base: Roster | None = None, ready: bool = True
    ) -> RoundView | None:
        """As `watch`, and again while the leader is only slow; `check` as for `ask_patiently`."""
        while True:
            try:
                return self.watch(known, seconds, base, ready)
            except ConnectionError as error:
                if not self.is_only_slow(error):
                    raise
            check()

    def _watch(self, leader: Leader, look: Message, seconds: float) -> RoundView | None:
        try:
            connection = self._connected(leader)
            if self._looks_until is None:
                wait = longest_hold(self._silence) * random.uniform(0.75, 1.0)  # so that looks do not come together
                me = self._service.me.token
                connection.send({"do": "look", "token": me, "wait": wait, "seen": self._seen, **look})
                self._looks_until = time.monotonic() + wait + self._reach
            if not connection.is_readable(seconds):
                if time.monotonic() < self._looks_until:
                    return None
                raise ConnectionError(f"no answer within {self._reach:g} s") from TimeoutError()
            self._looks_until = None
            reply = connection.receive()
        except ConnectionError:
            self.close()
            raise
        return parsed(RoundView, self._checked(reply))

    def read_roster(self, first: RosterPage, known: Roster) -> Roster | None:
        """The roster whose first page has arrived at this node, which knows `known`; None if it is that of an old round
        by now. Raises ConnectionError, ProtocolError."""
        for base in dict.fromkeys((first.base, "")):
            pages = [first] if first.base == base else [self._page(base, 0)]
            pages += [self._page(base, number) for number in range(1, pages[0].pages)]
            if roster := assembled(pages, known):
                return roster
        return None

    def _page(self, base: str, number: int) -> RosterPage:
        return parsed(RosterReply, self.ask("roster", base=base, page=number)).roster

    def is_only_slow(self, error: Exception) -> bool:
        """Whether a request timed out, but the leader replied to another one recently."""
        return isinstance(error.__cause__, TimeoutError) and self.silent_seconds < self._silence

    def close(self) -> None:
        """Close the connection; the next request makes a new one."""
        self._looks_until = None
        if self._connection:
            self._connection.close()
            self._connection = None


class LocalNode:
    """This node of a job. `reach`: seconds for one request. `rest`: seconds between two looks at a complete round."""

    def __init__(self, settings: RendezvousSettings) -> None:
        door.raise_limit()  # a leader has a connection of each node
        self.settings = settings
        self.reach = settings.reach
        self.rest = min(_REST_SECONDS, settings.silence / 10)
        self.events = Events(settings.node)  # rejected connections
        self.listener, self.host = endpoint.open_port(
            settings.endpoints, settings.address, settings.loopback_only, peers.node_answers
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
            self.listener,
            self.credentials,
            service.answer_or_hold,
            service.gone,
            service.tick,
            self.events,
            service,
        )
        self._sizes = SizeReport()
        control.leave(settings, own)

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
