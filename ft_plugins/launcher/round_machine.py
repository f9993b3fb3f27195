"""The rounds of one rendezvous as the node that leads it sees them: who waits, who was chosen, who is in. Pure.

Invariant: a round is complete only when each of its nodes was heard of after it had been chosen, and its store is
there; it has begun when each of them has said that it knows. One that is silent or leaves in between is dropped, and
the round is put together anew: nobody begins one in which another node does not take part. Time comes from outside.

    OPEN -> PROPOSED      enough nodes wait: ranks are given, the node of rank 0 makes the round's store
    PROPOSED -> OPEN      one of the chosen has gone
    PROPOSED -> COMPLETE  all have been heard of since
    COMPLETE -> OPEN      one has gone before the round had begun; a node of the round is back, one has come with which
                          the round can be larger, or one waits that can replace a node whose connection has ended

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
from .field_types import MOST_NODES, Count, Name, Seen, Token, Where, Workers
from .rounds import Candidate, Rules, Seat

_PAUSE_SECONDS = 1.0  # between two looks at the clock; if they are further apart, it was we who slept


class Phase(Enum):
    """Where a round is."""

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
    """A node and the endpoint at which it can be asked."""

    node: Name
    endpoint: Where


Places = Annotated[tuple[Place, ...], Field(max_length=MOST_NODES)]


@dataclass(frozen=True)
class Roster:
    """A complete round: its nodes by rank, and those that waited beside it. Raises ValueError."""

    round: Count
    members: Places = ()
    spares: Places = ()

    def __post_init__(self) -> None:
        if self.members and not self.round:
            raise ValueError("expected a round from 1 for its members")

    def seat(self, node: str) -> Seat | None:
        """Where `node` sat; None if it did not take part."""
        names = [place.node for place in self.members]
        return Seat(self.round, names.index(node), len(names)) if node in names else None

    @property
    def endpoints(self) -> list[str]:
        """Where the nodes of this round can be asked, in the order of their ranks, then the spares'."""
        return [place.endpoint for place in (*self.members, *self.spares)]


@dataclass(frozen=True)
class Application:
    """A node that asks to take part. `token` is its process's own: a node that was started again has another one.

    `knows` is the newest complete round that it has heard of, also one that it had no seat in. `opened`: its ranks have
    captured something under the command that runs. `trained`: they have completed an iteration, or hold a version.
    `workers` is how many of them it starts.
    """

    node: Name
    token: Token
    endpoint: Where
    seat: Seat | None = None
    wanted: Count | None = None
    knows: Seen = 0
    opened: Flag = False
    trained: Flag = False
    workers: Workers = 0


@dataclass(frozen=True)
class Proposal:
    """Ranks by token, given at a time, and where the store of the round is, '' while rank 0 has not told.

    `opened`, `trained`: any of its nodes has `Application.opened`, `Application.trained`. `workers`: of each node, by
    rank.
    """

    round: int
    ranks: dict[str, int]
    since: float
    store: str = ""
    opened: bool = False
    trained: bool = False
    workers: tuple[int, ...] = ()


