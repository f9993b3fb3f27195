"""Puts a rank's slot back together on this node: fetched from the node that still holds it, or decoded from parity.

Invariant: the slot is DIRTY until every bucket of it fits the digest table that was copied whole when the version was
exchanged; then it is sealed, and restored like any other. Nothing is guessed: what does not fit is an error.

In: an exchange plan, which positions are lost, a reader per position. Out: a CLEAN slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from typing import Protocol

import msgpack
import numpy as np
import numpy.typing as npt

from .. import faults
from ..errors import ResumeError, SegmentError
from ..redundancy.parity import Rebuild, plan_decode
from ..redundancy.plan import ExchangePlan, Section
from ..snapshot.segment import Segment
from ..snapshot.slots import Version, choose
from .wire import PAYLOAD_LIMIT

Bytes = npt.NDArray[np.uint8]


class Reader(Protocol):
    """What the SMP at a position of the plan hands out of a version: another node's over the wire, or our own."""

    def data(self, rank: int, version: Version, offset: int, nbytes: int) -> Bytes: ...
    def parity(self, key: tuple[int, int, int], version: Version, at: int, nbytes: int) -> Bytes: ...
    def copy(self, rank: int, version: Version) -> bytes: ...
    def slot(self, rank: int, version: Version) -> bytes: ...


def fetch(segment: Segment, version: Version, token: int, holder: Reader, pool: Executor) -> None:
    """Take the slot over from a node that holds it whole. Raises what the reader raises, CorruptSlotError."""
    rank, nbytes = segment.rank, segment.shape.nbytes

    def read(offset: int) -> Bytes:
        return holder.data(rank, version, offset, min(PAYLOAD_LIMIT, nbytes - offset))

    _write(segment, version, token, holder.slot(rank, version), read, pool)


def decode(
    segment: Segment,
    version: Version,
    token: int,
    plan: ExchangePlan,
    lost: Collection[int],
    readers: Mapping[int, Reader],
    pool: Executor,
) -> None:
    """Compute the slot from parity. `lost` are the positions whose data cannot be read, `readers` those that can.

    Raises ResumeError when more is lost than parity makes up for, what the readers raise, CorruptSlotError.
    """
    rank = segment.rank
    section = plan.section_of_rank[rank]
    own = section.positions.index(plan.position_of_rank[rank])
    gone = [node for node, position in enumerate(section.positions) if position in set(lost)]
    needed = {found.stripe: found for found in plan_decode(section.placement, gone) if found.wanted == ("data", own)}
    ahead = 0  # bytes of the node's stream before this rank's
    for extent in section.streams[own]:
        if extent.rank == rank:
            break
        ahead += extent.nbytes
    block = section.placement.block
    pieces = {piece.start: (stripe.index, piece) for stripe in section.placement.stripes for piece in stripe.data
              if piece.node == own and piece.stop > piece.start}  # fmt: skip

    def read(offset: int) -> Bytes:
        """Bytes of the slot from `offset` on, to the end of a frame or a block."""
        at, stop = ahead + offset, ahead + min(offset + PAYLOAD_LIMIT, segment.shape.nbytes)
        found = np.zeros(stop - at, dtype=np.uint8)
        done = at
        while done < stop:
            stripe, piece = pieces[done // block * block]
            end = min(stop, piece.stop)
            _combine(found[done - at : end - at], needed[stripe], section, done - piece.start, readers, version)
            done = end
        return found

    copy = _copy_from_any(plan, rank, version, readers)
    _write(segment, version, token, copy, read, pool)


def _combine(
    target: Bytes, rebuild: Rebuild, section: Section, at: int, readers: Mapping[int, Reader], version: Version
) -> None:
    """Add up the sources of `len(target)` bytes, `at` from the start of their blocks."""
    from ..redundancy import kernels  # here: numba takes a second to import

    stripe = section.placement.stripes[rebuild.stripe]
    for kind, which, factor in rebuild.sources:
        if kind == "parity":
            holder = readers[section.positions[stripe.parity[which]]]
            part = holder.parity((section.index, stripe.index, which), version, at, len(target))
            kernels.scale_xor_into(target, part, factor)
            continue
        (piece,) = [piece for piece in stripe.data if piece.node == which]
        start, stop = piece.start + at, min(piece.stop, piece.start + at + len(target))
        done = 0
        for extent in section.extents(which, start, stop) if start < stop else ():
            part = readers[section.positions[which]].data(extent.rank, version, extent.offset, extent.nbytes)
            kernels.scale_xor_into(target[done : done + extent.nbytes], part, factor)
            done += extent.nbytes


def _copy_from_any(plan: ExchangePlan, rank: int, version: Version, readers: Mapping[int, Reader]) -> bytes:
    """The rank's small state and digest table, from one of those that keep a copy."""
    problems = []
    for position in plan.copy_holders(rank):
        if position in readers:
            try:
                return readers[position].copy(rank, version)
            except SegmentError as error:
                problems.append(str(error))
    raise ResumeError(
        f"rank {rank}: no node holds a copy of the small state of version {version} "
        f"({'; '.join(problems) or 'those that did are lost'})"
    )


def _write(
    segment: Segment, version: Version, token: int, copy: bytes, read: Callable[[int], Bytes], pool: Executor
) -> None:
    """Write what `read` gives into a slot, frame by frame, verify it against the copied digests, and seal it."""
    small, table = msgpack.unpackb(copy)
    digests = np.frombuffer(table, dtype=np.uint64)
    if len(digests) != segment.shape.buckets:
        raise ResumeError(
            f"rank {segment.rank}: version {version} has {len(digests)} buckets, this segment {segment.shape.buckets}: "
            "the state was laid out otherwise"
        )
    index = choose(segment.slots())
    segment.dirty(index, version, token)
    data = segment.data(index)
    starts = range(0, segment.shape.nbytes, PAYLOAD_LIMIT)
    for offset, part in zip(starts, pool.map(read, starts), strict=True):
        faults.reach("rebuild.frame", rank=segment.rank, at=offset)
        data[offset : offset + len(part)] = part
    segment.write_small(index, small)
    segment.digests(index)[:] = digests
    segment.verify(index)
    segment.set_cursor(index, None)
    segment.seal(index, version, token, small, digests)
