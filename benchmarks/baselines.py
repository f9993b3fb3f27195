"""Every floor that benchmarks compare with, in one place: what this machine does without any of our code.

Invariant: a floor is measured in the same run as what is compared with it; this machine is shared and noisy, so only
ratios within one run mean anything. In: nothing. Out: seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

GIB = 1 << 30
REPEATS = 7


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
