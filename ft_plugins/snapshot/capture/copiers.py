"""Copy a bucket's bytes from the tensors into the slot, and compute parity of other nodes' shares from own replicas.

Invariant: when `copy` returns, the destination holds the bytes. The GIL is released once per bucket, not once per
tensor: next to a Python-bound step, taking it again can cost milliseconds.

A bucket of parity is the XOR of its sources as they are in this rank's tensors. Each source is digested, to be compared
with the digest of the rank that captured it. Sources are copied like captured bytes. The only extra memory is one
staging buffer of a bucket's size, pinned if state is on a device.

In: flat views of sources and destinations; layout, live tensors. Out: bytes in place; parity in a parity slot; digests
of the bucket and of its sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ...errors import InventoryError
from ..segment.segment import Segment
from .layout import Layout, ParitySource

Bytes = npt.NDArray[np.uint8]
_Copies = dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]]


class Copier(Protocol):
    """Copies the pieces of one bucket. Host memory needs no more than `copy`: the others do nothing by default."""

    def ready(self) -> None:
        """Called on the training thread at the version point: `copy` must see everything written before."""
        return

    def use(self, address: int, nbytes: int) -> None:
        """Called before copies into this part of the segment, which has memory."""
        return

    def copy(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source into its destination (same dtype and size), and wait for completion."""

    def close(self) -> None:
        """Release the resources of copying."""
        return


class HostCopier(Copier):
    """Copies from host memory, with one native call per bucket."""

    def copy(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(destinations), list(sources))


