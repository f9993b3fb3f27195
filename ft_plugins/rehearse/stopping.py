"""Let a program that starts jobs clean up when it is stopped by a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def raising_signals() -> Iterator[None]:
    """Turn SIGTERM, and SIGHUP unless it is ignored (nohup), into SystemExit, so that the body cleans up. The ones that
    follow are ignored: they would interrupt that."""

    def raised(number: int, frame: FrameType | None) -> None:
        for each in usual:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    known = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    usual = {number: handler for number, handler in known.items() if handler is not signal.SIG_IGN}
    for number in usual:
        signal.signal(number, raised)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
