"""Measure the layers of a job while they are averaged, and plan their schedule from that (DreamDDP's profiler).

    3 periods        forward and backward of each module by its edges, averaging on the background thread, and how long
                     training waited for it; all at the same time, as the job runs
    end of the last  ranks send each other what they measured, behind the next period
    end of that      all ranks plan from the same profile: the first time in any case, later if periods take longer than
                     planned; the new schedule begins with the next iteration

After that every tenth period is the last of three that are measured.

Invariant: nothing here waits for another rank in the step path, except for a message that had a period to arrive. When
to measure, to send and to begin depends on the iteration alone, so all ranks do it together.

In: edges of modules, marks. Out: `JobSchedule`; the profile, as a file of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..config import SyncConfig
from ..events import Events, catalogue
from ..sync.background import BackgroundTask
from ..sync.layer_profile import write_profile
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


class LayerPlanning:
    """When a schedule is planned, on one rank."""

    def __init__(
        self, config: SyncConfig, groups: SyncGroups, layers: JobLayers, under_way: SynchronisationUnderWay,
        measurement: LayerMeasurement, events: Events, folder: Path | None,
    ) -> None:  # fmt: skip
        self._config, self._groups, self._layers, self._events = config, groups, layers, events
        self._under_way, self._measurement, self._folder = under_way, measurement, folder
        self._check = 0  # iteration of the next check
        self._gather: BackgroundTask[Row] | None = None  # what ranks send each other after one

    def begin(self, completed: int, origin: int, schedule: JobSchedule) -> None:
        """The schedule holds after iteration `origin`, and `completed` iterations are done."""
        periods = max(0, -(-(completed - origin) // schedule.period))
        self._gather = None
        self._check = origin + (periods + _MEASURED) * schedule.period
        self._measurement.clear()

    def iteration_begin(self, step: int, period: int) -> None:
        """Measure the iterations before a check."""
        self._measurement.recording = self._check - _MEASURED * period < step <= self._check

    def iteration_end(self, step: int, schedule: JobSchedule) -> JobSchedule | None:
        """Iteration `step` is done. Returns the schedule from the next one on, if that changes."""
        if step < self._check:
            return None
        if self._gather is None:
            if step == self._check:
                row = self._measurement.row(self._layers.names, schedule.period)
                self._gather = self._under_way.run("the times of layers", lambda: self._merged(row))
            return None
        if step < self._check + schedule.period:
            return None
        gather, self._gather = self._gather, None
        self._check += _CHECKED * schedule.period
        self._measurement.clear()
        return self._planned(step, gather.wait(), schedule)

    def _merged(self, row: Row) -> Row:
        """Gather the rows of all ranks of this replica's sync groups. A collective of all of them."""
        merged = over_replicas(self._gathered(self._groups.peers, row))
        return over_ranks(self._gathered(self._groups.replica, merged))

    @staticmethod
    def _gathered(links: Links, row: Row) -> Row:
        return np.asarray(links.gather_job(row.tolist()))

    def _planned(self, step: int, row: Row, schedule: JobSchedule) -> JobSchedule | None:
        times, waited = times_of(self._layers.names, row)
        if schedule.exposed is not None and not schedule.falls_behind(waited, self._config.replans_beyond):
            return None
        profile = profile_of(self._layers, times, len(self._groups.wait.sync))
        chosen = planned_schedule(self._layers, profile, self._config.layer_period)
        reason = "the first profile"
        if schedule.exposed is not None:
            reason = f"a period waited {waited:.3g} s for averaging, {schedule.exposed:.3g} s were planned"
        if self._groups.rank == 0:
            if self._folder is not None:
                write_profile(profile, self._folder / "layers.json")
            self._events.emit(
                catalogue.LAYERS_PLANNED, iteration=step, period=chosen.period, exposed_seconds=chosen.exposed,
                seconds=chosen.seconds, reason=reason,
            )  # fmt: skip
        self._check = step + _CHECKED * chosen.period
        return chosen
