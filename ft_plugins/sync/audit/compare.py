"""Carry out an audit: gather digests of all buckets over each replica set, then the remedy, if one is needed.

    compare   digests, gathered as 8 bytes per bucket and replica. Only reads live tensors, so it may run behind forward
              and backward. Ends with a small gather over the job, so that all ranks know whether anything differs
    settle    copies and averages the buckets that differ. Rare; training waits for it

Invariant: nothing is decided here (see `audit.judge`, `audit.remedy`), and all ranks enter `settle` knowing what any of
them will do.

In: buckets, live tensors. Out: `AuditOutcome`; repaired live tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import xxhash

from ..averaging.aggregate import Aggregate
from ..averaging.averager import LiveTensors, aggregated, read, views, write
from ..buckets import Buckets, ReplicaBucket
from ..links import Links
from .audit import Audit, OnCorruption, Remedy, ScalarCopy, judge, remedy


class Scalars(Protocol):
    """The part of `model.host.ReplicaOperations` that reads and sets a replica's scalar state."""

    def scalars(self) -> bytes: ...
    def restore_scalars(self, encoded: bytes) -> None: ...


@dataclass(frozen=True)
class AuditOutcome:
    """One audit as one rank knows it: the details of its own replica sets, and for the whole job whether any replica
    changes, whether the job goes back, and whether copies are rebuilt."""

    iteration: int
    audits: tuple[Audit, ...]
    remedies: tuple[Remedy, ...]
    changes: bool
    rollback: bool
    derives: bool = False

    @property
    def agreed(self) -> bool:
        """Whether all replicas of the job are identical, copies included."""
        return self.state_agreed and not self.derives

    @property
    def state_agreed(self) -> bool:
        """Whether all replicas of state are identical; a version does not contain copies."""
        return not (self.changes or self.rollback)


class Auditing:
    """Audits one rank's replicas."""

    def __init__(
        self, buckets: Buckets, links: Links, tensors: LiveTensors, chosen: OnCorruption, scalars: Scalars
    ) -> None:
        self._scalars = scalars
        self._buckets = buckets
        self._links = links
        self._tensors = tensors
        self._chosen = chosen

    def compare(self, iteration: int) -> AuditOutcome:
        """Digest and compare. A collective of the job."""
        live = self._tensors()
        audits = []
        for replicas, buckets in self._buckets.by_set.items():
            digests = np.array([digest(views(bucket, live)) for bucket in buckets], dtype=np.uint64)
            audits.append(judge(iteration, replicas, buckets, self._links.gather_words(replicas, digests)))
        remedies = tuple(remedy(audit, self._chosen) for audit in audits)
        own = [any(getattr(one, name) for one in remedies) for name in ("changes", "rollback", "derives")]
        flags = self._links.gather_job([float(flag) for flag in own])
        return AuditOutcome(iteration, tuple(audits), remedies, *(bool(column.any()) for column in flags.T))

    def compared_with(self, rank: int) -> set[int]:
        """The ranks that share a replica set with `rank`, as far as this rank knows."""
        return {other for replicas in self._buckets.by_set if rank in replicas for other in replicas} - {rank}

    def settle(self, outcome: AuditOutcome) -> None:
        """Carry out the remedies, except for copies, which the host rebuilds. A collective of each set that changes."""
        live = self._tensors()
        rank = self._links.rank
        for one in outcome.remedies:
            for copy in one.copies:
                replicas = copy.bucket.replicas
                if rank == copy.source:
                    values = read(copy.bucket, live)
                    for target in copy.targets:
                        self._links.send(replicas, target, values)
                elif rank in copy.targets:
                    like = torch.cat(views(copy.bucket, live))
                    write(copy.bucket, live, self._links.receive(replicas, copy.source, like))
            for bucket in one.averages:
                self._average(bucket)
        for audit, one in zip(outcome.audits, outcome.remedies, strict=True):
            if one.scalars is not None:
                self._copy_scalars(audit.replicas, one.scalars)

    def _copy_scalars(self, replicas: tuple[int, ...], copy: ScalarCopy) -> None:
        if self._links.rank == copy.source:
            encoded = self._scalars.scalars()
            for target in copy.targets:
                self._links.send_bytes(replicas, target, encoded)
        elif self._links.rank in copy.targets:
            self._scalars.restore_scalars(self._links.receive_bytes(replicas, copy.source))

    def _average(self, bucket: ReplicaBucket) -> None:
        live = self._tensors()
        write(bucket, live, aggregated(self._links, bucket, read(bucket, live), Aggregate.MEAN, 1))


def digest(pieces: list[torch.Tensor]) -> int:
    """xxh3 of the bytes of flat tensors, one after another."""
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece.cpu().view(torch.uint8).numpy().data)
    return hasher.intdigest()
