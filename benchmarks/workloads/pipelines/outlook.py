"""One pipeline: bubbles by schedule, how many iterations it takes to send a version in bubbles, goodput. Pure.

The unit of time is a forward pass of a rank through all of its chunks; a backward pass takes two units, one of them for
weights. `Costs` has the length of an iteration in seconds.

In: sizes as given, `Cluster`, `Costs` or none. Out: `PipelineOutlook`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import Any

from ft_plugins.errors import ConfigError
from ft_plugins.model.timeline import Timeline
from ft_plugins.planner.intervals import Costs
from ft_plugins.planner.survival import Cluster, columns, demand
from workloads.pipelines import fitting, goodput
from workloads.pipelines.fitting import CopyPlacement
from workloads.pipelines.goodput import GoodputPlan, plan_goodput, plan_growth
from workloads.pipelines.pipeline import Pipeline, PipelineSchedule
from workloads.pipelines.simulate import PipelineLink, Times, simulate

NEEDED = ("stages", "microbatches")
RESTART_SECONDS = 600.0
CHUNKS = 2  # default of the interleaved schedule


@dataclass(frozen=True)
class PlannedPipeline:
    """A pipeline with each rank on a node of its own; a message takes `message_passes` forward passes of a stage."""

    pipeline: Pipeline
    message_passes: float = 0.0
    restart_seconds: float | None = None  # None: RESTART_SECONDS

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> PlannedPipeline | None:
        """The pipeline in `values` (schedule, stages, microbatches, chunks, message_passes, restart_seconds), where
        None means not given; None if none is given. Raises ConfigError if only some of the required ones are."""
        present = {name: value for name, value in values.items() if value is not None}
        missing = [name for name in NEEDED if name not in present]
        if not present:
            return None
        if missing:
            raise ConfigError(
                f"{', '.join(present)}: no effect without {', '.join(missing)}; give "
                f"{'it' if len(missing) == 1 else 'them'} too"
            )
        schedule = PipelineSchedule(present.get("schedule", PipelineSchedule.ONE_F_ONE_B.value))
        chunks = present.get("chunks", CHUNKS if schedule is PipelineSchedule.INTERLEAVED else 1)
        overlap = schedule is PipelineSchedule.INTERLEAVED
        passes = present.get("message_passes", 0.0)
        demand("message_passes", passes, "from 0 to 100", 0 <= passes <= 100)
        pipeline = Pipeline(schedule, present["stages"], present["microbatches"], chunks, overlap=overlap)
        return cls(pipeline, passes, present.get("restart_seconds"))

    def simulate(self, pipeline: Pipeline) -> tuple[Timeline, ...]:
        """The timelines of one iteration of `pipeline`: this pipeline, or the same with another schedule."""
        unit = 1 / pipeline.chunks
        return simulate(pipeline, Times((unit,), (2 * unit,), (unit,), links=(PipelineLink(self.message_passes),)))


@dataclass(frozen=True)
class PipelineOutlook:
    """`shares`: share of bubbles by schedule, for the schedules that accept these sizes. With costs: `iterations` whose
    bubbles carry one version, by placement (None: there is only one rank, or some rank is paced by a rate); `plans`:
    goodput as the job grows, with copies placed in pairs."""

    planned: PlannedPipeline
    timelines: tuple[Timeline, ...]
    shares: dict[PipelineSchedule, float]
    iterations: dict[CopyPlacement, int | None]
    plans: tuple[GoodputPlan, ...]

    def table(self) -> str:
        """The outlook as a table."""
        pipeline = self.planned.pipeline
        head = f"bubbles: {pipeline.ranks} stages, {pipeline.microbatches} microbatches, "
        head += f"a message takes {self.planned.message_passes:.2g} forward passes"
        rows = [("", "of an iteration")] + [
            (schedule.value + (" *" if schedule is pipeline.schedule else ""), f"{share:.1%}")
            for schedule, share in self.shares.items()
        ]
        lines = [head, *columns(rows), "  * the schedule of this plan"]
        if self.plans:
            by_placement = (
                f"{to.value}: {'does not fit' if one is None else one}" for to, one in self.iterations.items()
            )
            lines.append(f"  iterations whose bubbles carry one version: {', '.join(by_placement)}")
            lines += ["", goodput.table(self.plans)]
        return "\n".join(lines)


def plan_pipeline(planned: PlannedPipeline, cluster: Cluster, costs: Costs | None) -> PipelineOutlook:
    """The outlook of a pipeline: its bubbles; with costs, also what fits into them, and goodput as the job grows.

    Raises ConfigError if `restart_seconds`, which only goodput depends on, is given without costs.
    """
    if costs is None and planned.restart_seconds is not None:
        needed = ", ".join(part.name for part in fields(Costs) if part.default is MISSING)
        raise ConfigError(f"restart_seconds: no effect without {needed}; give them too")
    pipeline = planned.pipeline
    timelines = planned.simulate(pipeline)
    shares = {}
    for schedule in PipelineSchedule:
        other = _with_schedule(pipeline, schedule)
        if other is not None:
            shares[schedule] = fitting.bubble_share(timelines if other == pipeline else planned.simulate(other))
    if costs is None:
        return PipelineOutlook(planned, timelines, shares, {}, ())
    fit = partial(fitting.fit, reserved=planned.message_passes)
    restart_seconds = RESTART_SECONDS if planned.restart_seconds is None else planned.restart_seconds
    plans = plan_growth(cluster, costs, timelines, restart_seconds, fit)
    iterations = {
        to: plan_goodput(cluster, costs, timelines, fit=partial(fit, placement=to)).iterations_per_version
        for to in CopyPlacement
    }
    return PipelineOutlook(planned, timelines, shares, iterations, plans)


def _with_schedule(pipeline: Pipeline, schedule: PipelineSchedule) -> Pipeline | None:
    """`pipeline` with another schedule; None if that schedule does not accept these sizes."""
    if schedule is pipeline.schedule:
        return pipeline
    chunks = CHUNKS if schedule is PipelineSchedule.INTERLEAVED else 1
    try:
        return replace(
            pipeline, schedule=schedule, chunks=chunks, group=0, overlap=schedule is PipelineSchedule.INTERLEAVED
        )
    except ConfigError:
        return None
