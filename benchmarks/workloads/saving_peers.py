"""What saving is compared with: CheckFreq's way, torchsnapshot, dlrover, each to shared memory or to storage.

Invariant: a peer is complete where ours is that it is compared with: in shared memory, or on the disk of the folder for
temporary files, its files flushed.

In: the state. Out: seconds from the call to that end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

_SAVED_SECONDS = 600.0  # for a checkpoint on a disk


class Peer(Protocol):
    """One of them."""

    name: str

    def snapshot(self) -> None:
        """The version point."""

    def fence(self) -> None:
        """Wait until the state may change."""

    def committed(self) -> float:
        """Wait until the snapshot is complete; seconds since the version point."""


class CheckFreq:
    """What CheckFreq does with the whole state, one checkpoint at a time: a thread copies it, for which the next update
    waits, then serializes the copy and writes it to a disk."""

    name = "checkfreq"

    def __init__(self, state: dict[str, torch.Tensor], stack: ExitStack) -> None:
        self._state, self._copy = state, {name: torch.empty_like(tensor) for name, tensor in state.items()}
        folder = tempfile.mkdtemp(prefix="ft-")
        stack.callback(shutil.rmtree, folder)
        self._path = Path(folder) / "checkpoint"
        self._thread = stack.enter_context(ThreadPoolExecutor(1))

    def snapshot(self) -> None:
        self._copied = self._thread.submit(self._copy_all)
        self._saved = self._thread.submit(self._save, time.perf_counter())

    def _copy_all(self) -> None:
        for name, tensor in self._state.items():
            self._copy[name].copy_(tensor)

    def _save(self, started: float) -> float:
        with self._path.open("wb") as file:
            torch.save(self._copy, file)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - started

    def fence(self) -> None:
        self._copied.result(_SAVED_SECONDS)

    def committed(self) -> float:
        """Waits until it is: the next one may not begin before."""
        return self._saved.result(_SAVED_SECONDS)


class TorchSnapshot:
    """torchsnapshot's async_take to a folder in memory, or to one on a disk whose files are flushed."""

    name = "torchsnapshot"

    def __init__(self, state: dict[str, torch.Tensor], stack: ExitStack, storage: bool = False) -> None:
        from torchsnapshot import Snapshot, StateDict

        self._take, self._storage = Snapshot.async_take, storage
        self._state = {"state": StateDict(**state)}
        self._folder = tempfile.mkdtemp(prefix="ft-", dir=None if storage else "/dev/shm")
        stack.callback(shutil.rmtree, self._folder)
        self._thread = stack.enter_context(ThreadPoolExecutor(1))

    def snapshot(self) -> None:
        started = time.perf_counter()
        self._saved = self._thread.submit(self._save, self._take(f"{self._folder}/snapshot", self._state), started)

    def _save(self, pending: Any, started: float) -> float:
        pending.wait()
        if self._storage:
            for path in (each for each in Path(self._folder).rglob("*") if each.is_file()):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        return time.perf_counter() - started

    def fence(self) -> None:
        """`snapshot` returns when the state is copied, or written."""

    def committed(self) -> float:
        """Waits until it is: the next one may not begin before."""
        return self._saved.result(_SAVED_SECONDS)


class DLRover:
    """dlrover's Flash Checkpoint into shared memory. It has one buffer and returns when everything is copied."""

    name = "dlrover"

    def __init__(self, state: dict[str, torch.Tensor], stack: ExitStack) -> None:
        os.environ["DLROVER_LOG_LEVEL"] = "ERROR"
        os.environ["TORCHELASTIC_RUN_ID"] = f"stall{os.getpid()}"  # names its sockets and its shared memory
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._state, self._folder = state, tempfile.mkdtemp(prefix="ft-")
        stack.callback(shutil.rmtree, self._folder)
        self._checkpointer = DdpCheckpointer(self._folder)  # starts a saver process, which would write to storage
        engine = self._checkpointer._engine
        stack.callback(engine.saver_proc.terminate)
        stack.callback(engine._shm_handler.unlink)
        stack.callback(engine.close)
        self._memory = StorageType.MEMORY
        self._iteration = 0
        self._seconds = 0.0

    def snapshot(self) -> None:
        self._iteration += 1
        started = time.perf_counter()
        self._checkpointer.save_checkpoint(self._iteration, dict(self._state), storage_type=self._memory)
        self._seconds = time.perf_counter() - started

    def fence(self) -> None:
        """`snapshot` waits already."""

    def committed(self) -> float:
        return self._seconds


MEMORY: dict[str, type[TorchSnapshot] | type[DLRover]] = {"torchsnapshot": TorchSnapshot, "dlrover": DLRover}
