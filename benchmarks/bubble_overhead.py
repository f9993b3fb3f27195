"""Measure what copies sent in bubbles cost training, on the emulated cluster: 16 ranks in the paper's shapes.

    python benchmarks/bubble_overhead.py [--quick] [--batch 64] [--dilation N] [--shapes d2m2p4 ...] [--output FOLDER]

Megatron's own schedule runs between 4 nodes with throttled links; compute is replaced by sleeping. workloads/cluster.py
explains the scaling, and why time is stretched (--dilation): a version takes 10 to 22 ms of two cores shared by all 16
ranks, right after the update that all ranks wait for, whether iterations take 1 s (d4m1p4) or 3 s.

One run has blocks of 5 iterations in random order; the first iteration after a change of mode is discarded:

    on      captured after every iteration, copies in bubbles
    off     not protected (see workloads/emulated_rank.py for what still runs)
    once    as off, and after each update every rank sends the same bytes to the same rank with torch.distributed and
            waits for them, as FTPipeHD does (the last rounds)

    overhead      median over pairs of blocks of (on / off - 1), and the upper end of its 95% bootstrap interval; also
                  the mean with its interval, which a few expensive or disturbed blocks dominate
    null          off / off - 1 of neighbouring pairs: the noise of such a difference. It has half as many pairs, so its
                  interval (`null_lower`, `null_upper`) is wider; `null_farthest` is the end furthest from zero over all
                  shapes
    unplanned     once / off - 1
    processor     processor time that protection takes from a rank, as a share of the iteration, whether training waits
                  for it or not; ranks queue for cores here
    in_bubble     share of all copied bytes that arrived within their planned bubble; left out if disturbed links
                  delivered fewer than three versions
    filled        fill of the planned windows that had something to send (bubbles/fullness.py). A frame must arrive by
                  the end of its window, so the last milliseconds of each stay empty. The claim of 95% is about this
    fill          planned fill of the windows: by bytes (1 if there are bubbles), and by whole layers
    iterations    mean iterations from one committed version to the next, for the whole state of mixed precision, 12
                  bytes per parameter (with fewer than two versions: all iterations); `iterations_planned`: from the
                  last plan; `parameters_only`: planned for the bytes that the paper sends, a sixth of that
    rarer         whether the SMPs reported that checkpoints are less frequent than planned (`rarer_said`)

Claims: overhead_worst <= 0.01, null_difference <= 0.005, unplanned_overhead_worst >= 0.1, in_bubble_share >= 0.9,
filled_share >= 0.95, iterations_parameters_only_worst <= 3.

--disturb invalidates the plan during the run, for `overhead` and `iterations`. `slow`: links carry a tenth after the
first plan; `jitter`: each pass of the second stage takes up to 30% more or less; `drift`: after two minutes the second
stage gets 1.5 times as slow. Claims: overhead_worst <= 0.01; if checkpoints take more than twice the planned iterations
several times in a row, the SMPs report it. A whole run measures the first shape under each of them too, with ten pairs:
`slow_overhead`, `slow_iterations`, `slow_iterations_planned`, and so on.

--cluster FILE writes the input of `benchmarks/simulate.py --cluster FILE`. --raw FILE writes the seconds of every
iteration, one line of JSON per shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ft_plugins.bubbles.bubble_plan import BubblePlan, plan_bubbles
from ft_plugins.bubbles.filling import Granularity, Transfer
from ft_plugins.bubbles.gate.pacing_limits import least_bytes
from ft_plugins.bubbles.timeline.messages import traffic
from ft_plugins.bubbles.windows import SHORTEST_SECONDS, Reserve
from ft_plugins.events import catalogue
from ft_plugins.model.timeline import Kind, Profile, Timeline, busy_share
from ft_plugins.model.topology import Topology
from ft_plugins.redundancy.neighbour import pipelines, plan_neighbours
from harness.emulated_nodes import network
from harness.forkserver import ForkServer
from workloads import cluster
from workloads.bubble_blocks import BLOCK, BubbleCost, commit_interval, compared, cost, rounds, sent_share
from workloads.cluster import MESSAGE_BYTES, NODES, RANKS_OF_NODE, SCALE, ClusterOutcome, EmulatedJob
from workloads.emulated_rank import LAYERS, OFF, ON
from workloads.running import PROGRESS, Figures, arguments, run, say

PAIRS, QUICK_PAIRS = 16, 2
ONCE_ROUNDS, QUICK_ONCE_ROUNDS = 3, 0
SETTLE = 16  # iterations before the first block: profile, plan, the first copies
RESERVE_MS = 4.0  # times `dilation`; a message takes 1.5 ms of the link, and four ranks may send one
SECONDS = 3.6  # target length of the passes of an iteration, by stretching time
OF_PAPER = 6  # the bytes of a copy, in multiples of what the paper sends
SLOWER, JITTER, DRIFT, DRIFT_AFTER = 10, 0.3, 1.5, 120.0
DISTURBANCES, DISTURBED_PAIRS = ("slow", "jitter", "drift"), 10
EACH = (
    "overhead", "overhead_upper", "overhead_mean", "overhead_mean_upper", "null", "null_lower", "null_upper",
    "unplanned", "processor", "in_bubble", "filled", "iterations", "iterations_planned", "bubbles", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class ShapeMeasurement:
    """The figures of one shape. Shares are of an iteration without protection, or of bytes."""

    name: str
    cost: BubbleCost
    processor: float
    in_bubble: float | None
    filled: float | None
    fill_bytes: float
    fill_layers: float
    iterations: float
    iterations_planned: int
    parameters_only: int
    bubbles: float  # share of the iteration, over all ranks
    rarer: bool  # reported by the SMPs

    @property
    def figures(self) -> dict[str, float | bool | None]:
        """All figures by name."""
        return {**asdict(self.cost), **{name: value for name, value in vars(self).items() if name != "cost"}}

    def row(self) -> str:
        cost = self.cost
        shares = (
            cost.overhead, cost.overhead_upper, cost.overhead_mean, cost.overhead_mean_upper, cost.null,
            cost.unplanned, self.processor, self.in_bubble, self.filled, self.fill_bytes, self.fill_layers,
        )  # fmt: skip
        return (
            f"{self.name:<12} {cost.seconds:6.3f} s {self.bubbles:8.1%} "
            + " ".join(f"{share:9.2%}" if share is not None else f"{'-':>9}" for share in shares)
            + f" {self.iterations:10.2f} {self.iterations_planned:8d} {self.parameters_only:10d}"
        )


HEAD = (
    f"{'':<12} {'off':>8} {'bubbles':>8} {'overhead':>9} {'upper':>9} {'mean':>9} {'upper':>9} {'null':>9} "
    f"{'unplanned':>9} {'processor':>9} {'in bubble':>9} {'filled':>9} {'bytes':>9} {'layers':>9} {'iterations':>10} "
    f"{'planned':>8} {'parameters':>10}"
)


def evaluate(one: EmulatedJob, outcome: ClusterOutcome, pairs: int) -> ShapeMeasurement:
    """The figures of a run."""
    measured, profile = cost(outcome.blocks, pairs), outcome.profile
    first, last = outcome.blocks[0].completed, compared(outcome.blocks, pairs)[0][-1].completed
    planned, by_layers = (plan(one, profile, granularity) for granularity in Granularity)
    return ShapeMeasurement(
        one.name, measured,
        (outcome.processor(ON) - outcome.processor(OFF)) / measured.seconds,
        sent_share(outcome.events, first, last, ("in_bubbles",), ("in_bubbles", "late", "by_rate")),
        sent_share(outcome.events, first, last, ("taken",), ("offered",)),
        planned.fill_bytes or 0.0, by_layers.fill_layers or 0.0,
        commit_interval(outcome.events[0], first, last),
        [event.fields["iterations"] for event in outcome.events[0] if event.type is catalogue.BUBBLES_PLANNED][-1],
        plan(one, profile, Granularity.BYTES, OF_PAPER).iterations,
        1 - statistics.mean(busy_share(each, profile.reduce_work) for each in profile.timelines),
        any(event.type is catalogue.EXCHANGE_SLOWED for event in outcome.events[0]),
    )  # fmt: skip


def plan(one: EmulatedJob, profile: Profile, granularity: Granularity, part: int = 1) -> BubblePlan:
    """The plan of the ranks, by bytes or layers, for one of so many parts of the state. Leaves out the time of capture
    and what is sent in addition to a slot."""
    job = one.job
    nodes = tuple(f"n{rank // RANKS_OF_NODE}" for rank in range(NODES * RANKS_OF_NODE))
    topology = Topology(tp=job.tp, pp=job.pp, dp=job.dp)
    layer = round(job.rank_bytes / SCALE / LAYERS / part)
    copies = plan_neighbours(nodes, pipelines(topology), [LAYERS * layer] * len(nodes)).copies
    transfers = [
        Transfer(copy.rank, copy.source, copy.receiver, copy.target, copy.nbytes, (layer,) * LAYERS) for copy in copies
    ]
    ranks, reserve = range(len(nodes)), reserve_ms(one) / 1e3
    return plan_bubbles(
        transfers, dict(enumerate(profile.timelines)), {rank: profile.bubbles(rank) for rank in ranks},
        one.link_mbps * 1e6 / 8, Reserve(reserve, reserve, SHORTEST_SECONDS), granularity,
        least_bytes=least_bytes(one.link_mbps * 1e6 / 8), messages=traffic(profile.timelines, pipelines(topology)),
    )  # fmt: skip


def reserve_ms(one: EmulatedJob) -> float:
    """Time reserved at both ends of a bubble for the pipeline's own messages, in milliseconds."""
    return RESERVE_MS * one.dilation


