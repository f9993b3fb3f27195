"""Exchange the timelines of a job's ranks: what all need to know goes to all, a timeline to those whose plans read it.

    summary     to all ranks: failure, reductions, facts of the copies, digest and length of the timeline
    timeline    to its readers, over connections between these ranks, in the background; equal ones once
                if any rank does not know its readers, because it sends no copies: to all ranks

Invariant: every rank decides by the same summaries how timelines are sent, so all do the same. The step path waits only
for a rank that is late.

In: this rank's timeline, the summaries of all. Out: the timelines that this rank reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ...errors import FtError, ProtocolError
from .timeline_readers import TimelineReaders, receivers, sources

WAIT_SECONDS = 30.0  # for a timeline: training waits for it
TIMELINE_LIMIT = 64 << 20  # bytes of a timeline: a million spans

Bytes = npt.NDArray[np.uint8]


class GatherResult(Protocol):
    """A gather in progress."""

    def result(self) -> list[bytes]:
        """Wait for the payloads of all ranks, by rank."""


class OpenDoor(Protocol):
    """Where this rank listens for transfers."""

    endpoint: tuple[str, int]

    def close(self) -> None:
        """Stop listening."""


class Swaps(Protocol):
    """Connections between some ranks."""

    def swap(self, send: Mapping[int, Bytes], receive: Mapping[int, Bytes]) -> None:
        """Send bytes to ranks and receive from ranks; returns when all have arrived."""


class Gathers(Protocol):
    """The collective, as a profile uses it."""

    def start_gather(self, payload: bytes) -> GatherResult:
        """Start to gather the payloads of all ranks."""

    def listen(self, purpose: str) -> OpenDoor | None:
        """Listen for transfers; None in a job of one rank. Raises ConfigError."""

    def through(
        self, door: Any, endpoints: Sequence[tuple[str, int]], most_seconds: float
    ) -> AbstractContextManager[Swaps]:
        """Transfers between ranks that listen at `endpoints`, this one at `door`; no wait takes longer."""


class RankSummary(NamedTuple):
    """What a rank sends to all others."""

    failure: str = ""
    left_out: Sequence[int] = ()  # iterations
    reductions: Sequence[float] = ()  # seconds of each
    facts: Sequence[Any] = ()  # of a sender
    nbytes: int = 0  # of its timeline; 0 if nothing was recorded
    digest: int = 0
    endpoint: Sequence[Any] = ()  # where it listens for timelines; empty if all have to be sent to all ranks


class TimelineExchange:
    """One rank's part in the exchange for one profile."""

    def __init__(self, rank: int, collective: Gathers, readers: TimelineReaders | None) -> None:
        self._rank = rank
        self._collective = collective
        self._readers = readers
        self._own = b""
        self._door: OpenDoor | None = None
        self._pending: GatherResult | None = None
        self._received: _Received | None = None

    def summary(self, summary: RankSummary, timeline: bytes) -> RankSummary:
        """`summary` with what is to be known of the packed timeline; listens for those of others."""
        self._own = timeline
        if self._readers is not None:
            with suppress(FtError):  # all timelines are sent to all ranks instead
                self._door = self._collective.listen("timelines")
        endpoint = self._door.endpoint if self._door is not None else ()
        return summary._replace(
            nbytes=len(timeline), digest=xxhash.xxh3_64_intdigest(timeline), endpoint=tuple(endpoint)
        )

    def start(self, summaries: Sequence[RankSummary]) -> None:
        """Start to send and receive. Does not wait."""
        if self._readers is None or self._door is None or not all(one.endpoint for one in summaries):
            self.close()
            self._pending = self._collective.start_gather(self._own)
            return
        endpoints = [(str(host), int(port)) for host, port in (one.endpoint for one in summaries)]
        transfers = self._collective.through(self._door, endpoints, WAIT_SECONDS)
        self._received = _Received(self._rank, self._own, self._readers, summaries, transfers)

    def result(self) -> list[bytes | None]:
        """By rank, the packed timelines that this rank reads; waits for those that are late. Raises ProtocolError."""
        if self._received is not None:
            return self._received.result()
        assert self._pending is not None
        return list(self._pending.result())

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None


class _Received:
    """Timelines that arrive on a thread of their own."""

    def __init__(
        self, rank: int, own: bytes, readers: TimelineReaders, summaries: Sequence[RankSummary],
        transfers: AbstractContextManager[Swaps],
    ) -> None:  # fmt: skip
        self._rank, self._own, self._transfers = rank, own, transfers
        self._digests = [one.digest for one in summaries]
        self._reads = readers.reads(rank)
        self._from = sources(rank, self._reads, self._digests)
        if any(not 0 < summaries[sender].nbytes <= TIMELINE_LIMIT for sender in self._from.values()):
            raise ProtocolError(f"rank {rank}: a timeline has more than {TIMELINE_LIMIT} bytes")
        self._into = {sender: np.empty(summaries[sender].nbytes, dtype=np.uint8) for sender in self._from.values()}
        self._to = tuple(receivers(rank, readers, self._digests))
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ft-timelines", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._transfers as transfers:
                sent = np.frombuffer(self._own, dtype=np.uint8)
                transfers.swap(dict.fromkeys(self._to, sent), self._into)
        except Exception as error:
            self._error = error

    def result(self) -> list[bytes | None]:
        self._thread.join()
        if self._error is not None:
            raise ProtocolError(f"rank {self._rank}: timelines were not received: {self._error}") from self._error
        by_digest = {digest: self._into[sender].tobytes() for digest, sender in self._from.items()}
        by_digest[self._digests[self._rank]] = self._own
        for digest, timeline in by_digest.items():
            if xxhash.xxh3_64_intdigest(timeline) != digest:
                raise ProtocolError(f"rank {self._rank}: the timeline of rank {self._from[digest]} was altered")
        read = range(len(self._digests))
        return [by_digest[self._digests[rank]] if rank in self._reads else None for rank in read]


Readers = Callable[[], TimelineReaders | None]
