"""Waiting for a word in shared memory to change, in another process, without looking again and again.

The kernel's futex, on the low half of a word of 8 bytes. Whoever waits says what it has seen, so that a change between
looking and waiting is not missed.

Invariant: a wait ends when the word has changed and was woken, or when its time is over; it may end before. Where
there is no futex (not Linux, another processor) it lasts `POLL_SECONDS` at most, and waking does nothing.

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
_NUMBERS = {"x86_64": 202, "aarch64": 98}  # of the system call
_WAIT, _WAKE, _ALL = 0, 1, 1 << 30
_HALF = (1 << 32) - 1

Words = npt.NDArray[np.uint64]


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _found() -> Callable[..., int] | None:
    number = _NUMBERS.get(platform.machine())
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


_futex = _found()


class FutexWord:
    """One word of `words`, at place `at`."""

    def __init__(self, words: Words, at: int) -> None:
        self._words, self._at = words, at  # kept: the address is theirs
        self._address = words[at:].ctypes.data

    def wake(self) -> None:
        """Whoever waits for the word to change looks now. A microsecond or two."""
        if _futex is not None:
            _futex(self._address, _WAKE, _ALL)

    def wait(self, seen: int, seconds: float) -> float:
        """Until the word may be another than `seen`, for `seconds` at most. For how long a caller without futex has to
        sleep instead: 0 where there is one."""
        if _futex is None:
            return min(seconds, POLL_SECONDS)
        _futex(self._address, _WAIT, seen & _HALF, _Time(int(seconds), int(seconds % 1 * 1e9)))
        return 0.0