def for_simulator(one: EmulatedJob, outcome: ClusterOutcome, seconds: float) -> dict[str, Any]:
    """One line of --cluster: pass times of the first pipeline's ranks, iteration time and bubble share."""
    profile, job = outcome.profile, one.job
    ranks = pipelines(Topology(tp=job.tp, pp=job.pp, dp=job.dp))[0]
    chosen = [profile.timelines[rank] for rank in ranks]
    middle = lambda of, kind: statistics.median(lengths(of, kind)) if lengths(of, kind) else 0.0  # noqa: E731
    pipeline, link = one.pipeline, one.link_mbps * 1e6 / 8
    shares = [1 - busy_share(timeline, profile.reduce_work) for timeline in chosen]
    return {
        "shape": one.name, "schedule": pipeline.schedule.value, "ranks": pipeline.ranks,
        "microbatches": pipeline.microbatches, "chunks": pipeline.chunks, "overlap": pipeline.overlap,
        "forward": [middle(of, Kind.FORWARD) for of in chosen] * pipeline.chunks,
        "backward": [middle(of, Kind.BACKWARD) for of in chosen] * pipeline.chunks,
        "reduce": [sum(profile.reduce_work)], "update": [sum(lengths(of, Kind.UPDATE)) for of in chosen],
        "latency": latency(chosen, link), "bandwidth": link, "message_bytes": MESSAGE_BYTES, "joint": True,
        "iteration_seconds": seconds, "bubble_share": statistics.mean(shares),
    }  # fmt: skip


