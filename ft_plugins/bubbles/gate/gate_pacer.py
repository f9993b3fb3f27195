"""Send what an open gate allows: the SMP's side of the gate, as a `model.pacer.Pacer`.

It reads the gate, records what it sees, and carries out what `bubbles.gate.pacing` decides. The fallback pacer decides
alone until a gate is opened or held for the first time, and again while nothing is expected of the gate (a dead
trainer, an evaluation).

In: openings of one gate. Out: allowances, and counts of bytes sent in bubbles, late, and rate-limited.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ...model.pacer import Allowance, Pacer
from ..bubble_plan import LARGEST_RATE_DUTY
from .gate import Gate
from .pacing import AskFallback, GateSight, PacingState, SendNow, decide
from .pacing_limits import LIMITS, PacingLimits
from .window_use import Fullness


class GatePacer:
    """Paces one sender by the gate of its rank. Called by several threads.

    `rate_duty` is the rank's part of LARGEST_RATE_DUTY (`bubble_plan.rate_duties`).
    """

    def __init__(
        self, gate: Gate, otherwise: Pacer | None = None, rate_duty: float = LARGEST_RATE_DUTY,
        clock_ns: Callable[[], int] = time.monotonic_ns, limits: PacingLimits = LIMITS,
    ) -> None:  # fmt: skip
        self._gate = gate
        self._otherwise = otherwise
        self._limits = limits
        self._clock_ns = clock_ns
        self._by_kernel = clock_ns is time.monotonic_ns  # with another clock, the gate is polled
        self._lock = threading.Lock()
        has_fallback = otherwise is not None
        self._state = PacingState.start(limits, self._sight(), clock_ns(), has_fallback, rate_duty)

    @property
    def planned(self) -> int:
        return self._gate.planned

    @property
    def inside_bytes(self) -> int:
        return self._state.inside_bytes

    @property
    def late_bytes(self) -> int:
        """Bytes that were through after their window, or after the gate was closed."""
        return self._state.late_bytes

    @property
    def rate_bytes(self) -> int:
        return self._state.rate_bytes

    @property
    def fullness(self) -> Fullness:
        return self._state.fullness

    def filled(self, most: int | None = None) -> list[tuple[int, int]]:
        """(bubble, bytes) of the `most` fullest bubbles of the current plan, by bubble."""
        with self._lock:
            self._state.follow(self._sight(), self._clock_ns())
            fullest = sorted(self._state.filled.items(), key=lambda item: -item[1])
        return sorted(fullest[: self._limits.reported_bubbles if most is None else most])

    def begins(self, nbytes: int) -> None:
        """Note from when a copy of `nbytes` is being sent."""
        with self._lock:
            self._state.begins(nbytes, self._clock_ns())

    def take(self, nbytes: int, stop: threading.Event) -> Allowance:
        """Wait until some of `nbytes` may go; how many, 0 only if stopped."""
        asking_ns = self._clock_ns()
        while not stop.is_set():
            with self._lock:
                sight, now = self._sight(), self._clock_ns()
                self._state.observe(sight, asking_ns, now)
                decision = decide(self._state, sight, nbytes, now)
                if isinstance(decision, SendNow):
                    self._state.sent(decision, sight, nbytes, now)
            if isinstance(decision, SendNow):
                return self._allow(Allowance(decision.nbytes, decision.deadline_ns))
            if isinstance(decision, AskFallback):
                assert self._otherwise is not None
                return self._allow(self._otherwise.take(decision.nbytes, stop))
            wait = decision.seconds
            if wait is None and self._by_kernel:
                wait = self._gate.wait(sight.openings, self._limits.opening_seconds)
            elif wait is None:
                wait = self._limits.poll_seconds
            if wait:
                stop.wait(wait)
        return Allowance(0)

    def ended(self, allowed: Allowance) -> bool | None:
        """Count a frame that is through. Whether it was within its window, None outside windows."""
        with self._lock:
            opening = self._gate.read()  # None if the bubble ended early
            self._gate.count_move()
            return self._state.ended(allowed, opening, self._clock_ns())

    def _sight(self) -> GateSight:
        openings = self._gate.openings  # first, so that an opening during this read is noticed at the next
        gate = self._gate
        return GateSight(openings, gate.planned, gate.period_ns, gate.read(), gate.link_rate)

    def _allow(self, allowed: Allowance) -> Allowance:
        with self._lock:
            self._gate.count_move()
        return replace(allowed, began_ns=self._clock_ns())
