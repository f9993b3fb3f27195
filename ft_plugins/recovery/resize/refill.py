"""Fill a rank's slot with state of a previous size, from segments on all nodes, sent between the ranks.

Invariant: the slot is DIRTY until it is complete, then sealed with digests of its own like any captured version. The
segments of the previous size are only read. The host merges the small states of the previous ranks, and says whose own
state a rank takes over where replicas differ.

A rank sends its requests only to the ranks that can read what it needs; all ranks know only how many frames each
requests of whom, so what a rank receives and stores follows from its own ranges. In each round a rank sends and
receives one frame per partner, in the order of the requests, which bounds the memory. Ranges on the rank's own node are
copied without a message.

In: a `ResizePlan`, the manifest of this rank's slot. Out: a CLEAN slot of version `ResizePlan.now`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from ...base import faults
from ...collective import Collective, Transfers
from ...collective.transfers import spread
from ...errors import SegmentError
from ...snapshot.capture import codec, manifest
from ...snapshot.capture.manifest import Manifest
from ...snapshot.segment.claims import slot_to_rebuild
from ...snapshot.segment.segment import NOT_COMPUTED, Segment
from ...snapshot.segment.slots import Mark, SlotState, Version
from .previous_job import open_previous
from .previous_size import Coordinates, ResizePlan
from .reshard import plan_moves

Smalls = Sequence[Mapping[str, Any]]  # small states of previous ranks at this rank's place in the model, by rank
FRAME_BYTES = 4 << 20
_COUNT, _FIELD = np.dtype("<u4"), np.dtype("<u8")  # of a message
Bytes = npt.NDArray[np.uint8]


class TakingOver(Protocol):
    """What a host says of a resize."""

    def inherited(self, parts: Smalls) -> Sequence[int] | None:
        """The places in `parts` of the ranks whose own state this rank takes over; None if replicas are equal. Raises
        ResumeError."""

    def merged(self, parts: Smalls) -> dict[str, Any]:
        """The small state of this rank, from that of these ranks."""


class _PreviousSlots:
    """The planned version in the segments of this node, opened when they are needed."""

    def __init__(self, run_dir: Path, plan: ResizePlan) -> None:
        self._run_dir = run_dir
        self._plan = plan
        self._open: dict[int, tuple[Segment, int]] = {}

    def _slot(self, rank: int) -> tuple[Segment, int]:
        if rank not in self._open:
            segment = open_previous(self._run_dir, self._plan.world_size, rank)
            clean = [slot for slot in segment.slots() if slot.state is SlotState.CLEAN]
            indices = [slot.index for slot in clean if slot.version == self._plan.version]
            if not indices:
                raise SegmentError(
                    f"rank {rank} of {self._plan.world_size}: version {self._plan.version} is no longer in memory"
                )
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
    plan: ResizePlan, segment: Segment, target: Manifest, members: Sequence[Sequence[int]], collective: Collective,
    run_dir: Path, token: int, host: TakingOver,
) -> int:  # fmt: skip
    """Restore the planned state into a slot of `segment`, as `target` describes it. `members`: the ranks of each node.

    Returns the bytes of tensor data moved into this rank's slot. Every rank of the job calls. Raises ResumeError,
    SegmentError on all ranks.
    """
    own = collective.rank
    readable = {rank for rank, node in plan.holders.items() if own in members[node]}

    def reader(rank: int) -> int:
        """The rank of this job that reads the slot of `rank` for this one; the ranks of a node share the reads."""
        on_node = members[plan.holders[rank]]
        return own if rank in readable else on_node[(rank + own) % len(on_node)]

    with closing(_PreviousSlots(run_dir, plan)) as slots:
        sizes = _small_sizes(plan, readable, members, slots, collective)
        ranks = plan.ranks_of(target.coordinates)
        starts = np.cumsum([0, *(sizes[rank] for rank in ranks)]).tolist()
        joined: Bytes = np.empty(starts[-1], dtype=np.uint8)
        peers = _ranks_at(target.coordinates, collective)
        ranges = [PullRange(reader(r), r, 0, sizes[r], at) for r, at in zip(ranks, starts, strict=False)]
        pull(collective, ranges if own == peers[0] else [], slots.small, joined)
        with collective.transfers() as transfers:
            spread(transfers, own, peers[:1], peers[1:], joined)
        names = [f"rank {r} of {plan.world_size}, version {plan.version}" for r in ranks]
        parts = [joined[at : at + sizes[r]].tobytes() for r, at in zip(ranks, starts, strict=False)]
        smalls = [manifest.split(*part) for part in zip(parts, names, strict=True)]
        with collective.agreement():
            held = [manifest.read(encoded, name) for (encoded, _), name in zip(smalls, names, strict=True)]
            states = [codec.decode(state) for _, state in smalls]
            inherited = host.inherited(states)
            moves = plan_moves(held, target, None if inherited is None else {ranks[place] for place in inherited})
            taken_over = states if inherited is None else [states[place] for place in inherited]
            small = manifest.join(manifest.write(target), codec.encode(host.merged(taken_over)))
        index = slot_to_rebuild(segment)
        segment.dirty(index, plan.now, token)
        faults.reach("resize.filling", rank=own)
        ranges = [PullRange(reader(move.rank), move.rank, move.source, move.nbytes, move.target) for move in moves]
        pull(collective, ranges, slots.data, segment.data(index))
    _seal(segment, index, plan.now, token, small)
    for version in [slot.version for slot in segment.slots() if slot.version is not None]:
        # versions that were certified at this size before are older: they must not be preferred to the restored one
        segment.mark(version, plan.mark if version == plan.now else Mark.NONE)
    segment.header.completed = plan.completed
    collective.barrier()  # all ranks have their state: only then may the previous segments be removed
    return sum(move.nbytes for move in moves)


def _ranks_at(coordinates: Coordinates, collective: Collective) -> list[int]:
    """The ranks of this job at these coordinates in the model. They need the same small states: the first one collects
    them for all."""
    places = collective.gather(msgpack.packb(coordinates))
    return [rank for rank, place in enumerate(places) if place == msgpack.packb(coordinates)]


def _small_sizes(
    plan: ResizePlan, readable: set[int], members: Sequence[Sequence[int]], slots: _PreviousSlots,
    collective: Collective,
) -> dict[int, int]:  # fmt: skip
    """Bytes of the small state of every rank of the previous job, read by the first rank of its node."""
    mine = {rank for rank in readable if members[plan.holders[rank]][0] == collective.rank}
    with collective.agreement():
        own = [[rank, len(slots.small(rank))] for rank in sorted(mine)]
    return {rank: size for part in collective.gather(msgpack.packb(own)) for rank, size in msgpack.unpackb(part)}


def _seal(segment: Segment, index: int, version: Version, token: int, small: bytes) -> None:
    """Seal like a slot read from storage: without parity of other ranks' shares, which the trainer computes later."""
    data, table = segment.data(index), np.full(segment.shape.digests, NOT_COMPUTED, dtype=np.uint64)
    for number, (offset, nbytes) in enumerate(segment.data_ranges):
        table[number] = xxhash.xxh3_64_intdigest(data[offset : offset + nbytes].data)
    segment.write_small(index, small)
    segment.digests(index)[:] = table
    segment.set_cursor(index, None)
    segment.seal(index, version, token, small, table)


