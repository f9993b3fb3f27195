"""Bytes of former segments, brought from the node that has them to the ranks that need them, over the ranks' own group.

Invariant: every rank knows all that is asked of whom, so that messages between two ranks need no words: in each round a
rank sends and receives one frame for each of its partners, in the order in which they were asked for. The memory that
this takes is a frame for each partner. What is on the own node is read there, without a message.

In: `Wanted`s of each rank, who reads them out. Out: bytes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

import msgpack
import numpy as np
import numpy.typing as npt

from ..collective import Collective

FRAME_BYTES = 4 << 20

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Wanted:
    """`nbytes` at `offset` of what `holder`, a rank of this job, can read of a former rank; to lie at `target` here."""

    holder: int
    former: int
    offset: int
    nbytes: int
    target: int


def pull(
    collective: Collective, wanted: Sequence[Wanted], read: Callable[[int], Bytes], into: Bytes
) -> None:
    """Have all that is `wanted` in `into`. `read(former)` gives the bytes of a former rank that this rank holds.

    Every rank of the job calls.
    """
    own = collective.rank
    for one in wanted:
        if one.holder == own:
            into[one.target : one.target + one.nbytes] = read(one.former)[one.offset : one.offset + one.nbytes]
    frames = [frame for one in wanted if one.holder != own for frame in _frames(one)]
    asked = [msgpack.unpackb(part) for part in collective.gather(msgpack.packb([astuple(one) for one in frames]))]
    receive: dict[int, list[Wanted]] = {}
    for one in frames:
        receive.setdefault(one.holder, []).append(one)
    send: dict[int, list[Wanted]] = {}
    longest = 0
    for rank, theirs in enumerate(asked):
        counts: dict[int, int] = {}
        for entry in theirs:
            one = Wanted(*entry)
            counts[one.holder] = counts.get(one.holder, 0) + 1
            if one.holder == own:
                send.setdefault(rank, []).append(one)
        longest = max([longest, *counts.values()])
    for number in range(longest):
        _round(collective, number, send, receive, read, into)


def _frames(one: Wanted) -> list[Wanted]:
    return [
        Wanted(one.holder, one.former, one.offset + at, min(FRAME_BYTES, one.nbytes - at), one.target + at)
        for at in range(0, one.nbytes, FRAME_BYTES)
    ]


def _round(
    collective: Collective,
    number: int,
    send: Mapping[int, Sequence[Wanted]],
    receive: Mapping[int, Sequence[Wanted]],
    read: Callable[[int], Bytes],
    into: Bytes,
) -> None:
    outgoing = {
        rank: np.array(read(theirs[number].former)[theirs[number].offset :][: theirs[number].nbytes])
        for rank, theirs in send.items()
        if number < len(theirs)
    }
    incoming = {
        rank: np.empty(mine[number].nbytes, dtype=np.uint8) for rank, mine in receive.items() if number < len(mine)
    }
    collective.swap(outgoing, incoming)
    for rank, arrived in incoming.items():
        one = receive[rank][number]
        into[one.target : one.target + one.nbytes] = arrived
