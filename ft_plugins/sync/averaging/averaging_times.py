"""When replicas are averaged next: every H iterations, or as often as measured noise requires. Pure.

A turn is the iteration after whose update averaging starts. Once it is applied, the schedule derives the next turn from
what was measured over all ranks, so all ranks derive the same (PAFT, section 4.2):

    H_next = ||g|| / sigma    clipped to [H_min, H_max]

||g|| is the length of one step over the whole model, and sigma the length of the noise in it: s sqrt(d), with s the
standard deviation in one of d coordinates (`noise.estimate`). s alone, compared with a norm over d coordinates, would
give ever longer intervals for larger models. The measured step contains the noise, which adds less than 1 to the ratio.
Both are measured at the turn itself.

Invariant: no interval is below 1, and none of a noise-driven schedule is out of its bounds. No noise gives H_max; noise
that cannot be measured (NaN, or an update of length 0 with noise) gives H_min. A turn without information (learning
rates of 0) keeps the interval.

In: a measurement, or None. Out: `Turn`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ...config import PaftConfig
from ...errors import ConfigError
from .noise import NoiseMeasurement


@dataclass(frozen=True)
class Turn:
    """Averaging starts after the update of iteration `at`, `interval` iterations after the previous turn."""

    at: int
    interval: int
    reason: str = ""

    def __str__(self) -> str:
        return f"iteration {self.at}, interval {self.interval}" + (f" ({self.reason})" if self.reason else "")


class SyncSchedule(Protocol):
    """Decides when replicas are averaged."""

    def first(self, completed: int) -> Turn:
        """The first turn of a job that has completed `completed` iterations and has no turn yet."""
        ...

    def following(self, turn: Turn, measured: NoiseMeasurement | None) -> Turn:
        """The turn after `turn`; `measured` is None if nothing was measured."""
        ...

    def within(self, turn: Turn) -> Turn:
        """A restored turn, moved within this schedule's bounds: the configuration may have changed."""
        ...


@dataclass(frozen=True)
class Periodic:
    """PAFT-Sync: after iterations H, 2H, 3H, ... (Algorithm 1). Raises ConfigError if H is below 1."""

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
    """PAFT-Dyn (Algorithm 2): `h` is the first interval. Raises ConfigError for contradictory bounds."""

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
            return self.h_min, f"non-finite parameters on ranks {', '.join(map(str, measured.nonfinite))}: h_min"
        if measured is None or measured.sigma is None:
            return turn.interval, "nothing could be measured: interval unchanged"
        signal, noise = measured.signal, measured.noise
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return self.h_min, "non-finite noise: h_min"
        if noise == 0:
            return self.h_max, "no noise: h_max"
        ratio = signal / noise
        reason = f"||g|| {signal:.3g} / sigma {noise:.3g} = {ratio:.3g}"
        if ratio < self.h_min:
            return self.h_min, f"{reason}, clipped to h_min"
        if ratio > self.h_max:
            return self.h_max, f"{reason}, clipped to h_max"
        return math.floor(ratio), reason


def schedule_of(config: PaftConfig) -> SyncSchedule | None:
    """The configured schedule; None if nothing is averaged."""
    match config.mode:
        case "sync":
            return Periodic(config.h)
        case "dyn":
            return NoiseDriven(config.h, config.h_min, config.h_max)
    return None
