"""The gate: words in shared memory by which a trainer says how much of its copy may go now, bubble by bubble.

A trainer opens it at the begin of a bubble and closes it at the end. The SMP of its node reads it before each frame,
and waits for it to open.

    word   0        1        2           3        4       5 ..                                 29     30, 31, 32
           closed | number | iteration | bubble | count | begin, deadline, bytes (8 windows) | seal | the rest
                    `------------------ covered by the seal --------------------------------'

The rest is `moved`, `planned` and `period`. `moved` is the SMP's, all else the trainer's: it changes when a frame
begins to move and when it is through, so that a trainer knows of a time whether copies went in it. `planned`:
iterations within which its bubbles carry all, 0 for no plan; `period`: nanoseconds of an iteration of the plan.

Invariant: what is read is what was written by one `open`, or nothing: the seal, a digest written last, fits no mixture
of two openings, whatever order a machine makes stores visible in. Closing is one store of 8 bytes: an opening is over
when `closed` names its number. A gate is closed until it is opened, and an open one ends by its deadlines, also when
its trainer is dead: CLOCK_MONOTONIC is one for all processes of a machine. Neither side takes a lock; the trainer calls
the system once for an opening, to wake who waits for it (bubbles.futex).

It lies in the header page of the rank's segment, which trainer and SMP have mapped anyway, between words and
fingerprint: nothing more to create, find, or clean up.

In: grants of `bubble_plan`, spans as they begin and end. Out: `Opening`s, which `gate_pacer` follows.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ..model.timeline import COMPUTE, Kind
from .bubble_plan import SenderPlan
from .filling import Grant
from .futex import FutexWord
from .windows import WINDOWS

_SEALED = struct.Struct(f"=4Q{3 * WINDOWS}Q")
_CLOSED, _NUMBER, _SEAL = 0, 1, 1 + _SEALED.size // 8  # words
_MOVED, _PLANNED, _PERIOD = _SEAL + 1, _SEAL + 2, _SEAL + 3
GATE_BYTES = 8 * (_PERIOD + 1)
_LOOKS = 3  # at a gate that is being written
_NUMBERS = 1 << 63
STEADY = _NUMBERS - 1  # in the place of a bubble: what is granted is a rate, and in no bubble
HELD = _NUMBERS - 2  # nothing is granted
EDGE_TOLERANCE = 0.05  # of an iteration: a bubble that begins so much sooner or later than planned is left alone
EDGE_SECONDS = 0.25  # or so much, where iterations are short: a busy host may be late by that any time

Buffer = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Opening:
    """One bubble, as its trainer opened it: (begin_ns, deadline_ns, bytes) of each window, by CLOCK_MONOTONIC."""

    number: int
    iteration: int
    bubble: int
    windows: tuple[tuple[int, int, int], ...]


class Gate:
    """One rank's. Its trainer alone opens and closes, its node's SMP alone counts what moves; anyone reads. `buffer`
    has GATE_BYTES, aligned to 8."""

    def __init__(self, buffer: Buffer) -> None:
        self._words = buffer[:GATE_BYTES].view(np.uint64)
        self._opened = FutexWord(self._words, _NUMBER)
        self._bytes = memoryview(buffer[8 * _NUMBER : 8 * _SEAL])  # type: ignore[arg-type]

    def open(self, grants: Sequence[Grant], iteration: int, now_ns: int) -> None:
        """A bubble has begun at `now_ns`; `grants` are what the plan allows in it, WINDOWS at most."""
        number = (int(self._words[_NUMBER]) + 1) % _NUMBERS
        flat = [
            value
            for grant in grants[:WINDOWS]
            for value in (now_ns + int(grant.begin * 1e9), now_ns + int(grant.deadline * 1e9), grant.nbytes)
        ]
        bubble = grants[0].bubble if grants else 0
        flat += [0] * (3 * WINDOWS - len(flat))
        sealed = _SEALED.pack(number, iteration, bubble, min(len(grants), WINDOWS), *flat)
        self._bytes[:] = sealed
        self._words[_SEAL] = xxhash.xxh3_64_intdigest(sealed)
        self._opened.wake()

    def hold(self, seconds: float, now_ns: int) -> None:
        """Nothing may go until it is closed, for so long at most: an opening for no bytes."""
        self.open((Grant(HELD, -1, 0.0, seconds, 0),), 0, now_ns)

    def close(self) -> None:
        """The bubble is over, or a trainer has come that has not opened anything yet."""
        self._words[_CLOSED] = self._words[_NUMBER]

    @property
    def openings(self) -> int:
        """How many there were."""
        return int(self._words[_NUMBER])

    def wait(self, seen: int, seconds: float) -> float:
        """Until there may have been more openings than `seen`; what is left to sleep is returned (futex)."""
        return self._opened.wait(seen, seconds)

    @property
    def moved(self) -> int:
        """A number that is another one when a frame has begun to move, or is through."""
        return int(self._words[_MOVED])

    def count_move(self) -> None:
        """A frame begins to move, or is through."""
        self._words[_MOVED] = (int(self._words[_MOVED]) + 1) % _NUMBERS

    @property
    def planned(self) -> int:
        """Iterations within which the bubbles of the plan carry all that is sent; 0 where there is none."""
        return int(self._words[_PLANNED])

    @property
    def period_ns(self) -> int:
        """An iteration of the plan; 0 where there is none."""
        return int(self._words[_PERIOD])

    def plan(self, iterations: int, seconds: float) -> None:
        """From now on it is opened by a plan: what `planned` says, and seconds of an iteration. 0 of both: by none."""
        self._words[_PLANNED], self._words[_PERIOD] = iterations, int(seconds * 1e9)

    def read(self) -> Opening | None:
        """The opening that stands, whether its time has come, is or is over; None for a gate that is closed."""
        if self._words[_CLOSED] == self._words[_NUMBER]:  # the usual case, at little cost
            return None
        for _ in range(_LOOKS):
            sealed = bytes(self._bytes)
            if xxhash.xxh3_64_intdigest(sealed) == int(self._words[_SEAL]):
                number, iteration, bubble, count, *flat = _SEALED.unpack(sealed)
                if int(self._words[_CLOSED]) == number:  # read last: what is closed meanwhile is closed
                    return None
                if int(self._words[_NUMBER]) != number:  # closed meanwhile, and another one opened
                    continue
                return Opening(number, iteration, bubble, tuple(zip(*[iter(flat[: 3 * count])] * 3, strict=True)))
        return None


def edge_tolerance(seconds: float) -> float:
    """Seconds by which an edge of a plan may be off in iterations of so many: EDGE_TOLERANCE of them, or EDGE_SECONDS.
    Beyond that a bubble is left alone, so a profile that misses by more is to be taken anew."""
    return max(EDGE_SECONDS, EDGE_TOLERANCE * seconds)


class Gatekeeper:
    """Opens and closes the gate of one trainer by its plan. `begin` and `end` are `model.host.Edges`.

    It counts all spans, as a timeline does: what begins inside another belongs to it. A bubble is over where the next
    compute span begins. `steady`: what is granted at the begin of an iteration is for all of it, not for a bubble.

    Where a bubble begins more than `tolerance` seconds sooner or later in its iteration than was planned, what the
    receiver and the links are at is another thing than was planned: its gate is opened without a window, and closed. So
    whoever waits knows that this trainer lives, and nothing goes.
    """

    def __init__(
        self,
        gate: Gate,
        plan: SenderPlan,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        steady: bool = False,
        tolerance: float = math.inf,
    ) -> None:
        self._gate = gate
        self._plan = plan
        self._clock_ns = clock_ns
        self._steady = steady
        self._tolerance = tolerance
        self._began_ns = 0  # the iteration
        self._span = -1  # the span that ended last; -1 before the first
        self._depth = 0
        self._iteration = 0
        self._is_open = False
        gate.close()

    def iteration_begin(self, iteration: int) -> None:
        """The iteration of a period, from 0, has begun; beyond the last one, bubbles are open for what was late."""
        self._iteration, self._span, self._depth, self._began_ns = iteration, -1, 0, self._clock_ns()
        self._open()

    def begin(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        """A span begins: if it computes, the bubble before it, if there was one, is over."""
        self._depth += 1
        if self._depth == 1 and kind in COMPUTE and not self._steady:
            self._close()

    def end(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        """The span that has begun last ends: if it computes, a bubble may begin."""
        self._depth -= 1
        if self._depth == 0:
            self._span += 1
            if kind in COMPUTE:
                self._open()

    def iteration_end(self) -> None:
        """Nothing more is planned in this iteration."""
        self._close()

    def _close(self) -> None:
        if self._is_open:
            self._gate.close()
            self._is_open = False

    def _open(self) -> None:
        grants = self._plan.after(self._iteration, self._span)
        if grants:
            now = self._clock_ns()
            fits = abs((now - self._began_ns) / 1e9 - grants[0].edge) <= self._tolerance
            self._gate.open(grants if fits else (), self._iteration, now)
            self._is_open = True
            if not fits:
                self._close()
