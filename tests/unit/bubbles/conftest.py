"""Two processes with a gate between them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from ft_plugins.bubbles.gate import GATE_BYTES

_fork = multiprocessing.get_context("fork")
WAIT_SECONDS = 30.0  # for anything that takes milliseconds


@pytest.fixture
def memory(tmp_path: Path) -> np.ndarray:
    """What two processes share."""
    path = tmp_path / "gate"
    path.write_bytes(bytes(GATE_BYTES))
    return np.memmap(path, dtype=np.uint8, mode="r+", shape=(GATE_BYTES,))


@pytest.fixture
def trainer() -> Callable[..., AbstractContextManager[tuple[Callable[[], object], int]]]:
    """Begins a process that does what it is given: what it says next, and its pid. Killed afterwards."""

    @contextmanager
    def begin(act: Callable[[Connection], None]) -> Iterator[tuple[Callable[[], object], int]]:
        here, there = _fork.Pipe()

        def told() -> object:
            assert here.poll(WAIT_SECONDS), "the other process says nothing"
            return here.recv()

        process = _fork.Process(target=act, args=(there,), daemon=True)
        process.start()
        try:
            assert process.pid is not None
            yield told, process.pid
        finally:
            process.kill()
            process.join(WAIT_SECONDS)

    return begin
