"""Averaging by turns: what the policy asks for is started behind the step, and applied when it may be.

    after_update(t)        t is the turn: the length of the step is measured, averaging starts      (PAFT, Algorithm 2)
    before_update(t + 1)   averages become live; from what was measured the schedule finds the next turn
    after_update(u - 1)    u is the next turn: parameters are kept as they are, for the length of that step

With a policy that waits, all of it happens in after_update(t).

Invariant: the next turn follows from what was gathered over all ranks, so it is the same on each. Averages of
parameters that an audit has repaired since are not applied, on any rank: the replicas agree without them.

In: a policy, the executor, learning rates. Out: changed live tensors, `replicas.averaged` events, `state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from ..events import Events, catalogue
from .averager import Averaging
from .background import Background, BackgroundJob
from .links import Links
from .noise import NoiseMeasurement, NoisePart, combine
from .policy import Policy
from .schedule import SyncSchedule, Turn


@dataclass(frozen=True)
class Finished:
    """What an averaging has come to: whether it was `applied`, to live tensors; and of which ranks (`spoilt`)
    parameters were infinite or no number until then, so that the gradients at hand, made of them, are worthless."""

    applied: bool = False
    spoilt: tuple[int, ...] = ()


class SyncTurns:
    """One rank's. Guards the jobs that are under way."""

    def __init__(
        self, policy: Policy, schedule: SyncSchedule, averaging: Averaging, links: Links, background: Background,
        events: Events,
    ) -> None:  # fmt: skip
        self._policy, self._schedule = policy, schedule
        self._averaging, self._links, self._background, self._events = averaging, links, background, events
        self.turn = schedule.first(0)
        self.drifting = False  # what the last measurement has found
        self._rate = 0.0
        self._rates_squared = 0.0  # since the replicas were equal
        self._signal: BackgroundJob[NoisePart] | None = None  # until the turn that it belongs to is over
        self._average: BackgroundJob[NoiseMeasurement] | None = None
        self._stale = False  # what it averages was repaired since
        self._keep: BackgroundJob[None] | None = None
        self._kept_for = -1  # the iteration before whose update parameters are as they are kept

    def begin(self, completed: int, state: Mapping[str, Any] | None) -> None:
        """Go on after so many iterations, from the state of that version; an averaging in flight is started again."""
        self._signal = self._average = self._keep = None  # of a version that is not gone on from
        self._stale, self._kept_for = False, -1
        self.turn, self.drifting, self._rates_squared = self._schedule.first(completed), False, 0.0
        if state is None:
            return
        turn = Turn(*state["turn"])
        within = self._schedule.within(turn)
        self.drifting, self._rates_squared = state["drifting"], state["rates_squared"]
        if state["signal"] is not None:
            self.turn = replace(turn, interval=within.interval)  # it has come
            known = NoisePart(*state["signal"])
            self._signal = self._background.start(lambda: known)
            self._start()
        elif within.at > completed:  # else it would never come
            self.turn = within

    def state(self) -> dict[str, Any]:
        """At a version point, of this rank: plain values. Waits for the length of a step that is being measured."""
        return {
            "turn": list(astuple(self.turn)),
            "drifting": self.drifting,
            "rates_squared": self._rates_squared,
            "signal": None if self._signal is None else list(astuple(self._signal.wait())),
        }

    def before(self, step: int, rate: float) -> Finished:
        """The fence: averages are applied. `rate` is the learning rate of the update that comes."""
        finished = Finished() if self._average is None else self._finish(step)
        self.fence()
        self._rate = rate
        if self._policy.actions(step, self.turn).remember and self._kept_for != step:
            self._averaging.keep()
            self._kept_for = step
        return finished

    def measure(self, step: int) -> None:
        """Start measuring the length of the update of `step`, where it is a turn: the only thing that a version point
        waits for, so what is given before it is what that waits for, too. Before `after`, which does it otherwise."""
        if self._signal is None and self._policy.actions(step, self.turn).average:
            rate = self._rate
            self._signal = self._background.start(lambda: self._averaging.measure(rate))

    def after(self, step: int) -> bool:
        """Start what is due. Whether live tensors were changed."""
        self._rates_squared += self._rate**2
        actions = self._policy.actions(step, self.turn)
        if actions.average:
            self.measure(step)
            self._start()
            if actions.waits:
                self._finish(step + 1)
        if self._average is None and self._policy.actions(step + 1, self.turn).remember and self._kept_for != step + 1:
            self._keep, self._kept_for = self._background.start(self._averaging.keep), step + 1
        return actions.waits

    def fence(self) -> None:
        """Nothing that reads live tensors is under way when this returns."""
        for job in (self._keep, self._average):
            if job is not None:
                job.wait()
        self._keep = None

    def equal(self, changed: bool) -> None:
        """The replicas are, since now; `changed`: because live tensors were."""
        self._rates_squared, self.drifting = 0.0, False
        if changed:
            self._kept_for, self._stale = -1, self._average is not None

    def _start(self) -> None:
        rates_squared, signal = self._rates_squared, self._signal

        def work() -> NoiseMeasurement:
            assert signal is not None
            found = self._averaging.average() + signal.wait()
            told = self._links.gather_job([*found.row(), rates_squared])
            return combine(told[:, :-1], float(told[:, -1].max()))  # a stage may update at a rate of its own

        self._average = self._background.start(work)

    def _finish(self, step: int) -> Finished:
        """Apply what was averaged, before the update of `step`."""
        assert self._average is not None
        job, self._average, self._signal = self._average, None, None
        stale, self._stale = self._stale, False
        measured, turn = job.wait(), self.turn
        self.turn = self._schedule.following(turn, measured)
        self._kept_for = -1
        if not stale:
            self._averaging.apply()
            self._rates_squared, self._kept_for = 0.0, step
            self.drifting = measured.divergence != 0
        self._events.emit(
            catalogue.REPLICAS_AVERAGED, iteration=turn.at, applied=not stale, waited_seconds=job.waited,
            next=self.turn.at, interval=self.turn.interval, reason=self.turn.reason,
            divergence=measured.divergence, sigma=measured.sigma, signal=measured.signal,
            nonfinite=list(measured.nonfinite),
        )  # fmt: skip
        if measured.nonfinite:
            ranks = ", ".join(map(str, measured.nonfinite))
            reason = f"after iteration {turn.at} parameters of ranks {ranks} were infinite or no number"
            self._events.emit(catalogue.NONFINITE_DETECTED, iteration=turn.at, ranks=ranks, reason=reason)
        return Finished(not stale, () if stale else measured.nonfinite)
