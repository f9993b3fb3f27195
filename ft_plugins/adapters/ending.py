"""How a script ends that nobody runs for us: asked at exit, when the interpreter has forgotten why it exits.

Invariant: an end that is not known to be orderly is none. Orderly is a script whose outermost frame returned (a frame
keeps the instruction with which it was left), or that called `sys.exit` with status 0; of `raise SystemExit(...)`
nobody learns the status.

In: a frame of the script, or one that it has called. Out: a question to be asked at exit.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn


def follow_end(frame: FrameType) -> Callable[[], bool]:
    """Whether the script whose frame is the outermost of `frame` has ended in order, once it has ended."""
    while frame.f_back is not None:
        frame = frame.f_back
    statuses: list[Any] = ["none"]
    original = sys.exit

    def exit(status: Any = None, /) -> NoReturn:
        statuses.append(status)
        original(status)

    sys.exit = exit

    def orderly() -> bool:
        returned = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
        uncaught = hasattr(sys, "last_type")
        return not uncaught and (returned or statuses[-1] in (None, 0))

    return orderly
