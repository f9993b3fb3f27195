"""RAIM5 and RAIM6: which bytes of a redundancy group's nodes form each parity, and where it is stored. Pure.

A group has n nodes (failure domains); node i holds a stream of sizes[i] bytes. There are n stripes; each takes at most
one piece from a node, and its parity is stored on nodes that give it none (REFT, section 4.2). With L losses:

    node x + k (mod n), k < L,  stores parity k of stripe x:  P = sum_j D_j,  Q = sum_j 2**j D_j  over GF(256)
                                (j: place of the piece among the stripe's data, from 0; not the node)
    node i gives stripe x its block number (x - i - 1) mod n; it stores the parity of the L stripes for which that
    number is >= n - L

So a stream is cut into n - L blocks, and every node stores L times 1/(n - L) of the largest stream. Bytes beyond the
end of a stream are zeros.

Invariant: whichever L nodes are lost, every stripe keeps enough pieces to compute what it lost. A stripe is a linear
code whose rows are unit vectors (data), ones (P) and powers of 2 (Q); one algorithm decodes all patterns of loss.

In: sizes, then the lost nodes. Out: `Placement`, `StripeRebuild`s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, overload

from ..errors import ResumeError, TopologyError
from .field import ORDER, power, solve, times

ALIGNMENT = 64  # bytes: blocks end on cache lines
LEAST_NODES = {1: 2, 2: 4}  # that a group has, by losses: RAIM6 over three would be copies, not parity
T = TypeVar("T")


class OnDemand(Sequence[T]):
    """`count` items, each created on first use: no process needs all of a large job's."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._count = count
        self._make = make
        self._made: dict[int, T] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(self._count)))
        place = range(self._count)[index]  # raises IndexError beyond the end
        if place not in self._made:
            self._made[place] = self._make(place)
        return self._made[place]


@dataclass(frozen=True)
class StripePiece:
    """The bytes `start .. stop` of a node's stream, as data of a stripe; fewer than a block at the stream's end.

    In Q it is multiplied by 2**exponent; the exponent is its place in the stripe's data, from 0.
    """

    node: int
    start: int
    stop: int
    exponent: int


@dataclass(frozen=True)
class Stripe:
    """Data pieces, at most one per node, and the nodes that store their P (and Q)."""

    index: int
    parity_nodes: tuple[int, ...]
    data: tuple[StripePiece, ...]


@dataclass(frozen=True)
class Placement:
    """All stripes of a group that survives the loss of any `losses` nodes. Each parity has `block` bytes."""

    sizes: tuple[int, ...]
    losses: int
    block: int

    @cached_property
    def stripes(self) -> Sequence[Stripe]:
        return OnDemand(len(self.sizes), self._stripe)

    def _stripe(self, index: int) -> Stripe:
        pieces = (self.piece(index, node) for node in range(len(self.sizes)))
        return Stripe(index, self._parity_nodes(index), tuple(piece for piece in pieces if piece is not None))

    def _parity_nodes(self, stripe: int) -> tuple[int, ...]:
        return tuple((stripe + which) % len(self.sizes) for which in range(self.losses))

    def piece(self, stripe: int, node: int) -> StripePiece | None:
        """The piece that `node` gives to a stripe; None if it stores the stripe's parity."""
        parity_nodes = self._parity_nodes(stripe)
        if node in parity_nodes:
            return None
        start = min((stripe - node - 1) % len(self.sizes) * self.block, self.sizes[node])
        stop = min(start + self.block, self.sizes[node])
        return StripePiece(node, start, stop, node - sum(keeper < node for keeper in parity_nodes))

    def parities_on(self, node: int) -> tuple[tuple[int, int], ...]:
        """The parities that `node` stores, as (stripe, 0 for P or 1 for Q), P before Q; its parity store has the same
        order."""
        nodes = len(self.sizes)
        if not 0 <= node < nodes:
            raise TopologyError(f"node {node} is not in this group of {nodes} (0 to {nodes - 1})")
        return tuple(((node - which) % nodes, which) for which in range(self.losses))


