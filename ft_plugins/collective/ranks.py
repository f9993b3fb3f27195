"""The collective operations of protection, over all ranks of the job: at start, at recovery and at the end.
`start_gather` does not wait, and may be called during training.

Invariant: no pickle, no process group of torch, and so no connection of each rank with each other: ranks form a tree
(`operations`) over connections of their own, by the job's secret. A job of one process needs no connection. The ranks
call in the same order.

In: the job's store, for addresses alone; the secret. Out: payloads of all ranks, the first error of any, bulk data.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import torch.distributed as dist

from .. import errors
from ..config import LaunchContext, launch_context
from ..errors import ConfigError, FtError, ProtocolError
from ..events import Events
from ..transport.own_address import depends_on_name, own_address
from .meeting import RankDoor, RankMeeting, meet
from .operations import FrameKind, failed, failure, framed, payloads
from .switch import Call, LostNeighbour, Switch
from .transfers import Transfers

_HEARD_SECONDS = 2.0  # until all ranks have a word; a rank that is stopped never has it
_TEXT = 20_000  # characters of an error that other ranks raise too
_numbers = itertools.count()  # of the meetings of this process, the same on all ranks


@dataclass(frozen=True)
class PendingGather:
    """A gather that was started."""

    switch: Switch | None
    call: Call | None
    count: int
    own: bytes

    @property
    def refused(self) -> bool:
        """Whether it was not started, so that no rank will have a result."""
        return self.call is not None and self.call.refused

    @property
    def seconds(self) -> float:
        """The longest wait for the others."""
        return 0.0 if self.switch is None else self.switch.seconds

    def waits(self, seconds: float) -> bool:
        """Whether not all payloads have arrived after so many seconds."""
        return self.call is not None and not self.call.over.wait(seconds)

    def result(self) -> list[bytes]:
        """Every rank's payload, by rank; waits until all have arrived. Raises ProtocolError."""
        if self.switch is None or self.call is None:
            return [self.own]
        return payloads(self.switch.result(self.call), self.count)


@dataclass
class Agreement:
    """What `Collective.agreement` yields. `tolerated`: the error that ended this rank's block, if it was tolerated."""

    tolerated: FtError | None = None