class CudaCopier:
    """Copies from device memory on a side stream. The parts of the segment that are used are pinned memory, so copies
    are asynchronous DMA."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda`: what has the streams, events and registered memory of torch.cuda."""
        self._device, self._cuda = device, cuda
        self._addresses: list[int] = []
        self._stream = cuda.Stream(device)
        self._event = cuda.Event()

    def ready(self) -> None:
        self._event.record(self._cuda.current_stream(self._device))

    def use(self, address: int, nbytes: int) -> None:
        """Register `nbytes` at `address` with the CUDA runtime."""
        with self._cuda.device(self._device):
            status = self._cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(status) != 0:
            raise InventoryError(
                f"{self._device}: the segment cannot be registered as pinned memory (CUDA error {int(status)})"
            )
        self._addresses.append(address)

    def copy(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with self._cuda.stream(self._stream):
            self._stream.wait_event(self._event)
            for destination, source in zip(destinations, sources, strict=True):
                destination.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def close(self) -> None:
        for address in self._addresses:
            self._cuda.cudart().cudaHostUnregister(address)
        self._addresses.clear()


def copier_for(device: torch.device) -> Copier:
    """The copier for tensors on `device` into a segment."""
    if device.type == "cuda" and torch.cuda.is_available():
        return CudaCopier(device)
    if device.type != "cpu":
        raise InventoryError(f"tensors on {device.type} cannot be captured; expected cpu or cuda")
    return HostCopier()


def flat_bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a dense tensor as one uint8 view, in memory order. Zeros for one on the meta device, which stands
    for one that is not there yet: they take no memory as long as they are only read.

    Raises InventoryError for a tensor with gaps or overlaps, whose bytes cannot be captured or restored as one range,
    and for one that only stands for others, as a quantized one does: it has no bytes, or those of a copy.
    """
    detached = tensor.detach()
    if tensor.is_meta:
        return torch.from_numpy(np.zeros(tensor.numel() * tensor.element_size(), np.uint8))
    if not is_dense(detached):
        raise InventoryError(
            f"item '{name}': shape {tuple(tensor.shape)} with strides {tensor.stride()} is not dense in memory"
        )
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not _has_bytes(detached):
        raise InventoryError(
            f"item '{name}' is a {type(tensor).__name__}, which stands for other tensors (as one in fp8 does), so that "
            "its bytes cannot be captured: keep it as a plain tensor"
        )
    return _as_bytes(detached)


def _has_bytes(tensor: torch.Tensor) -> bool:
    with suppress(Exception):  # its class may not know how to give them
        flat = _as_bytes(tensor)
        return type(flat) is torch.Tensor and 0 != flat.data_ptr() == _as_bytes(tensor).data_ptr()
    return False


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def as_words(destination: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two flat uint8 views as int64 if both allow it: torch copies bytes a third slower than words."""
    if any(view.data_ptr() % 8 or view.numel() % 8 for view in (destination, source)):
        return destination, source
    return destination.view(torch.int64), source.view(torch.int64)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory exactly once, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and tensor.numel():
            if stride != expected:
                return False
            expected *= size
    return True


# ---- parity ----


class Encoder:
    """Computes the parity buckets of one layout. Owns the staging buffer: one bucket at a time."""

    def __init__(
        self, segment: Segment, layout: Layout, flat: Mapping[str, torch.Tensor],
        copiers: Mapping[torch.device, Copier],
    ) -> None:  # fmt: skip
        """`flat` are the bytes of the live tensors by item, `copiers` those of capture."""
        self._segment = segment
        self._buckets = layout.parity
        self._flat = flat
        self._copiers = copiers
        sizes = [source.nbytes for bucket in layout.parity for source in bucket.sources if not source.direct]
        pinned = any(device.type == "cuda" for device in copiers)
        self._staging = torch.empty(max(sizes, default=0), dtype=torch.uint8, pin_memory=pinned)
        # thousands of views, created once: creating each holds the GIL
        self._staged = [
            [{} if source.direct else self._copies(source, self._staging, source.at) for source in bucket.sources]
            for bucket in layout.parity
        ]
        self._in_place = [[self._host_bytes(source) for source in bucket.sources] for bucket in layout.parity]
        self._direct = {
            index: [self._direct_copies(number, self._area(index, number)) for number in range(len(layout.parity))]
            for index in segment.shape.parity_indices
        }

    def encode(self, index: int, number: int, private: bool = False) -> tuple[int, list[int]]:
        """Compute parity bucket `number` into parity slot `index`. Returns its digest, and those of its sources.

        `private`: compute in private memory first, for a bucket that a superseded writer may still write to.
        """
        bucket = self._buckets[number]
        area = self._area(index, number)
        target = np.empty_like(area) if private else area
        direct = self._direct_copies(number, target) if private else self._direct[index][number]
        digests: list[int] = []
        done = 0  # bytes filled by direct sources
        for place, source in enumerate(bucket.sources):
            if source.direct:
                part = target[source.at : source.at + source.nbytes]
                self._copy(direct[place], source, part)
                done = source.at + source.nbytes
            else:
                target[done:] = 0
                done = bucket.nbytes
                in_place = self._in_place[number][place]
                part = self._staging[: source.nbytes].numpy() if in_place is None else in_place
                if in_place is None:
                    self._copy(self._staged[number][place], source, part)
                into = target[source.at : source.at + source.nbytes]
                np.bitwise_xor(into, part, out=into)
            digests.append(xxhash.xxh3_64_intdigest(part.data))
        target[done:] = 0
        digest = xxhash.xxh3_64_intdigest(target.data)
        if private:
            area[:] = target
        return digest, digests

    def close(self) -> None:
        self._staged.clear()
        self._in_place.clear()
        self._direct.clear()
        self._staging = torch.empty(0, dtype=torch.uint8)

    def _area(self, index: int, number: int) -> Bytes:
        start = self._buckets[number].offset - self._segment.shape.data_nbytes
        return self._segment.data(index)[start : start + self._buckets[number].nbytes]

    def _copy(self, copies: _Copies, source: ParitySource, part: Bytes) -> None:
        """Copy a source into `part`, the destination of `copies`; gaps between its pieces become zeros."""
        at = source.at
        for piece in source.pieces:
            part[at - source.at : piece.offset - source.at] = 0
            at = piece.offset + piece.nbytes
        part[at - source.at :] = 0
        for device, (destinations, sources) in copies.items():
            self._copiers[device].copy(destinations, sources)

    def _host_bytes(self, source: ParitySource) -> Bytes | None:
        """The bytes of a source that is one piece of one host tensor, and so needs no staging; else None."""
        piece = source.pieces[0] if len(source.pieces) == 1 else None
        if piece is None or piece.nbytes != source.nbytes or self._flat[piece.item].device.type != "cpu":
            return None
        view: Bytes = self._flat[piece.item][piece.item_offset : piece.item_offset + piece.nbytes].numpy()
        return view

    def _direct_copies(self, number: int, target: Bytes) -> Sequence[_Copies]:
        into = torch.from_numpy(target)
        return [self._copies(s, into, 0) if s.direct else {} for s in self._buckets[number].sources]

    def _copies(self, source: ParitySource, target: torch.Tensor, base: int) -> _Copies:
        """The destinations in `target`, which starts at byte `base` of the bucket, and the sources, by device."""
        copies: _Copies = {}
        for piece in source.pieces:
            flat = self._flat[piece.item]
            destinations, sources = copies.setdefault(flat.device, ([], []))
            destination, view = as_words(
                target[piece.offset - base : piece.offset - base + piece.nbytes],
                flat[piece.item_offset : piece.item_offset + piece.nbytes],
            )
            destinations.append(destination)
            sources.append(view)
        return copies
