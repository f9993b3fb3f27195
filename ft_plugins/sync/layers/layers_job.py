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
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...errors import ConfigError
from .layer_profile import MOST_SECONDS, NANO, LayerProfile, LayerTimes
from .layers_filling import fill
from .layers_schedule import LayerSchedule, choose_period, equal_number, iteration_ns, spread_layers

USUAL_PERIOD = 5  # as in the paper's experiments; also until the first plan, if the period is to be chosen

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

    def most_bytes(self, stage: int, nbytes: Mapping[str, int]) -> int:
        """Bytes of the largest iteration of a stage, of the layers that `nbytes` names."""
        return max(sum(nbytes.get(name, 0) for name in own) for own in self.stages[stage])

    def faster_than(self, other: JobSchedule) -> bool:
        """Whether an iteration takes less by the same profile, on average over a period."""
        assert self.seconds is not None and other.seconds is not None
        return self.seconds * other.period < other.seconds * self.period

    def falls_behind(self, exposed: float, beyond: float) -> bool:
        """Whether a period that exposed so many seconds took longer than planned by more than the share `beyond`."""
        return self.exposed is not None and self.seconds is not None and exposed - self.exposed > beyond * self.seconds

    def block(self) -> dict[str, Any]:
        return {"stages": [[list(own) for own in one] for one in self.stages], "planned": [self.exposed, self.seconds]}

    @classmethod
    def of(cls, block: Mapping[str, Any]) -> JobSchedule:
        stages = tuple(tuple(tuple(own) for own in one) for one in block["stages"])
        return cls(stages, *block["planned"])


def job_period(layers: JobLayers, h: int | Literal["auto"] | None) -> int | None:
    """The configured period; None if it is to be chosen from a profile. Unset it is that of the paper's experiments, or
    what the model has layers for."""
    if h == "auto":
        return None
    return min(USUAL_PERIOD, max(layers.longest, 1)) if h is None else h


def equal_schedule(layers: JobLayers, period: int | None) -> JobSchedule:
    """As many layers in each iteration; without a profile. Raises ConfigError."""
    chosen = min(USUAL_PERIOD, max(layers.longest, 1)) if period is None else period
    require_job_period(layers, chosen)
    return _assembled(layers, chosen, lambda stage, count, own: equal_number(count, own))


def planned_schedule(layers: JobLayers, profile: LayerProfile, period: int | None) -> JobSchedule:
    """The schedule that exposes least, its idle link time filled up to the bytes of its largest iteration; `period`
    None: the shortest that hides everything. Raises ConfigError, also for a profile of other layers."""
    stages = _stage_profiles(layers, profile)
    if period is None:
        period = max((choose_period(one).period for one in stages.values()), default=1)
    require_job_period(layers, period)

    def plan(stage: int, count: int, period: int) -> LayerSchedule:
        return _last_layer_first(fill(stages[stage], spread_layers(stages[stage], period), bounded=True))

    return _costed(layers, stages, _assembled(layers, period, plan).stages)


def next_schedule(
    layers: JobLayers, profile: LayerProfile, waited: float, present: JobSchedule, h: int | Literal["auto"] | None,
    beyond: float,
) -> tuple[JobSchedule, str] | None:  # fmt: skip
    """The schedule to use from now on, and why; None to keep the `present` one, whose last periods `waited` that many
    seconds for averaging. It changes after the first profile, and later if a period takes more than the share `beyond`
    longer than planned and another schedule would be faster by the new profile. Raises ConfigError."""
    reason = "the first profile"
    if present.exposed is not None:
        if not present.falls_behind(waited, beyond):
            return None
        reason = f"a period waited {waited:.3g} s for averaging, {present.exposed:.3g} s were planned"
    chosen = planned_schedule(layers, profile, job_period(layers, h))
    if present.exposed is not None and not chosen.faster_than(costed(layers, profile, present)):
        return None
    return chosen, reason


def costed(layers: JobLayers, profile: LayerProfile, schedule: JobSchedule) -> JobSchedule:
    """A schedule with what it exposes by another profile."""
    return _costed(layers, _stage_profiles(layers, profile), schedule.stages)


def _stage_profiles(layers: JobLayers, profile: LayerProfile) -> dict[int, LayerProfile]:
    """The profiles of the stages that have layers of their own. The shared layers are averaged before the first one of
    a backward, so their time is added to that of this one. Raises ConfigError."""
    profile.require_names(layers.names)
    times = {one.name: one for one in profile.layers}
    shared = sum(times[name].communication for name in layers.shared)
    stages = {}
    for stage, names in enumerate(layers.stages):
        if names:
            *rest, first = (times[name] for name in names)
            own = (*rest, replace(first, communication=min(first.communication + shared, MOST_SECONDS)))
            stages[stage] = LayerProfile(own, profile.replicas)
    return stages


def _last_layer_first(schedule: LayerSchedule) -> LayerSchedule:
    """Begin the period with an iteration that averages the last layer: the shared ones go there too."""
    at = next(number for number, own in enumerate(schedule.iterations) if schedule.layers - 1 in own)
    return LayerSchedule(schedule.layers, schedule.iterations[at:] + schedule.iterations[:at])


def _costed(
    layers: JobLayers, profiles: Mapping[int, LayerProfile], stages: tuple[tuple[Names, ...], ...]
) -> JobSchedule:
    exposed, seconds = [0], [0]
    for stage, profile in profiles.items():
        numbers = {name: number for number, name in enumerate(layers.stages[stage])}
        turns = [[numbers[name] for name in own if name in numbers] for own in stages[stage]]
        seconds.append(sum(iteration_ns(profile, own) for own in turns))
        exposed.append(seconds[-1] - len(turns) * profile.compute_ns)
    return JobSchedule(stages, max(exposed) / NANO, max(seconds) / NANO)


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
