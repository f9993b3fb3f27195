"""Take times on the device that computes: on a processor by its clock, on a GPU by events of the current stream.

Invariant: a mark never waits for the device. `seconds` does, until the later mark has passed, so it is asked for marks
of an earlier iteration.

In: marks. Out: seconds between them."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


class Stopwatch:
    """The clock of one device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Mark:
        """Now, in the order of what the calling thread has given to the device."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        if isinstance(begin, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            end.synchronize()
            return begin.elapsed_time(end) / 1e3
        assert isinstance(end, float)
        return end - begin
