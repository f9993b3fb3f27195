"""Copy a bucket's bytes from the tensors into the slot: one small class per kind of device.

Invariant: when `copy` returns, the destination holds the bytes. The GIL is released once per bucket, not once per
tensor: next to a Python-bound step, taking it again can cost milliseconds.

In: flat views of sources and destinations. Out: bytes in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ...errors import InventoryError


class Copier(Protocol):
    """Copies the pieces of one bucket."""

    def ready(self) -> None:
        """Called on the training thread at the version point: `copy` must see everything written before."""
        ...

    def use(self, address: int, nbytes: int) -> None:
        """Called before copies into this part of the segment, which has memory."""
        ...

    def copy(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source into its destination (same dtype and size), and wait for completion."""
        ...

    def close(self) -> None:
        """Release the resources of copying."""
        ...


class HostCopier:
    """Copies from host memory, with one native call per bucket."""

    def ready(self) -> None:
        return

    def use(self, address: int, nbytes: int) -> None:
        return

    def copy(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(destinations), list(sources))

    def close(self) -> None:
        return


class CudaCopier:
    """Copies from device memory on a side stream. The parts of the segment that are used are pinned memory, so copies
    are asynchronous DMA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._addresses: list[int] = []
        self._stream = torch.cuda.Stream(device)
        self._event = torch.cuda.Event()

    def ready(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def use(self, address: int, nbytes: int) -> None:
        """Register `nbytes` at `address` with the CUDA runtime."""
        with torch.cuda.device(self._device):
            status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(status) != 0:
            raise InventoryError(
                f"{self._device}: the segment cannot be registered as pinned memory (CUDA error {int(status)})"
            )
        self._addresses.append(address)

    def copy(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._event)
            for destination, source in zip(destinations, sources, strict=True):
                destination.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def close(self) -> None:
        for address in self._addresses:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._addresses.clear()


def copier_for(device: torch.device) -> Copier:
    """The copier for tensors on `device` into a segment."""
    if device.type == "cuda" and torch.cuda.is_available():
        return CudaCopier(device)
    if device.type != "cpu":
        raise InventoryError(f"tensors on {device.type} cannot be captured; expected cpu or cuda")
    return HostCopier()


def flat_bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a dense tensor as one uint8 view, in memory order.

    Raises InventoryError for a tensor with gaps or overlaps, whose bytes cannot be captured or restored as one range.
    """
    detached = tensor.detach()
    if not _dense(detached):
        raise InventoryError(
            f"item '{name}': shape {tuple(tensor.shape)} with strides {tensor.stride()} is not dense in memory"
        )
    flat = detached.as_strided((detached.numel(),), (1,))
    return flat.view(torch.uint8)


def as_words(destination: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two flat uint8 views as int64 if both allow it: torch copies bytes a third slower than words."""
    if any(view.data_ptr() % 8 or view.numel() % 8 for view in (destination, source)):
        return destination, source
    return destination.view(torch.int64), source.view(torch.int64)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory exactly once, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and tensor.numel():
            if stride != expected:
                return False
            expected *= size
    return True
