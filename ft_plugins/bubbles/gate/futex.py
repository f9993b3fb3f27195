"""Wait without polling until another process changes a word in shared memory.

The kernel's futex, on the low half of an 8-byte word. The waiter passes the value it has seen, so a change between
reading and waiting is not missed.

Invariant: a wait ends when the word has changed and was woken, or at its timeout; it may end earlier. Without futex
(not Linux, another processor) the caller polls every `POLL_SECONDS`, and waking does nothing.

In: an array of 8-byte words in a shared mapping. Out: nothing.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

POLL_SECONDS = 0.002
_SYSCALL = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE, _ALL = 0, 1, 1 << 30
_HALF = (1 << 32) - 1

Words = npt.NDArray[np.uint64]


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _system_call() -> Callable[..., int] | None:
    number = _SYSCALL.get(platform.machine())
    if sys.platform != "linux" or sys.byteorder != "little" or number is None:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long

    def futex(address: int, operation: int, value: int, time: _Time | None = None) -> int:
        until = ctypes.byref(time) if time is not None else None
        return int(
            call(ctypes.c_long(number), ctypes.c_void_p(address), operation, ctypes.c_uint32(value), until, None, 0)
        )

    return futex


_futex = _system_call()


class FutexWord:
    """One word of `words`, at place `at`."""

    def __init__(self, words: Words, at: int) -> None:
        self._words = words  # keeps the address valid
        self._address = words[at:].ctypes.data

    def wake(self) -> None:
        """Wake all waiters. Takes a microsecond or two."""
        if _futex is not None:
            _futex(self._address, _WAKE, _ALL)

    def wait(self, seen: int, seconds: float) -> float:
        """Wait until the word may differ from `seen`, for at most `seconds`. Returns the seconds that the caller must
        sleep instead, if there is no futex; 0 otherwise."""
        if _futex is None:
            return min(seconds, POLL_SECONDS)
        _futex(self._address, _WAIT, seen & _HALF, _Time(int(seconds), int(seconds % 1 * 1e9)))
        return 0.0
