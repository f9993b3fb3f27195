"""Ranks of real jobs that compute on a CPU, and whose device is not there before their host is through an iteration.

The device is emulated, the job is real: what the host gives to its stream in an iteration, the stores in the gate and
the events of the clock, is done when the host waits for its device, before the version point: in the same order, and
`PACE` times as slowly. So the host has left each bubble before it begins on the device.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from ft_plugins.bubbles.gate.cuda_stores import CudaStores
from ft_plugins.bubbles.gate.gate import HELD, Words
from ft_plugins.bubbles.timeline import record
from ft_plugins.systems import measured

from .late_device import CPU, LateDevice, LateEvent, LateStream, Queued

PACE = 3.0  # bubbles that a busy reader sees, and processor time for it meanwhile
KILLED_IN = 12  # iteration, or later: once, rank 0 is killed when its device has opened the gate for a bubble


class PlayedStream(LateStream):
    """Does at once what it is given while the host waits for it, and between iterations."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__(device)
        self.is_ahead = False  # the host
        self._given: list[tuple[float, Callable[[], object]]] = []

    def give(self, work: Callable[[], object], after: LateEvent | None = None) -> None:
        if self.is_ahead:
            self._given.append((time.perf_counter(), work))
        else:
            work()

    def synchronize(self) -> None:
        self.is_ahead = False
        given, self._given = self._given, []
        began = time.perf_counter()
        for at, work in given:
            time.sleep(max(0.0, began + PACE * (at - given[0][0]) - time.perf_counter()))
            work()


class PlayedEvent:
    """What CudaClock uses of torch.cuda.Event."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self._when: float | None = None

    def record(self) -> None:
        self._when = None
        self._stream.give(self._reach)

    def _reach(self) -> None:
        self._when = time.perf_counter()

    def query(self) -> bool:
        return self._when is not None

    def elapsed_time(self, end: PlayedEvent) -> float:
        assert self._when is not None and end._when is not None
        return 1e3 * (end._when - self._when)


class PlayedStores(CudaStores):
    """`opened` is called by the device once it has opened the gate for a bubble."""

    opened: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, memory: Words, device: LateDevice) -> None:
        super().__init__(memory, CPU, device)
        self._stream = device.training

    def store(self, words: Words, at: int) -> bool:
        with Queued(self._stream):
            made = super().store(words, at)
        if len(words) > 1 and words[2] < HELD:
            self._stream.give(self.opened)
        return made


def with_a_late_device() -> None:
    """Give this rank such a device."""
    device = LateDevice([0])
    stream = device.training = PlayedStream(device)
    events = SimpleNamespace(Event=lambda enable_timing: PlayedEvent(stream), memory_allocated=lambda: 0)
    vars(record)["torch"] = SimpleNamespace(cuda=events)
    vars(measured)["clock_of"] = lambda device: record.CudaClock()
    is_killed = (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("0", "0")

    class OnDevice(measured.Measurement):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            assert self.baft is not None
            self.baft._stores_in = lambda words: PlayedStores(words, device)

        def iteration_begin(self, step: int) -> None:
            dist.barrier()  # else a host's wait for another's device would be played too, and slower
            stream.is_ahead = True
            if is_killed and step >= KILLED_IN:
                PlayedStores.opened = staticmethod(lambda: os.kill(os.getpid(), signal.SIGKILL))
            super().iteration_begin(step)

        def bubbles_end(self) -> None:
            super().bubbles_end()
            stream.synchronize()

    vars(measured)["Measurement"] = OnDevice


def deepspeed_example(argv: Sequence[str]) -> None:
    """One rank of the DeepSpeed example."""
    with_a_late_device()
    import_module("deepspeed_gpt").main(argv)
