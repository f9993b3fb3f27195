"""The nodes that wait for a round, indexed as they come and go. Pure.

Invariant: what a node asks of the leader while it waits is answered from these indices: how many wait, the first names,
who of the last round is missing, whether the round can begin. An arrival or departure costs a search in a sorted list;
nothing is counted again.

In: applications; the last complete round. Out: counts, names, candidates.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from ...base.intake import Flag
from . import rounds
from .field_types import Count, EndpointText, Name, Reported, Token, Workers
from .roster import Roster
from .rounds import Candidate, Seat, Turnout

_DEPARTED = 64  # entries of a heap that belong to nodes that have left


@dataclass(frozen=True)
class Application:
    """A node's request to take part. `token` identifies its process: a restarted node has another one.

    `knows`: the newest complete round that it knows of, with or without a seat in it. `opened`: its ranks have captured
    under the running command. `trained`: they have completed an iteration, or hold a version. `took_part`: its process
    has been in a round, so the job goes on, and is not being started again. `workers`: how many it starts. `failed`:
    one of them failed, and does not only report that others were lost. `replaceable`: see `Candidate`.
    """

    node: Name
    token: Token
    endpoint: EndpointText
    seat: Seat | None = None
    wanted: Count | None = None
    knows: Reported = 0
    opened: Flag = False
    trained: Flag = False
    took_part: Flag = False
    workers: Workers = 0
    failed: Flag = False
    replaceable: Flag = False

    @property
    def newest_round(self) -> int:
        """The newest round that this node knows of."""
        return max(self.knows, self.seat.round if self.seat else 0)


class WaitingNodes:
    """The applications of nodes of different names and tokens, in order of arrival."""

    def __init__(self, last: Roster) -> None:
        self._by_token: dict[str, Application] = {}
        self._by_name: dict[str, str] = {}  # tokens
        self._sorted: list[tuple[tuple[tuple[str, int], ...], str]] = []  # names, by their natural order
        self._knowing: list[tuple[int, str, int]] = []  # heap: rounds that nodes know of, negative; token; arrival
        self._arrivals: dict[str, int] = {}
        self._arrived = 0
        self.follow(last)

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Application]:
        return iter(self._by_token.values())

    def __contains__(self, token: str) -> bool:
        return token in self._by_token

    def __getitem__(self, token: str) -> Application:
        return self._by_token[token]

    def follow(self, last: Roster) -> None:
        """Count by the seats and members of this round from now on. Costs a look at each node."""
        self._last = last
        waiting = self._by_name
        self._missing = [rank for rank, place in enumerate(last.members) if place.node not in waiting]
        self._seats: dict[str, Seat] = {}  # the newest one of each waiting node that has one
        self._of_round: Counter[int] = Counter()  # how many of them are of a round
        self._newest: Seat | None = None
        self._newest_left = False  # whether a node of this seat has left: to be searched again
        for each in self:
            self._count(each)

    def add(self, application: Application) -> None:
        """One more node. Its name and token must not wait already."""
        token, node = application.token, application.node
        self._by_token[token] = application
        self._by_name[node] = token
        self._arrived += 1
        self._arrivals[token] = self._arrived
        insort(self._sorted, rounds.natural(node))
        heapq.heappush(self._knowing, self._knowledge(application))
        if len(self._knowing) > 2 * len(self) + _DEPARTED:
            self._knowing = sorted(map(self._knowledge, self))
        if (rank := self._last.ranks.get(node)) is not None:
            del self._missing[bisect_left(self._missing, rank)]
        self._count(application)

    def remove(self, token: str) -> Application | None:
        """One less; None if it does not wait."""
        application = self._by_token.pop(token, None)
        if application is None:
            return None
        node = application.node
        del self._by_name[node], self._arrivals[token]
        del self._sorted[bisect_left(self._sorted, rounds.natural(node))]
        if (rank := self._last.ranks.get(node)) is not None:
            insort(self._missing, rank)
        if seat := self._seats.pop(token, None):
            self._of_round[seat.round] -= 1
            self._newest_left |= seat == self._newest
        return application

    def _knowledge(self, application: Application) -> tuple[int, str, int]:
        return -application.newest_round, application.token, self._arrivals[application.token]

    def _count(self, application: Application) -> None:
        own, remembered = application.seat, self._last.seat(application.node)
        seat = max(own, remembered) if own and remembered else own or remembered
        if seat:
            self._seats[application.token] = seat
            self._of_round[seat.round] += 1
            self._newest = max(self._newest, seat) if self._newest else seat

    def token(self, node: str) -> str | None:
        """The token of a waiting node."""
        return self._by_name.get(node)

    def names(self, most: int | None = None) -> list[str]:
        """The first names in natural order."""
        return [name for _, name in self._sorted[:most]]

    def missing(self, most: int | None = None) -> list[str]:
        """The first nodes of the last round, by rank, that do not wait."""
        return [self._last.members[rank].node for rank in islice(self._missing, most)]

    @property
    def newest_round(self) -> int:
        """The newest round that a waiting node knows of; 0 without one."""
        while self._knowing and self._arrivals.get(self._knowing[0][1]) != self._knowing[0][2]:
            heapq.heappop(self._knowing)  # has left
        return -self._knowing[0][0] if self._knowing else 0

    @property
    def turnout(self) -> Turnout:
        """What the size of a round depends on."""
        if self._newest_left:
            self._newest, self._newest_left = max(self._seats.values(), default=None), False
        if self._newest is None:
            return Turnout(len(self))
        return Turnout(len(self), self._newest.round, self._newest.size, self._of_round[self._newest.round])

    def candidates(self, failures: Mapping[str, int]) -> list[Candidate]:
        """The waiting nodes, with the newest seat that they or this node remember. `failures`: by node."""
        return [
            Candidate(each.node, self._seats.get(each.token), each.wanted, failures.get(each.node, 0), each.replaceable)
            for each in self
        ]
