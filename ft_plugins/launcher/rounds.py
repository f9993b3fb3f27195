"""Who takes part in a round of the rendezvous, and with which group rank. Pure.

Invariant: a node of the last round that comes back keeps its rank, as long as the round is large enough for it; whoever
comes instead of a lost one takes the rank that is vacant. The same nodes with the same seats get the same ranks,
whatever their addresses and whoever was first. A first round is in the order of the nodes' names, read naturally
(node2 before node10), but for nodes that want a certain rank.

In: the nodes that wait, with the seats they had. Out: the size of the round, a rank for each node that takes part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import ConfigError
from .field_types import LIMIT, Count, Seen


@dataclass(frozen=True, order=True)
class Seat:
    """The rank that a node had in a round of so many nodes. Later rounds are greater. Raises ValueError."""

    round: Seen
    rank: Count
    size: Count

    def __post_init__(self) -> None:
        if not (0 < self.round <= LIMIT and 0 <= self.rank < self.size <= LIMIT):
            raise ValueError(f"expected a round from 1 and a rank below the size, found {self}")


@dataclass(frozen=True)
class Candidate:
    """A node that waits for a round. `wanted` is a rank that its owner asked for."""

    node: str
    seat: Seat | None = None
    wanted: int | None = None


@dataclass(frozen=True)
class Rules:
    """How large a round may be, and how long it waits for more nodes. Seconds count from when there are enough.

    `last_call`: before a first round that could be larger. `wait`: for a node of the last round, or a substitute,
    before a round goes on without. Raises ConfigError.
    """

    min_nodes: int
    max_nodes: int
    sizes: tuple[int, ...] = ()  # those allowed; empty: all from min_nodes to max_nodes
    last_call: float = 30.0
    wait: float = 30.0
    stateful: bool = False  # nodes of the last round hold state that the next one needs and a spare cannot hand out

    def __post_init__(self) -> None:
        wrong = [size for size in self.sizes if not self.min_nodes <= size <= self.max_nodes]
        if wrong:
            raise ConfigError(
                f"sizes: expected numbers of nodes from {self.min_nodes} to {self.max_nodes} (--nnodes), found "
                f"{', '.join(map(str, wrong))}; change one of the two"
            )

    def among(self, sizes: Sequence[int], spares_asked: bool = False) -> Rules:
        """These rules with `sizes` alone, as far as they allow them; the same ones where that leaves nothing.

        `spares_asked`: state on nodes that become spares is within reach of the job.
        """
        fitting = [size for size in sizes if self.min_nodes <= size <= self.max_nodes]
        if self.sizes:
            fitting = [size for size in fitting if size in self.sizes]
        return replace(self, sizes=tuple(fitting), stateful=not spares_asked) if fitting else self

    @property
    def largest(self) -> int:
        """The size at which a round waits for nobody any more."""
        return max(self.sizes, default=self.max_nodes)

    def fit(self, count: int) -> int:
        """The largest allowed size for `count` nodes; 0 if there are too few."""
        if self.sizes:
            return max((size for size in self.sizes if size <= count), default=0)
        return min(count, self.max_nodes) if count >= self.min_nodes else 0


def natural(name: str) -> tuple[tuple[tuple[str, int], ...], str]:
    """A key that sorts names by their texts and, where these are equal, by their numbers: node2 before node10."""
    parts = re.findall(r"(\D*)(\d*)", name, re.ASCII)
    return tuple((text, int(number or -1)) for text, number in parts), name


def last_seats(candidates: Iterable[Candidate]) -> tuple[int, int]:
    """The newest round that any of them sat in, and its size; (0, 0) if none did."""
    newest = max((found.seat for found in candidates if found.seat), default=None)
    return (newest.round, newest.size) if newest else (0, 0)


def size_now(rules: Rules, candidates: Sequence[Candidate], waited: float) -> int:
    """The size of the round that can begin now, `waited` seconds after there were enough nodes; 0: it cannot yet.

    It begins at once when it can get no larger, or when all nodes of the last round are back: then nobody is missing.
    Where state on a spare is out of reach (`Rules.stateful`) it never begins without one of the last round that is
    back; where spares are asked, the surplus ones wait beside the largest round that can be had.
    """
    size = rules.fit(len(candidates))
    last, last_size = last_seats(candidates)
    back = sum(found.seat is not None and found.seat.round == last for found in candidates)
    if size in (0, rules.largest) or last and back >= last_size:
        return size
    if rules.stateful and size < back:
        return 0  # state of the last round would be on a spare, out of reach: a substitute has to come
    return size if waited >= (rules.wait if last else rules.last_call) else 0


def ranks(candidates: Sequence[Candidate], size: int) -> dict[str, int]:
    """The rank of each node that takes part in a round of `size`, by name; the others are spares.

    Ranks are given, each time to whoever is left: to nodes of the last round, that which they had; to those of them
    for whose rank the round is too small, the lowest vacant; to nodes of older rounds, that which they had; to nodes
    that want one, that one; to all others, the lowest vacant, in the natural order of their names.

    Raises ValueError for fewer than `size` nodes, or two of the same name.
    """
    if len({found.node for found in candidates}) < max(size, len(candidates)):
        raise ValueError(f"{size} nodes of different names are needed, found {[found.node for found in candidates]}")
    last, _ = last_seats(candidates)
    by_name = sorted(candidates, key=lambda found: natural(found.node))
    seated = sorted((found for found in by_name if found.seat), key=_newest_first)
    newest = [found for found in seated if found.seat and found.seat.round == last]
    given: dict[str, int] = {}
    vacant = list(range(size))

    def give(to: Candidate, rank: int) -> None:
        if to.node not in given and rank in vacant:
            given[to.node] = rank
            vacant.remove(rank)

    def give_own(to: Sequence[Candidate]) -> None:
        for found in to:
            if found.seat:
                give(found, found.seat.rank)

    def give_lowest(to: Sequence[Candidate]) -> None:
        for found in to:
            if vacant:
                give(found, vacant[0])

    give_own(newest)
    give_lowest(newest)
    give_own(seated)
    for found in by_name:
        if found.wanted is not None:
            give(found, found.wanted)
    give_lowest(by_name)
    return given


def _newest_first(found: Candidate) -> tuple[int, int]:
    return (-found.seat.round, found.seat.rank) if found.seat else (0, 0)
