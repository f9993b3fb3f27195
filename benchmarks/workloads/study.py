"""Simulate the jobs in `jobs`: the numbers behind the paper's figures 3, 4 and 7.

`ShapeStudy` is one of the paper's configurations: bubbles of each stage (figure 3), and what a checkpoint costs that is
sent in bubbles, or at once as FTPipeHD does it, where training waits for all of it (figure 7). `ScaleStudy` is one of
the family: bubbles under each schedule (figure 4), and goodput under each protection.

Two figures for the iterations of a checkpoint, because of the first stage (see `idle`): as a `ring`, as in the paper,
and in `pairs`, as a job sends it.

Invariant: pure, and the same every time. In: a `TrainingJob`. Out: `ShapeStudy` or `ScaleStudy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ft_plugins.planner import fitting
from ft_plugins.planner.goodput import GoodputPlan, plan_goodput
from ft_plugins.planner.pipeline import PipelineSchedule
from ft_plugins.planner.simulate import Times, simulate
from ft_plugins.planner.survival import columns
from workloads.jobs import TrainingJob


@dataclass(frozen=True)
class ShapeStudy:
    """A configuration of the paper's. Seconds; None: some rank goes by a rate."""

    job: TrainingJob
    iteration_seconds: float
    bubble_shares: tuple[float, ...]  # by stage
    ring: int | None  # iterations of a checkpoint
    pairs: int | None
    send_seconds: float  # of all of a checkpoint, at once
    snapshot_seconds: float

    @property
    def iterations(self) -> int:
        """Of a checkpoint, in pairs, as a job sends it; as long as sending at once takes where that does not go."""
        return self.pairs or int(self.send_seconds // self.iteration_seconds) + 1

    @property
    def in_bubbles(self) -> float:
        """Overhead of a checkpoint sent in bubbles: the wait for the snapshot."""
        return self.snapshot_seconds / (self.iterations * self.iteration_seconds)

    @property
    def at_once(self) -> float:
        """Overhead of sending it at once, as often."""
        return (self.snapshot_seconds + self.send_seconds) / (self.iterations * self.iteration_seconds)

    @property
    def while_sending(self) -> float:
        """Overhead of sending it at once in the iteration that does."""
        return (self.snapshot_seconds + self.send_seconds) / self.iteration_seconds


@dataclass(frozen=True)
class ScaleStudy:
    """A job of the family. `plan` is that of its own schedule, in pairs; `ring` and `pairs` are the iterations of a
    checkpoint."""

    job: TrainingJob
    shares: dict[PipelineSchedule, float]
    plan: GoodputPlan
    ring: int | None
    pairs: int | None


def study_shape(job: TrainingJob, snapshot_seconds: float = 0.02) -> ShapeStudy:
    """One of the paper's configurations."""
    pipeline = job.pipeline()
    times = job.times(pipeline)
    timelines = simulate(pipeline, times)
    fit = fit_for(job, times)
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
    """One job of the family, under every schedule."""
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
    """`fitting.fit` with the job's nodes, and its longest message reserved."""
    message = max(link.seconds(times.message_bytes) for link in times.links)
    return partial(fitting.fit, per_node=job.stages_per_node, reserved=message)


def shapes_table(shapes: Sequence[ShapeStudy]) -> str:
    """Configurations for people."""
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
    """The family's bubbles for people."""
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
