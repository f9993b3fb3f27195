"""What a node answers at its port: who leads the rendezvous and, if it does so itself, how the rounds stand.

Invariant: at most one lead is elected for a generation among nodes that can reach each other: whoever wants to lead
needs the consent of all that it reaches, which each of them gives once a generation, and never beside a lead that
lives there. Election says nothing about the nodes' memory of rounds: that travels with those who apply.

Leads that could not reach each other when they were elected (a network that was parted, a process that was stopped)
are told apart by `standing`: the lower one resigns as soon as it hears of the other, unless its round is complete.

In: requests of other nodes, and of this one. Out: replies, as maps.

    meet    who are you, whom do you follow? With `lead`: I lead, if you look for somebody.
    elect   may `lead` lead its generation?
    apply, look, serve, leave, finish    of nodes to their lead, see `Gathering`
    close   the rendezvous is over
"""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ..errors import ProtocolError
from ..recovery.sizes import Told
from .gathering import Application, Gathering, Phase, Place, Roster
from .post import Message
from .rounds import LIMIT, Rules

_STEP_SECONDS = 0.05  # between two looks of the lead at its round
_REST_SECONDS = 0.25  # while it is complete, or another one leads
_OF_ANYONE = ("meet", "elect", "leave", "close")
_OF_LEADS = ("apply", "look", "serve", "finish")
_NAMED = 16  # of the nodes that wait, so many are named in a reply

T = TypeVar("T")


@dataclass(frozen=True)
class Lead:
    """A node that leads the rendezvous, or did. `round` and `complete` tell how far it was when it said so."""

    node: str
    token: str
    endpoint: str
    generation: int
    round: int = 0
    complete: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.generation <= LIMIT and 0 <= self.round <= LIMIT):
            raise ValueError(f"expected a generation from 1 and a round from 0, found {self}")

    @property
    def standing(self) -> tuple[int, bool, int, str]:
        """The greater one stays when two leads meet."""
        return (self.round, self.complete, self.generation, self.token)


@dataclass(frozen=True)
class Identity:
    """This process among the nodes of a job."""

    run: str
    node: str
    token: str
    endpoint: str


