"""Simulate the jobs in `jobs`: the numbers behind the BAFT paper's figures 3, 4 and 7. Pure and deterministic.

`ShapeStudy`: a configuration of the paper, with the bubbles of each stage (figure 3) and the cost of a checkpoint sent
in bubbles, or at once while training waits, as FTPipeHD does (figure 7). `ScaleStudy`: a job of the family, with the
bubbles of each schedule (figure 4) and the goodput of each protection.

There are two figures for the iterations per checkpoint, one for each `fitting.CopyPlacement`: a `ring` of stages, as in
the paper, and `pairs`, as a job sends copies.

In: a `TrainingJob`. Out: `ShapeStudy` or `ScaleStudy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ft_plugins.planner.survival import columns
from workloads.jobs import TrainingJob
from workloads.pipelines import fitting
from workloads.pipelines.goodput import GoodputPlan, plan_goodput
from workloads.pipelines.pipeline import PipelineSchedule
from workloads.pipelines.simulate import Times, simulate


@dataclass(frozen=True)
class ShapeStudy:
    """A configuration of the paper. `ring` and `pairs`: None if some rank would be rate-limited."""

    job: TrainingJob
    iteration_seconds: float
    bubble_shares: tuple[float, ...]  # by stage
    ring: int | None  # iterations per checkpoint
    pairs: int | None
    send_seconds: float  # for a whole checkpoint, at once
    snapshot_seconds: float

    @property
    def iterations(self) -> int:
        """Iterations per checkpoint in pairs; if that is impossible, as many as sending at once takes."""
        return self.pairs or int(self.send_seconds // self.iteration_seconds) + 1

    @property
    def in_bubbles(self) -> float:
        """Overhead of sending in bubbles: the wait for the snapshot."""
        return self.snapshot_seconds / (self.iterations * self.iteration_seconds)

    @property
    def at_once(self) -> float:
        """Overhead of sending at once, equally often."""
        return (self.snapshot_seconds + self.send_seconds) / (self.iterations * self.iteration_seconds)

    @property
    def while_sending(self) -> float:
        """Overhead of sending at once, in the sending iteration."""
        return (self.snapshot_seconds + self.send_seconds) / self.iteration_seconds


@dataclass(frozen=True)
class ScaleStudy:
    """A job of the family. `plan`: with its own schedule, in pairs; `ring`, `pairs`: iterations per checkpoint."""

    job: TrainingJob
    shares: dict[PipelineSchedule, float]
    plan: GoodputPlan
    ring: int | None
    pairs: int | None


def study_shape(job: TrainingJob, snapshot_seconds: float = 0.02, reserves: bool = True) -> ShapeStudy:
    """Study one configuration of the paper. `reserves`: time at both ends of a bubble, for the longest message."""
    pipeline = job.pipeline()
    times = job.times(pipeline)
    timelines = simulate(pipeline, times)
    fit = fit_for(job, times) if reserves else partial(fitting.fit, per_node=job.stages_per_node)
    ring, pairs = (fit(timelines, job.rank_bytes, job.rank_link, placement=to) for to in fitting.CopyPlacement)
    return ShapeStudy(
        job,
        timelines[0].seconds,
        fitting.bubble_shares(timelines),
        ring,
        pairs,
        job.rank_bytes / job.rank_link,
        snapshot_seconds,
    )


def study_scale(job: TrainingJob, restart_seconds: float = 600.0, snapshot_seconds: float = 0.05) -> ScaleStudy:
    """Study one job of the family under every schedule."""
    shares = {}
    for schedule in PipelineSchedule:
        pipeline = job.pipeline(schedule)
        shares[schedule] = fitting.bubble_share(simulate(pipeline, job.times(pipeline)))
    pipeline = job.pipeline()
    times = job.times(pipeline)
    timelines = simulate(pipeline, times)
    costs = job.costs(timelines[0].seconds, snapshot_seconds)
    fit = fit_for(job, times)
    ring, pairs = (fit(timelines, job.rank_bytes, job.rank_link, placement=to) for to in fitting.CopyPlacement)
    in_pairs = partial(fit, placement=fitting.CopyPlacement.PAIRS)
    plan = plan_goodput(job.cluster(), costs, timelines, restart_seconds, in_pairs)
    return ScaleStudy(job, shares, plan, ring, pairs)


def fit_for(job: TrainingJob, times: Times) -> partial[int | None]:
    """`fitting.fit` for the job's nodes, with time reserved for its longest message."""
    message = max(link.seconds(times.message_bytes) for link in times.links)
    return partial(fitting.fit, per_node=job.stages_per_node, reserved=message)


def shapes_table(shapes: Sequence[ShapeStudy]) -> str:
    """A table of configurations."""
    rows: list[tuple[str, ...]] = [
        ("", "batch", "iteration", "bubbles", "ring", "pairs", "in bubbles", "at once", "while sending")
    ]
    for one in shapes:
        low, high = min(one.bubble_shares), max(one.bubble_shares)
        rows.append(
            (
                *(one.job.name, str(one.job.batch), f"{one.iteration_seconds:.2f} s", f"{low:.0%} to {high:.0%}"),
                *(_count(one.ring), _count(one.pairs)),
                *(f"{share:.1%}" for share in (one.in_bubbles, one.at_once, one.while_sending)),
            )
        )
    return "\n".join(["iterations of a checkpoint, and its overhead", *columns(rows)])


def scales_table(scales: Sequence[ScaleStudy]) -> str:
    """A table of the family's bubbles."""
    head = ("ranks", *(schedule.value for schedule in PipelineSchedule), "its own", "ring", "pairs")
    rows = [head] + [
        (
            f"{one.job.ranks} ",
            *(f"{share:.1%}" for share in one.shares.values()),
            f"{one.plan.bubble_share:.1%}",
            _count(one.ring),
            _count(one.pairs),
        )
        for one in scales
    ]
    return "\n".join(["bubbles by schedule, and iterations of a checkpoint", *columns(rows)])


def _count(iterations: int | None) -> str:
    return "none" if iterations is None else str(iterations)
