"""Bulk data between ranks, over connections of their own that exist as long as a restore needs them.

Invariant: bytes arrive as they were sent, in authenticated units, straight into their place; what a failed transfer
leaves there must not be used. A connection carries bytes in one direction. A rank connects to those that it sends to,
and a replica set passes shares around a ring, so the connections of a rank do not grow with the set.

Bytes that some ranks have are copied to those that lack them in rounds in which the number of holders doubles
(`spread`). All ranks that take part know who has the bytes, so no message needs a header; other ranks do not call.

In: where each rank listens, a key of this incarnation. Out: filled buffers; ProtocolError for altered bytes, a lost
rank or a timeout.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ..errors import ProtocolError
from ..transport.frame_codec import FrameBounds, Message
from ..transport.framed import Link
from .meeting import RankDoor, dial

PART_BYTES = 32 << 20  # of a share, passed around at a time: bounds the memory of a restore

_BOUNDS = FrameBounds(64, 1 << 48)  # bytes of a payload: what is received has to be as long as its place

Bytes = npt.NDArray[np.uint8]


class Transfers:
    """Connections of one rank to others, until the end of a `with` block."""

    def __init__(
        self, rank: int, endpoints: Sequence[tuple[str, int]], door: RankDoor | None, key: bytes, seconds: float
    ) -> None:
        """`endpoints`: where each rank listens; `door`: where this one does, for those that know `key`; None in a job
        of one rank. `seconds` bounds each wait."""
        self._rank = rank
        self._endpoints = endpoints
        self._door = door
        self._key = key
        self._seconds = seconds
        self._to: dict[int, Link] = {}
        self._from: dict[int, Link] = {}

    def __enter__(self) -> Transfers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._door is not None:
            self._door.close()
        for link in (*self._to.values(), *self._from.values()):
            link.connection.close()

    def swap(self, send: Mapping[int, Bytes], receive: Mapping[int, Bytes]) -> None:
        """Send bytes to ranks and receive from ranks, by rank; returns when all of `receive` is filled.

        Both ranks of a pair call, in the same order and with equal sizes; no other rank takes part. Raises
        ProtocolError.
        """
        until = time.monotonic() + self._seconds
        moving: dict[int, tuple[int, Callable[[], bool]]] = {}  # by descriptor: rank, and what moves bytes
        poller = select.poll()
        for rank, data in sorted(send.items()):
            link = self._connected(rank, until)
            link.push({}, data.data.cast("B"))
            moving[link.connection.fileno()] = rank, _sending(link)
            poller.register(link.connection, select.POLLOUT)
        for rank, into in sorted(receive.items()):
            link = self._accepted(rank, until)
            moving[link.connection.fileno()] = rank, _receiving(link, into.data.cast("B"))
            poller.register(link.connection, select.POLLIN)
        while moving:
            ready = poller.poll(1000 * self._seconds)
            if not ready:
                ranks = ", ".join(str(rank) for rank, _ in moving.values())
                raise ProtocolError(f"rank {self._rank}: no byte passed to or from rank {ranks} in {self._seconds:g} s")
            for descriptor, _ in ready:
                if self._advance(*moving[descriptor]):
                    poller.unregister(descriptor)
                    del moving[descriptor]

    def _advance(self, rank: int, move: Callable[[], bool]) -> bool:
        try:
            return move()
        except OSError as error:
            raise ProtocolError(f"rank {self._rank}: rank {rank} was lost during a transfer ({error})") from error
        except ProtocolError as error:
            raise ProtocolError(
                f"rank {self._rank}: rejected data of rank {rank}: {error}. Another process takes part in the job's "
                "traffic; make sure that only the job's nodes reach its ports, then start the job again"
            ) from error

    def exchange_shares(
        self, replicas: Sequence[int], shares: Sequence[tuple[int, int]], own: Bytes
    ) -> Iterator[tuple[int, Bytes]]:
        """All-gather a replica set's byte stream from its members' shares, in parts of bounded size.

        `shares[i]` is the range (start, stop) that `replicas[i]` holds, `own` this rank's bytes. Yields (offset in the
        stream, bytes) until all of it has been received; the bytes are valid until the next one. Members of the set
        call together. Raises ProtocolError.
        """
        count, place = len(replicas), list(replicas).index(self._rank)
        following, previous = replicas[(place + 1) % count], replicas[place - 1]
        for at in range(0, max(stop - start for start, stop in shares), PART_BYTES):
            sizes = [max(0, min(PART_BYTES, stop - start - at)) for start, stop in shares]
            piece = np.ascontiguousarray(own[at : at + sizes[place]])
            if sizes[place]:
                yield shares[place][0] + at, piece
            for step in range(1, count):
                source = (place - step) % count  # whose piece arrives now; that of the one after it is passed on
                arriving = np.empty(sizes[source], dtype=np.uint8)
                self.swap(
                    {following: piece} if len(piece) else {}, {previous: arriving} if len(arriving) else {}
                )  # fmt: skip
                if len(arriving):
                    yield shares[source][0] + at, arriving
                piece = arriving

    def _connected(self, rank: int, until: float) -> Link:
        assert self._door is not None
        if rank not in self._to:
            where, me = self._endpoints[rank], self._door.me
            connection, _, channel, _ = dial(where, self._key, me, rank, until, lambda connection: None)
            self._to[rank] = Link(connection, channel, _BOUNDS, self._seconds)
        return self._to[rank]

    def _accepted(self, rank: int, until: float) -> Link:
        assert self._door is not None
        while rank not in self._from:
            connection, sender, channel = self._door.next(until, set(range(len(self._endpoints))) - {self._rank})
            if (before := self._from.get(sender)) is not None:  # cut off before it had sent anything
                before.connection.close()
            self._from[sender] = Link(connection, channel, _BOUNDS, self._seconds)
        return self._from[rank]


def _sending(link: Link) -> Callable[[], bool]:
    """Sends what the connection takes now, and returns whether that was all. Raises OSError."""

    def move() -> bool:
        link.write()
        return not link.waiting

    return move


def _receiving(link: Link, into: memoryview) -> Callable[[], bool]:
    """Receives what has arrived, and returns whether that was all. Raises ProtocolError, OSError."""

    def place(message: Message, nbytes: int) -> memoryview:
        if nbytes != len(into):
            raise ProtocolError(f"expected {len(into)} bytes, found {nbytes}")
        return into

    def move() -> bool:
        for message, payload in link.read():
            return len(payload) == len(into) or bool(place(message, len(payload)))
        return False

    link.decoder.room = place
    return move


# ---- to many ranks ----


def rounds_of(have: Sequence[int], lack: Sequence[int]) -> list[list[tuple[int, int]]]:
    """By round, the (sender, receiver) of each copy. Pure."""
    holders, waiting, rounds = list(have), list(lack), list[list[tuple[int, int]]]()
    while waiting and holders:
        pairs = list(zip(holders, waiting, strict=False))
        rounds.append(pairs)
        holders += waiting[: len(pairs)]
        waiting = waiting[len(pairs) :]
    return rounds


def spread(transfers: Transfers, rank: int, have: Sequence[int], lack: Sequence[int], held: Bytes) -> None:
    """Fill `held` on the ranks that `lack` it with what it is on those that `have` it. Each `rank` of these calls.

    Raises ProtocolError for altered bytes.
    """
    for pairs in rounds_of(have, lack):
        for sender, receiver in pairs:
            if sender == rank:
                transfers.swap({receiver: held}, {})
            elif receiver == rank:
                transfers.swap({}, {sender: held})
