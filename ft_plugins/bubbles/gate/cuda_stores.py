"""Stores that a CUDA device makes in a gate: copies in the order of the stream that is current at the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...errors import FtError
from .gate import Words


class CudaStores:
    """Stores in the `memory` of one gate, a numpy array of 8-byte words."""

    def __init__(self, memory: Words, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda`: what has the streams and registered memory of torch.cuda. Raises FtError if it cannot register it."""
        self._device, self._cuda = device, cuda
        self._address = memory.ctypes.data
        self._memory = torch.from_numpy(memory.view(np.int64))
        with cuda.device(device):
            status = int(cuda.cudart().cudaHostRegister(self._address, memory.nbytes, 0))
        if status != 0:
            raise FtError(f"{device}: the gate cannot be registered as pinned memory (CUDA error {status})")

    def store(self, words: Words, at: int) -> bool:
        source = torch.from_numpy(words.view(np.int64).copy())
        if self._device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():  # a graph would store this opening again at each replay
                return False
            source = source.pin_memory()  # torch's allocator keeps it until the copy is through
        staged = torch.empty_like(source, device=self._device)
        staged.copy_(source, non_blocking=True)
        self._memory[at : at + len(words)].copy_(staged, non_blocking=True)
        return True

    def close(self) -> None:
        """Wait for what was given to the current stream, and release the memory, which may be unmapped then."""
        self._cuda.current_stream(self._device).synchronize()
        self._cuda.cudart().cudaHostUnregister(self._address)
