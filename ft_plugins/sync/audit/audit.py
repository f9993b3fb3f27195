"""Judge from digests which replicas are wrong, and decide what to do about it. Pure.

Without faults the replicas of a tensor are bit-identical, so 8 bytes per bucket and replica show whether they are (the
PAFT paper leaves voting to future work). If three or more replicas differ, a majority is right and the others are
named; two that differ are named as 'one of these two'. Copies that a rank computes with are derived from optimizer
state: a wrong copy is rebuilt from there, without a majority.

Invariant: all ranks of a replica set reach the same verdicts and remedy from the same digests. A majority is always
more than half.

What an audit can guarantee (`promise`): that replicas agree. The result of a clean run, bit for bit, only if the
verdict comes before the wrong replica has influenced the next update. Nothing for state that a single rank holds
(shards of ZeRO and of distributed optimizers): an error in it reaches all replicas in the same way.

In: digests by bucket and replica. Out: `Audit`; `Remedy`, which an executor carries out; `Offences`, the ranks that
were wrong repeatedly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from ..buckets import ReplicaBucket

Digests = npt.NDArray[np.uint64]  # (replicas, buckets)
REPEATED = 2  # audits at which a rank must be wrong to be suspected


class OnCorruption(str, Enum):
    """What to do about replicas that differ."""

    REPAIR = "repair"
    AVERAGE = "average"
    ROLLBACK = "rollback"


@dataclass(frozen=True)
class AuditVerdict:
    """A bucket whose replicas differ: `wrong` are the ranks outside the majority, `source` is the first rank in it.
    Without a majority `source` is None and `wrong` has all ranks."""

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
    """The verdicts on one replica set after the update of `iteration`."""

    iteration: int
    replicas: tuple[int, ...]
    buckets: int
    verdicts: tuple[AuditVerdict, ...]

    @property
    def agreed(self) -> bool:
        """Whether all buckets are identical on all replicas."""
        return not self.verdicts

    @property
    def state(self) -> tuple[AuditVerdict, ...]:
        """The verdicts on state, which a version consists of; verdicts on copies excluded."""
        return tuple(verdict for verdict in self.verdicts if not verdict.bucket.derived)

    @property
    def accused(self) -> frozenset[int]:
        """The ranks that a majority contradicts. A tie accuses no rank."""
        return frozenset(rank for one in self.verdicts if one.source is not None for rank in one.wrong)

    @property
    def reporter(self) -> int:
        """The rank that reports: the first that is right, or the first of all without a majority."""
        return next((one.source for one in self.verdicts if one.source is not None), self.replicas[0])


@dataclass(frozen=True)
class BucketCopy:
    """Copy all of `bucket` from `source` to `targets`."""

    bucket: ReplicaBucket
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class ScalarCopy:
    """Copy scalar state (update counts, schedule) from `source` to `targets`: a wrong update may have left it wrong."""

    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Remedy:
    """What to do, buckets in ascending order. A bucket is in at most one of the two lists; with `rollback` both are
    empty. With `derives`, copies are rebuilt; `scalars` accompanies changed state."""

    copies: tuple[BucketCopy, ...] = ()
    averages: tuple[ReplicaBucket, ...] = ()
    rollback: bool = False
    derives: bool = False
    scalars: ScalarCopy | None = None

    @property
    def changes(self) -> bool:
        return bool(self.copies or self.averages)


def judge(iteration: int, replicas: Sequence[int], buckets: Sequence[ReplicaBucket], digests: Digests) -> Audit:
    """Judge one replica set; `digests[i, j]` is the digest of `buckets[j]` on `replicas[i]`."""
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
    """Repair from the majority. Without one, average the replicas, so that they agree at least.

    Buckets without a mean (integers) are then copied from the first replica. Wrong copies are rebuilt whatever is
    chosen: the state that they derive from is intact, so there is no need to go back.
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
    """From the first rank that no majority contradicts, to the ranks with any wrong bucket."""
    if not audit.state:
        return None
    accused = {rank for verdict in audit.state if verdict.source is not None for rank in verdict.wrong}
    source = next((rank for rank in audit.replicas if rank not in accused), audit.replicas[0])
    wrong = {rank for verdict in audit.state for rank in verdict.wrong} - {source}
    return ScalarCopy(source, tuple(sorted(wrong)))


@dataclass(frozen=True)
class Offences:
    """At how many iterations each rank was in a minority. A tie counts against no rank."""

    by_rank: Mapping[int, int] = field(default_factory=dict)

    def after(self, *audits: Audit) -> Offences:
        """Add the verdicts of one iteration; several buckets or replica sets make one offence."""
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
    """What an audit can and cannot guarantee in this job; printed at start.

    `before_forward`: verdicts are awaited before the next forward, not before the next update; `recomputes`: the host
    can recompute an iteration's gradients; `replicas`: fewest replicas of any state, 0 if no state is compared;
    `copies`: whether copies that ranks compute with are compared; `left_out`: number of tensors that a single rank
    holds; `clips_together`: how one replica's gradients affect the clipping of all, '' if they do not.
    """
    every = "every update" if interval == 1 else f"every {interval} updates"
    parts = [f"audit: replicas are compared after {every}"]
    if before_forward:
        when, clean = "before the next forward", True
    elif recomputes:
        when, clean = "before the next update, whose gradients are recomputed", True
    else:
        when, clean = "before the next update, but its gradients cannot be recomputed here", False
    identical = f"{when}: the run stays bit-identical to a clean one"
    if replicas:
        parts.append(_promise_of_state(interval, chosen, replicas, identical if clean else f"{when}: {_AGREE}"))
    if copies:
        rebuilt = "copies that ranks compute with are rebuilt from optimizer state, without a majority,"
        parts.append(f"{rebuilt} {identical if clean else f'{when}: the effect of a wrong copy stays in all replicas'}")
        if interval > 1:
            parts.append("each update rebuilds them too, so an error in one between two audits is not detected")
    parts += [
        "an evaluation between an update and its verdict uses the replicas as they are",
        "an error that reached all replicas in the same way is not detected",
    ]
    if clips_together and replicas and chosen is not OnCorruption.ROLLBACK:
        parts.append(
            f"{clips_together}: the effect of one replica's wrong gradients on it stays in all replicas, and the run "
            "then differs from a clean one"
        )
    if left_out:
        parts.append(
            f"{left_out} tensors held by a single rank are not compared: they have no replica, and an error in one "
            "reaches all replicas in the same way"
        )
    return "; ".join(parts)


_DIFFERS = "but the run differs from a clean one"
_AGREE = f"replicas agree, {_DIFFERS}"


def _promise_of_state(interval: int, chosen: OnCorruption, replicas: int, repaired: str) -> str:
    if chosen is OnCorruption.ROLLBACK:
        return "if replicas differ, the job goes back to the newest version whose replicas agreed"
    if replicas < 3:
        return f"two that differ are averaged: they agree again, {_DIFFERS}"
    if chosen is OnCorruption.AVERAGE:
        return f"replicas that differ are averaged: they agree again, {_DIFFERS}"
    if interval > 1:
        return f"a minority is repaired: replicas agree again, {_DIFFERS}"
    return f"a minority is repaired {repaired}"
