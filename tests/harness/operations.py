"""Count what a computation does instead of the time it takes: the same on every machine, however busy.

Loops in C (`sum`, `sorted`, `in` of a tuple) are one instruction each, so only the growth of Python code is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions(work: Callable[[], object]) -> int:
    """How many instructions of the interpreter `work()` executes in this thread."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def doubling(work: Callable[[int], object], size: int) -> float:
    """How many times as many instructions `work(2 * size)` takes as `work(size)`: 2 if it is linear, 4 if quadratic."""
    return instructions(lambda: work(2 * size)) / instructions(lambda: work(size))