def lengths(timeline: Timeline, kind: Kind) -> list[float]:
    """Lengths of the spans of one kind, in seconds."""
    return [span.end - span.begin for span in timeline.spans if span.kind is kind]


def latency(pipeline: Sequence[Timeline], bytes_per_second: float) -> float:
    """Latency of a message in seconds, without the transfer of its bytes.

    Measured from the end of a pass to the beginning of the pass that waits for it on the next rank (backward: the
    previous rank). The minimum over microbatches, since most of them meet a busy rank or link; then the median over
    neighbours and directions.
    """
    ways = [(Kind.FORWARD, ours, theirs) for ours, theirs in zip(pipeline, pipeline[1:], strict=False)]
    ways += [(Kind.BACKWARD, ours, theirs) for theirs, ours in zip(pipeline, pipeline[1:], strict=False)]
    gaps = []
    for kind, ours, theirs in ways:
        ends = {span.microbatch: span.end for span in ours.spans if span.kind is kind and span.chunk == 0}
        begins = {span.microbatch: span.begin for span in theirs.spans if span.kind is kind and span.chunk == 0}
        gaps.append(min(begins[at] - ends[at] for at in ends if at in begins))
    return max(0.0, statistics.median(gaps) - MESSAGE_BYTES / bytes_per_second)


def disturbed(one: EmulatedJob, how: str) -> tuple[EmulatedJob, int]:
    """The disturbed job, and the factor by which its links get slower."""
    if how == "jitter":
        return replace(one, jitter=JITTER), 1
    if how == "drift":
        return replace(one, drift=DRIFT, drift_after=DRIFT_AFTER), 1
    return one, SLOWER if how == "slow" else 1


def measure_shapes(
    chosen: Sequence[EmulatedJob], pairs: int, once: int, seed: int, how: str, written: Path | None, raw: Path | None
) -> list[ShapeMeasurement]:
    """Measure one shape after the other."""
    measurements = []
    PROGRESS.plan(len(chosen))
    with ForkServer(cluster.PRELOAD) as server:
        for each in chosen:
            one, slower = disturbed(each, how)
            blocks = rounds(SETTLE, pairs, once, seed)
            iterations = sum(count + 1 for _, count in blocks)
            PROGRESS.step(f"{one.name}, {iterations} iterations")
            with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as folder, network(range(1, NODES + 1)) as hosts:
                seconds = 4.0 * one.dilation * iterations
                flags = ("--baft-reserve-ms", str(reserve_ms(one)))
                outcome = cluster.run(server, one, hosts, Path(folder), blocks, seconds, *flags, slower=slower)
            append(raw, {"shape": one.name, "blocks": [asdict(block) for block in outcome.blocks]})
            measurements.append(evaluate(one, outcome, pairs))
            append(written, for_simulator(one, outcome, measurements[-1].cost.seconds))
            say(measurements[-1].row())
    return measurements


