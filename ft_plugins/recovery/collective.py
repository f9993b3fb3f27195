"""The few collectives that protection needs, as bytes over gloo; outside the step path, at start and restore only, but
for `start_gather`, which does not wait.

Invariant: no pickle. A job of one process needs no process group. Every rank of the job calls in the same order. The
job's store takes all comers, and gloo's addresses come from it: a word in the store, or bytes of another rank, are
believed only with a proof by a key of this incarnation, which ranks agree on over the process group and which stands
nowhere.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

_ANSWER_SECONDS = 2.0  # for a word in the job's store to be looked up
_DEAF_SECONDS = 60.0
_NONCE = 32  # bytes
_SIZE = 8  # bytes before a payload that hold its length
ROUND_BYTES = 32 << 20  # per member and round of a share exchange: bounds the memory that restoring takes

_TO_ALL = "to all ranks"

Bytes = npt.NDArray[np.uint8]


def _impatient(store: dist.Store) -> dist.Store | None:
    """A connection of our own to the job's store, which answers soon or not at all; the store itself where torch cannot
    make one, None where it does not answer."""
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
class Gathering:
    """Payloads on their way: `found` when `work` is done. The tensors live as long as it."""

    found: list[torch.Tensor]
    own: torch.Tensor
    work: dist.Work | None
    number: int  # of this gather
    proofs: Proofs

    def result(self) -> list[bytes]:
        """Every rank's payload, by rank. Waits for those that are not here yet. Raises ProtocolError for one that is
        not what its rank sent."""
        if self.work is not None:
            self.work.wait()
        return [self._opened(rank, part.numpy().tobytes()) for rank, part in enumerate(self.found)]

    def _opened(self, rank: int, part: bytes) -> bytes:
        payload = part[_SIZE:-TAG][: int.from_bytes(part[:_SIZE], "little")]
        self.proofs.check(_TO_ALL, self.number, rank, payload, part[-TAG:])
        return payload


def _between(sender: int, receiver: int) -> str:
    """The purpose of what one rank sends to another alone."""
    return f"rank {sender} to rank {receiver}"


class Collective:
    """All ranks of the job."""

    def __init__(self, secret: bytes = b"") -> None:
        """Uses the default process group where that is gloo, else makes a gloo group next to it.

        `secret`: of the job, if it has one: then what passed between ranks is not enough to forge a word. Every rank of
        the job calls. Raises ConfigError, on all ranks, where they do not know the same one.
        """
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group: dist.ProcessGroup | None = None
        self._store: Any = None if self._alone else _impatient(dist.distributed_c10d._get_default_store())
        self._deaf_until = 0.0  # a store that does not answer is left alone for a while
        self._told: set[str] = set()
        self._forged = False  # a word that no rank has said was found
        self._made: set[tuple[int, ...]] = set()  # replica sets of the job that have a group
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # those of this rank
        if not self._alone and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")
        self.rank = 0 if not dist.is_initialized() else dist.get_rank()
        self.world_size = 1 if self._alone else dist.get_world_size()
        self._passed: Counter[str] = Counter()  # payloads by purpose; equal on all ranks that take part in one
        self._proofs = Proofs(self.rank, self._agree_on_key(secret))

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank. Raises ProtocolError for one that was altered on the way."""
        if self._alone:
            return [payload]
        sizes = self.start_gather(len(payload).to_bytes(_SIZE, "little"), _SIZE).result()
        return self.start_gather(payload, max(int.from_bytes(size, "little") for size in sizes)).result()

    def start_gather(self, payload: bytes, longest: int) -> Gathering:
        """Start a gather of payloads of at most `longest` bytes, the same number on every rank, and do not wait."""
        if len(payload) > longest:
            raise ValueError(f"rank {self.rank}: a payload of {len(payload)} bytes, but all agreed on {longest}")
        number = self._next_number(_TO_ALL)
        tag = self._proofs.tag(_TO_ALL, number, self.rank, payload)
        framed = b"".join((len(payload).to_bytes(_SIZE, "little"), payload, bytes(longest - len(payload)), tag))
        found, own, work = self._send_to_all(framed)
        return Gathering(found, own, work, number, self._proofs)

    def _send_to_all(self, framed: bytes) -> tuple[list[torch.Tensor], torch.Tensor, dist.Work | None]:
        """Start to gather as many bytes of every rank: where they arrive, where they are sent from, and the work."""
        own = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        if self._alone:
            return [own], own, None
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        return found, own, dist.all_gather(found, own, group=self._group, async_op=True)

    def barrier(self) -> None:
        """Until every rank is here."""
        self.gather(b"")

    def _agree_on_key(self, secret: bytes) -> bytes:
        """A key that all ranks of this incarnation have, and no other process."""
        own = secrets.token_bytes(_NONCE)
        found, _sent, work = self._send_to_all(own + hmac.digest(secret or b"none", own, "sha256"))
        if work is not None:
            work.wait()
        told = [part.numpy().tobytes() for part in found]
        for rank, part in enumerate(told):
            if not hmac.compare_digest(part[_NONCE:], hmac.digest(secret or b"none", part[:_NONCE], "sha256")):
                raise ConfigError(
                    f"rank {self.rank}: rank {rank} knows another secret, or only one of the two has one; give "
                    "--ftp-secret-file, with the same content, on all nodes"
                )
        return hmac.digest(secret or b"none", b"".join((b"ft_plugins words", *told)), "sha256")

    def tell_all(self, word: str) -> None:
        """Leave `word` where every rank finds it with `told`, without waiting for anyone; for this incarnation only."""
        self._told.add(word)
        with contextlib.suppress(RuntimeError):  # the store is gone with its host: the job is ending anyway
            if self._store is not None:
                self._store.set(f"ft_plugins/{word}", self._proofs.word(word))

    def told(self, word: str) -> bool:
        """Whether any rank has said `word`. A question to the job's store, bounded in time; asked behind the step.

        What anyone else has written there is passed over, and said once.
        """
        if word not in self._told and self._store is not None and time.monotonic() >= self._deaf_until:
            try:
                if self._store.check([f"ft_plugins/{word}"]):
                    self._believe(word, self._store.get(f"ft_plugins/{word}"))
            except RuntimeError:  # stopped, or gone with its host: then the job is ending anyway
                self._deaf_until = time.monotonic() + _DEAF_SECONDS
        return word in self._told

    def _believe(self, word: str, proof: bytes) -> None:
        if hmac.compare_digest(proof, self._proofs.word(word)):
            self._told.add(word)
        elif not self._forged:
            self._forged = True
            say(
                f"rank {self.rank}: '{word}' stands in the job's store, but no rank of this job has written that; it "
                "is not believed. Some other process writes to the store: see that only the job's nodes reach its port",
                alarm=True,
            )

    def agree(self, error: FtError | None) -> None:
        """Raise on every rank when any rank has an error: one rank its own, the others an echo of it.

        That is the lowest rank with an error of its own; an error that is an echo already counts if there is no other.
        """
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

    def swap(self, send: Mapping[int, Bytes], receive: Mapping[int, Bytes]) -> None:
        """Send these bytes to these ranks, and have those of others in place when it returns.

        Both ranks of a pair call equally often and with equal sizes; no other rank takes part. Raises ProtocolError
        for bytes that were altered on the way.
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
        """What `sender` sent, without its tag. Raises ProtocolError."""
        payload = framed[:-TAG]
        self._proofs.check(purpose, number, sender, payload.data, framed[-TAG:].data)
        return payload

    def _next_number(self, purpose: str) -> int:
        """The number of the next payload for that purpose."""
        self._passed[purpose] += 1
        return self._passed[purpose] - 1

    def connect(self, replica_sets: Iterable[Sequence[int]]) -> None:
        """Make the groups for `exchange_shares`, once for each set that any rank names. Every rank of the job calls.

        All ranks make all groups, members or not: where only members do (`use_local_synchronization`), torch names a
        group by the number of groups that each rank knows, and ranks that know different numbers wait for ever.
        """
        if self._alone:
            return
        own = sorted({tuple(replicas) for replicas in replica_sets if 1 < len(replicas) < self.world_size})
        named = {tuple(replicas) for part in self.gather(msgpack.packb(own)) for replicas in msgpack.unpackb(part)}
        for replicas in sorted(named - self._made):
            group = dist.new_group(ranks=list(replicas), backend="gloo")
            self._made.add(replicas)
            if self.rank in replicas:
                self._groups[replicas] = group

    def exchange_shares(
        self, replicas: Sequence[int], shares: Sequence[tuple[int, int]], own: Bytes
    ) -> Iterator[tuple[int, Bytes]]:
        """All-gather a replica set's byte stream from its members' shares, in rounds of bounded memory.

        `shares[i]` is the range (start, stop) that `replicas[i]` holds, `own` this rank's bytes. Yields (offset in
        the stream, bytes) until all of it has passed. Members of the set call together, after `connect`. Raises
        ProtocolError for a share that was altered on the way.
        """
        if len(replicas) == 1:
            yield shares[0][0], own
            return
        group = self._group if len(replicas) == self.world_size else self._groups[tuple(replicas)]
        purpose = f"shares of ranks {list(replicas)}"
        longest = max(stop - start for start, stop in shares)
        size = max(1, min(ROUND_BYTES, longest))
        send = np.zeros(size + TAG, dtype=np.uint8)
        found = [torch.empty(size + TAG, dtype=torch.uint8) for _ in replicas]
        for at in range(0, longest, size):
            part, number = own[at : at + size], self._next_number(purpose)
            send[: len(part)] = part
            send[size:] = np.frombuffer(self._proofs.tag(purpose, number, self.rank, send[:size].data), dtype=np.uint8)
            dist.all_gather(found, torch.from_numpy(send), group=group)
            for rank, (start, stop), arrived in zip(replicas, shares, found, strict=True):
                length = min(size, stop - start - at)
                if length > 0:
                    yield start + at, self._checked(purpose, number, rank, arrived.numpy())[:length]
