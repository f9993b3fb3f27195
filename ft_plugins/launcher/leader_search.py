"""How a node finds the one that leads the rendezvous, or comes to lead it itself.

Invariant: a node takes the lead only after those before it in the order were found unreachable or asleep, and with the
consent of all whom it reaches (`NodeService`), asked in one order by everyone, so that one of two is refused early.
The order: the nodes of the last round by rank, then its spares, then the endpoints that the user gave. Every node that
can be reached tells whom it follows, so one living endpoint is enough to find the lead wherever it is.

In: this node's station, endpoints. Out: a `Leader` that was alive and leading when it was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from ..errors import ProtocolError
from ..intake import parsed
from .node_messages import Leader, Meeting, Message, Vote
from .node_service import NodeService
from .peer_client import ASKED_AT_ONCE, Credentials, ForeignError, ask, ask_all
from .roster_file import RosterFile

_AT_ONCE = 8  # of those before us so many are asked before the rest, who may not be needed

Check = Callable[[], None]


def _nothing() -> None:
    """For questions that no time limits."""


class LeaderSearch:
    """`reach`: seconds within which a node answers that can be reached."""

    def __init__(
        self, station: NodeService, memory: RosterFile, initial: Sequence[str], reach: float, credentials: Credentials
    ) -> None:
        self.unreached: dict[str, str] = {}  # why, by endpoint
        self.foreign: dict[str, str] = {}  # of those, where a node answers that is not of this job
        self._station = station
        self._memory = memory
        self._me = station.me
        self._initial = initial
        self._reach = reach
        self._credentials = credentials

    def order(self) -> list[str]:
        """Endpoints of those that may lead, the first one first."""
        return list(dict.fromkeys([*self._memory.roster.endpoints, *self._initial]))

    def look(self, patient: bool, check: Check = _nothing) -> Leader | None:
        """The lead, as far as one round of questions tells; None: ask again. `patient`: leave it to those before us
        who are awake to take the lead. `check` is called between questions, and raises what ends the looking."""
        if own := self._station.leading:
            return own
        order = self.order()
        place = order.index(self._me.endpoint) if self._me.endpoint in order else len(order)
        known = self.meet([self._me.endpoint])
        for begin in range(0, place, _AT_ONCE):
            known |= self.meet(order[begin : min(begin + _AT_ONCE, place)], check=check)
            if found := self.best(known, check=check):
                return found
            if patient and any(meeting.awake for meeting in known.values() if meeting.token != self._me.token):
                return None
        if place == len(order):
            return self.best(known, check=check)
        known |= self.meet(order[place + 1 :], check=check)
        return self.best(known, check=check) or self._claim(known, check)

    def meet(
        self, endpoints: Iterable[str], lead: Leader | None = None, reach: float = 0.0, check: Check = _nothing
    ) -> dict[str, Meeting]:
        """Those that answer, by endpoint. They are told of `lead`, if given."""
        message = {"do": "meet", "lead": asdict(lead) if lead else None}
        others = [endpoint for endpoint in endpoints if endpoint != self._me.endpoint]
        replies: dict[str, Message | ConnectionError] = {}
        for begin in range(0, len(others), ASKED_AT_ONCE):
            check()
            some = others[begin : begin + ASKED_AT_ONCE]
            replies |= ask_all(some, message, reach or self._reach, self._credentials)
        if self._me.endpoint in endpoints:
            replies[self._me.endpoint] = self._station.answer(message | {"lead": None})
        found = {}
        for endpoint, reply in replies.items():
            self.unreached.pop(endpoint, None)
            self.foreign.pop(endpoint, None)
            try:
                if isinstance(reply, ConnectionError):
                    raise reply
                meeting = parsed(Meeting, reply)
            except (ConnectionError, ProtocolError) as error:
                self.unreached[endpoint] = str(error)
                if isinstance(error, ForeignError):
                    self.foreign[endpoint] = str(error)
                continue
            self._station.heard_of(meeting.generation)
            if meeting.closed and endpoint != self._me.endpoint:
                self._station.close(meeting.closed, meeting.in_order)
            found[endpoint] = meeting
        return found

    def best(self, known: dict[str, Meeting], reach: float = 0.0, check: Check = _nothing) -> Leader | None:
        """Of all leads that those in `known` know of, the one that leads and has the highest standing."""
        asked = dict(known)
        while True:
            named = {lead.endpoint for meeting in asked.values() for lead in meeting.known}
            missing = named - asked.keys()
            if not missing:
                break
            met = self.meet(missing, reach=reach, check=check)
            asked |= met
            for endpoint in missing - met.keys():  # not asked again now
                asked[endpoint] = _ABSENT
        leads = [meeting.leading for meeting in asked.values() if meeting.leading]
        return max(leads, key=lambda lead: lead.standing, default=None)

    def _claim(self, known: dict[str, Meeting], check: Check = _nothing) -> Leader | None:
        """This node as the lead, if all in `known` consent."""
        me = self._me
        lead = Leader(me.node, me.token, me.endpoint, self._station.generation + 1)
        message = {"do": "elect", "lead": asdict(lead)}
        for endpoint in sorted({*known, me.endpoint}):
            check()
            try:
                own = endpoint == me.endpoint
                vote = parsed(
                    Vote,
                    self._station.answer(message) if own else ask(endpoint, message, self._reach, self._credentials),
                )
            except (ConnectionError, ProtocolError):
                continue  # it has gone since we met
            if not vote.granted:
                self._station.heard_of(vote.generation)
                return None
        return self._station.leading if self._station.take_lead(lead, self._memory.roster) else None


_ABSENT = Meeting("", "", False, 0, None, ())
