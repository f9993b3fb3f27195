"""The part of `ft-plugins plan` about a pipeline: bubbles by schedule, iterations of a checkpoint, goodput. Pure.

The unit of time is a forward pass of a rank through all of its chunks; a backward pass takes two units, one of them for
weights. `Costs` has the length of an iteration in seconds.

In: sizes as given, `Cluster`, `Costs` or none. Out: `PipelineOutlook`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ..errors import ConfigError
from ..model.timeline import Timeline
from . import fitting, goodput
from .fitting import CopyPlacement
from .goodput import GoodputPlan, plan_goodput, plan_growth
from .intervals import Costs
from .pipeline import Pipeline, PipelineSchedule
from .simulate import PipelineLink, Times, simulate
from .survival import Cluster, columns, demand

NEEDED = ("stages", "microbatches")
RESTART_SECONDS = 600.0
CHUNKS = 2  # default of the interleaved schedule


@dataclass(frozen=True)
class PlannedPipeline:
    """A pipeline with each rank on a node of its own; a message takes `message_share` units."""

    pipeline: Pipeline
    message_share: float = 0.0
    restart_seconds: float = RESTART_SECONDS

    @classmethod
    def given(cls, values: Mapping[str, Any]) -> PlannedPipeline | None:
        """The pipeline in `values` (schedule, stages, microbatches, chunks, message_share, restart_seconds), where None
        means not given; None if none is given. Raises ConfigError if only some of the required ones are."""
        present = {name: value for name, value in values.items() if value is not None}
        missing = [name for name in NEEDED if name not in present]
        if not present:
            return None
        if missing:
            raise ConfigError(
                f"{', '.join(present)}: without effect; a pipeline can be simulated when {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} given too"
            )
        schedule = PipelineSchedule(present.get("schedule", PipelineSchedule.ONE_F_ONE_B.value))
        chunks = present.get("chunks", CHUNKS if schedule is PipelineSchedule.INTERLEAVED else 1)
        overlap = schedule is PipelineSchedule.INTERLEAVED
        share = present.get("message_share", 0.0)
        demand("message_share", share, "from 0 to 100", 0 <= share <= 100)
        pipeline = Pipeline(schedule, present["stages"], present["microbatches"], chunks, overlap=overlap)
        return cls(pipeline, share, present.get("restart_seconds", RESTART_SECONDS))

    def simulate(self, pipeline: Pipeline) -> tuple[Timeline, ...]:
        """An iteration of `pipeline`, which is this one or the same with another schedule."""
        unit = 1 / pipeline.chunks
        return simulate(pipeline, Times((unit,), (2 * unit,), (unit,), links=(PipelineLink(self.message_share),)))


@dataclass(frozen=True)
class PipelineOutlook:
    """`shares`: share of bubbles by schedule, for schedules that fit the pipeline. With costs: `iterations` of a
    checkpoint by placement (None: some rank is paced by a rate), and `plans` for the growing job, placed in pairs."""

    wanted: PlannedPipeline
    timelines: tuple[Timeline, ...]
    shares: dict[PipelineSchedule, float]
    iterations: dict[CopyPlacement, int | None]
    plans: tuple[GoodputPlan, ...]

    def table(self) -> str:
        """The outlook as a table."""
        pipeline = self.wanted.pipeline
        head = f"bubbles: {pipeline.ranks} stages, {pipeline.microbatches} microbatches, "
        head += f"a message takes {self.wanted.message_share:.2g} of a forward pass"
        rows = [("", "of an iteration")] + [
            (schedule.value + (" *" if schedule is pipeline.schedule else ""), f"{share:.1%}")
            for schedule, share in self.shares.items()
        ]
        lines = [head, *columns(rows), "  * the schedule of this plan"]
        if self.plans:
            by_placement = (
                f"{'of no' if one is None else f'of {one}'} iteration{'s' * (one != 1)} as {to.value}"
                for to, one in self.iterations.items()
            )
            lines.append(f"  a checkpoint fits into the bubbles {', '.join(by_placement)}")
            lines += ["", goodput.table(self.plans)]
        return "\n".join(lines)

    def block(self) -> dict[str, Any]:
        """The outlook as JSON."""
        pipeline = asdict(self.wanted.pipeline) | {"schedule": self.wanted.pipeline.schedule.value}
        return {
            "pipeline": pipeline | {"message_share": self.wanted.message_share},
            "bubble_shares": {schedule.value: share for schedule, share in self.shares.items()},
            "by_stage": fitting.bubble_shares(self.timelines),
            "iterations_per_checkpoint": {to.value: one for to, one in self.iterations.items()},
            "goodput": [plan.block() for plan in self.plans],
        }


def plan_pipeline(wanted: PlannedPipeline, cluster: Cluster, costs: Costs | None) -> PipelineOutlook:
    """The outlook of a pipeline: its bubbles; with costs, also what fits into them, and goodput as the job grows."""
    pipeline = wanted.pipeline
    timelines = wanted.simulate(pipeline)
    shares = {}
    for schedule in PipelineSchedule:
        other = _in(pipeline, schedule)
        if other is not None:
            shares[schedule] = fitting.bubble_share(timelines if other == pipeline else wanted.simulate(other))
    if costs is None:
        return PipelineOutlook(wanted, timelines, shares, {}, ())
    fit = partial(fitting.fit, reserved=wanted.message_share)
    plans = plan_growth(cluster, costs, timelines, wanted.restart_seconds, fit)
    iterations = {
        to: plan_goodput(cluster, costs, timelines, fit=partial(fit, placement=to)).iterations_per_checkpoint
        for to in CopyPlacement
    }
    return PipelineOutlook(wanted, timelines, shares, iterations, plans)


def _in(pipeline: Pipeline, schedule: PipelineSchedule) -> Pipeline | None:
    """`pipeline` with another schedule; None if it does not fit."""
    if schedule is pipeline.schedule:
        return pipeline
    chunks = CHUNKS if schedule is PipelineSchedule.INTERLEAVED else 1
    try:
        return replace(
            pipeline, schedule=schedule, chunks=chunks, group=0, overlap=schedule is PipelineSchedule.INTERLEAVED
        )
    except ConfigError:
        return None
