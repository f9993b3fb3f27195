"""The collective operations of protection, over gloo: at start, at recovery and at the end. `start_gather` does not
wait, and may be called during training.

Invariant: no pickle. A job of one process needs no process group. The ranks that take part in an operation (all of the
job, unless it says otherwise) call in the same order. Any process that reaches the
job's store can write to it, and gloo takes its addresses from there, so an announcement in the store or data from
another rank is accepted only with a proof made with the key of this incarnation. Ranks agree on the key over the
process group; it is never stored.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from .. import errors
from ..errors import ConfigError, FtError
from ..events import say
from .proof import TAG, Proofs
from .stores import BoundedStore

_ANSWER_SECONDS = 2.0  # timeout of a look-up in the job's store
_RETRY_SECONDS = 60.0  # until a store that did not answer is asked again
_NONCE = 32  # bytes
_SIZE = 8  # bytes of the length in front of a payload
PART_BYTES = 32 << 20  # per member and all-gather of a share exchange: bounds the memory of a restore

_TO_ALL = "to all ranks"

Bytes = npt.NDArray[np.uint8]


def _bounded(store: dist.Store) -> dist.Store | None:
    """A separate connection to the job's store with a short timeout; the store itself if torch cannot clone it, None
    if it does not answer."""
    bound = timedelta(seconds=_ANSWER_SECONDS)

    def connect() -> dist.Store:
        try:
            own: dist.Store = store.clone()  # type: ignore[attr-defined]  # of a TCPStore and its like
            own.set_timeout(bound)
        except (AttributeError, NotImplementedError, RuntimeError):
            return store
        return own

    try:
        return BoundedStore(connect, bound, "the job's rank 0")
    except RuntimeError:
        return None


@dataclass(frozen=True)
class PendingGather:
    """A gather that was started: `received` is filled once `work` is done. It keeps the tensors alive."""

    received: list[torch.Tensor]
    own: torch.Tensor
    work: dist.Work | None
    number: int  # of this gather
    proofs: Proofs

    def result(self) -> list[bytes]:
        """Every rank's payload, by rank; waits until all have arrived. Raises ProtocolError for an altered payload."""
        if self.work is not None:
            self.work.wait()
        return [self._opened(rank, part.numpy().tobytes()) for rank, part in enumerate(self.received)]

    def _opened(self, rank: int, part: bytes) -> bytes:
        payload = part[_SIZE:-TAG][: int.from_bytes(part[:_SIZE], "little")]
        self.proofs.check(_TO_ALL, self.number, rank, payload, part[-TAG:])
        return payload


@dataclass
class Agreement:
    """What `Collective.agreement` yields. `tolerated`: the error that ended this rank's block, if it was tolerated."""

    tolerated: FtError | None = None


def _between(sender: int, receiver: int) -> str:
    """The purpose of what one rank sends to another alone."""
    return f"rank {sender} to rank {receiver}"


