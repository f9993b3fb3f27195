"""Combine the values of M replicas coordinate by coordinate: mean, median or trimmed mean. Pure tensor maths.

Each replica owns 1/M of the coordinates: it receives the others' values of its part, aggregates them in rank order, and
sends the result to all. So every replica gets the same bits from any aggregate, for the traffic of a ring all-reduce:
2 (M-1)/M of the bytes, each way (`cost`).

Invariant: if all replicas agree, the result is their value, bit for bit; a mean would round (float64) or lose the sign
of a zero. Sums are in float64. Non-finite values are ignored, unless no replica has a finite one: then the first
replica's value is used.

    mean      least variance if all replicas carry similar noise; one outlier moves it without bound
    median    up to (M-1)/2 outliers cannot move it beyond the values of sound replicas; the mean if M = 2; under
              Gaussian noise its variance is up to pi/2 that of the mean
    trimmed   the mean without the `trim` lowest and highest values: withstands `trim` outliers; needs M > 2 trim

In: values of M replicas, (M, n). Out: (n,), same dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil

import torch

from ...errors import ConfigError
from ..buckets import ReplicaBucket


class Aggregate(str, Enum):
    """How the values of the replicas are combined."""

    MEAN = "mean"
    MEDIAN = "median"
    TRIMMED = "trimmed"


@dataclass(frozen=True)
class AggregationCost:
    """What one aggregation costs each rank."""

    sent_bytes: int
    work_bytes: int  # temporary memory
    comparisons: int  # per coordinate, for the sort; 0 for a mean

    def __str__(self) -> str:
        sort = f", {self.comparisons} comparisons per coordinate" if self.comparisons else ""
        return f"{self.sent_bytes} bytes sent, {self.work_bytes} bytes of work memory{sort}"


def cost(how: Aggregate, elements: int, width: int, replicas: int) -> AggregationCost:
    """The cost of aggregating `elements` coordinates of `width` bytes."""
    part = ceil(elements / replicas)
    sent = 2 * (replicas - 1) * part * width
    if how is Aggregate.MEAN:
        return AggregationCost(sent, part * replicas * (width + 8), 0)
    return AggregationCost(sent, part * replicas * (width + 8 + 8), replicas * max(1, (replicas - 1).bit_length()))


def describe_cost(how: Aggregate, buckets: Sequence[ReplicaBucket]) -> str:
    """What each averaging of these buckets costs a rank, as text."""
    costs = [cost(how, b.elements, b.nbytes // b.elements, len(b.replicas)) for b in buckets]
    largest = max(costs, key=lambda one: one.work_bytes)
    total = AggregationCost(sum(one.sent_bytes for one in costs), largest.work_bytes, largest.comparisons)
    return f"averaging by {how.value}: {total} each time; {sum(b.nbytes for b in buckets)} bytes held permanently"


def require_enough(how: Aggregate, replicas: int, trim: int) -> None:
    """Raises ConfigError if trimming leaves no values."""
    if how is Aggregate.TRIMMED and replicas <= 2 * trim:
        raise ConfigError(
            f"trimming the {trim} lowest and {trim} highest of {replicas} replicas leaves no values to average: "
            f"expected at least {2 * trim + 1} replicas; lower the trim or choose median"
        )


def aggregate(values: torch.Tensor, how: Aggregate, trim: int = 1) -> torch.Tensor:
    """(M, n) -> (n,); `values[m]` is the m-th replica. Raises ConfigError for too few replicas to trim."""
    require_enough(how, len(values), trim)
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return _all_finite(values, how, trim)
    result = torch.empty_like(values[0])
    counts = finite.sum(0)
    for count in counts.unique().tolist():
        chosen = counts == count
        if count == 0:
            result[chosen] = values[0, chosen]
            continue
        rows = values[:, chosen].T[finite[:, chosen].T].view(-1, count).T  # finite values, in rank order
        enough = how is not Aggregate.TRIMMED or count > 2 * trim
        result[chosen] = _all_finite(rows, how if enough else Aggregate.MEDIAN, trim)
    return result


def _all_finite(values: torch.Tensor, how: Aggregate, trim: int) -> torch.Tensor:
    wide = values.double()
    if how is Aggregate.MEAN:
        result = wide.sum(0) / len(wide)
    else:
        ordered = wide.sort(0).values
        cut = trim if how is Aggregate.TRIMMED else (len(wide) - 1) // 2
        result = ordered[cut : len(wide) - cut].mean(0)
    return torch.where((values == values[0]).all(0), values[0], result.to(values.dtype))


def weighted(values: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """(M, n) -> (n,) float64: the sum of the replicas' values times their weights, which add up to 1. A replica of
    weight 0 is left out, so that its values may be non-finite. Summed in rank order."""
    result = torch.zeros_like(values[0], dtype=torch.float64)
    for row, weight in zip(values, weights, strict=True):
        if weight:
            result.add_(row.double(), alpha=weight)
    return result
