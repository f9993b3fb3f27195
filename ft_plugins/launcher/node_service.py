"""Answer the requests of a job's nodes: which node is the leader and, on the leader, the state of the rounds.

Invariant: among nodes that reach each other at most one leader is elected per generation. A candidate needs the consent
of every node that it reaches; a node consents once per generation, and never while it leads. An election transfers no
memory of rounds: nodes send it when they apply.

Leaders that could not reach each other when they were elected (a network partition, a stopped process) compare their
`standing`: the lower one resigns when it learns of the other, unless its round is complete.

In: requests of other nodes and of this one. Out: replies, as maps.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import ProtocolError
from ..intake import parsed
from ..recovery.resize.sizes import SizeReport
from .node_messages import (
    ANSWERED_BY_ALL,
    ANSWERED_BY_LEADER,
    Admission,
    Answered,
    Apply,
    Close,
    Elect,
    Finish,
    Leader,
    Leave,
    Look,
    Meet,
    Meeting,
    Message,
    RoundView,
    Serve,
    Vote,
)
from .round_machine import Phase, Place, Roster, RoundMachine
from .rounds import Rules

_STEP_SECONDS = 0.05  # between two steps of the leader's round
_REST_SECONDS = 0.25  # while the round is complete or another node leads
_AHEAD = 1 << 24  # generations, one per election, that this node may have missed
_NAMED = 16  # maximum of nodes named in a reply


@dataclass(frozen=True)
class NodeIdentity:
    """This process among the nodes of a job."""

    run: str
    node: str
    token: str
    endpoint: str


class NodeService:
    """The state from which this node's port answers. Methods may be called from any thread."""

    def __init__(self, me: NodeIdentity, rules: Rules, silence: float) -> None:
        self.me = me
        self._configured_rules = self._rules = rules
        self._silence = silence
        self._lock = threading.RLock()
        self._generation = 0  # the newest that this node consented to or learned of
        self._elected: Leader | None = None  # to which this node consented last
        self._introduced: Leader | None = None  # the last one that introduced itself
        self._followed: Leader | None = None
        self._rounds: RoundMachine | None = None
        self._closed = ""
        self._in_order = False
        self._awake = float("-inf")
        self._stepped = 0.0
        # by connection: the token of its last request; a token is at the connection that used it last
        self._connections: dict[int, str] = {}

    # ---- for this node ----

    def allow(self, report: SizeReport) -> None:
        """Restrict rounds to the sizes with which the job can be trained, as its ranks report."""
        with self._lock:
            self._rules = self._configured_rules.among(report.sizes, report.spares_asked)
            if self._rounds:
                self._rounds.allow(self._rules)

    def wake(self) -> None:
        """Note that this node's agent is running: other nodes may leave the election to it for `silence` seconds."""
        self._awake = time.monotonic()

    def follow(self, leader: Leader) -> None:
        """Note the leader that this node follows."""
        with self._lock:
            self._followed = leader

    @property
    def closed(self) -> str:
        """Why the rendezvous is over; '' if it is not."""
        return self._closed

    @property
    def in_order(self) -> bool:
        """Whether it is over because the job has succeeded."""
        return self._in_order

    @property
    def leading(self) -> Leader | None:
        """This node as the leader; None if it is not."""
        with self._lock:
            if self._rounds is None or self._elected is None:
                return None
            complete = self._rounds.phase is Phase.COMPLETE
            return replace(self._elected, round=self._rounds.last_round, complete=complete)

    @property
    def generation(self) -> int:
        """The newest generation that this node knows."""
        return self._generation

    @property
    def present(self) -> list[Place]:
        """The nodes that wait, if this node leads."""
        with self._lock:
            return self._rounds.places if self._rounds else []

    def heard_of(self, generation: int) -> None:
        """Note that another node knows this generation."""
        with self._lock:
            if self._plausible(generation):
                self._generation = max(self._generation, generation)

    def _plausible(self, generation: int) -> bool:
        """Whether a generation can be this far ahead; otherwise a false one could use up all that are left."""
        return generation - self._generation <= _AHEAD

    def take_lead(self, leader: Leader, last: Roster | None) -> bool:
        """Become the leader, after every node that was reached has consented. False if this node has consented to
        another one meanwhile, or heard of a newer generation."""
        with self._lock:
            if self._elected is None or self._elected.token != self.me.token or self._generation != leader.generation:
                return False
            self._rounds = RoundMachine(self._rules, self._silence, last, time.monotonic())
            return True

    def resign(self) -> None:
        """Stop leading: the replies to waiting nodes say so, and they search for the other leader."""
        with self._lock:
            self._rounds = self._elected = None

    def close(self, reason: str, in_order: bool) -> None:
        """Note that the rendezvous is over."""
        with self._lock:
            if not self._closed:
                self._closed, self._in_order = reason, in_order

    # ---- for the port ----

    def answer(self, request: Message, connection: int = 0) -> Message:
        """The reply to one request. Raises ProtocolError for a malformed one."""
        name = request.get("do")
        kind: Any = ANSWERED_BY_ALL.get(name) or ANSWERED_BY_LEADER.get(name) if isinstance(name, str) else None
        if kind is None:
            raise ProtocolError(f"unknown request {name!r:.40}")
        message: Any = parsed(kind, request, str(name))
        with self._lock:
            reply = asdict(Answered(self._closed, self._in_order))
            if name in ANSWERED_BY_ALL:
                return reply | getattr(self, f"_{name}")(message)
            if self._rounds is None:
                return reply | {"moved": True}
            if connection and self._connections.get(connection) != message.token:
                others = {each: token for each, token in self._connections.items() if token != message.token}
                self._connections = others | {connection: message.token}
            return reply | getattr(self, f"_{name}")(self._rounds, message)

    def gone(self, connection: int) -> None:
        """Note that a connection has ended: its last user is lost, unless it returns on another one."""
        with self._lock:
            token = self._connections.pop(connection, None)
            if token and self._rounds:
                self._rounds.hang_up(token, time.monotonic())

    def tick(self) -> float:
        """Advance the round; returns the seconds until the next call."""
        with self._lock:
            if self._rounds is None:
                return _REST_SECONDS
            now = time.monotonic()
            if now - self._stepped >= _STEP_SECONDS:
                self._stepped = now
                self._rounds.step(now)
            resting = self._rounds.phase is Phase.COMPLETE
            return _REST_SECONDS if resting else _STEP_SECONDS

    def _meet(self, request: Meet) -> Message:
        if request.lead is not None and self._plausible(request.lead.generation):
            self._introduced = request.lead
            self.heard_of(request.lead.generation)
        known = {each.token: each for each in (self._elected, self._followed, self._introduced) if each}
        awake = time.monotonic() - self._awake <= self._silence
        me, closed = self.me, (self._closed, self._in_order)
        return asdict(Meeting(me.node, me.token, awake, self._generation, self.leading, tuple(known.values()), *closed))

    def _elect(self, request: Elect) -> Message:
        newer = request.lead.generation > self._generation and self._plausible(request.lead.generation)
        granted = self._rounds is None and newer
        if granted:
            self._generation, self._elected = request.lead.generation, request.lead
        return asdict(Vote(granted, self._generation))

    def _leave(self, request: Leave) -> Message:
        if self._rounds:
            self._rounds.leave(request.token)
        return {}

    def _close(self, request: Close) -> Message:
        self.close(request.reason, request.in_order)
        return {"closed": self._closed}

    def _apply(self, rounds: RoundMachine, request: Apply) -> Message:
        return asdict(Admission(rounds.apply(request.application, time.monotonic()), rounds.roster))

    def _look(self, rounds: RoundMachine, request: Look) -> Message:
        now = time.monotonic()
        waits = rounds.hear(request.token, request.round, now)
        proposal, waiting = rounds.proposal, rounds.waiting
        view = RoundView(
            phase=rounds.phase,
            round=rounds.round,
            begun=rounds.begun,
            waits=waits,
            waiting=len(waiting),
            names=tuple(waiting[:_NAMED]),
            missing=tuple(rounds.missing[:_NAMED]),
            done=len(rounds.done),
            lost=len(rounds.lost(now)),
        )
        if proposal and request.token in proposal.ranks and waits is (rounds.phase is Phase.PROPOSED):
            rank, size = proposal.ranks[request.token], len(proposal.ranks)
            view = replace(view, rank=rank, size=size, store=proposal.store or None)
            view = replace(view, opened=proposal.opened, trained=proposal.trained)
            view = replace(view, first=sum(proposal.workers[:rank]), workers=sum(proposal.workers))
        if rounds.phase is Phase.COMPLETE and request.round != rounds.round:
            view = replace(view, roster=rounds.roster)
        return asdict(view) | {"phase": view.phase.value}

    def _serve(self, rounds: RoundMachine, request: Serve) -> Message:
        rounds.serve(request.token, request.store)
        return {}

    def _finish(self, rounds: RoundMachine, request: Finish) -> Message:
        rounds.finish(request.token, request.round)
        return {}
