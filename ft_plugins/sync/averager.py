"""Averages parameters over their replicas, bucket by bucket: what the plan of buckets says, and no decision.

    keep      parameters as they are before an update, in memory of their own
    measure   the length of the step that the update made: live against kept
    average   live -> swap -> aggregate -> gather -> kept; how far live is from it is the divergence
    apply     kept -> live

Everything but `apply` only reads live tensors, and may run behind forward and backward.

Invariant: after `apply` all replicas hold the same bits. Parameters are kept once (`nbytes`), claimed at start; beyond
that a bucket takes the work memory of its aggregate.

In: buckets, live tensors. Out: `NoisePart`s for the measurement of noise; changed live tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil

import torch

from ..errors import InventoryError
from .aggregate import Aggregate, aggregate, require_enough
from .buckets import ReplicaBucket
from .links import Links
from .noise import NoisePart, part_of

Tensors = Callable[[], Mapping[str, torch.Tensor]]


def flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that is dense in memory, in the order of memory, as a view."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride()[axis])
    if not tensor.permute(order).is_contiguous():
        raise InventoryError(f"item '{name}' has gaps in memory: expected a dense tensor")
    return tensor.permute(order).view(-1)


def views(bucket: ReplicaBucket, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The pieces of a bucket, as views of the live tensors."""
    return [flat(piece.item, tensors[piece.item])[piece.start : piece.stop] for piece in bucket.pieces]


def read(bucket: ReplicaBucket, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A bucket's elements, copied out."""
    return torch.cat(views(bucket, tensors))


def write(bucket: ReplicaBucket, tensors: Mapping[str, torch.Tensor], values: torch.Tensor) -> None:
    """A bucket's elements, in place."""
    with torch.no_grad():
        pieces = views(bucket, tensors)
        torch._foreach_copy_(pieces, list(values.split([len(piece) for piece in pieces])))


def mixed(links: Links, bucket: ReplicaBucket, own: torch.Tensor, how: Aggregate, trim: int) -> torch.Tensor:
    """What `how` makes of all replicas' values of a bucket. Its ranks call together."""
    count = len(bucket.replicas)
    part = ceil(len(own) / count)
    rows = torch.zeros(count * part, dtype=own.dtype, device=own.device)
    rows[: len(own)] = own
    found = aggregate(links.swap(bucket.replicas, rows.view(count, part)), how, trim)
    return links.gather(bucket.replicas, found).view(-1)[: len(own)]


class Averaging:
    """One rank's. Guards the memory in which parameters are kept."""

    def __init__(
        self, buckets: Sequence[ReplicaBucket], links: Links, tensors: Tensors, how: Aggregate, trim: int
    ) -> None:
        """Claim memory. Raises ConfigError where `trim` leaves no replica of a set."""
        for bucket in buckets:
            require_enough(how, len(bucket.replicas), trim)
        self._buckets = tuple(buckets)
        self._links = links
        self._tensors = tensors
        self._how = how
        self._trim = trim
        live = tensors()
        self._kept = {bucket.number: read(bucket, live) for bucket in self._buckets}

    @property
    def nbytes(self) -> int:
        """Memory that is held for good."""
        return sum(kept.numel() * kept.element_size() for kept in self._kept.values())

    def save_parameters(self) -> None:
        """Live parameters, before an update."""
        live = self._tensors()
        for bucket in self._buckets:
            torch.cat(views(bucket, live), out=self._kept[bucket.number])

    def measure(self, rate: float) -> NoisePart:
        """The step of the update since `keep`, at learning rate `rate`; of no length where that is 0."""
        live, found = self._tensors(), NoisePart()
        for bucket in self._buckets:
            moved = read(bucket, live).double() - self._kept[bucket.number].double()
            squares = torch.where(torch.isfinite(moved), moved, 0.0).square().sum().item()
            found += part_of(bucket, 0.0, squares / rate**2 if rate else 0.0, 0)
        return NoisePart(signal=found.signal)

    def average(self) -> NoisePart:
        """Aggregate all replicas' parameters, and measure how far this one's are from that. All ranks call together."""
        live, found = self._tensors(), NoisePart()
        for bucket in self._buckets:
            own = read(bucket, live)
            result = mixed(self._links, bucket, own, self._how, self._trim)
            self._kept[bucket.number].copy_(result)
            apart = result.double() - own.double()
            finite = torch.isfinite(own) & torch.isfinite(result)
            squares = torch.where(finite, apart, 0.0).square().sum().item()
            found += part_of(bucket, squares, 0.0, int(finite.sum().item()))
        return found

    def apply(self) -> None:
        """What was averaged last becomes live."""
        live = self._tensors()
        for bucket in self._buckets:
            write(bucket, live, self._kept[bucket.number])