class Station:
    """The state that this node's post answers from. Every method may be called from any thread."""

    def __init__(self, me: Identity, rules: Rules, silence: float) -> None:
        self.me = me
        self._given = self._rules = rules
        self._silence = silence
        self._lock = threading.RLock()
        self._generation = 0  # the newest for which consent was given here, or of which was heard
        self._elected: Lead | None = None  # who got it
        self._told: Lead | None = None  # the last one that said it leads
        self._followed: Lead | None = None
        self._rounds: Gathering | None = None
        self._closed = ""
        self._in_order = False
        self._awake = float("-inf")
        self._stepped = 0.0
        self._connections: dict[str, int] = {}  # by token, the newest one

    # ---- this node's own part ----

    def allow(self, told: Told) -> None:
        """The job can be trained with these numbers of nodes, as its ranks say."""
        with self._lock:
            self._rules = self._given.among(told.sizes, told.spares_asked)
            if self._rounds:
                self._rounds.allow(self._rules)

    def wake(self) -> None:
        """This node's agent is at work: those that wait for it to take the lead are right to do so."""
        self._awake = time.monotonic()

    def follow(self, lead: Lead | None) -> None:
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
    def leading(self) -> Lead | None:
        """This node as the lead, if it is."""
        with self._lock:
            if self._rounds is None or self._elected is None:
                return None
            found = {name: getattr(self._elected, name) for name in ("node", "token", "endpoint", "generation")}
            return Lead(**found, round=self._rounds.last_round, complete=self._rounds.phase is Phase.COMPLETE)

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
            self._generation = max(self._generation, generation)

    def take_lead(self, lead: Lead, last: Roster | None) -> bool:
        """Lead, after all have consented; False if another one was elected here meanwhile."""
        with self._lock:
            if self._elected is None or self._elected.token != self.me.token or self._generation != lead.generation:
                return False
            self._rounds = Gathering(self._rules, self._silence, last, time.monotonic())
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
        name, run = _field(request, "do", str), _field(request, "run", str)
        if run != self.me.run:
            return {"ok": False, "message": f"it belongs to job '{self.me.run}'"}
        with self._lock:
            found: Message = {"ok": True, "closed": self._closed, "in_order": self._in_order}
            if name in _OF_ANYONE:
                return found | getattr(self, f"_{name}")(request)
            if name not in _OF_LEADS:
                raise ProtocolError(f"'{name}' is no request")
            if self._rounds is None:
                return found | {"moved": True}
            token = request.get("token")
            if isinstance(token, str) and connection:
                self._connections[token] = connection
            return found | {"moved": False} | getattr(self, f"_{name}")(self._rounds, request)

    def gone(self, connection: int) -> None:
        """A connection has ended: whoever used it last is gone, or comes back on another one."""
        with self._lock:
            for token in [token for token, last in self._connections.items() if last == connection]:
                del self._connections[token]
                if self._rounds:
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

    def _meet(self, request: Message) -> Message:
        if request.get("lead") is not None:
            self._told = read(Lead, request["lead"])
            self._generation = max(self._generation, self._told.generation)
        leading = self.leading
        known = {lead.token: lead for lead in (self._elected, self._followed, self._told) if lead}
        return {
            "node": self.me.node,
            "token": self.me.token,
            "awake": time.monotonic() - self._awake <= self._silence,
            "generation": self._generation,
            "leading": asdict(leading) if leading else None,
            "known": [asdict(lead) for lead in known.values()],
        }

    def _elect(self, request: Message) -> Message:
        lead = read(Lead, request.get("lead"))
        granted = self._rounds is None and lead.generation > self._generation
        if granted:
            self._generation, self._elected = lead.generation, lead
        return {"granted": granted, "generation": self._generation}

    def _leave(self, request: Message) -> Message:
        if self._rounds:
            self._rounds.leave(_field(request, "token", str))
        return {}

    def _close(self, request: Message) -> Message:
        self.close(_field(request, "reason", str), _field(request, "in_order", bool))
        return {"closed": self._closed}

    def _apply(self, gathering: Gathering, request: Message) -> Message:
        accepted = gathering.apply(read(Application, request.get("application")), time.monotonic())
        return {"accepted": accepted, "roster": asdict(gathering.roster)}

    def _look(self, gathering: Gathering, request: Message) -> Message:
        token = _field(request, "token", str)
        now = time.monotonic()
        knows = request.get("round")
        waits = gathering.hear(token, knows if isinstance(knows, int) else 0, now)
        proposal, waiting = gathering.proposal, gathering.waiting
        reply: Message = {
            "phase": gathering.phase.value,
            "round": gathering.round,
            "begun": gathering.begun,
            "waits": waits,
            "waiting": len(waiting),
            "names": waiting[:_NAMED],
            "missing": gathering.missing[:_NAMED],
            "done": len(gathering.done),
            "lost": len(gathering.lost(now)),
        }
        if proposal and token in proposal.ranks and waits is (gathering.phase is Phase.PROPOSED):
            reply |= {"rank": proposal.ranks[token], "size": len(proposal.ranks), "store": proposal.store}
        if gathering.phase is Phase.COMPLETE and knows != gathering.round:
            reply["roster"] = asdict(gathering.roster)
        return reply

    def _serve(self, gathering: Gathering, request: Message) -> Message:
        gathering.serve(_field(request, "token", str), _field(request, "store", str))
        return {}

    def _finish(self, gathering: Gathering, request: Message) -> Message:
        gathering.finish(_field(request, "token", str), _field(request, "round", int))
        return {}


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read(kind: type[T], given: Any) -> T:
    """A dataclass of ours from a map, its types checked. Raises ProtocolError."""
    try:
        known: Any = kind
        found: T = _adapter(known).validate_python(given)
        return found
    except ValidationError as error:
        raise ProtocolError(f"{kind.__name__}: {error.errors()[0]['msg']}, found {given!r:.200}") from error


def _field(message: Message, name: str, kind: type[T]) -> T:
    value = message.get(name)
    if not isinstance(value, kind):
        raise ProtocolError(f"field '{name}' should be a {kind.__name__}, found {type(value).__name__}")
    return value
