"""Measure the layers of a job while they are averaged, and plan their schedule from that (DreamDDP's profiler).

    3 periods        forward and backward of each module by its edges, averaging on the background thread, and how long
                     training waited for it; all at the same time, as the job runs
    end of the last  ranks send each other what they measured, and all plan from the same profile, behind the next
                     period: the first time in any case, later if periods take longer than planned
    end of that      the new schedule begins

After that every tenth period is the last of three that are measured.

Invariant: nothing here waits for another rank in the step path, except for a plan that had a period to be made. When
to measure, to send and to begin depends on the iteration alone, so all ranks do it together.

In: edges of modules, marks. Out: `JobSchedule`; the profile, as a file of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config import SyncConfig
from ..events import Events, catalogue
from ..sync.background import BackgroundTask
from ..sync.layer_profile import LayerProfile, write_profile
from ..sync.layers_job import JobLayers, JobSchedule, planned_schedule, profile_of
from ..sync.layers_measured import ModuleSamples, Row, over_ranks, over_replicas, row_of, times_of
from ..sync.links import Links
from ..sync.module_times import EdgeKind, TimedEdge, module_times
from ..sync.stopwatch import Mark, Stopwatch
from .sync_groups import SyncGroups
from .under_way import SynchronisationUnderWay

_MEASURED = 3  # periods: a median of three ignores one outlier, also for a layer that is averaged once in a period
_CHECKED = 10  # periods from one check of the plan to the next: measuring costs a call for each edge of a module


class LayerMeasurement:
    """What this rank measures of its modules."""

    def __init__(self, stopwatch: Stopwatch, nbytes: dict[str, int]) -> None:
        self._stopwatch, self._nbytes = stopwatch, nbytes
        self._edges: list[tuple[EdgeKind, str, Mark]] = []
        self.recording = False
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._edges = []
        self._averagings: list[tuple[str, Mark, Mark]] = []
        self._waits: list[tuple[Mark, Mark]] = []
        self._computed: list[dict[str, tuple[float, float]]] = []

    def edge(self, kind: EdgeKind, module: str) -> None:
        """A forward or backward of a module begins or ends."""
        if self.recording:
            self._edges.append((kind, module, self._stopwatch.mark()))

    def averaging(self, module: str, exchange: Callable[[str], float]) -> float:
        """Exchange a module."""
        begin = self._stopwatch.mark()
        factor = exchange(module)
        if self.recording:
            self._averagings.append((module, begin, self._stopwatch.mark()))
        return factor

    def waiting(self, wait: Callable[[], None]) -> None:
        """Wait for modules, at the end of an iteration's backward."""
        begin = self._stopwatch.mark()
        wait()
        if self.recording:
            self._waits.append((begin, self._stopwatch.mark()))

    def iteration_end(self) -> None:
        """Sum up the edges of one iteration."""
        if self._edges:
            (_, _, first), end = self._edges[0], self._stopwatch.mark()
            edges = [
                TimedEdge(kind, module, self._stopwatch.seconds(first, mark)) for kind, module, mark in self._edges
            ]
            times = module_times(edges, self._stopwatch.seconds(first, end))
            self._computed.append({name: (one.forward, one.backward) for name, one in times.items()})
        self._edges = []

    def row(self, modules: tuple[str, ...], period: int) -> Row:
        """What was measured since `clear`, for `layers_measured`."""
        samples = {}
        for name, nbytes in self._nbytes.items():
            computed = [one[name] for one in self._computed if name in one]
            averaging = [self._stopwatch.seconds(begin, end) for each, begin, end in self._averagings if each == name]
            forward, backward = [each for each, _ in computed], [each for _, each in computed]
            samples[name] = ModuleSamples(forward, backward, averaging, nbytes)
        waited = [self._stopwatch.seconds(begin, end) for begin, end in self._waits]
        return row_of(modules, samples, waited, period)


@dataclass(frozen=True)
class LayerPlan:
    """A new schedule, the profile from which it was planned, and why."""

    profile: LayerProfile
    schedule: JobSchedule
    reason: str


class LayerPlanning:
    """When a schedule is planned, on one rank."""

    def __init__(
        self, config: SyncConfig, groups: SyncGroups, layers: JobLayers, under_way: SynchronisationUnderWay,
        measurement: LayerMeasurement, events: Events, folder: Path | None,
    ) -> None:  # fmt: skip
        self._config, self._groups, self._layers, self._events = config, groups, layers, events
        self._under_way, self._measurement, self._folder = under_way, measurement, folder
        self._check = 0  # iteration of the next check
        self._plan: BackgroundTask[LayerPlan | None] | None = None  # under way after one

    def begin(self, completed: int, origin: int, schedule: JobSchedule) -> None:
        """The schedule holds after iteration `origin`, and `completed` iterations are done."""
        periods = max(0, -(-(completed - origin) // schedule.period))
        self._plan = None
        self._check = origin + (periods + _MEASURED) * schedule.period
        self._measurement.clear()

    def iteration_begin(self, step: int, period: int) -> None:
        """Measure the iterations before a check."""
        self._measurement.recording = self._check - _MEASURED * period < step <= self._check

    def iteration_end(self, step: int, schedule: JobSchedule) -> JobSchedule | None:
        """Iteration `step` is done. Returns the schedule from the next one on, if that changes."""
        if step == self._check:
            row = self._measurement.row(self._layers.names, schedule.period)
            self._plan = self._under_way.run("the times of layers", lambda: self._planned(row, schedule))
        if self._plan is None or step < self._check + schedule.period:
            return None
        plan, self._plan = self._plan.wait(), None
        self._check = step + (_CHECKED - 1) * schedule.period
        self._measurement.clear()
        if plan is None:
            return None
        self._check = step + _CHECKED * plan.schedule.period
        if self._groups.rank == 0:
            if self._folder is not None:
                write_profile(plan.profile, self._folder / "layers.json")
            self._events.emit(
                catalogue.LAYERS_PLANNED, iteration=step, period=plan.schedule.period,
                exposed_seconds=plan.schedule.exposed, seconds=plan.schedule.seconds, reason=plan.reason,
            )  # fmt: skip
        return plan.schedule

    # ---- background thread ----

    def _planned(self, row: Row, schedule: JobSchedule) -> LayerPlan | None:
        """Merge what all ranks of this replica's sync groups measured, of whom all call, and plan from it; None if the
        present schedule stays."""
        merged = over_replicas(self._gathered(self._groups.peers, row))
        row = over_ranks(self._gathered(self._groups.replica, merged))
        times, waited = times_of(self._layers.names, row)
        reason = "the first profile"
        if schedule.exposed is not None:
            if not schedule.falls_behind(waited, self._config.replans_beyond):
                return None
            reason = f"a period waited {waited:.3g} s for averaging, {schedule.exposed:.3g} s were planned"
        profile = profile_of(self._layers, times, len(self._groups.wait.sync))
        return LayerPlan(profile, planned_schedule(self._layers, profile, self._config.layer_period), reason)

    @staticmethod
    def _gathered(links: Links, row: Row) -> Row:
        return np.asarray(links.gather_job(row.tolist()))
