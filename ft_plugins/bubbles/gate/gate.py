"""The gate: words in shared memory by which a rank allows its SMP to send its copy, bubble by bubble.

The trainer opens it at the begin of a bubble and closes it at the end. The SMP of its node reads it before each frame,
and waits for it to open.

    word   0        1        2           3        4       5 ..                                 29     30 to 33
           closed | number | iteration | bubble | count | begin, deadline, bytes (8 windows) | seal | the rest
                    `------------------ covered by the seal --------------------------------'

The rest is `moved`, `planned`, `period`, `link_rate`. The SMP writes `moved`, the trainer all others. `moved` changes
when a frame begins to move and when it is through, so a trainer can see whether copies moved in a period of time.
`planned`: iterations within which the bubbles carry all, 0 for no plan; `period`: nanoseconds of an iteration of the
plan; `link_rate`: bytes per second, this rank's part of the link by the plan.

Invariant: a read returns what one `open` wrote, or nothing: the seal, a digest written last, fits no mixture of two
openings, in whatever order stores become visible. Closing is one store of 8 bytes: an opening is over when `closed`
equals its number. A gate is closed until it is opened, and an open one ends by its deadlines even if its trainer dies:
CLOCK_MONOTONIC is common to all processes of a machine. No locks; the trainer makes one system call per opening, to
wake the waiters (`FutexWord`).

The gate is in the header page of the rank's segment, between words and fingerprint. Trainer and SMP map it anyway, so
there is nothing more to create, find or clean up.

Where the host runs ahead of its device, the device opens and closes the gate (`Gate.follow`): the same bytes are copied
in the order of its stream, with times since the edge instead. A reader counts begins from when it first sees such an
opening and deadlines from its look before that, between which the edge was; so it never uses a bubble for longer than
planned, and hardly at all if it was not looking. Nothing wakes it, so it looks every `POLL_SECONDS`.

A wait uses the kernel's futex, on the low half of an 8-byte word. The waiter passes the value it has seen, so a change
between reading and waiting is not missed. It ends when the word has changed and was woken, or at its timeout, or
earlier. Without futex (not Linux, another processor) the caller polls every `POLL_SECONDS`, and waking does nothing.

In: grants of `bubble_plan`, spans as they begin and end. Out: `Opening`s, followed by `gate_pacer`.
"""

from __future__ import annotations

import ctypes
import math
import platform
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ...events import say
from ...model.timeline import COMPUTE, Kind
from ..bubble_plan import SenderPlan
from ..filling import Grant
from ..windows import WINDOWS

POLL_SECONDS = 0.002
_SYSCALL = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE, _ALL = 0, 1, 1 << 30
_HALF = (1 << 32) - 1

Words = npt.NDArray[np.uint64]
_SEALED = struct.Struct(f"=4Q{3 * WINDOWS}Q")
_CLOSED, _NUMBER, _SEAL = 0, 1, 1 + _SEALED.size // 8  # words
_MOVED, _PLANNED, _PERIOD, _LINK_RATE = range(_SEAL + 1, _SEAL + 5)
GATE_BYTES = 8 * (_LINK_RATE + 1)
_READS = 3  # attempts at a gate that is being written
_NUMBERS = 1 << 63
_BY_DEVICE = 1 << 63  # in `count`: times are since the edge; in `period`: no opening wakes waiters
STEADY = _NUMBERS - 1  # instead of a bubble's number: a rate is granted, outside bubbles
HELD = _NUMBERS - 2  # nothing is granted
EDGE_TOLERANCE = 0.05  # of an iteration: a bubble that begins earlier or later than planned by more is not used
EDGE_SECONDS = 0.25  # the least tolerance, for short iterations: a busy host may be late by that at any time
Buffer = npt.NDArray[np.uint8]
_Windows = tuple[tuple[int, int, int], ...]


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


@dataclass(frozen=True)
class Opening:
    """One bubble, as its trainer opened it: (begin_ns, deadline_ns, bytes) of each window, by CLOCK_MONOTONIC."""

    number: int
    iteration: int
    bubble: int
    windows: tuple[tuple[int, int, int], ...]


class StreamStores(Protocol):
    """Stores that a device makes."""

    def store(self, words: Words, at: int) -> bool:
        """Store `words` at place `at` of the gate once the stream in use comes there; does not wait. Returns False if
        nothing is stored."""

    def close(self) -> None:
        """Wait for all stores; the memory may be unmapped then."""


