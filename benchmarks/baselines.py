"""Every floor that benchmarks compare with, in one place: what this machine does without any of our code.

Invariant: a floor is measured in the same run as what is compared with it; this machine is shared and noisy, so only
ratios within one run mean anything. In: nothing. Out: seconds, or bytes a second.
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
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def memcpy(nbytes: int = GIB) -> float:
    """torch `copy_` of `nbytes` of contiguous memory by one thread into a destination touched before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source, destination = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
        destination.copy_(source)
        return seconds(lambda: destination.copy_(source))
    finally:
        torch.set_num_threads(threads)


def xor_work(nbytes: int = GIB) -> Callable[[], None]:
    """An in-place XOR of one array of `nbytes` into another by NumPy, in blocks of 256 KiB: to be timed by the caller.

    Both arrays are aligned, as memory that is mapped is, and touched before.
    """
    source = torch.ones(nbytes, dtype=torch.uint8).numpy()
    target = torch.ones(nbytes, dtype=torch.uint8).numpy()

    def work() -> None:
        for start in range(0, nbytes, XOR_BYTES):
            block = target[start : start + XOR_BYTES]
            np.bitwise_xor(block, source[start : start + XOR_BYTES], out=block)

    return work


def loopback(nbytes: int = GIB // 4, repeats: int = REPEATS) -> float:
    """Bytes a second through one pair of TCP sockets on the loopback device: the median of `repeats` times `nbytes`.

    Blocking sends of a MiB of memory that was touched before; a thread receives all into one buffer of a MiB.
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
            ours.recv(1)  # all has arrived

    return nbytes / seconds(work, repeats)
