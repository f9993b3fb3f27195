"""When this process passed the steps of its start, by one clock, and the processor time that it had used by then.

Invariant: a step is one reading of two clocks; nothing is printed, sent or written here. The clock is CLOCK_MONOTONIC,
which all processes of a node share, so that the steps of a node's processes can be compared.

    began     this module was imported, which a rank does first, or `begin` was called
    joining   `torch.distributed.init_process_group` was called for the first time: imports are over
    built     `attach` was called: the model is built
    restored  the state is loaded
    completed the first iteration is over

`grouped` is how long the process was inside functions of torch that make process groups, until `built`.

In: calls, `follow_groups` once torch is there. Out: `taken`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

STEPS = ("began", "joining", "built", "restored")
_GROUP_FUNCTIONS = ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group")
_MARK = "_ft_plugins_measured"  # attribute of functions that are measured


@dataclass
class Stamps:
    """Seconds of the monotonic clock, and processor seconds of this process, by step; absent: not passed. `unused`: its
    processor seconds before it became a rank, which do not count."""

    clock: dict[str, float] = field(default_factory=dict)
    processor: dict[str, float] = field(default_factory=dict)
    grouped: float = 0.0
    unused: float = 0.0


_afterwards: list[Callable[[], None]] = []
_taken = Stamps({"began": time.monotonic()}, {"began": time.process_time()})


def taken() -> Stamps:
    """The steps of this process so far."""
    return _taken


def begin() -> None:
    """This process becomes a rank only now: it was forked, or stood by. Forgets the steps before."""
    _taken.clock.clear()
    _taken.processor.clear()
    _taken.grouped, _taken.unused = 0.0, time.process_time()
    pass_step("began")


def pass_step(step: str) -> None:
    """The process passes `step`, again if it has passed it before."""
    _taken.clock[step], _taken.processor[step] = time.monotonic(), time.process_time() - _taken.unused
    if step == "completed":
        while _afterwards:
            _afterwards.pop()()


def afterwards(function: Callable[[], None]) -> None:
    """Call `function` once, when an iteration is completed."""
    _afterwards.append(function)


def follow_groups(module: Any) -> None:
    """Measure the functions of `module`, torch.distributed, that make process groups. What they do is unchanged.
    Idempotent."""
    depth = [0]
    for name in _GROUP_FUNCTIONS:
        original = getattr(module, name, None)
        if original is not None and not hasattr(original, _MARK):
            setattr(module, name, _measured(original, depth))


def _measured(original: Callable[..., Any], depth: list[int]) -> Callable[..., Any]:
    @functools.wraps(original)
    def measured(*args: Any, **kwargs: Any) -> Any:
        if depth[0] or "built" in _taken.clock:
            return original(*args, **kwargs)
        if "joining" not in _taken.clock:
            pass_step("joining")
        began = time.monotonic()
        depth[0] += 1
        try:
            return original(*args, **kwargs)
        finally:
            depth[0] -= 1
            _taken.grouped += time.monotonic() - began

    setattr(measured, _MARK, True)
    return measured
