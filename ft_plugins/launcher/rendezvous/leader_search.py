"""Find the leader of the rendezvous, or have this node elected.

Invariant: a node becomes leader only after all nodes before it in the order were found unreachable, asleep or with an
older memory, and with the consent of every node that it reaches (`NodeService`). All candidates ask in one order, so of
two concurrent ones one is refused early. The order: the nodes of the last round by rank, then its spares, then the
endpoints that the user gave. Every reachable node names the leader that it follows, so one live endpoint is enough to
find it.

In: this node's service, endpoints. Out: a `Leader` that was alive and leading when it was asked.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict

from ...base.intake import parsed
from ...errors import ProtocolError, printable
from ...transport.own_address import address_of, listening
from ..rounds.node_messages import Leader, Meeting, Message, Vote
from ..rounds.node_service import NodeService
from ..rounds.roster_file import RosterFile
from .endpoint import Endpoint
from .peers import ASKED_AT_ONCE, Credentials, ForeignError, ask_all

_SHOWN = 80  # characters of a command line
_EVERY_ADDRESS = ("0.0.0.0", "::")
_AT_ONCE = 8  # nodes before this one in the order that are asked together, before the rest; candidates' first voters

Check = Callable[[], None]


def _no_check() -> None:
    """For searches without a time limit."""


class LeaderSearch:
    """`reach`: seconds within which a reachable node replies. `given`: endpoints from the user."""

    def __init__(
        self, service: NodeService, roster_file: RosterFile, given: list[str], reach: float, credentials: Credentials
    ) -> None:
        self.unreached: dict[str, str] = {}  # why, by endpoint
        self.foreign: dict[str, str] = {}  # of those, where a node of another job answered
        self._service = service
        self._roster_file = roster_file
        service.remembered = lambda: roster_file.roster.round
        self._me = service.me
        self._given = given
        self._reach = reach
        self._credentials = credentials
        self._last_meeting, self._spent = float("-inf"), 0.0  # monotonic: of absent nodes; seconds that it took
        self._absent: list[str] = []  # endpoints, in the order in which they are met next
        self._absent_as_of: object = None  # the state of the service and the roster from which they were found

    def order(self) -> list[str]:
        """Endpoints of the nodes that may lead, the first one first."""
        return list(dict.fromkeys([*self._roster_file.roster.endpoints, *self._given]))

    def look(self, patient: bool, check: Check = _no_check) -> Leader | None:
        """The leader, after one round of requests; None: try again. `patient`: leave the election to nodes before this
        one that are awake. `check` is called between requests, and raises what ends the search."""
        if own := self._service.leading:
            return own
        order = self.order()
        place = order.index(self._me.endpoint) if self._me.endpoint in order else len(order)
        known = self.meet([self._me.endpoint])
        for begin in range(0, place, _AT_ONCE):
            known |= self.meet(order[begin : min(begin + _AT_ONCE, place)], check=check)
            if leader := self.best(known, check=check):
                return leader
            if patient and any(self._may_lead(meeting) for meeting in known.values()):
                return None
        if place == len(order):
            return self.best(known, check=check)
        known |= self.meet(order[place + 1 :], check=check)
        return self.best(known, check=check) or self._claim(known, check)

    def _may_lead(self, other: Meeting) -> bool:
        """Whether the election is left to another node: it is awake, and this one would consent to it."""
        return other.awake and other.token != self._me.token and other.knows >= self._roster_file.roster.round

    def meet(
        self, endpoints: Iterable[str], leader: Leader | None = None, reach: float = 0.0, check: Check = _no_check
    ) -> dict[str, Meeting]:
        """The nodes that answer, by endpoint. `leader`, if given, is introduced to them."""
        message = {"do": "meet", "lead": asdict(leader) if leader else None}
        others = [endpoint for endpoint in endpoints if endpoint != self._me.endpoint]
        replies: dict[str, Message | ConnectionError] = {}
        for begin in range(0, len(others), ASKED_AT_ONCE):
            check()
            some = others[begin : begin + ASKED_AT_ONCE]
            replies |= ask_all(some, message, reach or self._reach, self._credentials)
        if self._me.endpoint in endpoints:
            replies[self._me.endpoint] = self._service.answer(message | {"lead": None})
        meetings = {}
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
            self._service.heard_of(meeting.generation)
            if meeting.closed and endpoint != self._me.endpoint:
                self._service.close(meeting.closed, meeting.status)
            meetings[endpoint] = meeting
        self._service.note_answers({each: meetings[each].node if each in meetings else "" for each in replies})
        return meetings

    def best(self, known: dict[str, Meeting], reach: float = 0.0, check: Check = _no_check) -> Leader | None:
        """The active leader with the highest standing of all that nodes in `known` name."""
        asked = dict(known)
        while True:
            named = {leader.endpoint for meeting in asked.values() for leader in meeting.known}
            missing = named - asked.keys()
            if not missing:
                break
            met = self.meet(missing, reach=reach, check=check)
            asked |= met
            for endpoint in missing - met.keys():  # not to be asked again now
                asked[endpoint] = _ABSENT
        leaders = [meeting.leading for meeting in asked.values() if meeting.leading]
        return max(leaders, key=lambda leader: leader.standing, default=None)

    def meet_absent(self, pause: float, reach: float) -> None:
        """As the leader, introduce this node to absent nodes, at most once per `pause` seconds, and to a few at a time.
        Raises ConnectionError if this node no longer leads, or resigns now because another leader has a higher
        standing."""
        own, now = self._service.leading, time.monotonic()
        if own is None:
            raise ConnectionError("this node no longer leads")
        if now < self._last_meeting + max(pause, self._spent):
            return
        better = self.best(self.meet([self._me.endpoint, *self._next_absent(own.complete)], own, reach), reach)
        self._last_meeting = time.monotonic()
        self._spent = self._last_meeting - now
        own = self._service.leading  # its round may have become complete meanwhile
        if own and better and not own.complete and better.standing > own.standing:
            self._service.resign()
            raise ConnectionError(f"this node resigned in favour of {better.node}")

    def _next_absent(self, complete: bool) -> list[str]:
        """Endpoints of the absent nodes whose turn it is."""
        as_of = (self._service.revision, self._roster_file.roster.digest)
        if as_of != self._absent_as_of:
            present = {self._me.endpoint, *(place.endpoint for place in self._service.present)}
            if complete:
                present |= set(self._roster_file.roster.endpoints)
            absent = dict.fromkeys(endpoint for endpoint in self.order() if endpoint not in present)
            met = dict.fromkeys(endpoint for endpoint in self._absent if endpoint in absent)
            self._absent = [*(endpoint for endpoint in absent if endpoint not in met), *met]
            self._absent_as_of = as_of
        turn = self._absent[:ASKED_AT_ONCE]
        self._absent = self._absent[ASKED_AT_ONCE:] + turn
        return turn

    def _claim(self, known: dict[str, Meeting], check: Check = _no_check) -> Leader | None:
        """This node as the leader, if all nodes in `known` consent."""
        me = self._me
        last = self._roster_file.roster
        leader = Leader(me.node, me.token, me.endpoint, self._service.generation + 1, last.round)
        message = {"do": "elect", "lead": asdict(leader)}
        voters = sorted({*known, me.endpoint})
        for some in _batches(voters):
            check()
            replies: dict[str, Message | ConnectionError] = {}
            if me.endpoint in some:
                replies[me.endpoint] = self._service.answer(message)
            replies |= ask_all([each for each in some if each != me.endpoint], message, self._reach, self._credentials)
            for reply in replies.values():
                try:
                    if isinstance(reply, ConnectionError):
                        raise reply
                    vote = parsed(Vote, reply)
                except (ConnectionError, ProtocolError):
                    continue  # lost since it was met
                if not vote.granted:
                    self._service.heard_of(vote.generation)
                    return None
        if not self._service.take_lead(leader, last):
            return None
        self._service.note_answers(dict.fromkeys(self.unreached, ""))
        return self._service.leading

    def other_job(self) -> str:
        """For people: where a node of another job answers, and what to check; '' for nowhere."""
        if not self.foreign:
            return ""
        endpoint, why = next(iter(self.foreign.items()))
        return (
            f"--rdzv-endpoint {endpoint}: expected a node of job '{self._me.run}', found that {why}; choose another "
            "port, or give the same --rdzv-id (--ftp-job) and --ftp-secret-file on all nodes"
        )

    def no_node(self) -> str:
        """For people: where this node looked for others in vain, and what to do."""
        asked = "; ".join(f"{endpoint}: {why}" for endpoint, why in self.unreached.items())
        return (
            f"expected a node of the job at one of {', '.join(self.order())}, found none ({asked}); "
            "give the endpoint of a live node in --rdzv-endpoint, the same on all nodes"
        )

    def taken(self) -> str:
        """For people: which other process of this machine listens at an endpoint that the user gave, where no node of
        the job answers this one; '' for none."""
        for text in self._given:
            unanswered = text in self.unreached or text == self._me.endpoint
            if unanswered and (who := _others_at(Endpoint.read(text))):
                return (
                    f"--rdzv-endpoint {text}: {who} listens there and is not a node of this job that answers; end it "
                    "and give this command again, or choose another port on all nodes"
                )
        return ""


def _batches(voters: list[str]) -> Iterator[list[str]]:
    """The first ones alone, so that of two candidates one is refused early; the others together."""
    for voter in voters[:_AT_ONCE]:
        yield [voter]
    for begin in range(_AT_ONCE, len(voters), ASKED_AT_ONCE):
        yield voters[begin : begin + ASKED_AT_ONCE]


_ABSENT = Meeting("", "", False, 0, None, ())


def _others_at(place: Endpoint) -> str:
    """The processes of this machine, but this one, that listen there, for people; '' if there is none, or it is another
    machine's."""
    import psutil  # slow, and only needed here

    try:
        resolved = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        addresses = {str(each[0]) for *_, each in resolved if _is_here(address_of(each))}
        listening = psutil.net_connections("tcp") if addresses else []
    except (OSError, UnicodeError, psutil.Error):
        return ""
    pids = [
        each.pid
        for each in listening
        if each.status == psutil.CONN_LISTEN
        and each.laddr.port == place.port
        and each.laddr.ip in (*addresses, *_EVERY_ADDRESS)
    ]
    return ", ".join(_described(pid) for pid in dict.fromkeys(pids) if pid != os.getpid())


def _is_here(address: str) -> bool:
    try:
        with closing(listening(address, 0, 1)):
            return True
    except OSError:
        return False


def _described(pid: int | None) -> str:
    import psutil

    if pid is None:
        return "a process of another user"
    try:
        words = " ".join(psutil.Process(pid).cmdline()).split()
        return f"process {pid} ({printable(' '.join(words))[:_SHOWN]})"
    except psutil.Error:
        return f"process {pid}"
