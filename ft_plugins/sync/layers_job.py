"""Schedule the layers of a job: one period for all pipeline stages, a schedule of its own for each (DreamDDP under 3D
parallelism). Pure.

A layer is averaged by the ranks of a stage that hold it, so each stage plans its own layers, in the order of its own
backward. All stages have the period in common: the longest that one of them needs. A stage with fewer layers than that
averages nothing in the last iterations. Layers that several stages hold (a tied embedding) are averaged in the first
iteration of a period, before all others: stages that wait for each other do so in the same place.

Invariant: all ranks derive the same schedule from the same layers and profile.

In: the stage and the modules of each rank of a replica; a profile. Out: `JobLayers`, `JobSchedule`. Raises ConfigError
for a period that no stage has enough layers for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .layer_profile import NANO, LayerProfile, LayerTimes
from .layers_filling import fill
from .layers_schedule import LayerSchedule, choose_period, equal_number, exposed_ns, period_ns
from .layers_spread import spread_layers

UNPLANNED_PERIOD = 5  # until the first plan, if the period is to be chosen

Names = tuple[str, ...]


@dataclass(frozen=True)
class JobLayers:
    """The layers of a replica. `stages`: by stage, those that only its ranks hold, in the order of the forward;
    `shared`: those of several stages, by name."""

    stages: tuple[Names, ...]
    shared: Names

    @property
    def names(self) -> Names:
        """All layers, each once: stage by stage, then the shared ones."""
        return (*(name for own in self.stages for name in own), *self.shared)

    @property
    def longest(self) -> int:
        """The layers of the stage that has most."""
        return max(map(len, self.stages))


def job_layers(stages: Sequence[int], modules: Sequence[Sequence[str]]) -> JobLayers:
    """From the stage and the modules of each rank of a replica, each rank's in the order of the forward."""
    held: dict[str, set[int]] = {}
    for stage, names in zip(stages, modules, strict=True):
        for name in names:
            held.setdefault(name, set()).add(stage)
    order: list[dict[str, None]] = [{} for _ in range(max(stages) + 1)]
    for stage, names in zip(stages, modules, strict=True):
        order[stage].update(dict.fromkeys(name for name in names if len(held[name]) == 1))
    return JobLayers(tuple(map(tuple, order)), tuple(sorted(name for name, those in held.items() if len(those) > 1)))


@dataclass(frozen=True)
class JobSchedule:
    """By stage and iteration of a period, the layers to average, in the order in which their backwards end. `exposed`
    and `seconds`: what a period is planned to wait for averaging and to take, on the stage where that is most; None
    without a profile."""

    stages: tuple[tuple[Names, ...], ...]
    exposed: float | None = None
    seconds: float | None = None

    @property
    def period(self) -> int:
        """Iterations after which it repeats."""
        return len(self.stages[0])

    def due(self, stage: int, number: int) -> Names:
        """The layers of a stage in iteration `number` of training after the schedule began, counted from 0."""
        return self.stages[stage][number % self.period]

    def falls_behind(self, exposed: float, beyond: float) -> bool:
        """Whether a period that exposed so many seconds took longer than planned by more than the share `beyond`."""
        return self.exposed is not None and self.seconds is not None and exposed - self.exposed > beyond * self.seconds

    def block(self) -> dict[str, Any]:
        """As plain values, for `JobSchedule.of`."""
        return {"stages": [[list(own) for own in one] for one in self.stages], "planned": [self.exposed, self.seconds]}

    @classmethod
    def of(cls, block: Mapping[str, Any]) -> JobSchedule:
        """From `block`."""
        stages = tuple(tuple(tuple(own) for own in one) for one in block["stages"])
        return cls(stages, *block["planned"])


def equal_schedule(layers: JobLayers, period: int | None) -> JobSchedule:
    """As many layers in each iteration; without a profile. Raises ConfigError."""
    chosen = min(UNPLANNED_PERIOD, layers.longest) if period is None else period
    require_job_period(layers, chosen)
    return _assembled(layers, chosen, lambda stage, count, own: equal_number(count, own))


def planned_schedule(layers: JobLayers, profile: LayerProfile, period: int | None) -> JobSchedule:
    """The schedule that exposes least, its idle link time filled; `period` None: the shortest that hides everything.
    Raises ConfigError, also for a profile of other layers."""
    profile.require_names(layers.names)
    times = {one.name: one for one in profile.layers}
    own = {
        stage: LayerProfile(tuple(times[name] for name in names), profile.replicas)
        for stage, names in enumerate(layers.stages)
        if names
    }
    if period is None:
        period = max((choose_period(one).schedule.period for one in own.values()), default=1)
    require_job_period(layers, period)
    planned: dict[int, LayerSchedule] = {}

    def plan(stage: int, count: int, period: int) -> LayerSchedule:
        planned[stage] = fill(own[stage], spread_layers(own[stage], period))
        return planned[stage]

    schedule = _assembled(layers, period, plan)
    exposed = {stage: exposed_ns(own[stage], one) for stage, one in planned.items()}
    seconds = [
        period_ns(own[stage], one) + (period - one.period) * own[stage].compute_ns for stage, one in planned.items()
    ]
    return JobSchedule(schedule.stages, max(exposed.values(), default=0) / NANO, max(seconds, default=0) / NANO)


def require_job_period(layers: JobLayers, period: int) -> None:
    """Raises ConfigError for a period with an iteration in which no stage has a layer left to average."""
    most = max(layers.longest, 1)
    if period > most:
        raise ConfigError(
            f"--sync-h {period}: expected at most {most}, because no pipeline stage has more than {most} "
            f"layer{'s' * (most > 1)} that can be averaged in different iterations; choose a smaller one, or "
            "--sync-policy post_local_sgd"
        )


def _assembled(layers: JobLayers, period: int, plan: Callable[[int, int, int], LayerSchedule]) -> JobSchedule:
    """`plan(stage, layers, period)` gives the schedule of a stage; the shared layers come first."""
    stages = []
    for stage, names in enumerate(layers.stages):
        iterations: list[Names] = [()] * period
        if names:
            for number, own in enumerate(plan(stage, len(names), min(period, len(names))).iterations):
                iterations[number] = tuple(names[layer] for layer in own)
        iterations[0] = (*layers.shared, *iterations[0])
        stages.append(tuple(iterations))
    return JobSchedule(tuple(stages))


def profile_of(layers: JobLayers, times: Mapping[str, LayerTimes], replicas: int) -> LayerProfile:
    """A profile of the whole job, for `planned_schedule`. Raises ConfigError."""
    return LayerProfile(tuple(times[name] for name in layers.names), replicas)
