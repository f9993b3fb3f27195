"""Copy byte ranges of previous segments from the ranks that can read them to the ranks that need them.

Invariant: every rank knows the requests of all ranks, so messages need no headers. In each round a rank sends and
receives one frame per partner, in the order of the requests. That bounds the memory: one frame per partner. Ranges on
the rank's own node are copied without a message.

In: the `PullRange`s of each rank, a function that reads a segment of this node. Out: bytes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

import msgpack
import numpy as np
import numpy.typing as npt

from ...collective import Collective, Transfers

FRAME_BYTES = 4 << 20

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PullRange:
    """`nbytes` at `offset` of the state of `previous_rank`, read by rank `reader` of this job, go to `target` here."""

    reader: int
    previous_rank: int
    offset: int
    nbytes: int
    target: int


def pull(collective: Collective, ranges: Sequence[PullRange], read: Callable[[int], Bytes], into: Bytes) -> None:
    """Copy all `ranges` to `into`. `read(previous_rank)` returns the bytes of a previous rank that this rank can read.

    Every rank of the job calls.
    """
    own = collective.rank
    for one in ranges:
        if one.reader == own:
            into[one.target : one.target + one.nbytes] = read(one.previous_rank)[one.offset : one.offset + one.nbytes]
    frames = [frame for one in ranges if one.reader != own for frame in _frames(one)]
    requests = [msgpack.unpackb(part) for part in collective.gather(msgpack.packb([astuple(one) for one in frames]))]
    receive: dict[int, list[PullRange]] = {}
    for one in frames:
        receive.setdefault(one.reader, []).append(one)
    send: dict[int, list[PullRange]] = {}
    rounds = 0
    for rank, requested in enumerate(requests):
        counts: dict[int, int] = {}
        for entry in requested:
            one = PullRange(*entry)
            counts[one.reader] = counts.get(one.reader, 0) + 1
            if one.reader == own:
                send.setdefault(rank, []).append(one)
        rounds = max([rounds, *counts.values()])
    with collective.transfers() as transfers:
        for number in range(rounds):
            _round(transfers, number, send, receive, read, into)


def _frames(one: PullRange) -> list[PullRange]:
    return [
        PullRange(one.reader, one.previous_rank, one.offset + at, min(FRAME_BYTES, one.nbytes - at), one.target + at)
        for at in range(0, one.nbytes, FRAME_BYTES)
    ]


def _round(
    transfers: Transfers,
    number: int,
    send: Mapping[int, Sequence[PullRange]],
    receive: Mapping[int, Sequence[PullRange]],
    read: Callable[[int], Bytes],
    into: Bytes,
) -> None:
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