class Gate:
    """The gate of one rank. Only its trainer opens and closes it, only its node's SMP counts moves; any process reads.
    `buffer` has GATE_BYTES, aligned to 8."""

    def __init__(self, buffer: Buffer, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._words = buffer[:GATE_BYTES].view(np.uint64)
        self._opened = FutexWord(self._words, _NUMBER)
        self._bytes = memoryview(buffer[8 * _NUMBER : 8 * _SEAL])  # type: ignore[arg-type]
        self._clock_ns = clock_ns
        self._stores: StreamStores | None = None
        self._number = 0  # of the last opening given to `_stores`
        self._failed = False  # a store of theirs
        self._looked_ns = 0
        self._arrived = (-1, 0, 0)  # number of the device's opening read last, when it was first seen, the look before

    def follow(self, stores: StreamStores) -> None:
        """Have all later openings and closings made by a device, in the order of its stream."""
        self.close()
        self._number, self._stores = self.openings, stores

    def open(self, grants: Sequence[Grant], iteration: int, now_ns: int) -> None:
        """Open for a bubble that began at `now_ns`, with its `grants`, WINDOWS at most."""
        last, began, flag = (self.openings, now_ns, 0) if self._stores is None else (self._number, 0, _BY_DEVICE)
        number = (last + 1) % _NUMBERS
        flat = [
            value
            for grant in grants[:WINDOWS]
            for value in (began + int(grant.begin * 1e9), began + int(grant.deadline * 1e9), grant.nbytes)
        ]
        bubble = grants[0].bubble if grants else 0
        flat += [0] * (3 * WINDOWS - len(flat))
        sealed = _SEALED.pack(number, iteration, bubble, min(len(grants), WINDOWS) | flag, *flat)
        seal = xxhash.xxh3_64_intdigest(sealed)
        if self._stores is not None:
            if self._store(np.frombuffer(sealed + seal.to_bytes(8, sys.byteorder), dtype=np.uint64), _NUMBER):
                self._number = number
            return
        self._bytes[:] = sealed
        self._words[_SEAL] = seal
        self._opened.wake()

    def hold(self, seconds: float, now_ns: int) -> None:
        """Allow nothing for `seconds` or until it is closed: an opening for 0 bytes."""
        self.open((Grant(HELD, -1, 0.0, seconds, 0),), 0, now_ns)

    def close(self) -> None:
        """Close at the end of a bubble, or when a new trainer starts."""
        if self._stores is None:
            self._words[_CLOSED] = self._words[_NUMBER]
        else:
            self._store(np.array([self._number], dtype=np.uint64), _CLOSED)

    def _store(self, words: Words, at: int) -> bool:
        """Whether the device makes a store. One that has no memory left leaves the gate as it is: an opening ends by
        its deadlines, and copies go at a rate; training goes on."""
        assert self._stores is not None
        try:
            return self._stores.store(words, at)
        except Exception as error:
            if not self._failed:
                self._failed = True
                say(f"the device could not open its gate, so that copies wait or go at a rate: {error}", alarm=True)
            return False

    @property
    def by_device(self) -> bool:
        """Whether a device opens and closes it."""
        return self._stores is not None

    @property
    def memory(self) -> Words:
        """Its 8-byte words, for `StreamStores`."""
        return self._words

    @property
    def openings(self) -> int:
        return int(self._words[_NUMBER])

    def wait(self, seen: int, seconds: float) -> float:
        """Wait until there may be more openings than `seen`; returns what is left to sleep, as `FutexWord.wait`."""
        if int(self._words[_PERIOD]) & _BY_DEVICE:
            return min(seconds, POLL_SECONDS)
        return self._opened.wait(seen, seconds)

    @property
    def moved(self) -> int:
        """A number that changes when a frame begins to move, and when it is through."""
        return int(self._words[_MOVED])

    def count_move(self) -> None:
        """Record that a frame begins to move, or is through."""
        self._words[_MOVED] = (int(self._words[_MOVED]) + 1) % _NUMBERS

    @property
    def planned(self) -> int:
        """Iterations within which the plan's bubbles carry all bytes; 0 without a plan."""
        return int(self._words[_PLANNED])

    @property
    def period_ns(self) -> int:
        """Nanoseconds of an iteration of the plan; 0 without a plan."""
        return int(self._words[_PERIOD]) % _BY_DEVICE

    @property
    def link_rate(self) -> int:
        """Bytes per second, this rank's part of the link by the plan; 0 without a plan."""
        return int(self._words[_LINK_RATE])

    def plan(self, iterations: int, seconds: float, link_rate: float) -> None:
        """Publish the plan that opens the gate from now on; zeros: none. `seconds`: of an iteration."""
        self._words[_LINK_RATE] = int(link_rate)
        self._words[_PERIOD] = int(seconds * 1e9) | (_BY_DEVICE if self.by_device else 0)
        self._words[_PLANNED] = iterations

    def read(self) -> Opening | None:
        """The current opening, whatever its deadlines; None if the gate is closed."""
        looked, self._looked_ns = self._looked_ns, self._clock_ns()
        if self._words[_CLOSED] == self._words[_NUMBER]:  # the usual case, cheap
            return None
        for _ in range(_READS):
            sealed = bytes(self._bytes)
            if xxhash.xxh3_64_intdigest(sealed) == int(self._words[_SEAL]):
                number, iteration, bubble, count, *flat = _SEALED.unpack(sealed)
                if int(self._words[_CLOSED]) == number:  # read last: closed meanwhile
                    return None
                if int(self._words[_NUMBER]) != number:  # closed meanwhile, and another one opened
                    continue
                windows = tuple(zip(*[iter(flat[: 3 * (count % _BY_DEVICE)])] * 3, strict=True))
                return Opening(
                    number, iteration, bubble, self._seen(number, windows, looked) if count & _BY_DEVICE else windows
                )
        return None

    def _seen(self, number: int, windows: _Windows, looked_ns: int) -> _Windows:
        """The windows of a device's opening, by this reader's looks; bytes as the link carries in what is left."""
        if number != self._arrived[0]:  # not the time before it was read: this process may have been suspended since
            self._arrived = number, self._clock_ns(), looked_ns
        _, now, before = self._arrived
        cut = [(now + begin, max(now + begin, before + end), end - begin, nbytes) for begin, end, nbytes in windows]
        return tuple((begin, end, nbytes * (end - begin) // max(1, whole)) for begin, end, whole, nbytes in cut)


def edge_tolerance(seconds: float) -> float:
    """Seconds by which an edge may deviate from the plan in iterations of `seconds`: EDGE_TOLERANCE, or EDGE_SECONDS.
    Beyond that a bubble is not used, so a profile that is off by more must be measured again."""
    return max(EDGE_SECONDS, EDGE_TOLERANCE * seconds)


class Gatekeeper:
    """Opens and closes the gate of one trainer according to its plan. `begin` and `end` are `model.host.Edges`.

    Spans are counted as in a timeline: one that begins inside another is part of it. A bubble ends when the next
    compute span begins. `steady`: a grant at the begin of an iteration is for all of it, not for a bubble.

    If a bubble begins more than `tolerance` seconds earlier or later in its iteration than planned, receiver and links
    are busy with something else than planned: the gate is opened without a window, and closed. So the SMP sees that the
    trainer is alive, and sends nothing.
    """

    def __init__(
        self, gate: Gate, plan: SenderPlan, clock_ns: Callable[[], int] = time.monotonic_ns, steady: bool = False,
        tolerance: float = math.inf,
    ) -> None:  # fmt: skip
        self._gate = gate
        self._plan = plan
        self._clock_ns = clock_ns
        self._steady = steady
        self._tolerance = tolerance
        self._began_ns = 0  # begin of the iteration
        self._span = -1  # the span that ended last; -1 before the first
        self._depth = 0
        self._iteration = 0
        self._is_open = False
        gate.close()

    def iteration_begin(self, iteration: int) -> None:
        """Begin `iteration` of a period, from 0; beyond the planned ones, bubbles are open for late bytes."""
        self._iteration, self._span, self._depth, self._began_ns = iteration, -1, 0, self._clock_ns()
        self._open()

    def begin(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        """Begin a span; a compute span ends the bubble before it."""
        self._depth += 1
        if self._depth == 1 and kind in COMPUTE and not self._steady:
            self._close()

    def end(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        """End the span that began last; after a compute span a bubble may begin."""
        self._depth -= 1
        if self._depth == 0:
            self._span += 1
            if kind in COMPUTE:
                self._open()

    def iteration_end(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._is_open:
            self._gate.close()
            self._is_open = False

    def _open(self) -> None:
        grants = self._plan.grants_after(self._iteration, self._span)
        if grants:
            now = self._clock_ns()
            fits = abs((now - self._began_ns) / 1e9 - grants[0].edge) <= self._tolerance
            self._gate.open(grants if fits else (), self._iteration, now)
            self._is_open = True
            if not fits:
                self._close()
