"""Two processes with a gate between them."""

import multiprocessing
from contextlib import contextmanager

import numpy as np
import pytest

from ft_plugins.bubbles.gate.gate import GATE_BYTES

_fork = multiprocessing.get_context("fork")
WAIT_SECONDS = 90.0  # for anything that takes milliseconds


@pytest.fixture
def memory(tmp_path):
    """Memory that two processes share."""
    path = tmp_path / "gate"
    path.write_bytes(bytes(GATE_BYTES))
    return np.memmap(path, dtype=np.uint8, mode="r+", shape=(GATE_BYTES,))


@pytest.fixture
def trainer():
    """Fork a process that runs a function; yields a function for its next message, and its pid. Killed afterwards."""

    @contextmanager
    def begin(act):
        ours, theirs = _fork.Pipe()

        def next_message():
            assert ours.poll(WAIT_SECONDS), "no message from the other process"
            return ours.recv()

        process = _fork.Process(target=act, args=(theirs,), daemon=True)
        process.start()
        try:
            assert process.pid is not None
            yield next_message, process.pid
        finally:
            process.kill()
            process.join(WAIT_SECONDS)

    return begin
