"""The baselines of all benchmarks: what this machine does without any of our code.

Invariant: a baseline is measured in the same run as the figure compared with it, since only ratios within one run are
meaningful on a shared, noisy machine. Out: seconds, or bytes per second.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

GIB = 1 << 30
REPEATS = 7
XOR_BYTES = 256 << 10
SEND_BYTES = 1 << 20


def seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median of `repeats` runs of `work`."""
    took = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return statistics.median(took)


def memcpy(nbytes: int = GIB) -> float:
    """Seconds of torch `copy_` of `nbytes` of contiguous memory by one thread into mapped memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source, destination = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
        destination.copy_(source)
        return seconds(lambda: destination.copy_(source))
    finally:
        torch.set_num_threads(threads)


def xor_work(nbytes: int = GIB) -> Callable[[], None]:
    """A function that XORs one array of `nbytes` into another with NumPy, in blocks of 256 KiB.

    Both arrays are aligned like mapped segments, and already touched.
    """
    source = torch.ones(nbytes, dtype=torch.uint8).numpy()
    target = torch.ones(nbytes, dtype=torch.uint8).numpy()

    def work() -> None:
        for start in range(0, nbytes, XOR_BYTES):
            block = target[start : start + XOR_BYTES]
            np.bitwise_xor(block, source[start : start + XOR_BYTES], out=block)

    return work


def loopback(nbytes: int = GIB // 4, repeats: int = REPEATS) -> float:
    """Bytes per second through one pair of TCP sockets on the loopback device: median of `repeats` runs of `nbytes`.

    Blocking sends of 1 MiB of touched memory; a thread receives everything into one buffer of 1 MiB.
    """
    sent = memoryview(torch.ones(SEND_BYTES, dtype=torch.uint8).numpy())

    def receive(connection: socket.socket) -> None:
        with connection:
            buffer, left = memoryview(bytearray(SEND_BYTES)), nbytes
            while left:
                left -= connection.recv_into(buffer, min(left, SEND_BYTES))
            connection.sendall(b"1")

    def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
            threading.Thread(target=receive, args=(server.accept()[0],)).start()
            for start in range(0, nbytes, SEND_BYTES):
                ours.sendall(sent[: nbytes - start])
            ours.recv(1)  # everything has arrived

    return nbytes / seconds(work, repeats)