class Collective:
    """The ranks of the job, as one of them reaches the others."""

    def __init__(self, secret: bytes = b"") -> None:
        """Use the default process group if it is gloo, else create a gloo group. Every rank of the job calls.

        `secret` is the job's, if it has one; with it, a process that only reads traffic cannot forge a proof. Raises
        ConfigError, on all ranks, when their secrets differ.
        """
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group: dist.ProcessGroup | None = None
        self._store: Any = None if self._alone else _bounded(dist.distributed_c10d._get_default_store())
        self._retry_at = 0.0  # when a store that did not answer is asked again, by the monotonic clock
        self._announced: set[str] = set()
        self._forgery_reported = False
        self._grouped: set[tuple[int, ...]] = set()  # replica sets of the job that have a group
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # those of this rank
        if not self._alone and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")
        self.rank = 0 if not dist.is_initialized() else dist.get_rank()
        self.world_size = 1 if self._alone else dist.get_world_size()
        self._passed: Counter[str] = Counter()  # payloads by purpose; equal on all ranks that take part in one
        self._proofs = Proofs(self.rank, self._agree_on_key(secret))

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank. Raises ProtocolError for an altered payload."""
        if self._alone:
            return [payload]
        sizes = self.start_gather(len(payload).to_bytes(_SIZE, "little"), _SIZE).result()
        return self.start_gather(payload, max(int.from_bytes(size, "little") for size in sizes)).result()

    def start_gather(self, payload: bytes, longest: int) -> PendingGather:
        """Start a gather of payloads of at most `longest` bytes, which is the same on every rank. Does not wait."""
        if len(payload) > longest:
            raise ValueError(f"rank {self.rank}: the payload has {len(payload)} bytes, more than the agreed {longest}")
        number = self._next_number(_TO_ALL)
        tag = self._proofs.tag(_TO_ALL, number, self.rank, payload)
        framed = b"".join((len(payload).to_bytes(_SIZE, "little"), payload, bytes(longest - len(payload)), tag))
        received, own, work = self._send_to_all(framed)
        return PendingGather(received, own, work, number, self._proofs)

    def _send_to_all(self, framed: bytes) -> tuple[list[torch.Tensor], torch.Tensor, dist.Work | None]:
        """Start an all-gather of equally many bytes of every rank: receive buffers, send buffer, work."""
        own = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        if self._alone:
            return [own], own, None
        received = [torch.empty_like(own) for _ in range(self.world_size)]
        return received, own, dist.all_gather(received, own, group=self._group, async_op=True)

    def barrier(self) -> None:
        """Wait until every rank has called."""
        self.gather(b"")

    def _agree_on_key(self, secret: bytes) -> bytes:
        """A key that all ranks of this incarnation have, and no other process."""
        own = secrets.token_bytes(_NONCE)
        received, _own, work = self._send_to_all(own + hmac.digest(secret or b"none", own, "sha256"))
        if work is not None:
            work.wait()
        nonces = [part.numpy().tobytes() for part in received]
        for rank, part in enumerate(nonces):
            if not hmac.compare_digest(part[_NONCE:], hmac.digest(secret or b"none", part[:_NONCE], "sha256")):
                raise ConfigError(
                    f"rank {self.rank}: rank {rank} has another secret, or only one of the two has one; give "
                    "--ftp-secret-file, with the same content, on all nodes"
                )
        return hmac.digest(secret or b"none", b"".join((b"ft_plugins words", *nonces)), "sha256")

    # ---- announcements ----

    def announce(self, word: str) -> None:
        """Leave `word` in the job's store, where the ranks of this incarnation find it by `announced`. Waits for no
        rank."""
        self._announced.add(word)
        with contextlib.suppress(RuntimeError):  # the store is gone with its host: the job is ending anyway
            if self._store is not None:
                self._store.set(f"ft_plugins/{word}", self._proofs.word(word))

    def announced(self, word: str) -> bool:
        """Whether any rank has announced `word`. Asks the job's store, in bounded time, outside the step path.

        A word without a valid proof is ignored, and reported once.
        """
        if word not in self._announced and self._store is not None and time.monotonic() >= self._retry_at:
            try:
                if self._store.check([f"ft_plugins/{word}"]):
                    self._accept(word, self._store.get(f"ft_plugins/{word}"))
            except RuntimeError:  # stopped, or gone with its host: the job is ending anyway
                self._retry_at = time.monotonic() + _RETRY_SECONDS
        return word in self._announced

    def _accept(self, word: str, proof: bytes) -> None:
        if hmac.compare_digest(proof, self._proofs.word(word)):
            self._announced.add(word)
        elif not self._forgery_reported:
            self._forgery_reported = True
            say(
                f"rank {self.rank}: ignored '{word}' in the job's store: no rank of this job wrote it. Another process "
                "writes to the store; make sure that only the job's nodes reach its port",
                alarm=True,
            )

    # ---- errors ----

    @contextlib.contextmanager
    def agreement(self, tolerate: Callable[[FtError], bool] = lambda error: False) -> Iterator[Agreement]:
        """Run a block on every rank, then raise on every rank when it raised an FtError on any.

        One rank raises its own error, the others an echo of it: the lowest rank whose error is not an echo already, or
        the lowest rank if all are. An error that this rank may `tolerate` is kept in `Agreement.tolerated` instead, and
        does not end the other ranks. Every rank of the job enters. Errors of other kinds pass through at once.
        """
        agreement = Agreement()
        failure: FtError | None = None
        try:
            yield agreement
        except FtError as error:
            if tolerate(error):
                agreement.tolerated = error
            else:
                failure = error
        self._raise_together(failure)

    def _raise_together(self, error: FtError | None) -> None:
        own = [type(error).__name__, str(error), error.echo] if error else None
        entries = [msgpack.unpackb(part) for part in self.gather(msgpack.packb(own))]
        failed = [rank for rank, entry in enumerate(entries) if entry is not None]
        if not failed:
            return
        first = min(failed, key=lambda rank: (entries[rank][2], rank))
        if error is not None and first == self.rank:
            error.echo = False
            raise error
        echo = getattr(errors, entries[first][0])(entries[first][1])
        echo.echo = True
        raise echo

    # ---- bulk data ----

    def swap(self, send: Mapping[int, Bytes], receive: Mapping[int, Bytes]) -> None:
        """Send bytes to ranks and receive from ranks, by rank; returns when all of `receive` is filled.

        Both ranks of a pair call, equally often and with equal sizes; no other rank takes part. Raises ProtocolError
        for altered bytes.
        """
        arriving = {rank: torch.empty(len(into) + TAG, dtype=torch.uint8) for rank, into in sorted(receive.items())}
        leaving = {rank: self._with_tag(_between(self.rank, rank), data) for rank, data in sorted(send.items())}
        pending = [dist.irecv(framed, src=rank, group=self._group) for rank, framed in arriving.items()]
        pending += [dist.isend(framed, dst=rank, group=self._group) for rank, framed in leaving.items()]
        for work in pending:
            if work is not None:  # None: not a member of the group, which all ranks are
                work.wait()
        for rank, framed in arriving.items():
            purpose = _between(rank, self.rank)
            receive[rank][:] = self._checked(purpose, self._next_number(purpose), rank, framed.numpy())

    def _with_tag(self, purpose: str, data: Bytes) -> torch.Tensor:
        """Bytes of this rank for `purpose`, and their tag."""
        tag = self._proofs.tag(purpose, self._next_number(purpose), self.rank, data.data)
        return torch.from_numpy(np.concatenate([data, np.frombuffer(tag, dtype=np.uint8)]))

    def _checked(self, purpose: str, number: int, sender: int, framed: Bytes) -> Bytes:
        """The payload of `sender`, without its tag. Raises ProtocolError."""
        payload = framed[:-TAG]
        self._proofs.check(purpose, number, sender, payload.data, framed[-TAG:].data)
        return payload

    def _next_number(self, purpose: str) -> int:
        """The number of the next payload for that purpose."""
        self._passed[purpose] += 1
        return self._passed[purpose] - 1

    def connect(self, replica_sets: Iterable[Sequence[int]]) -> None:
        """Create the groups for `exchange_shares`, once for each set that any rank names. Every rank of the job calls.

        All ranks create all groups, members or not. If only members did (`use_local_synchronization`), torch would name
        a group by the number of groups that each rank knows, and ranks with different numbers would wait forever.
        """
        if self._alone:
            return
        own = sorted({tuple(replicas) for replicas in replica_sets if 1 < len(replicas) < self.world_size})
        named = {tuple(replicas) for part in self.gather(msgpack.packb(own)) for replicas in msgpack.unpackb(part)}
        for replicas in sorted(named - self._grouped):
            group = dist.new_group(ranks=list(replicas), backend="gloo")
            self._grouped.add(replicas)
            if self.rank in replicas:
                self._groups[replicas] = group

    def exchange_shares(
        self, replicas: Sequence[int], shares: Sequence[tuple[int, int]], own: Bytes
    ) -> Iterator[tuple[int, Bytes]]:
        """All-gather a replica set's byte stream from its members' shares, in all-gathers of bounded size.

        `shares[i]` is the range (start, stop) that `replicas[i]` holds, `own` this rank's bytes. Yields (offset in
        the stream, bytes) until all of it has been received. Members of the set call together, after `connect`. Raises
        ProtocolError for an altered share.
        """
        if len(replicas) == 1:
            yield shares[0][0], own
            return
        group = self._group if len(replicas) == self.world_size else self._groups[tuple(replicas)]
        purpose = f"shares of ranks {list(replicas)}"
        longest = max(stop - start for start, stop in shares)
        size = max(1, min(PART_BYTES, longest))
        send = np.zeros(size + TAG, dtype=np.uint8)
        received = [torch.empty(size + TAG, dtype=torch.uint8) for _ in replicas]
        for at in range(0, longest, size):
            part, number = own[at : at + size], self._next_number(purpose)
            send[: len(part)] = part
            send[size:] = np.frombuffer(self._proofs.tag(purpose, number, self.rank, send[:size].data), dtype=np.uint8)
            dist.all_gather(received, torch.from_numpy(send), group=group)
            for rank, (start, stop), arrived in zip(replicas, shares, received, strict=True):
                length = min(size, stop - start - at)
                if length > 0:
                    yield start + at, self._checked(purpose, number, rank, arrived.numpy())[:length]
