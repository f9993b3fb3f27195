"""Fills a rank's slot with state of another data-parallel size: from former segments on all nodes, through the ranks.

Invariant: the slot is DIRTY until all of it is there, then sealed with digests of its own, as any captured version; the
former segments are only read. The small state is the former replicas', merged by the host.

In: a `Takeover`, what lies where in this rank's slot. Out: a CLEAN slot of version `Takeover.now`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash

from .. import faults
from ..collective import Collective
from ..errors import SegmentError
from ..snapshot import codec, manifest
from ..snapshot.manifest import Manifest
from ..snapshot.segment import NOT_COMPUTED, Segment
from ..snapshot.slots import Mark, SlotState, Version, choose
from .pull import Bytes, Wanted, pull
from .reshard import plan_moves
from .takeover import Takeover, open_former

Merge = Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]


class _Former:
    """The former segments of this node, opened as they are needed."""

    def __init__(self, run_dir: Path, found: Takeover) -> None:
        self._run_dir = run_dir
        self._found = found
        self._open: dict[int, tuple[Segment, int]] = {}

    def _slot(self, rank: int) -> tuple[Segment, int]:
        if rank not in self._open:
            segment = open_former(self._run_dir, self._found.world_size, rank)
            clean = [slot for slot in segment.slots() if slot.state is SlotState.CLEAN]
            indices = [slot.index for slot in clean if slot.version == self._found.version]
            if not indices:
                raise SegmentError(f"former rank {rank}: version {self._found.version} is not in memory any more")
            self._open[rank] = segment, indices[0]
        return self._open[rank]

    def data(self, rank: int) -> Bytes:
        segment, index = self._slot(rank)
        return segment.data(index)

    def small(self, rank: int) -> Bytes:
        segment, index = self._slot(rank)
        return np.frombuffer(segment.small(index), dtype=np.uint8)

    def close(self) -> None:
        for segment, _ in self._open.values():
            segment.close()
        self._open.clear()


def refill(
    found: Takeover,
    segment: Segment,
    now: Manifest,
    members: Sequence[Sequence[int]],
    collective: Collective,
    run_dir: Path,
    token: int,
    merged: Merge,
) -> int:
    """Take the state over into a slot of `segment`; returns the bytes. `members` are the ranks of each node.

    Every rank of the job calls. Raises ResumeError, SegmentError, on all ranks alike.
    """
    own = collective.rank
    mine = {former for former, node in found.holders.items() if own in members[node]}

    def holder(former: int) -> int:
        on_node = members[found.holders[former]]
        return own if former in mine else on_node[(former + own) % len(on_node)]

    with closing(_Former(run_dir, found)) as former:
        sizes = _sizes(found, mine, members, former, collective)
        ranks = found.of_place(now.place)
        starts = np.cumsum([0, *(sizes[rank] for rank in ranks)]).tolist()
        smalls: Bytes = np.empty(starts[-1], dtype=np.uint8)
        wanted = [Wanted(holder(r), r, 0, sizes[r], at) for r, at in zip(ranks, starts, strict=False)]
        pull(collective, wanted, former.small, smalls)
        told = [manifest.split(smalls[at : at + sizes[r]].tobytes()) for r, at in zip(ranks, starts, strict=False)]
        with collective.agreement():
            moves = plan_moves([manifest.read(encoded) for encoded, _ in told], now)
        index = choose(segment.slots())
        segment.dirty(index, found.now, token)
        faults.reach("resize.filling", rank=own)
        wanted = [Wanted(holder(move.rank), move.rank, move.source, move.nbytes, move.target) for move in moves]
        pull(collective, wanted, former.data, segment.data(index))
    small = manifest.join(manifest.write(now), codec.encode(merged([codec.decode(state) for _, state in told])))
    _seal(segment, index, found.now, token, small)
    for version in [slot.version for slot in segment.slots() if slot.version is not None]:
        # what was certified at this size before is older, and goes first no more
        segment.mark(version, found.mark if version == found.now else Mark.NONE)
    segment.completed = found.completed
    collective.barrier()  # all have it: only then may what it was made of be given up
    return sum(move.nbytes for move in moves)


def _sizes(
    found: Takeover, mine: set[int], members: Sequence[Sequence[int]], former: _Former, collective: Collective
) -> dict[int, int]:
    """Bytes of every former rank's small state; one rank of each node says so."""
    firsts = {rank for rank in mine if members[found.holders[rank]][0] == collective.rank}
    with collective.agreement():
        own = [[rank, len(former.small(rank))] for rank in sorted(firsts)]
    return {rank: size for part in collective.gather(msgpack.packb(own)) for rank, size in msgpack.unpackb(part)}


def _seal(segment: Segment, index: int, version: Version, token: int, small: bytes) -> None:
    """As a slot that was read from storage: without the parity of other ranks' shares, which the trainer computes."""
    data, table = segment.data(index), np.full(segment.shape.digests, NOT_COMPUTED, dtype=np.uint64)
    for number, (offset, nbytes) in enumerate(segment.data_ranges):
        table[number] = xxhash.xxh3_64_intdigest(data[offset : offset + nbytes].data)
    segment.write_small(index, small)
    segment.digests(index)[:] = table
    segment.set_cursor(index, None)
    segment.seal(index, version, token, small, table)
