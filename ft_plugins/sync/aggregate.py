"""One value from those of M replicas, coordinate by coordinate: mean, median or trimmed mean. Pure tensor maths.

Each replica owns 1/M of the coordinates: it receives the others' values of its part, aggregates them in the order of
ranks, and sends the result to all. So every replica holds the same bits, whatever the aggregate, and the traffic is
that of a ring all-reduce: 2 (M-1)/M of the bytes, each way (`cost`).

Invariant: where all replicas agree the result is their value, bit for bit: a mean would round (float64) or lose the
sign of a zero. Sums are in float64. A value that is infinite or no number does not count, unless no replica has a
finite one: then it stays as the first replica has it.

    mean      the least variance where every replica carries like noise; one wild value moves it without bound
    median    at most (M-1)/2 wild values cannot move it beyond what sound replicas have; of M = 2 it is the mean; under
              Gaussian noise its variance is up to pi/2 of the mean's
    trimmed   the mean without the `trim` lowest and highest: withstands `trim` wild values; needs M > 2 trim

In: values of M replicas, (M, n). Out: (n,), of the same type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil

import torch

from ..errors import ConfigError
from .buckets import ReplicaBucket


class Aggregate(str, Enum):
    """How several values become one."""

    MEAN = "mean"
    MEDIAN = "median"
    TRIMMED = "trimmed"


@dataclass(frozen=True)
class AggregationCost:
    """Of one aggregation of `nbytes` over `replicas`, for each rank."""

    sent_bytes: int
    work_bytes: int  # of memory while it is under way
    comparisons: int  # per coordinate, of a sort; 0 for a mean

    def __str__(self) -> str:
        sort = f", {self.comparisons} comparisons per coordinate" if self.comparisons else ""
        return f"{self.sent_bytes} bytes sent, {self.work_bytes} bytes of work memory{sort}"


def cost(how: Aggregate, elements: int, width: int, replicas: int) -> AggregationCost:
    """Of `elements` coordinates of `width` bytes."""
    part = ceil(elements / replicas)
    sent = 2 * (replicas - 1) * part * width
    if how is Aggregate.MEAN:
        return AggregationCost(sent, part * replicas * (width + 8), 0)
    return AggregationCost(sent, part * replicas * (width + 8 + 8), replicas * max(1, (replicas - 1).bit_length()))


def describe_cost(how: Aggregate, buckets: Sequence[ReplicaBucket]) -> str:
    """What each turn costs a rank that averages these buckets, for people."""
    costs = [cost(how, b.elements, b.nbytes // b.elements, len(b.replicas)) for b in buckets]
    largest = max(costs, key=lambda one: one.work_bytes)
    total = AggregationCost(sum(one.sent_bytes for one in costs), largest.work_bytes, largest.comparisons)
    return f"averaging: the {how.value}, each turn {total}; {sum(b.nbytes for b in buckets)} bytes are held for good"


def require_enough(how: Aggregate, replicas: int, trim: int) -> None:
    """Raises ConfigError where `trim` leaves nothing to take a mean of."""
    if how is Aggregate.TRIMMED and replicas <= 2 * trim:
        raise ConfigError(
            f"a mean of {replicas} replicas without the {trim} lowest and the {trim} highest values is one of nothing: "
            f"expected at least {2 * trim + 1} replicas; lower the trim or choose median"
        )


def aggregate(values: torch.Tensor, how: Aggregate, trim: int = 1) -> torch.Tensor:
    """(M, n) -> (n,), `values[m]` those of the m-th replica. Raises ConfigError for too few replicas to trim."""
    require_enough(how, len(values), trim)
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return _all_finite(values, how, trim)
    found = torch.empty_like(values[0])
    counts = finite.sum(0)
    for count in counts.unique().tolist():
        chosen = counts == count
        if count == 0:
            found[chosen] = values[0, chosen]
            continue
        rows = values[:, chosen].T[finite[:, chosen].T].view(-1, count).T  # the finite ones, still by rank
        enough = how is not Aggregate.TRIMMED or count > 2 * trim
        found[chosen] = _all_finite(rows, how if enough else Aggregate.MEDIAN, trim)
    return found


def _all_finite(values: torch.Tensor, how: Aggregate, trim: int) -> torch.Tensor:
    wide = values.double()
    if how is Aggregate.MEAN:
        found = wide.sum(0) / len(wide)
    else:
        ordered = wide.sort(0).values
        keep = trim if how is Aggregate.TRIMMED else (len(wide) - 1) // 2
        found = ordered[keep : len(wide) - keep].mean(0)
    return torch.where((values == values[0]).all(0), values[0], found.to(values.dtype))