class RoundMachine:
    """The rounds of one rendezvous, led by this node. `last` is the last complete round that it knows of."""

    def __init__(self, rules: Rules, silence: float, last: Roster | None, now: float) -> None:
        """`silence`: seconds after which a node that was not heard of is gone."""
        self.phase = Phase.OPEN
        self.roster = last or Roster(0)
        self.proposal: Proposal | None = None  # of the round that is proposed or complete
        self.done: set[str] = set()  # tokens of nodes whose workers have all succeeded in the complete round
        self._rules = rules
        self._silence = silence
        self._waiting: dict[str, Application] = {}  # by token, as they came
        self._names: list[str] | None = None  # of those, sorted; None: to be sorted again
        self._members: dict[str, str] = {}  # node: token, of the complete round
        self._unaware: set[str] = set()  # tokens of those that have not said yet that they know of it
        self._heard: dict[str, float] = {}  # by token
        self._ended: dict[str, float] = {}  # by token of a member: since when it has had no connection
        self._enough_since: float | None = None
        self._looked = now

    def allow(self, rules: Rules) -> None:
        """The sizes that are admitted from now on."""
        self._rules = rules

    @property
    def round(self) -> int:
        """The number of the round that is complete or will be next."""
        return self.proposal.round if self.proposal else self.last_round + 1

    @property
    def last_round(self) -> int:
        """The newest complete round that this node or one of those waiting knows of."""
        seats = [found.seat.round for found in self._waiting.values() if found.seat]
        return max([self.roster.round, *seats, *(found.knows for found in self._waiting.values())])

    @property
    def begun(self) -> bool:
        """Whether all nodes of the complete round know of it: only then may any of them rely on the others."""
        return self.phase is Phase.COMPLETE and not self._unaware

    @property
    def waiting(self) -> list[str]:
        """Names of the nodes that wait, in natural order."""
        if self._names is None:
            self._names = sorted((found.node for found in self._waiting.values()), key=rounds.natural)
        return self._names

    @property
    def missing(self) -> list[str]:
        """Names of the nodes of the last round that do not wait."""
        here = set(self.waiting)
        return [place.node for place in self.roster.members if place.node not in here]

    @property
    def places(self) -> list[Place]:
        """The nodes that wait."""
        return [Place(found.node, found.endpoint) for found in self._waiting.values()]

    def apply(self, application: Application, now: float) -> bool:
        """Have a node wait for a round. False while another living process has its name: to be tried again."""
        holders = [found.token for found in self._waiting.values() if found.node == application.node]
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
        """Note that a process is alive, and which round it `knows` to be complete; False if it does not wait here."""
        if token in self._heard:
            self._heard[token] = now
            self._ended.pop(token, None)
        if self.phase is Phase.COMPLETE and knows == self.round:
            self._unaware.discard(token)
        return token in self._waiting

    def hang_up(self, token: str, now: float) -> None:
        """Note that a process has closed its connection: unless it is heard of again, it is gone."""
        if token in self._heard:
            self._heard[token] = float("-inf")
        if token in self._members.values():
            self._ended[token] = now

    def lost(self, now: float) -> list[str]:
        """Nodes of the complete round that have gone before they were done, as far as connections tell."""
        if not self._ended:
            return []
        gone = {token for token, since in self._ended.items() if now - since > self._silence} - self.done
        return [node for node, token in self._members.items() if token in gone]

    def leave(self, token: str) -> None:
        """A node does not wait any more."""
        self._waiting.pop(token, None)
        self._names = None
        if self.phase is Phase.PROPOSED and self.proposal and token in self.proposal.ranks:
            self._turn(Phase.OPEN)

    def serve(self, token: str, store: str) -> None:
        """The node of rank 0 tells where the store of the proposed round is."""
        if self.phase is Phase.PROPOSED and self.proposal and self.proposal.ranks.get(token) == 0:
            self.proposal = replace(self.proposal, store=store)

    def finish(self, token: str, number: int) -> None:
        """A node tells that its workers have succeeded in round `number`."""
        if self.phase is Phase.COMPLETE and number == self.round and token in self._members.values():
            self.done.add(token)

    def step(self, now: float) -> None:
        """Go on as far as the time allows: drop the silent, choose, complete."""
        slept = max(0.0, now - self._looked - _PAUSE_SECONDS)
        self._looked = now
        if slept:  # nobody could be heard meanwhile
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
        """End a complete round of which a node is back, or that can be larger, or whole again."""
        size, waiting = len(self._members), self._waiting.values()
        if self.phase is not Phase.COMPLETE or not waiting:
            return
        back = any(found.node in self._members for found in waiting)
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
            tokens = {found.node: found.token for found in self._waiting.values()}
            given = rounds.ranks(candidates, size)
            chosen = [self._waiting[tokens[node]] for node in given]
            ranks = {tokens[node]: rank for node, rank in given.items()}
            opened, trained = any(each.opened for each in chosen), any(each.trained for each in chosen)
            workers = tuple(self._waiting[token].workers for token in sorted(ranks, key=ranks.__getitem__))
            self.proposal = Proposal(self.round, ranks, now, opened=opened, trained=trained, workers=workers)
            self._turn(Phase.PROPOSED)

    def _candidates(self) -> Sequence[Candidate]:
        """Those who wait, with the newest seat that they or this node remember."""
        found = []
        for each in self._waiting.values():
            seats = [seat for seat in (each.seat, self.roster.seat(each.node)) if seat]
            found.append(Candidate(each.node, max(seats, default=None), each.wanted))
        return found

    def _complete(self, proposal: Proposal) -> None:
        by_rank = [self._waiting.pop(token) for token in sorted(proposal.ranks, key=proposal.ranks.__getitem__)]
        self._names = None
        members = tuple(Place(found.node, found.endpoint) for found in by_rank)
        self._members = {found.node: found.token for found in by_rank}
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
