"""A device whose streams run late, on purpose.

It is emulated: what is given to a stream waits in its queue, and each call to the device lets some of it run,
as drawn. Only an event that is waited for orders two streams, and only `synchronize` makes the host wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class LateEvent:
    """Done when the stream that recorded it last has come that far; one that was never recorded is done."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._recorded, self.reached = device, 0, 0

    @property
    def done(self) -> bool:
        return self.reached >= self._recorded

    def record(self, stream: LateStream) -> None:
        self._recorded += 1
        number = self._recorded

        def reach() -> None:
            self.reached = number

        stream.give(reach)


class LateStream:
    """A queue of work, each with the event that it waits for."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.queue: deque[tuple[Callable[[], object], LateEvent | None]] = deque()

    def give(self, work: Callable[[], object], after: LateEvent | None = None) -> None:
        with self._device.lock:
            self.queue.append((work, after))
            self._device.tick()

    def wait_event(self, event: LateEvent) -> None:
        self.give(lambda: None, event)

    def run(self, count: int) -> bool:
        """Do up to `count` pieces of work. Whether any could be done."""
        before = count
        while count and self.queue and (self.queue[0][1] is None or self.queue[0][1].done):
            self.queue.popleft()[0]()
            count -= 1
        return count < before

    def synchronize(self) -> None:
        """Other streams do only what this one waits for."""
        with self._device.lock:
            while self.queue:
                if not self.run(1):
                    for stream in self._device.streams:
                        stream.run(1)


class Queued(TorchFunctionMode):
    """Gives each `copy_` to a stream, in place of doing it."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            assert kwargs == {"non_blocking": True}, "else the host waits in the middle of a bucket"
            self._stream.give(lambda: self._copy(args[0], args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():  # the stream may come here where copies are given to one
            target.copy_(source)


class LateDevice:
    """What a copier uses of torch.cuda. `pace`: how many pieces of work each stream does at each call."""

    def __init__(self, pace: list[int]) -> None:
        self.lock = threading.RLock()
        self.streams: list[LateStream] = []
        self._pace, self._ticks = pace, 0
        self.training = self.Stream(CPU)
        self.registered: dict[int, int] = {}
        self.status = 0

    def tick(self) -> None:
        for stream in self.streams:
            stream.run(self._pace[self._ticks % len(self._pace)])
            self._ticks += 1

    def Stream(self, device: torch.device) -> LateStream:
        self.streams.append(LateStream(self))
        return self.streams[-1]

    def Event(self) -> LateEvent:
        return LateEvent(self)

    def current_stream(self, device: torch.device) -> LateStream:
        return self.training

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        with Queued(stream):
            yield

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def cudart(self) -> LateDevice:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert not any(address < at + size and at < address + nbytes for at, size in self.registered.items())
        self.registered[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0