@dataclass(frozen=True)
class StripeRebuild:
    """One lost member of a stripe: `wanted`, which was on `node`, is the sum of factor * source over GF(256).

    A member is ("data", node) or ("parity", 0 for P or 1 for Q). A source is a member and its factor, 1 for plain XOR.
    Only the first n bytes of each source are needed, n being the size of `wanted`; a shorter source is padded with
    zeros. Empty pieces have no sources and are not sources.
    """

    stripe: int
    wanted: tuple[str, int]
    node: int
    sources: tuple[tuple[str, int, int], ...]


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def cut(nbytes: int, parts: int) -> list[tuple[int, int]]:
    """Cut `nbytes` into `parts` consecutive ranges of nearly equal size, at multiples of ALIGNMENT."""
    lines = -(-nbytes // ALIGNMENT)
    edges = [min(nbytes, lines * i // parts * ALIGNMENT) for i in range(parts)] + [nbytes]
    return list(zip(edges, edges[1:], strict=False))


def place_parity(sizes: Sequence[int], losses: int = 1) -> Placement:
    """Place the pieces and parities of a group; `sizes` are the bytes of each node's stream.

    Raises TopologyError if the group cannot survive that many losses.
    """
    nodes = len(sizes)
    _check(sizes, losses)
    block = -(-max(sizes) // ((nodes - losses) * ALIGNMENT)) * ALIGNMENT
    return Placement(tuple(sizes), losses, block)


def _check(sizes: Sequence[int], losses: int) -> None:
    nodes = len(sizes)
    if losses not in (1, 2):
        raise TopologyError(f"parity against {losses} lost nodes is not supported: expected 1 (RAIM5) or 2 (RAIM6)")
    if nodes < 2:
        raise TopologyError(f"a group of {nodes} node(s) cannot be protected: parity needs at least 2 nodes")
    if losses == 2 and nodes < 4:
        raise TopologyError(
            f"RAIM6 (2 losses) needs at least 4 nodes in a group, found {nodes}: make the groups larger, or use RAIM5, "
            "which needs 2"
        )
    if losses == 2 and nodes - losses > ORDER:
        raise TopologyError(
            f"RAIM6 (2 losses) supports at most {ORDER + losses} nodes in a group, found {nodes}: make the groups "
            "smaller"
        )
    for node, size in enumerate(sizes):
        if size < 0:
            raise TopologyError(f"node {node}: its stream has {size} bytes: expected 0 or more")


def plan_decode(placement: Placement, lost: Collection[int]) -> tuple[StripeRebuild, ...]:
    """How to compute everything that was on the `lost` nodes from what survived, by stripe, data before parity.

    Raises ResumeError if more nodes are lost than the placement survives, TopologyError for a node that is not in the
    group.
    """
    nodes = sorted(set(lost))
    unknown = [node for node in nodes if not 0 <= node < len(placement.sizes)]
    if unknown:
        raise TopologyError(f"nodes {unknown} are not in this group of {len(placement.sizes)}")
    if len(nodes) > placement.losses:
        raise ResumeError(
            f"nodes {', '.join(map(str, nodes))} of the group are lost, but its parity makes up for "
            f"{placement.losses}: restore from another tier"
        )
    return tuple(rebuild for stripe in placement.stripes for rebuild in _rebuilds(stripe, set(nodes)))


def _rebuilds(stripe: Stripe, lost_nodes: set[int]) -> list[StripeRebuild]:
    """The members that the stripe lost.

    Every member is a row: its factor for each data piece, empty ones left out. A lost row is written as
    sum_k c[k] * (row of parity k) + d, where d is 0 at the lost pieces: those columns give c, the other columns then
    give d, the factors of the surviving data. As many parities are used as pieces were lost, P first, because its
    factors are 1.
    """
    lost = [piece for piece in stripe.data if piece.node in lost_nodes and piece.stop > piece.start]
    alive = [piece for piece in stripe.data if piece.node not in lost_nodes and piece.stop > piece.start]
    parities = [which for which, node in enumerate(stripe.parity_nodes) if node not in lost_nodes][: len(lost)]

    def row(wanted: tuple[str, int], pieces: Sequence[StripePiece]) -> list[int]:
        kind, which = wanted
        if kind == "data":
            return [int(piece.node == which) for piece in pieces]
        return [power(which * piece.exponent) for piece in pieces]

    at_lost = [row(("parity", which), lost) for which in parities]
    at_alive = [row(("parity", which), alive) for which in parities]
    equations = list(zip(*at_lost, strict=True))

    def sources(wanted: tuple[str, int]) -> tuple[tuple[str, int, int], ...]:
        factors = solve(equations, row(wanted, lost))
        rest = row(wanted, alive)
        for factor, entries in zip(factors, at_alive, strict=True):
            rest = [own ^ times(factor, entry) for own, entry in zip(rest, entries, strict=True)]
        data = [("data", piece.node, factor) for piece, factor in zip(alive, rest, strict=True) if factor]
        parity = [("parity", which, factor) for which, factor in zip(parities, factors, strict=True) if factor]
        return tuple(data + parity)

    rebuilds = [
        StripeRebuild(
            stripe.index, ("data", piece.node), piece.node, sources(("data", piece.node)) if piece in lost else ()
        )
        for piece in stripe.data
        if piece.node in lost_nodes
    ]
    for which, node in enumerate(stripe.parity_nodes):
        if node in lost_nodes:
            rebuilds.append(StripeRebuild(stripe.index, ("parity", which), node, sources(("parity", which))))
    return rebuilds
