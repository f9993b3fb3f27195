"""Compare replicas: digests of the bytes from which one rank computed parity, with what another rank captured.

Invariant: bytes are compared only if both sides are sealed captures of one version, and while the slot is pinned. A
difference means silent corruption of one of the two replicas; parity made from them is useless.

    payload = for each check 4 words of 8 bytes: rank that captured the bytes, offset and bytes in its slot, digest

In: the checks of a plan, digest tables; payloads from other nodes. Out: payloads; which checks of a payload differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ...errors import ProtocolError
from ...redundancy.exchange_plan import Check, ExchangePlan
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import SlotState, Version

_WORDS = 4
CHECKS = 4096  # in a payload
SOURCE_BYTES = 64 << 20  # that the receiver of a payload digests, unless one check has more: it has to answer soon

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Difference:
    """Two replicas that differ in a version, detected through a bucket of parity."""

    version: Version
    check: Check

    def __str__(self) -> str:
        keeper, source = self.check.keeper, self.check.source
        return (
            f"ranks {keeper} and {source.rank} should hold the same bytes, but differ in version {self.version}: "
            f"within {source.nbytes} bytes at {source.offset} of the share of rank {source.rank}, bucket "
            f"{self.check.bucket} of rank {keeper}; one of the two replicas is corrupt"
        )


def by_target(plan: ExchangePlan, ranks: Sequence[int], segments: Mapping[int, Segment]) -> dict[int, list[Check]]:
    """The checks of `ranks`, by the position that holds the other side. Raises ProtocolError if the layout of a slot
    differs from the plan's."""
    checks: dict[int, list[Check]] = {}
    for rank in ranks:
        count = 0
        for check in plan.checks(rank, segments[rank].ranges):
            checks.setdefault(plan.position_of_rank[check.source.rank], []).append(check)
            count += 1
        if count != segments[rank].shape.checks:
            raise ProtocolError(
                f"rank {rank}: its slots have {segments[rank].shape.checks} digests of parity sources, the plan has "
                f"{count}: trainer and SMP disagree about the nodes of the job"
            )
    return checks


def batches(checks: Sequence[Check]) -> Iterator[Sequence[Check]]:
    """The checks in order, split so that each batch fits one payload."""
    first, nbytes = 0, 0
    for place, check in enumerate(checks):
        if place > first and (place - first == CHECKS or nbytes + check.source.nbytes > SOURCE_BYTES):
            yield checks[first:place]
            first, nbytes = place, 0
        nbytes += check.source.nbytes
    if first < len(checks):
        yield checks[first:]


def payload(checks: Sequence[Check], tables: Mapping[int, npt.NDArray[np.uint64]]) -> Bytes:
    """The request to the other side; `tables` are the digest tables of the keepers."""
    words = [(c.source.rank, c.source.offset, c.source.nbytes, int(tables[c.keeper][c.entry])) for c in checks]
    return np.array(words, dtype="<u8").reshape(-1).view(np.uint8)


def mismatched(segments: Mapping[int, Segment], version: Version, checks: Bytes) -> list[int] | None:
    """Which checks of a payload do not match the bytes here; None while `version` is not pinned here.

    Raises ProtocolError for a payload that fits no plan.
    """
    if len(checks) % (8 * _WORDS) or len(checks) > 8 * _WORDS * CHECKS:
        raise ProtocolError(f"{len(checks)} bytes are no valid checks; expected at most {CHECKS} of {8 * _WORDS} bytes")
    entries = checks.view("<u8").reshape(-1, _WORDS).tolist()
    if len(entries) > 1 and sum(entry[2] for entry in entries) > SOURCE_BYTES:
        raise ProtocolError(f"checks of more than {SOURCE_BYTES} bytes at a time")
    for rank, offset, nbytes, _ in entries:
        if rank not in segments or offset + nbytes > segments[rank].shape.data_nbytes:
            raise ProtocolError(f"{nbytes} bytes at {offset} of rank {rank} are not in slots of this node")
    ranks = {entry[0] for entry in entries}
    pinned = {rank: _pinned(segments[rank], version) for rank in ranks}
    places = []
    for place, (rank, offset, nbytes, digest) in enumerate(entries):
        index = pinned[rank]
        if index is None:
            return None
        area = segments[rank].data(index)[offset : offset + nbytes]
        if xxhash.xxh3_64_intdigest(area.data) != digest:
            places.append(place)
    was_unpinned = any(_pinned(segments[rank], version) != pinned[rank] for rank in ranks)  # during the comparison
    return None if was_unpinned else places


def _pinned(segment: Segment, version: Version) -> int | None:
    """The slot that holds `version`, if it is pinned."""
    for index in range(segment.shape.slots):
        if segment.pins(index):
            slot = segment.slot(index)
            if slot.version == version and slot.state is SlotState.CLEAN:
                return slot.index
    return None
