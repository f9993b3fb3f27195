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

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...config import SyncConfig
from ...events import Events, catalogue, say
from ...sync.background import Background, BackgroundTask
from ...sync.layers.layer_profile import LayerProfile, write_profile
from ...sync.layers.layers_job import JobLayers, JobSchedule, next_schedule, profile_of
from ...sync.layers.layers_measured import (
    EdgeKind,
    ModuleSamples,
    ModuleTimes,
    Row,
    TimedEdge,
    module_times,
    over_ranks,
    over_replicas,
    row_of,
    times_of,
)
from .sync_groups import SyncGroups
from .under_way import SynchronisationUnderWay

_MEASURED = 3  # periods: a median of three ignores one outlier, also for a layer that is averaged once in a period
_CHECKED = 10  # periods from one check of the plan to the next: measuring costs a call for each edge of a module

Mark = float | torch.cuda.Event


class LayerMeasurement:
    """What this rank measures of its modules."""

    def __init__(self, stopwatch: Stopwatch, nbytes: Mapping[str, int]) -> None:
        self._stopwatch, self._nbytes = stopwatch, nbytes
        self._edges: list[tuple[EdgeKind, str, Mark]] = []
        self.recording = False
        self.clear()

    def clear(self) -> None:
        self._edges = []
        self._averagings: list[tuple[str, Mark, Mark]] = []
        self._waits: list[tuple[Mark, Mark]] = []
        self._iterations: list[tuple[list[tuple[EdgeKind, str, Mark]], Mark]] = []  # edges, and the end

    def edge(self, kind: EdgeKind, module: str) -> None:
        """A forward or backward of a module begins or ends."""
        if self.recording:
            self._edges.append((kind, module, self._stopwatch.mark()))

    def averaging(self, module: str, exchange: Callable[[str], float]) -> float:
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
        if self._edges:
            self._iterations.append((self._edges, self._stopwatch.mark()))
        self._edges = []

    def row(self, modules: tuple[str, ...], period: int) -> Row:
        """What was measured since `clear`, for `layers_measured`. Waits for the device: not for the step path."""
        computed = [self._times(edges, end) for edges, end in self._iterations]
        samples = {}
        for name, nbytes in self._nbytes.items():
            own = [one[name] for one in computed if name in one]
            averaging = [self._stopwatch.seconds(begin, end) for each, begin, end in self._averagings if each == name]
            samples[name] = ModuleSamples(
                [one.forward for one in own], [one.backward for one in own], averaging, nbytes
            )
        waited = [self._stopwatch.seconds(begin, end) for begin, end in self._waits]
        return row_of(modules, samples, waited, period)

    def _times(self, edges: Sequence[tuple[EdgeKind, str, Mark]], end: Mark) -> Mapping[str, ModuleTimes]:
        _, _, first = edges[0]
        timed = [TimedEdge(kind, module, self._stopwatch.seconds(first, mark)) for kind, module, mark in edges]
        return module_times(timed, self._stopwatch.seconds(first, end))


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
        measurement: LayerMeasurement, nbytes: Mapping[str, int], events: Events, folder: Path | None,
    ) -> None:  # fmt: skip
        """`nbytes`: by module that this rank holds."""
        self._config, self._groups, self._layers, self._events = config, groups, layers, events
        self._nbytes = nbytes
        self._under_way, self._measurement, self._folder = under_way, measurement, folder
        self._planner: Background | None = None  # a thread of its own: averagings do not wait for a plan
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
            self._planner = self._planner or Background(torch.device("cpu"))
            names = self._layers.names
            gathered = self._under_way.run(
                "the times of layers", lambda: self._gathered(self._measurement.row(names, schedule.period))
            )
            self._plan = self._planner.start(lambda: self._planned(gathered.wait(), schedule))
        if self._plan is None or step < self._check + schedule.period:
            return None
        plan, self._plan = self._plan.wait(), None
        self._check = step + (_CHECKED - 1) * schedule.period
        self._measurement.clear()
        if plan is None:
            return None
        self._check = step + _CHECKED * plan.schedule.period
        if self._groups.rank == 0:
            self._report(step, plan)
        return plan.schedule

    def close(self) -> None:
        if self._planner is not None:
            self._planner.close()

    def _report(self, step: int, plan: LayerPlan) -> None:
        schedule = plan.schedule
        self._events.emit(
            catalogue.LAYERS_PLANNED, iteration=step, period=schedule.period, exposed_seconds=schedule.exposed,
            seconds=schedule.seconds, held_bytes=schedule.most_bytes(self._groups.stage, self._nbytes),
            reason=plan.reason,
        )  # fmt: skip
        if self._folder is not None:
            try:
                write_profile(plan.profile, self._folder / "layer-profile.json")
            except OSError as error:  # the plan holds without it
                say(f"the profile of layers could not be written to {self._folder}: {error}; training goes on")

    # ---- other threads ----

    def _planned(self, row: Row, schedule: JobSchedule) -> LayerPlan | None:
        """Plan from a merged row, equal on all ranks; None if the present schedule stays."""
        times, waited = times_of(self._layers.names, row)
        profile = profile_of(self._layers, times, len(self._groups.wait.sync))
        chosen = next_schedule(self._layers, profile, waited, schedule, self._config.h, self._config.replans_beyond)
        return None if chosen is None else LayerPlan(profile, *chosen)

    def _gathered(self, row: Row) -> Row:
        """Merge what all ranks of this replica's sync groups measured. A collective of all of them."""
        merged = over_replicas(np.asarray(self._groups.peers.gather_job(row.tolist())))
        return over_ranks(np.asarray(self._groups.replica.gather_job(merged.tolist())))


class Stopwatch:
    """The clock of one device: that of the processor, or events of the current stream of a GPU. A mark never waits for
    the device. `seconds` does, until the later mark has passed, so it is asked for marks of an earlier iteration."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Mark:
        """Now, in the order of what the calling thread has given to the device."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        if isinstance(begin, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            end.synchronize()
            return begin.elapsed_time(end) / 1e3
        assert isinstance(end, float)
        return end - begin
