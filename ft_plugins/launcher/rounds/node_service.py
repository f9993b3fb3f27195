"""Answer the requests of a job's nodes: which node is the leader and, on the leader, the state of the rounds.

Invariant: among nodes that reach each other at most one leader is elected per generation. A candidate needs the consent
of every node that it reaches; a node consents once per generation, never while it leads, and only to one that remembers
as new a round as itself: one that has forgotten the members of the last round would give their places away. An election
transfers no memory of rounds: nodes send it when they apply.

A look may be held back until something has changed that its sender must learn at once, or its time is over: a node
that waits need not ask again and again. A held look is answered when another request comes on its connection, and when
this node no longer leads or the rendezvous is over.

Leaders that could not reach each other when they were elected (a network partition, a stopped process) compare their
`standing`: the lower one resigns when it learns of the other, unless its round is complete.

In: requests of other nodes and of this one. Out: replies, as maps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...base.intake import parsed
from ...errors import ProtocolError
from ...recovery.resize.sizes import SizeReport
from ..agent.restarts import Status
from .field_types import reason_text
from .held_looks import HeldLooks, longest_hold
from .node_messages import (
    ANSWERED_BY_ALL,
    ANSWERED_BY_LEADER,
    Answered,
    Apply,
    Close,
    Depart,
    Drain,
    DrainReply,
    Elect,
    Finish,
    Leader,
    Leave,
    Look,
    Meet,
    Meeting,
    Message,
    ReadRoster,
    Refuse,
    Serve,
    Vote,
)
from .roster import Place, Roster, RosterPages
from .round_machine import Phase, RoundMachine
from .rounds import ALL, Rules

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
        self.generation = 0  # the newest that this node consented to or learned of
        self.remembered: Callable[[], int] = int  # the newest complete round that this node remembers
        self._elected: Leader | None = None  # to which this node consented last
        self._introduced: Leader | None = None  # the last one that introduced itself
        self._followed: Leader | None = None
        self._rounds: RoundMachine | None = None
        self.closed = ""  # why the rendezvous is over
        self.status: Status | None = None  # how the job has ended, if it is over
        self._awake = float("-inf")
        self._stepped = 0.0
        self._advanced: tuple[int, int] = (0, 0)  # the news of the last `advance`
        self._requested = threading.Event()  # a request of another node has arrived since the last wait
        # by connection: the token of its last request; a token is at the connection that used it last
        self._connections: dict[int, str] = {}
        self._connection_of: dict[str, int] = {}  # the inverse
        self._held = HeldLooks()
        self.undrainable = self.unstoppable = ""  # why no node of this job can be drained, or the job not be stopped
        self._leads = 0  # how often this node took or gave up the lead, or the rendezvous ended
        self._pages = RosterPages(Roster(0))
        self._common: tuple[tuple[int, int], Message] = ((0, 0), {})  # leads and revision; what all looks show then

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
    def leading(self) -> Leader | None:
        """This node as the leader; None if it is not."""
        with self._lock:
            if self._rounds is None or self._elected is None:
                return None
            complete = self._rounds.phase is Phase.COMPLETE
            return replace(self._elected, round=self._rounds.last_round, complete=complete)

    @property
    def present(self) -> list[Place]:
        """The nodes that wait, if this node leads."""
        with self._lock:
            return self._rounds.places if self._rounds else []

    @property
    def revision(self) -> tuple[int, int]:
        """Differs when `leading` or `present` does."""
        with self._lock:
            return self._leads, self._rounds.revision if self._rounds else 0

    def heard_of(self, generation: int) -> None:
        """Note that another node knows this generation."""
        with self._lock:
            if self._plausible(generation):
                self.generation = max(self.generation, generation)

    def _plausible(self, generation: int) -> bool:
        """Whether a generation can be this far ahead; otherwise a false one could use up all that are left."""
        return generation - self.generation <= _AHEAD

    def take_lead(self, leader: Leader, last: Roster | None) -> bool:
        """Become the leader, after every node that was reached has consented. False if this node has consented to
        another one meanwhile, or heard of a newer generation."""
        with self._lock:
            if self._elected is None or self._elected.token != self.me.token or self.generation != leader.generation:
                return False
            self._rounds = RoundMachine(self._rules, self._silence, last, time.monotonic(), self.me.node)
            self._pages = RosterPages(self._rounds.roster)
            self._leads += 1
            return True

    def note_answers(self, answers: dict[str, str]) -> None:
        """As the leader, note which node answers at an endpoint, '' for none."""
        with self._lock:
            if self._rounds:
                self._rounds.note_answers(answers)

    def resign(self) -> None:
        """Stop leading: the replies to waiting nodes say so, and they search for the other leader."""
        with self._lock:
            self._rounds = self._elected = None
            self._leads += 1

    def close(self, reason: str, status: Status | None) -> None:
        """Note that the rendezvous is over, because the job has ended so."""
        with self._lock:
            if not self.closed:
                self.closed, self.status = reason, status or "failed"
                self._leads += 1

    def advance(self) -> bool:
        """Advance the round now, as its leader, not at the next `tick`. Returns whether nodes whose looks are held have
        to learn something."""
        with self._lock:
            if self._rounds:
                self._step(self._rounds, time.monotonic())
            before, self._advanced = self._advanced, self._news
            return before != self._advanced

    def wait_for_request(self, seconds: float) -> None:
        """Wait until another node has sent a request, at most for `seconds`."""
        self._requested.wait(seconds)
        self._requested.clear()

    # ---- for the port ----

    def answer(self, request: Message, connection: int = 0) -> Message:
        """The reply to one request. Raises ProtocolError for a malformed one."""
        name = request.get("do")
        kind: Any = ANSWERED_BY_ALL.get(name) or ANSWERED_BY_LEADER.get(name) if isinstance(name, str) else None
        if kind is None:
            raise ProtocolError(f"unknown request {name!r:.40}")
        message: Any = parsed(kind, request, str(name))
        with self._lock:
            reply = asdict(Answered(self.closed, self.status))
            if name in ANSWERED_BY_ALL:
                return reply | getattr(self, f"_{name}")(message)
            if self._rounds is None:
                return reply | {"moved": True}
            self._note_user(connection, message.token)
            return reply | getattr(self, f"_{name}")(self._rounds, message)

    def answer_or_hold(self, request: Message, connection: int) -> Message | None:
        """As `answer`, for another node; None if the request is a look that is held back: `released` has its reply
        later."""
        self._requested.set()
        if request.get("do") == "look" and request.get("wait") and self._hold(request, connection):
            return None
        return self.answer(request, connection)

    def _hold(self, request: Message, connection: int) -> bool:
        """Hold a look back, if nothing has changed since its sender's last one. Raises ProtocolError."""
        look = parsed(Look, request, "look")
        with self._lock:
            rounds, now = self._rounds, time.monotonic()
            if rounds is None or self.closed or not rounds.knows(look.token):
                return False
            self._note_user(connection, look.token)
            rounds.hear(look.token, look.round, now, look.ready)
            if look.seen != rounds.changes:
                return False
            until = now + min(look.wait, longest_hold(self._silence))
            self._held.hold(connection, look, until, self._news)
            return True

    @property
    def _news(self) -> tuple[int, int]:
        """Differs when nodes that look have to learn something at once."""
        return self._leads, self._rounds.changes if self._rounds else 0

    def released(self) -> list[tuple[int, Message]]:
        """Connections with the replies to their held looks: all if something has changed, else those whose time is
        over."""
        with self._lock:
            due = self._held.due(time.monotonic(), self._news)
            return [(connection, self.release(connection)) for connection in due]

    def release(self, connection: int) -> Message:
        """The reply to the held look of a connection now: its user has sent another request."""
        with self._lock:
            look = self._held.release(connection)
            reply = {"closed": self.closed, "status": self.status, "moved": self._rounds is None}
            return reply | (self._look(self._rounds, look, hears=False) if self._rounds else {})

    def _note_user(self, connection: int, token: str) -> None:
        if not connection or self._connections.get(connection) == token:
            return
        if (before := self._connections.get(connection)) is not None:
            del self._connection_of[before]
        if (other := self._connection_of.get(token)) is not None:
            del self._connections[other]
        self._connections[connection], self._connection_of[token] = token, connection

    def gone(self, connection: int) -> None:
        """Note that a connection has ended: its last user is lost, unless it returns on another one."""
        with self._lock:
            self._held.drop(connection)
            token = self._connections.pop(connection, None)
            if token:
                del self._connection_of[token]
            if token and self._rounds:
                self._rounds.hang_up(token, time.monotonic())

    def tick(self) -> float:
        """Advance the round; returns the seconds until the next call."""
        with self._lock:
            if self._rounds is None:
                return _REST_SECONDS
            now = time.monotonic()
            if now - self._stepped >= _STEP_SECONDS:
                self._step(self._rounds, now)
            resting = self._rounds.phase is Phase.COMPLETE
            return _REST_SECONDS if resting else _STEP_SECONDS

    def _step(self, rounds: RoundMachine, now: float) -> None:
        self._stepped = now
        rounds.step(now)
        if rounds.is_hopeless:
            self.close(rounds.refused, "refused")

    def _meet(self, request: Meet) -> Message:
        if request.lead is not None and self._plausible(request.lead.generation):
            self._introduced = request.lead
            self.heard_of(request.lead.generation)
        known = {each.token: each for each in (self._elected, self._followed, self._introduced) if each}
        awake = time.monotonic() - self._awake <= self._silence
        me, rest = self.me, (self.closed, self.status, self.remembered())
        return asdict(Meeting(me.node, me.token, awake, self.generation, self.leading, tuple(known.values()), *rest))

    def _elect(self, request: Elect) -> Message:
        newer = request.lead.generation > self.generation and self._plausible(request.lead.generation)
        granted = self._rounds is None and newer and request.lead.round >= self.remembered()
        if granted:
            self.generation, self._elected = request.lead.generation, request.lead
        return asdict(Vote(granted, self.generation))

    def _leave(self, request: Leave) -> Message:
        if self._rounds:
            self._rounds.leave(request.token)
        return {}

    def _close(self, request: Close) -> Message:
        self.close(request.reason, request.status)
        return {"closed": self.closed}

    def _apply(self, rounds: RoundMachine, request: Apply) -> Message:
        accepted = rounds.apply(request.application, time.monotonic())
        unknown = accepted and rounds.roster.round > request.application.knows
        return {"accepted": accepted, "roster": self._roster_pages(rounds).page(request.base, 0) if unknown else None}

    def _roster(self, rounds: RoundMachine, request: ReadRoster) -> Message:
        rounds.hear(request.token, 0, time.monotonic(), ready=False)
        return {"roster": self._roster_pages(rounds).page(request.base, request.page)}

    def _roster_pages(self, rounds: RoundMachine) -> RosterPages:
        if self._pages.roster is not rounds.roster:
            self._pages = RosterPages(rounds.roster, self._pages.roster)
        return self._pages

    def _look(self, rounds: RoundMachine, request: Look, hears: bool = True) -> Message:
        """`hears`: it has just arrived."""
        token, now = request.token, time.monotonic()
        waits = rounds.hear(token, request.round, now, request.ready) if hears else rounds.is_waiting(token)
        if self._common[0] != (self._leads, rounds.revision):
            self._common = (self._leads, rounds.revision), self._seen_by_all(rounds)
        view: Message = {**self._common[1], "waits": waits, "absent": rounds.absent(_NAMED, now)}
        proposal = rounds.proposal
        if proposal and token in proposal.ranks and waits is (rounds.phase is Phase.PROPOSED):
            rank = proposal.ranks[token]
            view |= {
                "rank": rank,
                "size": len(proposal.ranks),
                "store": proposal.store or None,
                "opened": proposal.opened,
                "trained": proposal.trained,
                "first": proposal.first_workers[rank],
                "workers": proposal.first_workers[-1],
            }
        if request.roster and rounds.phase is Phase.COMPLETE and request.round != rounds.round:
            view["roster"] = self._roster_pages(rounds).page(request.base, 0)
        return view

    @staticmethod
    def _seen_by_all(rounds: RoundMachine) -> Message:
        """The fields of a `RoundView` that do not depend on who looks."""
        return {
            "phase": rounds.phase.value,
            "round": rounds.round,
            "begun": rounds.begun,
            "waiting": rounds.waiting_count,
            "names": rounds.waiting(_NAMED),
            "missing": rounds.missing(_NAMED),
            "done": len(rounds.done),
            "lost": rounds.lost_count,
            "changes": rounds.changes,
            "refused": rounds.refused,
            "draining": rounds.draining,
            "drained": rounds.drained or rounds.left,
        }

    def _serve(self, rounds: RoundMachine, request: Serve) -> Message:
        rounds.serve(request.token, request.store)
        return {}

    def _refuse(self, rounds: RoundMachine, request: Refuse) -> Message:
        rounds.refuse(request.node, request.reason, time.monotonic(), request.token)
        return {}

    def _drain(self, rounds: RoundMachine, request: Drain) -> Message:
        why = {"": "", ALL: self.unstoppable}.get(request.node, self.undrainable)
        return asdict(DrainReply(reason_text(why or rounds.drain(request.node))))

    def _depart(self, rounds: RoundMachine, request: Depart) -> Message:
        rounds.depart(request.token, time.monotonic())
        return {}

    def _finish(self, rounds: RoundMachine, request: Finish) -> Message:
        rounds.finish(request.token, request.round)
        return {}
