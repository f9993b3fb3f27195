"""When replicas are synchronised next: every H iterations, or as often as measured noise asks for. Pure.

A turn says after the update of which iteration averaging starts. When it has been applied, the schedule finds the next
one from what was measured; by the same facts on every rank, so that all ranks find the same (PAFT, section 4.2):

    H_next = ||g|| / sigma    clipped to [H_min, H_max]

||g|| is the length of one step over the whole model, sigma that of the noise in it: s sqrt(d), s being its standard
deviation in one of d coordinates (noise.estimate). So the ratio is one of like to like: s alone beside a norm over d
coordinates would ask for ever longer intervals the larger a model is. The measured step has the noise in it, which adds
less than 1 to the ratio. Both are measured at the turn itself.

Invariant: no interval is below 1, none of a noise-driven schedule outside of its bounds. No noise gives H_max; noise
that cannot be measured (a NaN, an update of length 0 beside noise) gives H_min. A turn from which nothing can be learnt
(learning rates of 0) keeps the interval.

In: what was measured, or None. Out: `Turn`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ..config import PaftConfig
from ..errors import ConfigError
from .noise import NoiseMeasurement


@dataclass(frozen=True)
class Turn:
    """Averaging starts after the update of iteration `at`, `interval` iterations after the turn before it."""

    at: int
    interval: int
    reason: str = ""

    def __str__(self) -> str:
        return f"iteration {self.at}, interval {self.interval}" + (f" ({self.reason})" if self.reason else "")


class SyncSchedule(Protocol):
    """Says when. A schedule by layers says it for each of its groups of layers."""

    def first(self, completed: int) -> Turn:
        """The first turn of a job that has completed so many iterations and remembers no turn."""
        ...

    def following(self, turn: Turn, measured: NoiseMeasurement | None) -> Turn:
        """The turn after `turn`; `measured` is None where nothing was."""
        ...

    def within(self, turn: Turn) -> Turn:
        """A turn that is remembered from before, as this schedule can have it: intervals may be configured anew."""
        ...


@dataclass(frozen=True)
class Periodic:
    """PAFT-Sync: after iterations H, 2H, 3H, ... (Algorithm 1). H below 1 raises ConfigError."""

    h: int

    def __post_init__(self) -> None:
        if self.h < 1:
            raise ConfigError(f"replicas are averaged every {self.h} iterations: expected at least 1")

    def first(self, completed: int) -> Turn:
        return Turn((completed // self.h + 1) * self.h, self.h, "first")

    def following(self, turn: Turn, measured: NoiseMeasurement | None) -> Turn:
        return Turn(turn.at + self.h, self.h)

    def within(self, turn: Turn) -> Turn:
        return turn if turn.interval == self.h else self.first(turn.at - turn.interval)


@dataclass(frozen=True)
class NoiseDriven:
    """PAFT-Dyn (Algorithm 2): `h` is the first interval. Bounds that contradict each other raise ConfigError."""

    h: int
    h_min: int
    h_max: int

    def __post_init__(self) -> None:
        if not 1 <= self.h_min <= self.h_max:
            raise ConfigError(
                f"the interval of averaging is bounded by h_min {self.h_min} and h_max {self.h_max}: expected "
                "1 <= h_min <= h_max"
            )

    def first(self, completed: int) -> Turn:
        interval = self._clipped(self.h)
        return Turn(completed + interval, interval, "first")

    def following(self, turn: Turn, measured: NoiseMeasurement | None) -> Turn:
        interval, reason = self._interval(turn, measured)
        return Turn(turn.at + interval, interval, reason)

    def within(self, turn: Turn) -> Turn:
        interval = self._clipped(turn.interval)
        return Turn(turn.at - turn.interval + interval, interval, turn.reason)

    def _clipped(self, interval: int) -> int:
        return min(max(interval, self.h_min), self.h_max)

    def _interval(self, turn: Turn, measured: NoiseMeasurement | None) -> tuple[int, str]:
        if measured is not None and measured.nonfinite:
            return self.h_min, f"no finite state on ranks {', '.join(map(str, measured.nonfinite))}: h_min"
        if measured is None or measured.sigma is None:
            return turn.interval, "nothing could be learnt: as before"
        signal, noise = measured.signal, measured.noise
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return self.h_min, "the noise is not finite: h_min"
        if noise == 0:
            return self.h_max, "no noise: h_max"
        ratio = signal / noise
        said = f"||g|| {signal:.3g} / sigma {noise:.3g} = {ratio:.3g}"
        if ratio < self.h_min:
            return self.h_min, f"{said}, clipped to h_min"
        if ratio > self.h_max:
            return self.h_max, f"{said}, clipped to h_max"
        return math.floor(ratio), said


def schedule_of(config: PaftConfig) -> SyncSchedule | None:
    """The schedule that is asked for; None where nothing is averaged by one."""
    match config.mode:
        case "sync":
            return Periodic(config.h)
        case "dyn":
            return NoiseDriven(config.h, config.h_min, config.h_max)
    return None
