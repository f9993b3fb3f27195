"""A gate that a CUDA device opens: when its stream is there, however far ahead the host is."""

import time

import numpy as np
import pytest
import torch

from ft_plugins.bubbles.filling import Grant
from ft_plugins.bubbles.gate.cuda_stores import CudaStores
from ft_plugins.bubbles.gate.gate import GATE_BYTES, Gate
from ft_plugins.snapshot.segment.shape import PAGE

pytestmark = pytest.mark.gpu

CYCLES = 200_000_000  # a tenth of a second or more, on any device of today
WAIT_SECONDS = 60.0


def test_a_device_opens_and_closes_its_gate_in_the_order_of_its_stream():
    memory = np.zeros(2 * PAGE, dtype=np.uint8)
    page = memory[-memory.ctypes.data % PAGE :][:GATE_BYTES]
    gate, reader = Gate(page), Gate(page)
    stores = CudaStores(gate.memory, torch.device("cuda"))
    gate.follow(stores)
    stream = torch.cuda.current_stream()
    stream.synchronize()
    seen = []
    began = time.perf_counter()
    for bubble in range(3):
        torch.cuda._sleep(CYCLES)
        gate.open([Grant(bubble, 0, 0.0, 9.0, 1 << 20)], 5, 0)
        torch.cuda._sleep(CYCLES)
        gate.close()
    given = time.perf_counter() - began
    while not stream.query() and time.perf_counter() < began + WAIT_SECONDS:
        found = reader.read()
        if not seen or found != seen[-1]:
            seen.append(found)
    whole = time.perf_counter() - began
    stores.close()
    assert given < 0.2 * whole, "the host waited for the device"
    assert [None if one is None else one.bubble for one in seen][:7] == [None, 0, None, 1, None, 2, None][: len(seen)]
    assert len(seen) >= 6 and reader.read() is None
    assert all(one.windows[0][2] > 0.9 * (1 << 20) for one in seen if one is not None)
