"""Run averaging by turns: start it behind the step, and apply it at the next fence.

    after_update(t)        t is the turn: the length of the step is measured, averaging starts      (PAFT, Algorithm 2)
    before_update(t + 1)   averages become live; the schedule derives the next turn u from the measurement
    after_update(u - 1)    parameters are saved, to measure the length of the step of u

With a policy that waits, all of it happens in after_update(t).

Invariant: the next turn follows from what was gathered over all ranks, so it is the same on each. If an audit has
repaired parameters while they were averaged, no rank applies the averages: the replicas already agree.

In: a policy, the executor, learning rates. Out: changed live tensors, `replicas.averaged` events, `state`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from ...events import Events, catalogue
from ..averaging.averager import Averaging
from ..averaging.averaging_times import NoiseMeasurement, NoisePart, SyncSchedule, Turn, combine
from ..averaging.policy import PaftPolicy
from ..background import Background, BackgroundTask
from ..links import Links


@dataclass(frozen=True)
class AveragingOutcome:
    """Whether averages were `applied` to live tensors, and which ranks had `nonfinite` parameters until then: gradients
    computed from those are worthless."""

    applied: bool = False
    nonfinite: tuple[int, ...] = ()


class SyncTurns:
    """Runs one rank's averaging. Owns the tasks in flight."""

    def __init__(
        self, policy: PaftPolicy, schedule: SyncSchedule, averaging: Averaging, links: Links, background: Background,
        events: Events,
    ) -> None:  # fmt: skip
        self._policy, self._schedule = policy, schedule
        self._averaging, self._links, self._background, self._events = averaging, links, background, events
        self.turn = schedule.first(0)
        self.diverged = False  # whether the last measurement found a divergence
        self._rate = 0.0
        self._rates_squared = 0.0  # sum of lr^2 since the replicas were equal
        self._signal: BackgroundTask[NoisePart] | None = None  # length of the step; until its turn is over
        self._average: BackgroundTask[NoiseMeasurement] | None = None
        self._stale = False  # whether its input was repaired since it started
        self._save: BackgroundTask[None] | None = None
        self._saved_for = -1  # parameters are saved as they are before the update of this iteration

    def begin(self, completed: int, state: Mapping[str, Any] | None) -> None:
        """Continue after `completed` iterations from the `state` of that version; restart an averaging in flight."""
        self._signal = self._average = self._save = None  # tasks of the abandoned version
        self._stale, self._saved_for = False, -1
        self.turn, self.diverged, self._rates_squared = self._schedule.first(completed), False, 0.0
        if state is None:
            return
        turn = Turn(*state["turn"])
        adjusted = self._schedule.within(turn)
        self.diverged, self._rates_squared = state["diverged"], state["rates_squared"]
        if state["signal"] is not None:
            self.turn = replace(turn, interval=adjusted.interval)  # the turn has begun
            signal = NoisePart(*state["signal"])
            self._signal = self._background.start(lambda: signal)
            self._start()
        elif adjusted.at > completed:  # a turn in the past would never begin
            self.turn = adjusted

    def state(self) -> dict[str, Any]:
        """This rank's state at a version point, as plain values. Waits for a measurement in flight."""
        return {
            "turn": list(astuple(self.turn)),
            "diverged": self.diverged,
            "rates_squared": self._rates_squared,
            "signal": None if self._signal is None else list(astuple(self._signal.wait())),
        }

    def before(self, step: int, rate: float) -> AveragingOutcome:
        """The fence: apply averages. `rate` is the learning rate of the coming update."""
        outcome = AveragingOutcome() if self._average is None else self._finish(step)
        self.fence()
        self._rate = rate
        if self._policy.averages(step, self.turn) and self._saved_for != step:
            self._averaging.save_parameters()
            self._saved_for = step
        return outcome

    def measure(self, step: int) -> None:
        """Start measuring the length of the update of `step`, if that is a turn. A version point waits for it, and for
        all tasks started before it, so call this first; otherwise `after` does."""
        if self._signal is None and self._policy.averages(step, self.turn):
            rate = self._rate
            self._signal = self._background.start(lambda: self._averaging.measure(rate))

    def after(self, step: int) -> bool:
        """Start the tasks that are due. Returns whether live tensors were changed."""
        self._rates_squared += self._rate**2
        averages = self._policy.averages(step, self.turn)
        if averages:
            self.measure(step)
            self._start()
            if self._policy.waits:
                self._finish(step + 1)
        save = self._average is None and self._policy.averages(step + 1, self.turn)
        if save and self._saved_for != step + 1:
            self._save, self._saved_for = self._background.start(self._averaging.save_parameters), step + 1
        return averages and self._policy.waits

    def fence(self) -> None:
        """Wait for all tasks that read live tensors."""
        for task in (self._save, self._average):
            if task is not None:
                task.wait()
        self._save = None

    def replicas_agreed(self, changed: bool) -> None:
        """The replicas are equal now; `changed`: because live tensors were repaired."""
        self._rates_squared, self.diverged = 0.0, False
        if changed:
            self._saved_for, self._stale = -1, self._average is not None

    def _start(self) -> None:
        rates_squared, signal = self._rates_squared, self._signal

        def work() -> NoiseMeasurement:
            assert signal is not None
            part = self._averaging.average() + signal.wait()
            rows = self._links.gather_job([*part.row(), rates_squared])
            return combine(rows[:, :-1], float(rows[:, -1].max()))  # stages may have different learning rates

        self._average = self._background.start(work)

    def _finish(self, step: int) -> AveragingOutcome:
        """Apply the averages before the update of `step`, and derive the next turn."""
        assert self._average is not None
        task, self._average, self._signal = self._average, None, None
        stale, self._stale = self._stale, False
        measured, turn = task.wait(), self.turn
        self.turn = self._schedule.following(turn, measured)
        self._saved_for = -1
        if not stale:
            self._averaging.apply()
            self._rates_squared, self._saved_for = 0.0, step
            self.diverged = measured.divergence != 0
        self._events.emit(
            catalogue.REPLICAS_AVERAGED, iteration=turn.at, applied=not stale, waited_seconds=task.waited,
            next=self.turn.at, interval=self.turn.interval, reason=self.turn.reason,
            divergence=measured.divergence, sigma=measured.sigma, signal=measured.signal,
            nonfinite=list(measured.nonfinite),
        )  # fmt: skip
        if measured.nonfinite:
            ranks = ", ".join(map(str, measured.nonfinite))
            reason = f"non-finite parameters on ranks {ranks} after iteration {turn.at}"
            self._events.emit(catalogue.NONFINITE_DETECTED, iteration=turn.at, ranks=ranks, reason=reason)
        return AveragingOutcome(not stale, () if stale else measured.nonfinite)
