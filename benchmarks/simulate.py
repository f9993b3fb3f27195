"""Measure how fast pipelines are planned, and simulate jobs from 16 to 16,384 ranks.

    python benchmarks/simulate.py [--quick] [--output FOLDER] [--cluster FILE] [--own NAME=VALUE ...]

    plan_seconds              planning one iteration of 64 stages and 512 microbatches (a model of 96 layers), 1f1b,
                              links of 1 ms: messages, bubbles, contents of each bubble by bytes and by layers; median
                              of the thread's processor seconds
    plan_slowest_seconds      the slowest schedule
    plan_long_seconds         1f1b, a state that takes `plan_long_iterations`: layers are chosen again for each. A job
                              that sends by bytes plans one rank, a job that sends by layers all 64
    analytic_error_worst      relative error of bubble shares against closed forms, over schedules and sizes
    shapes                    the paper's configurations: bubbles, iterations per checkpoint, overhead (figures 3, 7)
    bert_bubble_share_least, bert_iterations_middle, bert_iterations_reserved_middle
                              the same with the sizes of its two BERT models, and with the bytes that it sends; with
                              nothing, and with the longest message's time reserved at both ends of each bubble
    bubbles_16_SCHEDULE       16 stages, as many microbatches, backward twice the forward; `chimera_of_1f1b`: of those
    family                    16 to 16,384 ranks: bubbles by schedule (figure 4), goodput by protection

--cluster FILE: measured iterations to compare with, one JSON object per line:

    {"shape": "d2m2p4", "schedule": "1f1b", "ranks": 4, "microbatches": 8, "chunks": 1, "overlap": false,
     "forward": [...], "backward": [...], "reduce": [...], "update": [...], "latency": s, "bandwidth": bytes/s,
     "message_bytes": n, "joint": true, "iteration_seconds": s, "bubble_share": x}

(times in seconds, by stage or by rank as in `planner.simulate.Times`). Adds `iteration_error_worst` and
`bubble_error_worst`, |simulated / measured - 1|, and both per shape.

--own NAME=VALUE ...: a pipeline of your own, in addition: `stages`, `microbatches`, `schedule`, `chunks`,
`message_passes`, `restart_seconds`; the fields of `survival.Cluster`, of which `nodes`, `group_nodes`, `hw_rate` and
`sw_rate` are needed; and those of `intervals.Costs`, with which goodput is printed as the job grows.

Claims: plan_seconds < 1, analytic_error_worst < 1e-9, both errors <= 0.05.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ft_plugins.bubbles.timeline.messages import traffic
from ft_plugins.errors import ConfigError
from ft_plugins.planner.intervals import Costs
from ft_plugins.planner.survival import Cluster
from workloads.jobs import BERT, FAMILY, PAPER, WEIGHTS_ONLY
from workloads.pipelines import fitting
from workloads.pipelines.goodput import ProtectionKind, table
from workloads.pipelines.outlook import PipelineOutlook, PlannedPipeline, plan_pipeline
from workloads.pipelines.pipeline import Pipeline, PipelineSchedule
from workloads.pipelines.simulate import PipelineLink, Times, simulate
from workloads.running import PROGRESS, Figures, arguments, run, say
from workloads.study import ScaleStudy, ShapeStudy, scales_table, shapes_table, study_scale, study_shape

STAGES, MICROBATCHES, LAYERS = 64, 512, 96
EVEN = 16  # stages, and microbatches: a unit of chimera
LONG_STATE = 25e9  # bytes


def of(schedule: PipelineSchedule, ranks: int, microbatches: int) -> Pipeline:
    """A pipeline, with two chunks per rank if the schedule is interleaved."""
    return Pipeline(schedule, ranks, microbatches, 2 if schedule is PipelineSchedule.INTERLEAVED else 1)


def seconds_of(schedule: PipelineSchedule, rounds: int, microbatches: int, nbytes: float = 1e9) -> tuple[float, int]:
    """Seconds that a job takes to plan one pipeline, and the planned iterations for `nbytes` of each rank."""
    stage = LAYERS / STAGES * 1e-2
    times = Times((stage,), (2 * stage,), (stage,), links=(PipelineLink(1e-3),))
    seconds, iterations = [], 0
    for _ in range(rounds):
        timelines = simulate(of(schedule, STAGES, microbatches), times)
        started = time.thread_time()
        messages = traffic(timelines, [range(STAGES)])
        planned = fitting.plan(timelines, nbytes, 1e9, layers=LAYERS, messages=messages)
        seconds.append(time.thread_time() - started)
        iterations = planned.iterations if planned is not None else 0
    return statistics.median(seconds), iterations


def analytic_error() -> float:
    """The worst relative error of bubble shares over schedules and sizes."""
    worst = 0.0
    for ranks, count in ((2, 2), (4, 8), (8, 64), (16, 16), (32, 256)):
        for schedule in PipelineSchedule:
            pipeline = of(schedule, ranks, count)
            forward, backward, weight = (1.0, 2.0, 1.0)
            idle, work = (ranks - 1) * (forward + backward), pipeline.chunks * count * (forward + backward)
            if schedule is PipelineSchedule.ZERO_BUBBLE:
                idle = (ranks - 1) * (forward + (backward - weight) - weight)
            if schedule is PipelineSchedule.CHIMERA:  # units one after another, as they are
                idle = (ranks - 2) * (backward + (count / ranks - 1) * (backward - forward))
            share = fitting.bubble_share(simulate(pipeline, Times((forward,), (backward,), (weight,))))
            expected = idle / (idle + work)
            worst = max(worst, abs(share - expected) / (expected or 1.0))
    return worst


def compare(measured: dict[str, Any]) -> tuple[float, float]:
    """Relative errors of iteration time and bubble share against one measured iteration."""
    pipeline = Pipeline(
        PipelineSchedule(measured["schedule"]),
        measured["ranks"],
        measured["microbatches"],
        measured.get("chunks", 1),
        overlap=measured.get("overlap", False),
    )
    names = ("forward", "backward", "weight", "reduce", "update")
    spans = {name: tuple(measured[name]) for name in names if name in measured}
    link = PipelineLink(measured["latency"], measured["bandwidth"])
    times = Times(**spans, links=(link,), message_bytes=measured["message_bytes"], joint=measured.get("joint", True))
    timelines = simulate(pipeline, times)
    return (
        abs(timelines[0].seconds / measured["iteration_seconds"] - 1),
        abs(fitting.bubble_share(timelines) / measured["bubble_share"] - 1),
    )


def compared(path: Path) -> Figures:
    """The figures of a --cluster file."""
    figures: Figures = {}
    errors = []
    for text in path.read_text().splitlines():
        measured = json.loads(text)
        errors.append(compare(measured))
        figures[f"iteration_error_{measured['shape']}"], figures[f"bubble_error_{measured['shape']}"] = errors[-1]
        say(f"{measured['shape']}   iteration {errors[-1][0]:.2%} off   bubble share {errors[-1][1]:.2%} off")
    figures["iteration_error_worst"], figures["bubble_error_worst"] = (max(each) for each in zip(*errors, strict=True))
    return figures


def own(words: Sequence[str]) -> PipelineOutlook:
    """The outlook of a pipeline of the user's own. Raises ConfigError."""
    given: dict[str, Any] = {}
    kinds = {f.name: f.type for part in (Cluster, Costs) for f in fields(part)}
    kinds |= {"stages": "int", "microbatches": "int", "chunks": "int", "schedule": "str"}
    kinds |= {"message_passes": "float", "restart_seconds": "float"}
    for word in words:
        name, _, text = word.partition("=")
        if name not in kinds:
            raise ConfigError(f"--own {word}: expected NAME=VALUE with one of {', '.join(kinds)}")
        kind = {"int": int, "str": str}.get(str(kinds[name]), float)
        try:
            given[name] = kind(text)
        except ValueError as error:
            raise ConfigError(f"--own {word}: {error}") from error
    of_cluster = {f.name: given.pop(f.name) for f in fields(Cluster) if f.name in given}
    costs = Costs.from_options({f.name: given.pop(f.name, None) for f in fields(Costs)})
    planned = PlannedPipeline.from_options(given)
    if planned is None or not {"nodes", "group_nodes", "hw_rate", "sw_rate"} <= of_cluster.keys():
        raise ConfigError("--own: expected stages, microbatches, nodes, group_nodes, hw_rate and sw_rate at least")
    return plan_pipeline(planned, Cluster(**of_cluster), costs)


