"""What the digests of replicas say: which rank is wrong, where, and what is to be done about it. Pure.

Without faults the replicas of a tensor are bit-identical, so 8 bytes per bucket and replica tell whether they are
(beyond the PAFT paper, whose future work voting is). Of three or more replicas that differ a majority is right and the
rest is named; two that differ are named as 'one of these two'. What a rank computes with may be a copy of what an
optimizer holds: such a copy is made anew from there, for which nobody needs a majority.

Invariant: every rank of a replica set finds the same verdicts and the same remedy from the same digests. What needs
more than half is never taken from half or less.

What it can promise (`promise`): agreement, always. The clean run, bit for bit, only where the verdict comes before the
next update has been made of what the wrong replica contributed. And nothing of state that one rank alone holds (the
shards of ZeRO and of distributed optimizers): an error in it reaches all replicas alike.

In: digests by bucket and replica. Out: `Audit`; `Remedy`, what an executor carries out; `Offences`, who repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from .buckets import ReplicaBucket

Digests = npt.NDArray[np.uint64]  # (replicas, buckets)
REPEATED = 2  # verdicts against a rank from which on it is one that repeats
TABLE_VERDICTS = 32


class OnCorruption(str, Enum):
    """What is done about replicas that differ."""

    REPAIR = "repair"
    AVERAGE = "average"
    ROLLBACK = "rollback"


@dataclass(frozen=True)
class AuditVerdict:
    """A bucket whose replicas differ: `wrong` are the ranks that do not hold what most hold, `source` the first that
    does. Without a majority `source` is None and `wrong` are all of them."""

    bucket: ReplicaBucket
    wrong: tuple[int, ...]
    source: int | None

    def __str__(self) -> str:
        if self.source is not None:
            ranks = f"rank{'s' if len(self.wrong) > 1 else ''} {', '.join(map(str, self.wrong))}"
            return f"{ranks} of {len(self.bucket.replicas)} wrong in bucket {self.bucket.number}: {self.bucket.where}"
        these = "one of these two" if len(self.wrong) == 2 else f"some of these {len(self.wrong)}, no majority"
        return f"ranks {', '.join(map(str, self.wrong))}, {these}: bucket {self.bucket.number}, {self.bucket.where}"


@dataclass(frozen=True)
class Audit:
    """What the replicas of one set were found to be after the update of `iteration`."""

    iteration: int
    replicas: tuple[int, ...]
    buckets: int
    verdicts: tuple[AuditVerdict, ...]

    @property
    def agreed(self) -> bool:
        """Whether all buckets are alike on all replicas."""
        return not self.verdicts

    @property
    def state(self) -> tuple[AuditVerdict, ...]:
        """Those on what a version consists of: copies are none of it."""
        return tuple(verdict for verdict in self.verdicts if not verdict.bucket.derived)

    @property
    def accused(self) -> frozenset[int]:
        """The ranks that a majority names: ties accuse nobody."""
        return frozenset(rank for one in self.verdicts if one.source is not None for rank in one.wrong)

    @property
    def reporter(self) -> int:
        """Who reports: the first rank of those that are right, or the first of all where nobody can be named."""
        return next((one.source for one in self.verdicts if one.source is not None), self.replicas[0])

    def table(self) -> str:
        """For people: a line for each bucket that differs, the first 32."""
        shown = f"iteration {self.iteration}: {len(self.replicas)} replicas, {self.buckets} buckets"
        if self.agreed:
            return f"{shown}: identical"
        lines = [f"{shown}: {len(self.verdicts)} differ", *(f"  {one}" for one in self.verdicts[:TABLE_VERDICTS])]
        if len(self.verdicts) > TABLE_VERDICTS:
            lines.append(f"  ... and {len(self.verdicts) - TABLE_VERDICTS} more buckets")
        return "\n".join(lines)


@dataclass(frozen=True)
class BucketCopy:
    """`bucket` is copied from `source` to `targets`, all of it."""

    bucket: ReplicaBucket
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class ScalarCopy:
    """What replicas keep beside tensors is taken from `source` by `targets`: with a wrong update a wrong count of them
    may have come, or a schedule that has not moved."""

    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Remedy:
    """What is done, buckets in ascending order. At most one of the two lists has a bucket; with `rollback`, neither.
    With `derives` copies are made anew; `following` goes with what is changed."""

    copies: tuple[BucketCopy, ...] = ()
    averages: tuple[ReplicaBucket, ...] = ()
    rollback: bool = False
    derives: bool = False
    scalars: ScalarCopy | None = None

    @property
    def changes(self) -> bool:
        """Whether the state of any replica is changed."""
        return bool(self.copies or self.averages)


def judge(iteration: int, replicas: Sequence[int], buckets: Sequence[ReplicaBucket], digests: Digests) -> Audit:
    """`digests[i, j]` is what `replicas[i]` has found of `buckets[j]`."""
    differing = np.flatnonzero((digests != digests[0]).any(axis=0))
    verdicts = []
    for column in differing.tolist():
        values, counts = np.unique(digests[:, column], return_counts=True)
        most = int(counts.argmax())
        if 2 * int(counts[most]) > len(replicas):
            same = digests[:, column] == values[most]
            wrong = tuple(rank for rank, right in zip(replicas, same, strict=True) if not right)
            verdicts.append(AuditVerdict(buckets[column], wrong, replicas[int(same.argmax())]))
        else:
            verdicts.append(AuditVerdict(buckets[column], tuple(replicas), None))
    return Audit(iteration, tuple(replicas), len(buckets), tuple(verdicts))


def remedy(audit: Audit, chosen: OnCorruption) -> Remedy:
    """A repair copies from the majority; where there is none the replicas are averaged, which at least makes them one.

    What has no mean (integers) is copied from the first replica then. Copies are made anew, whatever is chosen: the
    state that they are made of is what it was, and no reason to go back.
    """
    derives = len(audit.state) < len(audit.verdicts)
    if chosen is OnCorruption.ROLLBACK:
        return Remedy(rollback=bool(audit.state), derives=derives)
    copies, averages = [], []
    for verdict in audit.state:
        if chosen is OnCorruption.REPAIR and verdict.source is not None:
            copies.append(BucketCopy(verdict.bucket, verdict.source, verdict.wrong))
        elif verdict.bucket.can_be_averaged:
            averages.append(verdict.bucket)
        else:
            source = audit.replicas[0] if verdict.source is None else verdict.source
            copies.append(BucketCopy(verdict.bucket, source, tuple(r for r in verdict.wrong if r != source)))
    return Remedy(tuple(copies), tuple(averages), derives=derives, scalars=_scalars_from(audit))


def _scalars_from(audit: Audit) -> ScalarCopy | None:
    """From the first replica that no majority accuses, by those that anything is wrong of."""
    if not audit.state:
        return None
    accused = {rank for verdict in audit.state if verdict.source is not None for rank in verdict.wrong}
    source = next((rank for rank in audit.replicas if rank not in accused), audit.replicas[0])
    wrong = {rank for verdict in audit.state for rank in verdict.wrong} - {source}
    return ScalarCopy(source, tuple(sorted(wrong)))


@dataclass(frozen=True)
class Offences:
    """How often each rank was in a minority: at how many iterations. Ties accuse nobody."""

    by_rank: Mapping[int, int] = field(default_factory=dict)

    def after(self, *audits: Audit) -> Offences:
        """With the verdicts of one more iteration; several buckets, or replica sets, are one offence there."""
        counts = dict(self.by_rank)
        for rank in sorted(set().union(*(audit.accused for audit in audits))):
            counts[rank] = counts.get(rank, 0) + 1
        return Offences(counts)

    def repeated(self, least: int = REPEATED) -> tuple[int, ...]:
        """The ranks whose device should be drained, ascending."""
        return tuple(sorted(rank for rank, count in self.by_rank.items() if count >= least))


def promise(
    interval: int, chosen: OnCorruption, before_forward: bool, recomputes: bool, replicas: int, copies: bool,
    left_out: int, clips_together: str = "",
) -> str:  # fmt: skip
    """What an audit can and cannot promise here, to be said at start.

    `before_forward`: verdicts are awaited before the next forward, not before the next update; `recomputes`: the host
    can compute an iteration's gradients once more; `replicas`: of state, 0 where none is compared; `copies`: whether
    copies that ranks compute with are; `left_out`: tensors that are held by one rank alone; `clips_together`: how the
    gradients of one replica reach the others, '' where they do not.
    """
    every = "every update" if interval == 1 else f"every {interval} updates"
    said = [f"audit: replicas are compared after {every}"]
    if before_forward:
        when, clean = "before the next forward", True
    elif recomputes:
        when, clean = "before the next update, whose gradients are computed again", True
    else:
        when, clean = "before the next update, but its gradients cannot be computed again here", False
    identical = f"{when}: the run stays bit-identical to a clean one"
    if replicas:
        said.append(_of_state(interval, chosen, replicas, identical if clean else f"{when}: {_AGREE}"))
    if copies:
        anew = "copies that ranks compute with are made anew, without a majority, from what the optimizers hold"
        said.append(f"{anew}, {identical if clean else f'{when}: what came of the wrong one is in all replicas'}")
        if interval > 1:
            said.append("each update makes them anew as well: an error in one between two audits is not seen")
    said.append("an evaluation between an update and its verdict is of the replicas as they are")
    said.append("an error that reached all replicas alike is not seen")
    if clips_together and replicas and chosen is not OnCorruption.ROLLBACK:
        said.append(
            f"{clips_together}: what wrong gradients of one have added to it is in all of them, and the run is not the "
            "clean one then"
        )
    if left_out:
        said.append(
            f"{left_out} tensors that one rank alone holds are not compared: no replica speaks of them, and an error "
            "in one reaches all replicas alike"
        )
    return "; ".join(said)


_AGREE = "replicas agree, the run is not the clean one"


def _of_state(interval: int, chosen: OnCorruption, replicas: int, repaired: str) -> str:
    if chosen is OnCorruption.ROLLBACK:
        return "one that differs has the job go back to the newest version whose replicas agreed"
    if replicas < 3:
        return "two that differ are averaged: they agree again, but the run is not the clean one"
    if chosen is OnCorruption.AVERAGE:
        return "those that differ are averaged: they agree again, but the run is not the clean one"
    if interval > 1:
        return "a minority is repaired: replicas agree again, but the run is not the clean one"
    return f"a minority is repaired {repaired}"
