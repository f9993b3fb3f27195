"""Carries out an audit: digests of all buckets, gathered over each replica set; then the remedy, where one is needed.

    compare   digests and the gather of 8 bytes per bucket and replica: only reads live tensors, may run behind forward
              and backward. Ends with one small gather over the job, so that all of it knows whether anything differs
    settle    copies and averages, of the buckets that differ alone. Rare, and waited for

Invariant: no decision is taken here (audit.judge, audit.remedy), and all ranks of the job come to `settle` with the
same knowledge of what is done anywhere.

In: buckets, live tensors. Out: `Found`; repaired live tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import xxhash

from .aggregate import Aggregate
from .audit import Audit, Following, OnCorruption, Remedy, judge, remedy
from .averager import Tensors, mixed, read, views, write
from .buckets import Buckets, ReplicaBucket
from .links import Links


class Scalars(Protocol):
    """What a replica keeps beside tensors: of `model.host.ReplicaOperations`."""

    def scalars(self) -> bytes: ...
    def restore_scalars(self, encoded: bytes) -> None: ...


@dataclass(frozen=True)
class Found:
    """What one rank knows of one audit: of its own replica sets all, of the job whether replicas are changed anywhere,
    whether any are to go back, and whether copies are to be made anew."""

    iteration: int
    audits: tuple[Audit, ...]
    remedies: tuple[Remedy, ...]
    changes: bool
    rollback: bool
    derives: bool = False

    @property
    def agreed(self) -> bool:
        """Whether all replicas of the job are identical."""
        return self.certain and not self.derives

    @property
    def certain(self) -> bool:
        """Whether all that a version consists of is: copies are none of it."""
        return not (self.changes or self.rollback)


class Auditing:
    """One rank's."""

    def __init__(
        self, buckets: Buckets, links: Links, tensors: Tensors, chosen: OnCorruption, scalars: Scalars
    ) -> None:
        self._scalars = scalars
        self._buckets = buckets
        self._links = links
        self._tensors = tensors
        self._chosen = chosen

    def compare(self, iteration: int) -> Found:
        """Digest and compare. All ranks of the job call together."""
        live = self._tensors()
        audits = []
        for replicas, buckets in self._buckets.by_set.items():
            own = np.array([digest(views(bucket, live)) for bucket in buckets], dtype=np.uint64)
            audits.append(judge(iteration, replicas, buckets, self._links.gather_words(replicas, own)))
        remedies = tuple(remedy(audit, self._chosen) for audit in audits)
        own_say = [any(getattr(one, what) for one in remedies) for what in ("changes", "rollback", "derives")]
        told = self._links.gather_job([float(say) for say in own_say])
        return Found(iteration, tuple(audits), remedies, *(bool(column.any()) for column in told.T))

    def compared_with(self, rank: int) -> set[int]:
        """The ranks that anything of `rank` is compared with, as far as this one knows."""
        return {other for replicas in self._buckets.by_set if rank in replicas for other in replicas} - {rank}

    def settle(self, found: Found) -> None:
        """Carry out the remedies, but for copies, which are the host's to make. The ranks of each set that is changed
        call together."""
        live = self._tensors()
        rank = self._links.rank
        for one in found.remedies:
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
        for audit, one in zip(found.audits, found.remedies, strict=True):
            if one.following is not None:
                self._follow(audit.replicas, one.following)

    def _follow(self, replicas: tuple[int, ...], told: Following) -> None:
        if self._links.rank == told.source:
            encoded = self._scalars.scalars()
            for target in told.targets:
                self._links.send_bytes(replicas, target, encoded)
        elif self._links.rank in told.targets:
            self._scalars.restore_scalars(self._links.receive_bytes(replicas, told.source))

    def _average(self, bucket: ReplicaBucket) -> None:
        live = self._tensors()
        write(bucket, live, mixed(self._links, bucket, read(bucket, live), Aggregate.MEAN, 1))


def digest(pieces: list[torch.Tensor]) -> int:
    """xxh3 of the bytes of some flat tensors, one after another."""
    found = xxhash.xxh3_64()
    for piece in pieces:
        found.update(piece.cpu().view(torch.uint8).numpy().data)
    return found.intdigest()