def append(file: Path | None, values: dict[str, Any]) -> None:
    """Append one line of JSON to `file`, if one is given."""
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(values) + "\n")


def figures(shapes: Sequence[ShapeMeasurement]) -> Figures:
    """The figures of the last line."""
    values: dict[str, float | bool | None] = {
        "overhead_worst": max(one.cost.overhead_upper for one in shapes),
        "overhead_mean_worst": max(one.cost.overhead_mean_upper for one in shapes),
        "unplanned_overhead_worst": min(
            (one.cost.unplanned for one in shapes if one.cost.unplanned is not None), default=None
        ),
        "processor_share_worst": max(one.processor for one in shapes),
        "null_difference": max(abs(one.cost.null) for one in shapes),
        "null_farthest": max(abs(end) for one in shapes for end in (one.cost.null_lower, one.cost.null_upper)),
        "in_bubble_share": min((one.in_bubble for one in shapes if one.in_bubble is not None), default=None),
        "filled_share": min((one.filled for one in shapes if one.filled is not None), default=None),
        "fill_share_bytes": min(one.fill_bytes for one in shapes),
        "fill_share_layers": min(one.fill_layers for one in shapes),
        "iterations_per_checkpoint_worst": max(one.iterations for one in shapes),
        "iterations_parameters_only_worst": max(one.parameters_only for one in shapes),
        "rarer_said": any(one.rarer for one in shapes),
    }
    for one in shapes:
        for name in EACH:
            values[f"{name}_{one.name}"] = one.figures[name]
    return {name: value for name, value in values.items() if value is not None}


def measure(chosen: argparse.Namespace) -> Figures:
    """Measure the chosen shapes. Prints a table."""
    shapes = cluster.shapes(chosen.batch, chosen.chunks, chosen.dilation or 1)
    if not chosen.dilation and not chosen.smoke:
        shapes = tuple(one.stretched_to(SECONDS) for one in shapes)
    if chosen.shapes:
        shapes = tuple(one for one in shapes if one.job.name in chosen.shapes)
    pairs, once = (QUICK_PAIRS, QUICK_ONCE_ROUNDS) if chosen.quick else (PAIRS, 1 if chosen.disturb else ONCE_ROUNDS)
    pairs = chosen.pairs or pairs
    say(HEAD)
    measurements = measure_shapes(
        shapes[: 1 if chosen.quick else None], pairs, once, chosen.seed, chosen.disturb, chosen.cluster, chosen.raw
    )
    under: Figures = {}
    for how in () if chosen.quick or chosen.disturb else DISTURBANCES:
        say(f"disturbed: {how}")
        for one in measure_shapes(shapes[:1], DISTURBED_PAIRS, 0, chosen.seed, how, None, chosen.raw):
            under |= {f"{how}_overhead": one.cost.overhead_upper, f"{how}_iterations": one.iterations,
                      f"{how}_iterations_planned": one.iterations_planned, f"{how}_pairs": DISTURBED_PAIRS,
                      f"{how}_rarer_said": one.rarer}  # fmt: skip
    costs = [(one.name, one.cost) for one in measurements if one.cost.unplanned is not None]
    if chosen.output is not None and costs:
        from workloads.pictures import draw_measured

        rows = [(name, of.overhead, of.overhead_upper, of.unplanned or 0.0) for name, of in costs]
        draw_measured(rows, chosen.output / "overhead.png")
    return figures(measurements) | {"shapes": len(measurements), "pairs": pairs} | under


if __name__ == "__main__":
    parser = arguments(__doc__, f"one shape, {QUICK_PAIRS} pairs, nothing sent at once")
    parser.add_argument("--batch", type=int, default=64, choices=(128, 64))
    parser.add_argument("--chunks", type=int, default=1, help="above 1: the interleaved schedule")
    parser.add_argument(
        "--dilation", type=int, help=f"factor to stretch time by (default: iterations take about {SECONDS} s)"
    )
    parser.add_argument("--shapes", nargs="+", help="measure only these")
    parser.add_argument("--pairs", type=int, help=f"pairs of blocks of {BLOCK} iterations (default {PAIRS})")
    parser.add_argument("--disturb", default="", choices=DISTURBANCES, help="see above")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cluster", type=Path, help="write measured iterations for benchmarks/simulate.py")
    parser.add_argument("--raw", type=Path, help="write every iteration of every block")
    run("bubble_overhead", measure, parser)
