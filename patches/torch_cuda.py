"""torch.cuda without a CUDA device: one stream that is always in order, and no memory accounting.

Upstream file: torch/cuda/__init__.py and its neighbours. Megatron calls torch.cuda directly throughout; each symbol
that training needs is listed here with its meaning on the CPU. The device's random generator is the CPU's default one,
because dropout and initialisation draw from it here.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from .declared import Patch
from .versions import TORCH


class Stream:
    """A stream whose work is complete when it is issued."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = 0
        self.stream_id = 0

    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """A point in host time."""

    def __init__(self, *_: object, **__: object) -> None:
        self.moment = 0.0

    def record(self, stream: object = None) -> None:
        self.moment = time.perf_counter()

    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        """In milliseconds, as of CUDA events."""
        return (other.moment - self.moment) * 1e3


class Device:
    """torch.cuda.device as a context manager: there is one device."""

    def __init__(self, device: object = None) -> None:
        self.idx = 0

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class DefaultGenerators:
    """torch.cuda.default_generators: the CPU's generator at every index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Generator:
        if index >= self.count:
            raise IndexError(index)  # also what ends an iteration
        return torch.default_generator


def patches(device_count: int) -> tuple[Patch, ...]:
    """The patches of torch.cuda for a node that emulates `device_count` devices, one for each local rank."""
    current = SimpleNamespace(device=0)
    stream = Stream()

    def set_device(device: Any) -> None:
        index = device.index if isinstance(device, torch.device) else device
        current.device = int(str(index).rpartition(":")[2]) if index is not None else 0

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def nothing(*_: object, **__: object) -> None: ...

    def zero(*_: object, **__: object) -> int:
        return 0

    properties = SimpleNamespace(name="cpu", major=8, minor=0, total_memory=0, multi_processor_count=1)
    device = "Megatron calls it directly, and its initialisation asserts a CUDA device"
    streams = "streams and events are used throughout; on the CPU all work is in order already"
    memory = "memory statistics are logged; there is no device memory to count"
    random = "the device's generator is the CPU's default one; torch.manual_seed calls this, so it must not call back"
    ranges = "profiler ranges need NVTX"
    built = "an optimizer's step uses the accelerator that torch was built for, which is None in a CPU build"
    replacements: dict[str, tuple[str, Any]] = {
        "is_available": (device, lambda: True),
        "is_initialized": (device, lambda: True),
        "init": (device, nothing),
        "_lazy_init": (device, nothing),
        "_lazy_call": (device, lambda callable, **_: callable()),
        "device_count": (device, lambda: device_count),
        "current_device": (device, lambda: current.device),
        "set_device": (device, set_device),
        "device": (device, Device),
        "get_device_name": (device, lambda *_: "cpu"),
        "get_device_capability": (device, lambda *_: (properties.major, properties.minor)),
        "get_device_properties": (device, lambda *_: properties),
        "is_bf16_supported": (device, lambda *_, **__: True),
        "Stream": (streams, Stream),
        "ExternalStream": (streams, Stream),
        "Event": (streams, Event),
        "stream": (streams, lambda _: nullcontext()),
        "current_stream": (streams, lambda *_: stream),
        "default_stream": (streams, lambda *_: stream),
        "set_stream": (streams, nothing),
        "synchronize": (streams, nothing),
        "is_current_stream_capturing": (streams, lambda: False),
        "empty_cache": (memory, nothing),
        "ipc_collect": (memory, nothing),
        "reset_peak_memory_stats": (memory, nothing),
        "memory_stats": (memory, lambda *_: defaultdict(int)),
        "memory_allocated": (memory, zero),
        "max_memory_allocated": (memory, zero),
        "memory_reserved": (memory, zero),
        "max_memory_reserved": (memory, zero),
        "mem_get_info": (memory, lambda *_: (0, 0)),
        "manual_seed": (random, manual_seed),
        "manual_seed_all": (random, manual_seed),
        "seed": (random, lambda: torch.default_generator.seed()),
        "seed_all": (random, lambda: torch.default_generator.seed()),
        "initial_seed": (random, lambda: torch.default_generator.initial_seed()),
        "get_rng_state": (random, lambda *_, **__: torch.default_generator.get_state()),
        "get_rng_state_all": (random, lambda: [torch.default_generator.get_state()]),
        "set_rng_state": (random, lambda state, *_, **__: torch.default_generator.set_state(state)),
        "set_rng_state_all": (random, lambda states: torch.default_generator.set_state(states[0])),
        "default_generators": (random, DefaultGenerators(device_count)),
    }
    also: dict[str, dict[str, tuple[str, Any]]] = {
        "torch.cuda.nvtx": dict.fromkeys(("range_push", "range_pop", "mark"), (ranges, nothing)),
        "torch.accelerator": {"current_accelerator": (built, lambda check_available=False: None)},
        "torch.cuda.random": {
            name: replacements[name] for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all")
        },
    }
    return tuple(
        Patch("torch", module, symbol, TORCH, reason, constant(value))
        for module, symbols in {"torch.cuda": replacements, **also}.items()
        for symbol, (reason, value) in symbols.items()
    )


def constant(value: Any) -> Callable[[Any], Any]:
    """A replacement that ignores the original."""
    return lambda _: value