class Collective:
    """The ranks of the job, as one of them reaches the others."""

    def __init__(
        self,
        secret: bytes = b"",
        interface: str | None = None,
        encrypt: bool = False,
        context: LaunchContext | None = None,
        events: Events | None = None,
        unfit: ConfigError | None = None,
    ) -> None:
        """Connect to the job's other ranks, which call as well.

        `secret` is the job's, if it has one; without, a process that reads the job's store can take part. `interface`
        is where other nodes reach this one. Raises ConfigError, on all ranks, when their secrets or `encrypt` differ,
        and the error of a rank that is `unfit` to take part; ProtocolError if ranks do not reach each other.
        """
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.rank = 0 if not dist.is_initialized() else dist.get_rank()
        self.world_size = 1 if alone else dist.get_world_size()
        self._words: set[str] = set()  # announced by this rank
        self._switch: Switch | None = None
        self._meeting: RankMeeting | None = None
        self._interface, self._context = interface, context
        if alone:
            if unfit is not None:
                raise unfit
            return
        context = self._context = context or launch_context()
        store: Any = dist.distributed_c10d._get_default_store()
        self._meeting = RankMeeting(
            store, str(next(_numbers)), self.rank, self.world_size, context.local_world_size, secret,
            own_address(interface, context.master_addr), encrypt, store.timeout.total_seconds(), events or Events(),
            depends_on_name(interface, context.master_addr),
        )  # fmt: skip
        met = meet(self._meeting)
        self._meeting = replace(self._meeting, address=met.address)
        self._key = met.key
        self._switch = Switch(met.place, met.links, self._meeting.seconds)
        try:
            refusal = unfit
            if refusal is None and met.refusal:
                refusal = ConfigError(met.refusal, echo=True)  # if another rank is unfit, that is the cause
            self._raise_together(refusal)
            if refusal is not None:  # what a neighbour without the secret says is not believed
                refusal.echo = False
                raise refusal
        except FtError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections; no operation may follow. Idempotent."""
        if self._switch is not None:
            self._switch.close()

    def __enter__(self) -> Collective:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where other nodes reach this one. Raises ConfigError."""
        if self._meeting is not None:
            return self._meeting.address
        return own_address(self._interface, (self._context or launch_context()).master_addr)

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank. Raises ProtocolError if a rank is lost."""
        return self.start_gather(payload).result()

    def start_gather(self, payload: bytes) -> PendingGather:
        """Start a gather. Does not wait."""
        call = self._switch.start(FrameKind.GATHER, framed(payload)) if self._switch is not None else None
        return PendingGather(self._switch, call, self.world_size, payload)

    def barrier(self) -> None:
        """Wait until every rank has called."""
        self._first_failure(b"")

    # ---- announcements ----

    def announce(self, word: str) -> str:
        """Send `word` to all ranks, for `announced`. Waits, in bounded time, until all have it. Returns why some may
        not, '' if all have; a rank that has ended in order, and those behind it, need it no more."""
        self._words.add(word)
        return "" if self._switch is None else self._switch.announce(word, _HEARD_SECONDS)

    @property
    def lost(self) -> LostNeighbour | None:
        """The neighbour whose connection this rank saw end during training, if it did; no word can be announced after
        that."""
        return None if self._switch is None else self._switch.lost

    def announced(self, word: str) -> bool:
        """Whether any rank has announced `word`. Sends nothing."""
        return word in self._words or (self._switch is not None and self._switch.knows(word))

    # ---- errors ----

    @contextlib.contextmanager
    def agreement(self, tolerate: Callable[[FtError], bool] = lambda error: False) -> Iterator[Agreement]:
        """Run a block on every rank, then raise on every rank when it raised an FtError on any.

        One rank raises its own error, the others an echo of it: the lowest rank whose error is not an echo already, or
        the lowest rank if all are. An error that this rank may `tolerate` is kept in `Agreement.tolerated` instead, and
        does not end the other ranks. Every rank of the job enters. Errors of other kinds pass through at once.
        """
        agreement = Agreement()
        error: FtError | None = None
        try:
            yield agreement
        except FtError as raised:
            if tolerate(raised):
                agreement.tolerated = raised
            else:
                error = raised
        self._raise_together(error)

    def _raise_together(self, error: FtError | None) -> None:
        own = failure(self.rank, type(error).__name__, str(error)[:_TEXT], error.echo) if error else b""
        first = self._first_failure(own)
        if first is None:
            return
        rank, kind, text = first
        if error is not None and rank == self.rank:
            error.echo = False
            raise error
        known = getattr(errors, kind, None)
        raise (known if isinstance(known, type) and issubclass(known, FtError) else ProtocolError)(text, echo=True)

    def _first_failure(self, own: bytes) -> tuple[int, str, str] | None:
        if self._switch is None:
            return failed(own)
        return failed(self._switch.result(self._switch.start(FrameKind.AGREE, own)))

    # ---- bulk data ----

    def transfers(self) -> Transfers:
        """Connections for bulk data, for a `with` block. Every rank of the job calls. Raises ProtocolError."""
        with contextlib.ExitStack() as stack:
            door: RankDoor | None = None
            with self.agreement():
                door = self.listen("transfers")
            if door is None:
                return self.through(None, [])
            stack.callback(door.close)
            endpoints = [tuple(msgpack.unpackb(part)) for part in self.gather(msgpack.packb(door.endpoint))]
            stack.pop_all()
        return self.through(door, endpoints)

    def listen(self, purpose: str) -> RankDoor | None:
        """Listen for transfers of that purpose; None in a job of one rank. Waits for no other rank. Raises
        ConfigError."""
        if self._meeting is None:
            return None
        meeting = self._meeting
        door = RankDoor(meeting.address, self._key, purpose, self.rank, meeting.events, meeting.encrypt)
        door.open()
        return door

    def through(
        self, door: RankDoor | None, endpoints: Sequence[tuple[str, int]], most_seconds: float = math.inf
    ) -> Transfers:
        """Transfers between ranks that listen at `endpoints`, this one at `door`; each wait of theirs takes at most
        `most_seconds`. This call waits for no other rank, and transfers may be used on another thread."""
        if self._meeting is None:
            return Transfers(self.rank, [], None, b"", 0.0)
        seconds = min(most_seconds, self._meeting.seconds)
        return Transfers(self.rank, endpoints, door, self._key, seconds)
