"""Choose the nodes of a rendezvous round and their group ranks. Pure.

Invariant: a node of the last round that returns keeps its rank if the round is large enough; a substitute takes the
vacant rank, but not that of a node that is alive and only slow to return. The same nodes with the same seats get the
same ranks, whatever their addresses and order of arrival. A first round follows the natural order of node names (node2
before node10), except for nodes that want a certain rank.

In: the nodes that wait, with the seats they had. Out: the size of the round, a rank for each node that takes part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...errors import ConfigError
from .field_types import LIMIT, Count, Reported

OFTEN = 2  # failures of a node in a job
ALL = "*"  # in place of the name of a node that is to leave: all nodes are, and so the job ends


@dataclass(frozen=True, order=True)
class Seat:
    """The rank that a node had in a round of `size` nodes. Later rounds compare greater. Raises ValueError."""

    round: Reported
    rank: Count
    size: Count

    def __post_init__(self) -> None:
        if not (0 < self.round <= LIMIT and 0 <= self.rank < self.size <= LIMIT):
            raise ValueError(f"expected a round from 1 and a rank below the size, found {self}")


@dataclass(frozen=True)
class Candidate:
    """A node that waits for a round. `wanted` is a rank that its user asked for. `failures`: in how many rounds it was
    the first to fail, or was lost. `replaceable`: the others can rebuild what it holds."""

    node: str
    seat: Seat | None = None
    wanted: int | None = None
    failures: int = 0
    replaceable: bool = False


@dataclass(frozen=True)
class Rules:
    """How large a round may be, and for how many seconds it waits for more nodes once there are enough.

    `last_call`: before a first round that could be larger. `wait`: for a node of the last round, or a substitute,
    before a round begins without one. Raises ConfigError.
    """

    min_nodes: int
    max_nodes: int
    sizes: tuple[int, ...] = ()  # allowed ones; empty: all from min_nodes to max_nodes
    last_call: float = 30.0
    wait: float = 30.0
    stateful: bool = False  # nodes of the last round hold state that the next one needs, and a spare could not send it

    def __post_init__(self) -> None:
        wrong = [size for size in self.sizes if not self.min_nodes <= size <= self.max_nodes]
        if wrong:
            raise ConfigError(
                f"sizes: expected numbers of nodes from {self.min_nodes} to {self.max_nodes} (--nnodes), found "
                f"{', '.join(map(str, wrong))}; change one of the two"
            )

    def among(self, sizes: Sequence[int], spares_asked: bool = False) -> Rules:
        """These rules restricted to `sizes`; unchanged if that leaves no size.

        `spares_asked`: the job can read state from nodes that become spares.
        """
        fitting = [size for size in sizes if self.min_nodes <= size <= self.max_nodes]
        if self.sizes:
            fitting = [size for size in fitting if size in self.sizes]
        return replace(self, sizes=tuple(fitting), stateful=not spares_asked) if fitting else self

    @property
    def is_fixed(self) -> bool:
        """Whether only one number of nodes is allowed."""
        return self.min_nodes == self.max_nodes

    @property
    def largest(self) -> int:
        """The size at which a round waits for no further node."""
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
    """The newest round in which any candidate had a seat, and its size; (0, 0) if none had."""
    newest = max((each.seat for each in candidates if each.seat), default=None)
    return (newest.round, newest.size) if newest else (0, 0)


@dataclass(frozen=True)
class Turnout:
    """What the size of a round depends on: how many nodes wait, and how many of them are `back` from the last round, of
    `last_size` nodes. `last`: its number; 0 if no waiting node had a seat. `expected`: another node of it is alive."""

    nodes: int
    last: int = 0
    last_size: int = 0
    back: int = 0
    expected: bool = False

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Turnout:
        """Counted from the nodes that wait."""
        last, last_size = last_seats(candidates)
        back = sum(each.seat is not None and each.seat.round == last for each in candidates)
        return cls(len(candidates), last, last_size, back)


def size_of(rules: Rules, turnout: Turnout, waited: float) -> int:
    """The size of the round that can begin now, `waited` seconds after there were enough nodes; 0: not yet.

    It waits for living nodes of the last round. Then it begins at once if it cannot get larger, or if all nodes of the
    last round are back. If the job cannot read state from spares (`Rules.stateful`), it includes every node of the last
    round that is back; else surplus nodes become spares of the largest possible round.
    """
    size = rules.fit(turnout.nodes)
    if turnout.expected and waited < rules.wait:
        return 0  # a spare would take its place, and what it holds would be lost
    if size in (0, rules.largest) or turnout.last and turnout.back >= turnout.last_size:
        return size
    if rules.stateful and size < turnout.back:
        return 0  # a spare would hold state of the last round: wait for a substitute
    return size if waited >= (rules.wait if turnout.last else rules.last_call) else 0


def why_not_drained(
    node: str, members: Sequence[str], spares: Sequence[str], draining: str, running: bool, lost: int, leader: str = ""
) -> str:
    """Why a node, or ALL of them, cannot leave the job at its next version, for people; '' if it can. `running`: a
    round has begun, of these members, of which so many are `lost`."""
    if node in spares and node == leader:
        return f"node {node} is a spare, but leads the others: when its ft-run ends, all ranks start again once"
    if node in spares:
        return f"node {node} is a spare, and has no part in the job: end its ft-run"
    if not running or lost:
        return "the job is between two rounds, or waits for a lost node: give this again when it trains"
    if node == ALL:
        return ""
    if node not in members:
        return f"there is no node {node} in this job; its nodes are {', '.join(sorted(members, key=natural))}"
    if not spares:
        return f"no spare waits that could take the place of node {node}: start another node with the job's command"
    if draining:
        return f"{'all nodes are' if draining == ALL else f'node {draining} is'} being drained: one node at a time"
    return ""


def is_hopeless(rules: Rules, turnout: Turnout, running: bool, patience: float, since_refusal: float) -> bool:
    """Whether the job ends because a node was refused `since_refusal` seconds ago: as no round can do without one, and
    no other came in its place within `patience`. A job that was `running` under this command has state that waits for
    a substitute, so it goes on waiting."""
    return rules.is_fixed and not running and since_refusal >= patience and not rules.fit(turnout.nodes)


def left_out(candidates: Sequence[Candidate], size: int) -> set[str]:
    """The nodes that have failed OFTEN and are spares in a round of `size`, because there are others: the worst first.

    Of the last round one at most, if all of its nodes are back and the others can rebuild what that one holds: no
    redundancy is sure to make up for more.
    """
    last, last_size = last_seats(candidates)
    members = {each.node for each in candidates if each.seat and each.seat.round == last}
    may_leave = len(members) == last_size
    out: set[str] = set()
    for each in sorted(candidates, key=lambda each: (-each.failures, natural(each.node))):
        if each.failures < OFTEN or len(candidates) - len(out) <= size:
            break
        if each.node in members:
            if not (may_leave and each.replaceable):
                continue
            may_leave = False
        out.add(each.node)
    return out


def ranks(candidates: Sequence[Candidate], size: int, leader: str = "") -> dict[str, int]:
    """The rank of each node that takes part in a round of `size`, by name; the others are spares, first of all those
    that are `left_out`.

    Ranks are assigned in this order:

    1. nodes of the last round: the rank they had
    2. nodes of the last round whose rank is beyond `size`: the lowest vacant one
    3. nodes of older rounds: the rank they had, if vacant
    4. nodes that want a rank: that one, if vacant
    5. all others, in the natural order of their names: the lowest vacant one

    If the `leader` is not left out and has got no rank, it takes the last one of a node that had none before: when a
    leader ends that is a spare, the ranks of all others start again.

    Raises ValueError for fewer than `size` nodes, or two of the same name.
    """
    if len({each.node for each in candidates}) < max(size, len(candidates)):
        raise ValueError(f"{size} nodes of different names are needed, found {[each.node for each in candidates]}")
    last, _ = last_seats(candidates)
    out = left_out(candidates, size)
    by_name = sorted((each for each in candidates if each.node not in out), key=lambda each: natural(each.node))
    seated = sorted((each for each in by_name if each.seat), key=_newest_first)
    newest = [each for each in seated if each.seat and each.seat.round == last]
    assigned: dict[str, int] = {}
    vacant = dict.fromkeys(range(size))  # in ascending order

    def assign(node: Candidate, rank: int) -> None:
        if node.node not in assigned and rank in vacant:
            assigned[node.node] = rank
            del vacant[rank]

    def assign_own(nodes: Sequence[Candidate]) -> None:
        for each in nodes:
            if each.seat:
                assign(each, each.seat.rank)

    def assign_lowest(nodes: Sequence[Candidate]) -> None:
        for each in nodes:
            if vacant:
                assign(each, next(iter(vacant)))

    assign_own(newest)
    assign_lowest(newest)
    assign_own(seated)
    for each in by_name:
        if each.wanted is not None:
            assign(each, each.wanted)
    assign_lowest(by_name)
    new = [each.node for each in by_name if each.node in assigned and not each.seat]
    if new and leader not in assigned and any(each.node == leader for each in by_name):
        assigned[leader] = assigned.pop(max(new, key=assigned.__getitem__))
    return assigned


def _newest_first(each: Candidate) -> tuple[int, int]:
    return (-each.seat.round, each.seat.rank) if each.seat else (0, 0)
