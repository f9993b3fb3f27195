"""State machine of the rendezvous rounds, on the leader: which nodes wait, are chosen, take part. Pure.

Invariant: a round is complete only when each of its nodes was heard from after it was chosen, and its store exists. It
has begun when each of them has acknowledged it. If one is silent or leaves in between, it is dropped and the round
opens again, so no node begins a round without the others. Time comes from outside.

    OPEN -> PROPOSED      enough nodes wait: ranks are assigned, the node of rank 0 creates the round's store
    PROPOSED -> OPEN      a chosen node was lost
    PROPOSED -> COMPLETE  all were heard from since
    COMPLETE -> OPEN      a node was lost before the round began, a node of the round is back, the round can become
                          larger, or a waiting node can replace one whose connection has ended

In: applications and looks of nodes, the time. Out: the phase, a `Roster` for each complete round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated

from pydantic import Field

from ..intake import Flag
from . import rounds
from .field_types import MOST_NODES, Count, EndpointText, Name, Reported, Token, Workers
from .rounds import Candidate, Rules, Seat

_PAUSE_SECONDS = 1.0  # maximum between two steps; if they are further apart, this process was stopped


class Phase(Enum):
    """The state of a round."""

    OPEN = "open"
    PROPOSED = "proposed"
    COMPLETE = "complete"


_NEXT = {
    Phase.OPEN: {Phase.PROPOSED},
    Phase.PROPOSED: {Phase.OPEN, Phase.COMPLETE},
    Phase.COMPLETE: {Phase.OPEN},
}


@dataclass(frozen=True)
class Place:
    """A node and its endpoint."""

    node: Name
    endpoint: EndpointText


Places = Annotated[tuple[Place, ...], Field(max_length=MOST_NODES)]


@dataclass(frozen=True)
class Roster:
    """A complete round: its nodes by rank, and its spares. Raises ValueError."""

    round: Count
    members: Places = ()
    spares: Places = ()

    def __post_init__(self) -> None:
        if self.members and not self.round:
            raise ValueError("expected a round from 1 for its members")

    def seat(self, node: str) -> Seat | None:
        """The seat of `node`; None if it did not take part."""
        names = [place.node for place in self.members]
        return Seat(self.round, names.index(node), len(names)) if node in names else None

    @property
    def endpoints(self) -> list[str]:
        """The endpoints of the nodes of this round, by rank, then of the spares."""
        return [place.endpoint for place in (*self.members, *self.spares)]


@dataclass(frozen=True)
class Application:
    """A node's request to take part. `token` identifies its process: a restarted node has another one.

    `knows`: the newest complete round that it knows of, with or without a seat in it. `opened`: its ranks have captured
    under the running command. `trained`: they have completed an iteration, or hold a version. `workers`: how many it
    starts.
    """

    node: Name
    token: Token
    endpoint: EndpointText
    seat: Seat | None = None
    wanted: Count | None = None
    knows: Reported = 0
    opened: Flag = False
    trained: Flag = False
    workers: Workers = 0


@dataclass(frozen=True)
class Proposal:
    """Ranks by token, when they were assigned, and the endpoint of the round's store, '' until rank 0 reports it.

    `opened`, `trained`: whether any of its nodes has `Application.opened`, `Application.trained`. `workers`: of each
    node, by rank.
    """

    round: int
    ranks: dict[str, int]
    since: float
    store: str = ""
    opened: bool = False
    trained: bool = False
    workers: tuple[int, ...] = ()


class RoundMachine:
    """The rounds of one rendezvous, led by this node. `last`: the last complete round that it knows of."""

    def __init__(self, rules: Rules, silence: float, last: Roster | None, now: float) -> None:
        """`silence`: seconds without a message after which a node is lost."""
        self.phase = Phase.OPEN
        self.roster = last or Roster(0)
        self.proposal: Proposal | None = None  # of the proposed or complete round
        self.done: set[str] = set()  # tokens of nodes whose workers have succeeded in the complete round
        self._rules = rules
        self._silence = silence
        self._waiting: dict[str, Application] = {}  # by token, in order of arrival
        self._names: list[str] | None = None  # of the waiting nodes, sorted; None: to be sorted again
        self._members: dict[str, str] = {}  # token by node, of the complete round
        self._unaware: set[str] = set()  # tokens of the members that have not acknowledged it
        self._heard: dict[str, float] = {}  # time of the last message, by token
        self._ended: dict[str, float] = {}  # by token of a member: since when it has no connection
        self._enough_since: float | None = None
        self._looked = now

    def allow(self, rules: Rules) -> None:
        """Change which sizes are allowed."""
        self._rules = rules

    @property
    def round(self) -> int:
        """The number of the complete round, else of the next one."""
        return self.proposal.round if self.proposal else self.last_round + 1

    @property
    def last_round(self) -> int:
        """The newest complete round that this node or a waiting one knows of."""
        waiting = self._waiting.values()
        seats = [each.seat.round for each in waiting if each.seat]
        return max([self.roster.round, *seats, *(each.knows for each in waiting)])

    @property
    def begun(self) -> bool:
        """Whether all nodes of the complete round have acknowledged it, so that each can rely on the others."""
        return self.phase is Phase.COMPLETE and not self._unaware

    @property
    def waiting(self) -> list[str]:
        """Names of the waiting nodes, in natural order."""
        if self._names is None:
            self._names = sorted((each.node for each in self._waiting.values()), key=rounds.natural)
        return self._names

    @property
    def missing(self) -> list[str]:
        """Names of the nodes of the last round that do not wait."""
        waiting = set(self.waiting)
        return [place.node for place in self.roster.members if place.node not in waiting]

    @property
    def places(self) -> list[Place]:
        """The waiting nodes."""
        return [Place(each.node, each.endpoint) for each in self._waiting.values()]

    def apply(self, application: Application, now: float) -> bool:
        """Add a node that waits for a round. False while another live process has its name: to be tried again."""
        holders = [each.token for each in self._waiting.values() if each.node == application.node]
        holders += [token for node, token in self._members.items() if node == application.node]
        for token in holders:
            if token != application.token and now - self._heard.get(token, now) <= self._silence:
                return False
        for token in holders:
            self.leave(token)
        self._waiting[application.token] = application
        self._names = None
        self._heard[application.token] = now
        self._reopen(now)
        return True

    def hear(self, token: str, knows: int, now: float) -> bool:
        """Note that a process is alive, and that it `knows` a round to be complete. False if it does not wait here."""
        if token in self._heard:
            self._heard[token] = now
            self._ended.pop(token, None)
        if self.phase is Phase.COMPLETE and knows == self.round:
            self._unaware.discard(token)
        return token in self._waiting

    def hang_up(self, token: str, now: float) -> None:
        """Note that a process has closed its connection: it is lost unless it sends another message."""
        if token in self._heard:
            self._heard[token] = float("-inf")
        if token in self._members.values():
            self._ended[token] = now

    def lost(self, now: float) -> list[str]:
        """Nodes of the complete round whose connections ended before their workers succeeded."""
        if not self._ended:
            return []
        lost = {token for token, since in self._ended.items() if now - since > self._silence} - self.done
        return [node for node, token in self._members.items() if token in lost]

    def leave(self, token: str) -> None:
        """Remove a waiting node."""
        self._waiting.pop(token, None)
        self._names = None
        if self.phase is Phase.PROPOSED and self.proposal and token in self.proposal.ranks:
            self._turn(Phase.OPEN)

    def serve(self, token: str, store: str) -> None:
        """Note the endpoint of the proposed round's store, reported by the node of rank 0."""
        if self.phase is Phase.PROPOSED and self.proposal and self.proposal.ranks.get(token) == 0:
            self.proposal = replace(self.proposal, store=store)

    def finish(self, token: str, number: int) -> None:
        """Note that the workers of a node have succeeded in round `number`."""
        if self.phase is Phase.COMPLETE and number == self.round and token in self._members.values():
            self.done.add(token)

    def step(self, now: float) -> None:
        """Advance to time `now`: drop silent nodes, choose, complete."""
        slept = max(0.0, now - self._looked - _PAUSE_SECONDS)
        self._looked = now
        if slept:  # no message could arrive meanwhile
            self._heard = {token: at + slept for token, at in self._heard.items()}
        for token in [token for token in self._waiting if now - self._heard[token] > self._silence]:
            self.leave(token)
        self._reopen(now)
        if self.phase is Phase.OPEN:
            self._choose(now)
        elif self.phase is Phase.PROPOSED and self.proposal and self.proposal.store:
            chosen, since = self.proposal.ranks, self.proposal.since
            if all(self._heard[token] > since for token in chosen):
                self._complete(self.proposal)
        elif self.phase is Phase.COMPLETE and any(now - self._heard[token] > self._silence for token in self._unaware):
            self._turn(Phase.OPEN)

    def _reopen(self, now: float) -> None:
        """End a complete round if one of its nodes is back, or it can become larger, or replace a lost node."""
        size, waiting = len(self._members), self._waiting.values()
        if self.phase is not Phase.COMPLETE or not waiting:
            return
        back = any(each.node in self._members for each in waiting)
        if back or self._rules.fit(size + len(waiting)) > size or self.lost(now):
            self._turn(Phase.OPEN)

    def _choose(self, now: float) -> None:
        candidates = self._candidates()
        if not self._rules.fit(len(candidates)):
            self._enough_since = None
            return
        self._enough_since = now if self._enough_since is None else self._enough_since
        size = rounds.size_now(self._rules, candidates, now - self._enough_since)
        if size:
            tokens = {each.node: each.token for each in self._waiting.values()}
            assigned = rounds.ranks(candidates, size)
            chosen = [self._waiting[tokens[node]] for node in assigned]
            ranks = {tokens[node]: rank for node, rank in assigned.items()}
            opened, trained = any(each.opened for each in chosen), any(each.trained for each in chosen)
            workers = tuple(self._waiting[token].workers for token in sorted(ranks, key=ranks.__getitem__))
            self.proposal = Proposal(self.round, ranks, now, opened=opened, trained=trained, workers=workers)
            self._turn(Phase.PROPOSED)

    def _candidates(self) -> Sequence[Candidate]:
        """The waiting nodes, with the newest seat that they or this node remember."""
        candidates = []
        for each in self._waiting.values():
            seats = [seat for seat in (each.seat, self.roster.seat(each.node)) if seat]
            candidates.append(Candidate(each.node, max(seats, default=None), each.wanted))
        return candidates

    def _complete(self, proposal: Proposal) -> None:
        by_rank = [self._waiting.pop(token) for token in sorted(proposal.ranks, key=proposal.ranks.__getitem__)]
        self._names = None
        members = tuple(Place(each.node, each.endpoint) for each in by_rank)
        self._members = {each.node: each.token for each in by_rank}
        self._unaware = set(proposal.ranks)
        self.roster = Roster(proposal.round, members, tuple(self.places))
        self._heard = {token: self._heard[token] for token in (*proposal.ranks, *self._waiting)}
        self._ended = {}
        self.done = set()
        self._turn(Phase.COMPLETE)

    def _turn(self, phase: Phase) -> None:
        if phase not in _NEXT[self.phase]:
            raise RuntimeError(f"a round cannot go from {self.phase.value} to {phase.value}")
        if phase is Phase.OPEN:
            self.proposal = None
        if self.phase is Phase.COMPLETE:
            self._enough_since = None
        self.phase = phase
