"""The nodes of a complete round, and the pages in which they are sent to a node that knows another round. Pure.

Invariant: a page has at most PAGE nodes, so with the longest names and endpoints it fits into one message. A node that
knows the round before receives only the places that changed. It keeps the result only if that has the digest that the
leader announced, so a roster is never put together from two.

In: rosters. Out: pages as plain values, for messages; a `Roster` from pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from .field_types import MOST_NODES, Count, EndpointText, Name
from .rounds import Seat

PAGE = 512  # nodes in one message: 48 bytes of name and at most 1,200 of endpoint each, less than FRAME_LIMIT in all
MOST_PAGES = 2 * MOST_NODES // PAGE  # of members and spares


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

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The rank of each node that took part; of two with one name the lower."""
        return {place.node: rank for rank, place in reversed(list(enumerate(self.members)))}

    def seat(self, node: str) -> Seat | None:
        """The seat of `node`; None if it did not take part."""
        rank = self.ranks.get(node)
        return None if rank is None else Seat(self.round, rank, len(self.members))

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The nodes of this round, by rank, then the spares."""
        return (*self.members, *self.spares)

    @property
    def endpoints(self) -> list[str]:
        """The endpoints of the nodes of this round, by rank, then of the spares."""
        return [place.endpoint for place in self.places]

    @cached_property
    def digest(self) -> str:
        """Equal for equal rosters only."""
        lines = [f"{self.round} {len(self.members)}", *(f"{place.node} {place.endpoint}" for place in self.places)]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


Digest = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32})?$")]
PageNumber = Annotated[int, Field(strict=True, ge=0, le=MOST_PAGES)]
Size = Annotated[int, Field(strict=True, ge=0, le=MOST_NODES)]
Position = Annotated[int, Field(strict=True, ge=0, lt=2 * MOST_NODES)]  # among members, then spares


@dataclass(frozen=True)
class RosterPage:
    """One of `pages` pages: places of the roster `digest` that differ from those of the roster `base`, '' for none."""

    digest: Digest
    base: Digest
    round: Count
    members: Size
    spares: Size
    number: PageNumber
    pages: PageNumber
    nodes: Annotated[tuple[tuple[Position, Name, EndpointText], ...], Field(max_length=PAGE)]


class RosterPages:
    """The pages of a roster for nodes that know `previous`, and for all others. Each page is made once."""

    def __init__(self, roster: Roster, previous: Roster | None = None) -> None:
        self.roster = roster
        self._bases = {"": ()} | ({previous.digest: previous.places} if previous else {})
        self._changes: dict[str, list[tuple[int, str, str]]] = {}
        self._made: dict[tuple[str, int], dict[str, Any]] = {}

    def page(self, base: str, number: int) -> dict[str, Any]:
        """Page `number` (the last one, if there are fewer) for a node that knows the roster of digest `base`: the
        fields of a `RosterPage`."""
        base = base if base in self._bases else ""
        changes = self._changes.get(base)
        if changes is None:
            changes = self._changes[base] = _changes(self.roster.places, self._bases[base])
        pages = max(1, -(-len(changes) // PAGE))
        number = min(number, pages - 1)
        if (base, number) not in self._made:
            self._made[base, number] = {
                "digest": self.roster.digest,
                "base": base,
                "round": self.roster.round,
                "members": len(self.roster.members),
                "spares": len(self.roster.spares),
                "number": number,
                "pages": pages,
                "nodes": changes[number * PAGE : (number + 1) * PAGE],
            }
        return self._made[base, number]


def _changes(places: Sequence[Place], base: Sequence[Place]) -> list[tuple[int, str, str]]:
    same = min(len(places), len(base))
    return [(at, place.node, place.endpoint) for at, place in enumerate(places) if at >= same or place != base[at]]


def assembled(pages: Sequence[RosterPage], known: Roster) -> Roster | None:
    """The roster of these pages, all that there are in their order, at a node that knows the roster `known`.

    None if they are not those of one roster, or do not result in what was announced: ask for all pages again, without a
    base.
    """
    first = pages[0]
    if first.base not in ("", known.digest):
        return None
    size = first.members + first.spares
    places: list[Place | None] = list(known.places[:size]) if first.base else []
    places += [None] * (size - len(places))
    for number, page in enumerate(pages):
        if (page.digest, page.base, page.number, page.pages) != (first.digest, first.base, number, len(pages)):
            return None
        for at, node, endpoint in page.nodes:
            if at >= size:
                return None
            places[at] = Place(node, endpoint)
    filled = tuple(place for place in places if place)
    if len(filled) < size or size and not first.round:
        return None
    roster = Roster(first.round, filled[: first.members], filled[first.members :])
    return roster if roster.digest == first.digest else None
