"""What `ft-plugins plan` says of a pipeline: bubbles by schedule, iterations of a checkpoint in them, goodput.

The unit of time is a forward pass of a rank through all of its chunks; a backward pass takes two, one of them for
weights. How long an iteration really is, `Costs` say.

Invariant: pure. In: sizes as they are given, `Cluster`, `Costs` or none. Out: `PipelineOutlook`.
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
CHUNKS = 2  # of the schedule that has them, where nothing is said


@dataclass(frozen=True)
class PlannedPipeline:
    """A pipeline, each of whose ranks is on a node of its own; a message takes `message_share` of the unit."""

    pipeline: Pipeline
    message_share: float = 0.0
    restart_seconds: float = RESTART_SECONDS

    @classmethod
    def given(cls, values: Mapping[str, Any]) -> PlannedPipeline | None:
        """The pipeline in `values` (schedule, stages, microbatches, chunks, message_share, restart_seconds), None is
        what was not given; None when nothing was. Raises ConfigError for a part."""
        found = {name: value for name, value in values.items() if value is not None}
        missing = [name for name in NEEDED if name not in found]
        if not found:
            return None
        if missing:
            raise ConfigError(
                f"{', '.join(found)}: without effect; a pipeline can be simulated when {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} given too"
            )
        schedule = PipelineSchedule(found.get("schedule", PipelineSchedule.ONE_F_ONE_B.value))
        chunks = found.get("chunks", CHUNKS if schedule is PipelineSchedule.INTERLEAVED else 1)
        overlap = schedule is PipelineSchedule.INTERLEAVED
        share = found.get("message_share", 0.0)
        demand("message_share", share, "from 0 to 100", 0 <= share <= 100)
        pipeline = Pipeline(schedule, found["stages"], found["microbatches"], chunks, overlap=overlap)
        return cls(pipeline, share, found.get("restart_seconds", RESTART_SECONDS))

    def simulate(self, pipeline: Pipeline) -> tuple[Timeline, ...]:
        """An iteration of this pipeline or of the same in another schedule."""
        unit = 1 / pipeline.chunks
        return simulate(pipeline, Times((unit,), (2 * unit,), (unit,), links=(PipelineLink(self.message_share),)))


@dataclass(frozen=True)
class PipelineOutlook:
    """`shares`: bubbles by schedule, of those in which it can be run. With costs: iterations of a checkpoint by
    placement (None: some rank goes by a rate), and the job as it grows, in pairs."""

    wanted: PlannedPipeline
    timelines: tuple[Timeline, ...]
    shares: dict[PipelineSchedule, float]
    iterations: dict[CopyPlacement, int | None]
    plans: tuple[GoodputPlan, ...]

    def table(self) -> str:
        """The outlook for people."""
        pipeline = self.wanted.pipeline
        head = f"bubbles: {pipeline.ranks} stages, {pipeline.microbatches} microbatches, "
        head += f"a message takes {self.wanted.message_share:.2g} of a forward pass"
        rows = [("", "of an iteration")] + [
            (schedule.value + (" *" if schedule is pipeline.schedule else ""), f"{share:.1%}")
            for schedule, share in self.shares.items()
        ]
        lines = [head, *columns(rows), "  * planned with"]
        if self.plans:
            counts = (
                f"{'of no' if one is None else f'of {one}'} iteration{'s' * (one != 1)} as {to.value}"
                for to, one in self.iterations.items()
            )
            lines.append(f"  a checkpoint fits into the bubbles {', '.join(counts)}")
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
    """Bubbles, and with costs what fits into them and what becomes of the job as it grows."""
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
    counts = {
        to: plan_goodput(cluster, costs, timelines, fit=partial(fit, placement=to)).iterations_per_checkpoint
        for to in CopyPlacement
    }
    return PipelineOutlook(wanted, timelines, shares, counts, plans)


def _in(pipeline: Pipeline, schedule: PipelineSchedule) -> Pipeline | None:
    """The same pipeline in another schedule; None where that cannot be."""
    if schedule is pipeline.schedule:
        return pipeline
    chunks = CHUNKS if schedule is PipelineSchedule.INTERLEAVED else 1
    try:
        return replace(
            pipeline, schedule=schedule, chunks=chunks, group=0, overlap=schedule is PipelineSchedule.INTERLEAVED
        )
    except ConfigError:
        return None