def draw(shapes: list[ShapeStudy], scales: list[ScaleStudy], folder: Path) -> None:
    """Draw all pictures."""
    from workloads import pictures

    pictures.draw_shapes(shapes, folder / "bubbles_by_shape.png")
    pictures.draw_schedules(scales, folder / "bubbles_by_schedule.png")
    pictures.draw_overheads(shapes, folder / "overhead_by_shape.png")
    pictures.draw_goodput(scales, folder / "goodput.png")


def measure(chosen: argparse.Namespace) -> Figures:
    """All figures. Prints tables."""
    outlook = own(chosen.own) if chosen.own else None
    rounds, count = 1 if chosen.quick else 5, STAGES if chosen.smoke else MICROBATCHES
    PROGRESS.plan(len(PipelineSchedule) + 2)
    seconds = {}
    for schedule in PipelineSchedule:
        PROGRESS.step(f"planning {schedule.value}")
        seconds[schedule] = seconds_of(schedule, rounds, count)[0]
    PROGRESS.step("planning a state that takes many iterations")
    long_seconds, long_iterations = seconds_of(PipelineSchedule.ONE_F_ONE_B, rounds, count, LONG_STATE)
    shown = "   ".join(f"{schedule.value} {took:.2f} s" for schedule, took in seconds.items())
    say(f"{STAGES} stages, {count} microbatches: {shown}\n")
    PROGRESS.step("simulating jobs")
    figures: Figures = {
        "plan_seconds": seconds[PipelineSchedule.ONE_F_ONE_B],
        "plan_slowest_seconds": max(seconds.values()),
        "plan_long_seconds": long_seconds,
        "plan_long_iterations": long_iterations,
        "analytic_error_worst": analytic_error(),
    }
    shapes = [study_shape(job) for batch in PAPER.values() for job in batch]
    scales = [study_scale(job) for job in FAMILY[: 2 if chosen.smoke else None]]
    for text in (shapes_table(shapes), scales_table(scales), table([one.plan for one in scales])):
        say(f"{text}\n")
    lighter = [replace(job, state_bytes=WEIGHTS_ONLY) for jobs in BERT.values() for job in jobs]
    for name, reserves in (("bert_iterations", False), ("bert_iterations_reserved", True)):
        berts = [study_shape(job, reserves=reserves) for job in lighter]
        say(f"{name}: {shapes_table(berts)}\n")
        figures[f"{name}_middle"] = statistics.median(one.pairs or float("inf") for one in berts)
    figures["bert_bubble_share_least"] = min(min(one.bubble_shares) for one in berts)
    for schedule in PipelineSchedule:
        share = fitting.bubble_share(simulate(of(schedule, EVEN, EVEN), Times()))
        figures[f"bubbles_{EVEN}_{schedule.value}"] = share
    figures["chimera_of_1f1b"] = float(figures[f"bubbles_{EVEN}_chimera"]) / float(figures[f"bubbles_{EVEN}_1f1b"])
    figures["bubble_share_least"] = min(min(one.bubble_shares) for one in shapes)
    figures["iterations_per_checkpoint_worst"] = max(one.iterations for one in shapes)
    figures["without_ring"] = sum(one.ring is None for one in [*shapes, *scales])
    largest = scales[-1].plan
    for protection in ProtectionKind:
        figures[f"goodput_{largest.nodes * 8}_{protection.value}"] = largest.of(protection).goodput
    if chosen.cluster is not None:
        figures |= compared(chosen.cluster)
    if chosen.output is not None:
        draw(shapes, scales, chosen.output)
    if outlook is not None:
        say(outlook.table())
        if chosen.output is not None and outlook.plans:
            from workloads.pictures import draw_plan

            draw_plan(outlook.timelines, outlook.plans, chosen.output / "own.png")
    return figures


if __name__ == "__main__":
    parser = arguments(__doc__, "one round each")
    parser.add_argument("--cluster", type=Path, help="measured iterations to compare with, JSON lines")
    parser.add_argument("--own", nargs="+", metavar="NAME=VALUE", help="a pipeline of your own, in addition")
    run("simulate", measure, parser)
