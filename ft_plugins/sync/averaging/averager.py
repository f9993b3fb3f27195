"""Average parameters over their replicas, bucket by bucket. Carries out a plan of buckets; decides nothing.

    save_parameters   live -> saved, before an update
    measure           the length of the step that the update made: live against saved
    average           live -> all-to-all -> aggregate -> all-gather -> saved; live - saved is the divergence
    apply             saved -> live

Only `apply` writes live tensors; the rest may run behind forward and backward.

Invariant: after `apply` all replicas hold the same bits. Memory for one copy of the parameters (`nbytes`) is claimed at
start; `average` temporarily takes 8 to 9 times the bytes of the largest float32 bucket, as it works in float64.

In: buckets, live tensors. Out: `NoisePart`s for the measurement of noise; changed live tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil

import torch

from ...errors import InventoryError
from ..buckets import PARAMETERS, ReplicaBucket
from ..links import Links
from .aggregate import Aggregate, aggregate, require_enough
from .averaging_times import NoisePart, part_of

LiveTensors = Callable[[], Mapping[str, torch.Tensor]]  # returns the live tensors by item name


def flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a dense tensor, in memory order. Raises InventoryError if it has gaps."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride()[axis])
    if not tensor.permute(order).is_contiguous():
        found = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        raise InventoryError(f"item '{name}' has gaps in memory ({found}): expected a dense tensor")
    return tensor.permute(order).view(-1)


def views(bucket: ReplicaBucket, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Views of the live tensors: the pieces of a bucket; zeros for those that no update has made yet."""

    def present(name: str) -> torch.Tensor:
        if not (tensor := tensors[name]).is_meta:
            return tensor
        return torch.zeros_like(tensor, device=next(one.device for one in tensors.values() if not one.is_meta))

    return [flat(piece.item, present(piece.item))[piece.start : piece.stop] for piece in bucket.pieces]


def read(bucket: ReplicaBucket, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat(views(bucket, tensors))


def write(bucket: ReplicaBucket, tensors: Mapping[str, torch.Tensor], values: torch.Tensor) -> None:
    """Copy `values` into a bucket's live tensors, in place."""
    with torch.no_grad():
        pieces = views(bucket, tensors)
        torch._foreach_copy_(pieces, list(values.split([len(piece) for piece in pieces])))


def aggregated(links: Links, bucket: ReplicaBucket, own: torch.Tensor, how: Aggregate, trim: int) -> torch.Tensor:
    """Aggregate a bucket over its replicas. A collective of its ranks."""
    count = len(bucket.replicas)
    part = ceil(len(own) / count)
    rows = torch.zeros(count * part, dtype=own.dtype, device=own.device)
    rows[: len(own)] = own
    own_part = aggregate(links.all_to_all(bucket.replicas, rows.view(count, part)), how, trim)
    return links.all_gather(bucket.replicas, own_part).view(-1)[: len(own)]


class Averaging:
    """Averages one rank's parameters. Owns the memory in which they are saved."""

    def __init__(
        self,
        buckets: Sequence[ReplicaBucket],
        links: Links,
        tensors: LiveTensors,
        how: Aggregate,
        trim: int,
        by_tensor: bool = False,
    ) -> None:
        """Claim memory. `by_tensor`: measure each tensor, too. Raises ConfigError if trimming leaves no replica of a
        set."""
        for bucket in buckets:
            require_enough(how, len(bucket.replicas), trim)
        self._buckets = tuple(buckets)
        self._links = links
        self._tensors = tensors
        self._how = how
        self._trim = trim
        self._by_tensor = by_tensor
        live = tensors()
        self._saved = {bucket.number: read(bucket, live) for bucket in self._buckets}

    @property
    def nbytes(self) -> int:
        return sum(saved.nbytes for saved in self._saved.values())

    def save_parameters(self) -> None:
        """Save live parameters, before an update."""
        live = self._tensors()
        for bucket in self._buckets:
            torch.cat(views(bucket, live), out=self._saved[bucket.number])

    def measure(self, rate: float) -> NoisePart:
        """||update since `save_parameters`||^2 / `rate`^2 over finite elements; 0 if the learning rate `rate` is 0."""
        live, total, steps = self._tensors(), NoisePart(), dict[str, float]()
        for bucket in self._buckets:
            moved = read(bucket, live).double() - self._saved[bucket.number].double()
            each = torch.where(torch.isfinite(moved), moved, 0.0).square()
            total += part_of(bucket, 0.0, each.sum().item() / rate**2 if rate else 0.0, 0)
            self._add(steps, bucket, each, 1 / rate**2 if rate else 0.0)
        return NoisePart(signal=total.signal, steps=steps)

    def _add(self, sums: dict[str, float], bucket: ReplicaBucket, squares: torch.Tensor, factor: float) -> None:
        """Add the squares of a bucket's tensors to their sums, if tensors are measured."""
        if self._by_tensor and bucket.role in PARAMETERS:
            parts = squares.split([piece.stop - piece.start for piece in bucket.pieces])
            totals = torch.stack([part.sum() for part in parts]).tolist()
            for piece, total in zip(bucket.pieces, totals, strict=True):
                sums[piece.item] = sums.get(piece.item, 0.0) + total * factor

    def average(self) -> NoisePart:
        """Aggregate all replicas' parameters, and measure how far this rank's are from the result. A collective."""
        live, total, tensors = self._tensors(), NoisePart(), dict[str, float]()
        for bucket in self._buckets:
            own = read(bucket, live)
            result = aggregated(self._links, bucket, own, self._how, self._trim)
            self._saved[bucket.number].copy_(result)
            apart = result.double() - own.double()
            finite = torch.isfinite(own) & torch.isfinite(result)
            each = torch.where(finite, apart, 0.0).square()
            total += part_of(bucket, each.sum().item(), 0.0, int(finite.sum().item()))
            count = len(bucket.replicas)
            self._add(tensors, bucket, each, count / (count - 1) if count > 1 else 0.0)
        return total + NoisePart(apart=tensors)

    def apply(self) -> None:
        live = self._tensors()
        for bucket in self._buckets:
            write(bucket, live, self._saved[bucket.number])
