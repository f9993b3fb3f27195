"""Plan the rebuild of a slot: for each frame, which bytes of which node, with which factor. Pure.

Invariant: the frames cover the slot once, in order; none is longer than a payload. The bytes of the slot are the sum
over GF(256) of factor * bytes of a frame's parts; a part with fewer bytes than its frame is padded with zeros. A frame
ends at a bucket boundary of the parity store that it is decoded from, so that SMP verifies one bucket per frame, and
each bucket once. Parity that ranks computed themselves is read like bytes of a slot that follow its data.

In: an exchange plan and the lost positions, or where the slot lies whole. Out: `Frame`s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...redundancy.exchange_plan import ExchangePlan
from ...redundancy.parity import StripeRebuild, plan_decode
from ...redundancy.sections import Encoding, Section
from ...snapshot.segment.slots import Version
from ...transport.frame_codec import PAYLOAD_LIMIT


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

    If any part is as long as the frame and has factor 1, the first part is such a base: the others are added to it.
    """

    offset: int
    nbytes: int
    parts: tuple[Part, ...]

    @property
    def has_base(self) -> bool:
        """Whether the first part is a base; if not, all parts are added to zeros."""
        return bool(self.parts) and _may_be_base(self.parts[0], self.nbytes)


def _may_be_base(part: Part, nbytes: int) -> bool:
    return part.factor == 1 and part.wanted.nbytes == nbytes


def copied(rank: int, version: Version, nbytes: int, position: int) -> Iterator[Frame]:
    """The frames of a slot that lies whole at `position`."""
    for at in range(0, nbytes, PAYLOAD_LIMIT):
        size = min(PAYLOAD_LIMIT, nbytes - at)
        yield Frame(at, size, (Part(position, Data(rank, version, at, size), 1, 0),))


def decoded(plan: ExchangePlan, rank: int, version: Version, lost: Collection[int]) -> Iterator[Frame]:
    """The frames of a slot that is computed from parity, without the positions `lost`. The parity that the rank held
    itself is not among them: it computes that again from its tensors.

    Raises ResumeError if more is lost than parity can replace.
    """
    sections = plan.recovery_sections(rank, lost) or plan.sections_of_rank[rank]  # None: decoding raises the error
    regions = sorted(_regions(plan, rank, sections), key=lambda region: region.offset)
    rebuilds = {section.index: _needed(plan, section, lost) for section in sections}
    return _decoded(plan, version, regions, rebuilds)


@dataclass(frozen=True)
class _Region:
    """Bytes `offset .. offset + nbytes` of a slot, which are those from `at` on of a node's stream."""

    offset: int
    nbytes: int
    section: Section
    node: int
    at: int


def _regions(plan: ExchangePlan, rank: int, sections: Sequence[Section]) -> Iterator[_Region]:
    """The parts of a rank's slot that belong to `sections`."""
    position = plan.position_of_rank[rank]
    for section in sections:
        node, at = section.positions.index(position), 0
        for extent in section.streams[node]:
            if extent.rank == rank:
                yield _Region(extent.offset, extent.nbytes, section, node, at)
            at += extent.nbytes


def _needed(
    plan: ExchangePlan, section: Section, lost: Collection[int]
) -> dict[tuple[int, tuple[str, int]], StripeRebuild]:
    """How each block of a section that lay at a lost position is computed, by stripe and block."""
    lost_nodes = [node for node, position in enumerate(section.positions) if position in set(lost)]
    return {(one.stripe, one.wanted): one for one in plan_decode(section.placement, lost_nodes)}


def _decoded(
    plan: ExchangePlan,
    version: Version,
    regions: Iterable[_Region],
    rebuilds: Mapping[int, Mapping[tuple[int, tuple[str, int]], StripeRebuild]],
) -> Iterator[Frame]:
    for region in regions:
        section, needed = region.section, rebuilds[region.section.index]
        blocks = {piece.start: (stripe.index, piece) for stripe in section.placement.stripes for piece in stripe.data
                  if piece.node == region.node and piece.stop > piece.start}  # fmt: skip
        done, end = region.at, region.at + region.nbytes
        while done < end:
            stripe, piece = blocks[done // section.placement.block * section.placement.block]
            rebuild, at = needed[stripe, ("data", region.node)], done - piece.start
            which = next((which for kind, which, _ in rebuild.sources if kind == "parity"), 0)
            area = plan.area_of.get((section.index, rebuild.stripe, which))  # None: it lies in slots
            in_bucket = (area.offset + at if area else 0) % PAYLOAD_LIMIT
            stop = min(end, piece.stop, done + PAYLOAD_LIMIT - in_bucket)
            parts = _parts(plan, section, rebuild, version, at, stop - done)
            yield _base_first(region.offset + done - region.at, stop - done, parts)
            done = stop


def _base_first(offset: int, nbytes: int, parts: Iterable[Part]) -> Frame:
    return Frame(offset, nbytes, tuple(sorted(parts, key=lambda part: not _may_be_base(part, nbytes))))


def _parts(
    plan: ExchangePlan, section: Section, rebuild: StripeRebuild, version: Version, at: int, nbytes: int
) -> Iterator[Part]:
    """The sources of `nbytes` bytes, `at` from the start of their blocks."""
    stripe = section.placement.stripes[rebuild.stripe]
    for kind, which, factor in rebuild.sources:
        if kind == "parity":
            position = section.positions[stripe.parity_nodes[which]]
            if section.encoding is Encoding.EXCHANGED:
                yield Part(position, Parity((section.index, stripe.index, which), version, at, nbytes), factor, 0)
                continue
            for part in plan.parts_of_stripe[section.index, stripe.index]:
                low, high = max(part.start, at), min(part.stop, at + nbytes)
                if low < high:
                    wanted = Data(part.rank, version, part.offset + low - part.start, high - low)
                    yield Part(position, wanted, factor, low - at)
            continue
        (piece,) = [piece for piece in stripe.data if piece.node == which]
        start, stop = piece.start + at, min(piece.stop, piece.start + at + nbytes)
        done = 0
        for extent in section.extents(which, start, stop) if start < stop else ():
            wanted = Data(extent.rank, version, extent.offset, extent.nbytes)
            yield Part(section.positions[which], wanted, factor, done)
            done += extent.nbytes
