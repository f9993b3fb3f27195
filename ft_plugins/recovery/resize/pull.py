"""Copy byte ranges of previous segments from the ranks that can read them to the ranks that need them.

Invariant: a rank sends its requests only to the ranks that can read what it needs; all ranks know only how many frames
each requests of whom, so what a rank receives and stores follows from its own ranges. In each round a rank sends and
receives one frame per partner, in the order of the requests. That bounds the memory: one frame per partner. Ranges on
the rank's own node are copied without a message.

In: the `PullRange`s of each rank, a function that reads a segment of this node. Out: bytes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...collective import Collective, Transfers

FRAME_BYTES = 4 << 20
_COUNT, _FIELD = np.dtype("<u4"), np.dtype("<u8")  # of a message

Bytes = npt.NDArray[np.uint8]


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
