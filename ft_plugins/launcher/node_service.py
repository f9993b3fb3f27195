"""What a node answers at its port: who leads the rendezvous and, if it does so itself, how the rounds stand.

Invariant: at most one lead is elected for a generation among nodes that can reach each other: whoever wants to lead
needs the consent of all that it reaches, which each of them gives once a generation, and never beside a lead that
lives there. Election says nothing about the nodes' memory of rounds: that travels with those who apply.

Leads that could not reach each other when they were elected (a network that was parted, a process that was stopped)
are told apart by `standing`: the lower one resigns as soon as it hears of the other, unless its round is complete.

In: requests of other nodes, and of this one (`requests`). Out: replies, as maps.
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
    OF_ANYONE,
    OF_LEADS,
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

_STEP_SECONDS = 0.05  # between two looks of the lead at its round
_REST_SECONDS = 0.25  # while it is complete, or another one leads
_AHEAD = 1 << 24  # generations, each an election, that this node may have missed
_NAMED = 16  # of the nodes that wait, so many are named in a reply


@dataclass(frozen=True)
class NodeIdentity:
    """This process among the nodes of a job."""

    run: str
    node: str
    token: str
    endpoint: str


class NodeService:
    """The state that this node's post answers from. Every method may be called from any thread."""

    def __init__(self, me: NodeIdentity, rules: Rules, silence: float) -> None:
        self.me = me
        self._given = self._rules = rules
        self._silence = silence
        self._lock = threading.RLock()
        self._generation = 0  # the newest for which consent was given here, or of which was heard
        self._elected: Leader | None = None  # who got it
        self._told: Leader | None = None  # the last one that said it leads
        self._followed: Leader | None = None
        self._rounds: RoundMachine | None = None
        self._closed = ""
        self._in_order = False
        self._awake = float("-inf")
        self._stepped = 0.0
        self._connections: dict[int, str] = {}  # the token that spoke on each; of one token, the newest

    # ---- this node's own part ----

    def allow(self, report: SizeReport) -> None:
        """The job can be trained with these numbers of nodes, as its ranks report."""
        with self._lock:
            self._rules = self._given.among(report.sizes, report.spares_asked)
            if self._rounds:
                self._rounds.allow(self._rules)

    def wake(self) -> None:
        """This node's agent is at work: those that wait for it to take the lead are right to do so."""
        self._awake = time.monotonic()

    def follow(self, lead: Leader | None) -> None:
        """This node takes part under `lead`."""
        with self._lock:
            self._followed = lead

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
        """This node as the lead, if it is."""
        with self._lock:
            if self._rounds is None or self._elected is None:
                return None
            found = {name: getattr(self._elected, name) for name in ("node", "token", "endpoint", "generation")}
            return Leader(**found, round=self._rounds.last_round, complete=self._rounds.phase is Phase.COMPLETE)

    @property
    def generation(self) -> int:
        """The newest generation of which this node knows."""
        return self._generation

    @property
    def present(self) -> list[Place]:
        """Those who wait here, where this node leads."""
        with self._lock:
            return self._rounds.places if self._rounds else []

    def heard_of(self, generation: int) -> None:
        """Another node knows of this generation."""
        with self._lock:
            if self._plausible(generation):
                self._generation = max(self._generation, generation)

    def _plausible(self, generation: int) -> bool:
        """Whether one can be so far ahead of what is known here: believed, the last ones leave none to be elected."""
        return generation - self._generation <= _AHEAD

    def take_lead(self, lead: Leader, last: Roster | None) -> bool:
        """Lead, after all have consented; False if another one was elected here meanwhile."""
        with self._lock:
            if self._elected is None or self._elected.token != self.me.token or self._generation != lead.generation:
                return False
            self._rounds = RoundMachine(self._rules, self._silence, last, time.monotonic())
            return True

    def resign(self) -> None:
        """Lead no more: who waits here is told so, and looks for the other one."""
        with self._lock:
            self._rounds = self._elected = None

    def close(self, reason: str, in_order: bool) -> None:
        """The rendezvous is over, as far as this node is concerned."""
        with self._lock:
            if not self._closed:
                self._closed, self._in_order = reason, in_order

    # ---- what others ask ----

    def answer(self, request: Message, connection: int = 0) -> Message:
        """The reply to one request. Raises ProtocolError for one that makes no sense."""
        name = request.get("do")
        kind: Any = OF_ANYONE.get(name) or OF_LEADS.get(name) if isinstance(name, str) else None
        if kind is None:
            raise ProtocolError(f"unknown request {name!r:.40}")
        asked: Any = parsed(kind, request, str(name))
        with self._lock:
            found = asdict(Answered(self._closed, self._in_order))
            if name in OF_ANYONE:
                return found | getattr(self, f"_{name}")(asked)
            if self._rounds is None:
                return found | {"moved": True}
            if connection and self._connections.get(connection) != asked.token:
                others = {each: token for each, token in self._connections.items() if token != asked.token}
                self._connections = others | {connection: asked.token}
            return found | getattr(self, f"_{name}")(self._rounds, asked)

    def gone(self, connection: int) -> None:
        """A connection has ended: whoever used it last is gone, or comes back on another one."""
        with self._lock:
            token = self._connections.pop(connection, None)
            if token and self._rounds:
                self._rounds.hang_up(token, time.monotonic())

    def tick(self) -> float:
        """Let the round go on; seconds until the next time."""
        with self._lock:
            if self._rounds is None:
                return _REST_SECONDS
            now = time.monotonic()
            if now - self._stepped >= _STEP_SECONDS:
                self._stepped = now
                self._rounds.step(now)
            resting = self._rounds.phase is Phase.COMPLETE
            return _REST_SECONDS if resting else _STEP_SECONDS

    def _meet(self, asked: Meet) -> Message:
        if asked.lead is not None and self._plausible(asked.lead.generation):
            self._told = asked.lead
            self.heard_of(asked.lead.generation)
        known = {lead.token: lead for lead in (self._elected, self._followed, self._told) if lead}
        awake = time.monotonic() - self._awake <= self._silence
        me, closed = self.me, (self._closed, self._in_order)
        return asdict(Meeting(me.node, me.token, awake, self._generation, self.leading, tuple(known.values()), *closed))

    def _elect(self, asked: Elect) -> Message:
        newer = asked.lead.generation > self._generation and self._plausible(asked.lead.generation)
        granted = self._rounds is None and newer
        if granted:
            self._generation, self._elected = asked.lead.generation, asked.lead
        return asdict(Vote(granted, self._generation))

    def _leave(self, asked: Leave) -> Message:
        if self._rounds:
            self._rounds.leave(asked.token)
        return {}

    def _close(self, asked: Close) -> Message:
        self.close(asked.reason, asked.in_order)
        return {"closed": self._closed}

    def _apply(self, gathering: RoundMachine, asked: Apply) -> Message:
        return asdict(Admission(gathering.apply(asked.application, time.monotonic()), gathering.roster))

    def _look(self, gathering: RoundMachine, asked: Look) -> Message:
        now = time.monotonic()
        waits = gathering.hear(asked.token, asked.round, now)
        proposal, waiting = gathering.proposal, gathering.waiting
        view = RoundView(
            phase=gathering.phase,
            round=gathering.round,
            begun=gathering.begun,
            waits=waits,
            waiting=len(waiting),
            names=tuple(waiting[:_NAMED]),
            missing=tuple(gathering.missing[:_NAMED]),
            done=len(gathering.done),
            lost=len(gathering.lost(now)),
        )
        if proposal and asked.token in proposal.ranks and waits is (gathering.phase is Phase.PROPOSED):
            rank, size = proposal.ranks[asked.token], len(proposal.ranks)
            view = replace(view, rank=rank, size=size, store=proposal.store or None)
            view = replace(view, opened=proposal.opened, trained=proposal.trained)
            view = replace(view, first=sum(proposal.workers[:rank]), workers=sum(proposal.workers))
        if gathering.phase is Phase.COMPLETE and asked.round != gathering.round:
            view = replace(view, roster=gathering.roster)
        return asdict(view) | {"phase": view.phase.value}

    def _serve(self, gathering: RoundMachine, asked: Serve) -> Message:
        gathering.serve(asked.token, asked.store)
        return {}

    def _finish(self, gathering: RoundMachine, asked: Finish) -> Message:
        gathering.finish(asked.token, asked.round)
        return {}