# ---- bytes from segments of other ranks ----


@dataclass(frozen=True)
class PullRange:
    """`nbytes` at `offset` of the state of `previous_rank`, read by rank `reader` of this job, go to `target` here."""

    reader: int
    previous_rank: int
    offset: int
    nbytes: int
    target: int


class _Requested(NamedTuple):
    """A frame that another rank requests."""

    previous_rank: int
    offset: int
    nbytes: int


def pull(collective: Collective, ranges: Sequence[PullRange], read: Callable[[int], Bytes], into: Bytes) -> None:
    """Copy all `ranges` to `into`. `read(previous_rank)` returns the bytes of a previous rank that this rank can read.

    Every rank of the job calls.
    """
    own = collective.rank
    receive: dict[int, list[PullRange]] = {}
    for one in ranges:
        if one.reader == own:
            into[one.target : one.target + one.nbytes] = read(one.previous_rank)[one.offset : one.offset + one.nbytes]
        else:
            receive.setdefault(one.reader, []).extend(_frames(one))
    counts = {reader: len(frames) for reader, frames in receive.items()}
    asked, rounds = _asked_of(own, collective.gather(_packed(counts)))
    with collective.transfers() as transfers:
        send = _exchange_requests(transfers, receive, asked)
        for number in range(rounds):
            _round(transfers, number, send, receive, read, into)


def _packed(counts: Mapping[int, int]) -> bytes:
    """By reader, the number of frames, as a message."""
    return np.array(list(counts.items()), dtype=_COUNT).tobytes()


def _asked_of(own: int, messages: Sequence[bytes]) -> tuple[dict[int, int], int]:
    """By rank, how many frames it requests of this one; and the number of rounds, the same on all ranks."""
    entries = np.frombuffer(b"".join(messages), dtype=_COUNT).reshape(-1, 2)
    ranks = np.repeat(np.arange(len(messages)), [len(message) // (2 * _COUNT.itemsize) for message in messages])
    here = entries[:, 0] == own
    asked = zip(ranks[here].tolist(), entries[here, 1].tolist(), strict=True)
    return dict(asked), int(entries[:, 1].max(initial=0))


def _exchange_requests(
    transfers: Transfers, receive: Mapping[int, Sequence[PullRange]], asked: Mapping[int, int]
) -> dict[int, list[_Requested]]:
    """Send each reader this rank's requests. Returns by rank what it requests of this one, in order."""
    leaving = {
        reader: np.array([(one.previous_rank, one.offset, one.nbytes) for one in frames], dtype=_FIELD).view(np.uint8)
        for reader, frames in receive.items()
    }
    arriving = {rank: np.empty((count, 3), dtype=_FIELD) for rank, count in asked.items()}
    transfers.swap(
        {reader: entries.reshape(-1) for reader, entries in leaving.items()},
        {rank: entries.reshape(-1).view(np.uint8) for rank, entries in arriving.items()},
    )
    return {rank: [_Requested(*entry) for entry in entries.tolist()] for rank, entries in arriving.items()}


def _frames(one: PullRange) -> list[PullRange]:
    return [
        PullRange(one.reader, one.previous_rank, one.offset + at, min(FRAME_BYTES, one.nbytes - at), one.target + at)
        for at in range(0, one.nbytes, FRAME_BYTES)
    ]


def _round(
    transfers: Transfers, number: int, send: Mapping[int, Sequence[_Requested]],
    receive: Mapping[int, Sequence[PullRange]], read: Callable[[int], Bytes], into: Bytes,
) -> None:  # fmt: skip
    outgoing = {
        rank: np.array(read(frames[number].previous_rank)[frames[number].offset :][: frames[number].nbytes])
        for rank, frames in send.items()
        if number < len(frames)
    }
    incoming = {
        rank: np.empty(frames[number].nbytes, dtype=np.uint8)
        for rank, frames in receive.items()
        if number < len(frames)
    }
    transfers.swap(outgoing, incoming)
    for rank, received in incoming.items():
        one = receive[rank][number]
        into[one.target : one.target + one.nbytes] = received
