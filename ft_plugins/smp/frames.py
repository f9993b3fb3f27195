"""What a slot is put together from: frame by frame, which bytes of which node, with which factor. Pure.

Invariant: the frames cover the slot once, in order; none is longer than a payload. The sum over GF(256) of factor *
bytes of a frame's parts is what the slot held there; where a part has fewer bytes than its frame, zeros stand behind
or before it. Frames end where buckets of the parity end from which they are decoded, so that the SMP that keeps it has
to verify one bucket for a frame, and each only once.

In: an exchange plan and the positions that are lost, or where the slot lies whole. Out: `Frame`s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..redundancy.parity import Rebuild, plan_decode
from ..redundancy.plan import ExchangePlan, Section
from ..snapshot.slots import Version
from .wire import PAYLOAD_LIMIT


@dataclass(frozen=True)
class Data:
    """Bytes `at .. at + nbytes` of the data in the slot of `rank`."""

    rank: int
    version: Version
    at: int
    nbytes: int


@dataclass(frozen=True)
class Parity:
    """Bytes `at .. at + nbytes` of the parity block `key`: section, stripe, 0 for P or 1 for Q."""

    key: tuple[int, int, int]
    version: Version
    at: int
    nbytes: int


@dataclass(frozen=True)
class Part:
    """What the SMP at a position of the plan contributes to a frame, from byte `at` of the frame on."""

    position: int
    wanted: Data | Parity
    factor: int
    at: int


@dataclass(frozen=True)
class Frame:
    """Bytes `offset .. offset + nbytes` of the slot.

    If any part is as long as the frame and has factor 1, the first one is: the others are added to it.
    """

    offset: int
    nbytes: int
    parts: tuple[Part, ...]

    @property
    def has_base(self) -> bool:
        """Whether the first part is such a one; else all are added to zeros."""
        return bool(self.parts) and _may_be_base(self.parts[0], self.nbytes)


def _may_be_base(part: Part, nbytes: int) -> bool:
    return part.factor == 1 and part.wanted.nbytes == nbytes


def copied(rank: int, version: Version, nbytes: int, position: int) -> Iterator[Frame]:
    """The frames of a slot that lies whole at `position`."""
    for at in range(0, nbytes, PAYLOAD_LIMIT):
        size = min(PAYLOAD_LIMIT, nbytes - at)
        yield Frame(at, size, (Part(position, Data(rank, version, at, size), 1, 0),))


def decoded(plan: ExchangePlan, rank: int, version: Version, nbytes: int, lost: Collection[int]) -> Iterator[Frame]:
    """The frames of a slot of `nbytes` that is computed from parity, without what lay at the positions `lost`.

    Raises ResumeError when more is lost than parity makes up for.
    """
    section = plan.section_of_rank[rank]
    own = section.positions.index(plan.position_of_rank[rank])
    gone = [node for node, position in enumerate(section.positions) if position in set(lost)]
    needed = {found.stripe: found for found in plan_decode(section.placement, gone) if found.wanted == ("data", own)}
    return _decoded(plan, section, own, rank, version, nbytes, needed)


def _decoded(
    plan: ExchangePlan,
    section: Section,
    own: int,
    rank: int,
    version: Version,
    nbytes: int,
    needed: dict[int, Rebuild],
) -> Iterator[Frame]:
    first = 0  # where this rank begins in the stream of its node
    for extent in section.streams[own]:
        if extent.rank == rank:
            break
        first += extent.nbytes
    blocks = {piece.start: (stripe.index, piece) for stripe in section.placement.stripes for piece in stripe.data
              if piece.node == own and piece.stop > piece.start}  # fmt: skip
    done = first
    while done < first + nbytes:
        stripe, piece = blocks[done // section.placement.block * section.placement.block]
        rebuild, at = needed[stripe], done - piece.start
        which = next((which for kind, which, _ in rebuild.sources if kind == "parity"), 0)
        in_bucket = (plan.area_of[section.index, stripe, which].offset + at) % PAYLOAD_LIMIT
        stop = min(first + nbytes, piece.stop, done + PAYLOAD_LIMIT - in_bucket)
        parts = _parts(section, rebuild, version, at, stop - done)
        base_first = sorted(parts, key=lambda part: not _may_be_base(part, stop - done))
        yield Frame(done - first, stop - done, tuple(base_first))
        done = stop


def _parts(section: Section, rebuild: Rebuild, version: Version, at: int, nbytes: int) -> Iterator[Part]:
    """The sources of `nbytes` bytes, `at` from the start of their blocks."""
    stripe = section.placement.stripes[rebuild.stripe]
    for kind, which, factor in rebuild.sources:
        if kind == "parity":
            key = (section.index, stripe.index, which)
            yield Part(section.positions[stripe.parity[which]], Parity(key, version, at, nbytes), factor, 0)
            continue
        (piece,) = [piece for piece in stripe.data if piece.node == which]
        start, stop = piece.start + at, min(piece.stop, piece.start + at + nbytes)
        done = 0
        for extent in section.extents(which, start, stop) if start < stop else ():
            wanted = Data(extent.rank, version, extent.offset, extent.nbytes)
            yield Part(section.positions[which], wanted, factor, done)
            done += extent.nbytes
