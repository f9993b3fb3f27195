"""What copies cost training that go out in bubbles, on the emulated cluster: 16 ranks in the paper's shapes.

    python benchmarks/bubble_overhead.py [--quick] [--batch 64] [--dilation N] [--shapes d2m2p4 ...] [--plot FILE]

Megatron's own schedule between 4 nodes with throttled links, compute replaced by sleeping; how it is scaled, and why
time is stretched (--dilation), says ft_plugins/rig/cluster.py: a version takes 10 to 22 ms of two cores that all 16
ranks share, right after the update that all of them wait for, in iterations of 1 s (d4m1p4) as of 3 s.
Blocks of 5 iterations in one run, in random order, each after one that is not counted:

    on      captured after every iteration, copies in bubbles
    off     nothing is protected (ft_plugins/rig/emulated.py says what is there all the same)
    once    as off, and after each update every rank sends the same bytes to the same rank at once and waits for
            them, by torch.distributed (the last rounds): what FTPipeHD does

    overhead      median over pairs of blocks of (on / off - 1), and the upper end of its 95% bootstrap interval; beside
                  it the mean with its own, which a few blocks decide: disturbed by something else, or dearer
    null          off / off - 1, of every second pair and the next: what such a difference is when there is none
    unplanned     once / off - 1
    processor     what protection takes of a rank's own processor, as a share of the iteration, whether training waits
                  for it or not; ranks queue for it here, as they have no core each
    in_bubble     of all bytes of copies: what was through within the bubble that it was planned for; left out where
                  disturbed links let fewer than three versions through
    filled        how full planned windows got in which there was something to send (bubbles/fullness.py)
    fill          how full they are planned: by bytes (as full as can be: all, where bubbles carry anything), and by
                  whole layers
    iterations    per checkpoint: from one version that counted to the next, mean (of fewer than two: all there were);
                  `full_state` as planned for the whole state of mixed precision, six times the bytes
    rarer         whether the SMPs have said that checkpoints get rarer than planned (`rarer_said`)

Claims: overhead_worst <= 0.01, null_difference <= 0.005, unplanned_overhead_worst >= 0.1, in_bubble_share >= 0.9,
filled_share >= 0.95, iterations_per_checkpoint_worst <= 3.

--disturb: the same, for `overhead` and `iterations`, when what was planned with is no longer so: `slow`: links carry a
tenth from the first plan on; `jitter`: each pass of the second stage takes up to 30% more or less; `drift`: two
minutes after the begin it gets 1.5 times as slow. Claim: overhead_worst <= 0.01; where iterations get more than twice
as planned, several times in a row, that is said.

--cluster FILE: writes what `benchmarks/simulate.py --cluster FILE` compares the simulator with. --raw FILE: writes the
seconds of every iteration, one line of JSON for a shape.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ft_plugins.bubbles.filling import Granularity, Transfer
from ft_plugins.bubbles.gate_pacer import least_bytes
from ft_plugins.bubbles.messages import traffic
from ft_plugins.bubbles.plan import BubblePlan, plan_bubbles
from ft_plugins.bubbles.windows import Reserve
from ft_plugins.model.timeline import Kind, Profile, Timeline, busy_share
from ft_plugins.model.topology import Topology
from ft_plugins.redundancy.neighbour import pipelines, plan_neighbours
from ft_plugins.rig import cluster
from ft_plugins.rig.cluster import MESSAGE_BYTES, NODES, RANKS_OF_NODE, SCALE, Emulated, Outcome
from ft_plugins.rig.emulated import LAYERS, OFF, ON, ONCE
from ft_plugins.rig.figures import line
from ft_plugins.rig.forkserver import ForkServer
from ft_plugins.rig.nodes import network
from ft_plugins.rig.sync_blocks import interval

BLOCK = 5  # iterations
PAIRS, QUICK_PAIRS = 40, 6
ONCE_ROUNDS = 3
SETTLE = 16  # iterations before the first block: profile, plan, the first copies
RESERVE_MS = 4.0  # a message of 32 KiB takes 1.3 ms of the link, and four ranks may send one; of each of `dilation`
SECONDS = 3.6  # of an iteration's passes, which time is stretched to
FULL_STATE = 6  # times the bytes that the paper sends
SLOWER, JITTER, DRIFT, DRIFT_AFTER = 10, 0.3, 1.5, 120.0
EACH = (
    "overhead", "overhead_upper", "overhead_mean", "overhead_mean_upper", "null", "unplanned", "processor",
    "in_bubble", "filled", "iterations", "bubbles", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One shape. Shares of an iteration without protection, medians."""

    name: str
    seconds: float  # of an iteration without protection
    overhead: float
    overhead_upper: float
    overhead_mean: float
    overhead_mean_upper: float
    null: float
    unplanned: float
    processor: float
    in_bubble: float | None
    filled: float | None
    fill_bytes: float
    fill_layers: float
    iterations: float
    full_state: int
    bubbles: float  # share of the iteration, over all ranks
    rarer: bool  # said by the SMPs

    def row(self) -> str:
        shares = (
            self.overhead, self.overhead_upper, self.overhead_mean, self.overhead_mean_upper, self.null,
            self.unplanned, self.processor, self.in_bubble, self.filled, self.fill_bytes, self.fill_layers,
        )  # fmt: skip
        return (
            f"{self.name:<12} {self.seconds:6.3f} s {self.bubbles:8.1%} "
            + " ".join(f"{share:9.2%}" if share is not None else f"{'-':>9}" for share in shares)
            + f" {self.iterations:10.2f} {self.full_state:10d}"
        )


HEAD = (
    f"{'':<12} {'off':>8} {'bubbles':>8} {'overhead':>9} {'upper':>9} {'mean':>9} {'upper':>9} {'null':>9} "
    f"{'unplanned':>9} {'processor':>9} {'in bubble':>9} {'filled':>9} {'bytes':>9} {'layers':>9} {'iterations':>10} "
    f"{'full state':>10}"
)


def rounds(pairs: int, once: int, order: random.Random) -> list[tuple[str, int]]:
    """The modes of all blocks."""
    found = [(ON, SETTLE)]
    for _ in range(pairs):
        modes = [ON, OFF]
        order.shuffle(modes)
        found += [(mode, BLOCK) for mode in modes]
    for _ in range(once):
        modes = [ONCE, OFF]
        order.shuffle(modes)
        found += [(mode, BLOCK) for mode in modes]
    return found


def evaluate(one: Emulated, outcome: Outcome, pairs: int) -> Measured:
    """Figures of a run."""
    compared, at_once = outcome.blocks[1 : 1 + 2 * pairs], outcome.blocks[1 + 2 * pairs :]
    paired = [
        {block.mode: statistics.mean(block.seconds) for block in compared[at : at + 2]}
        for at in range(0, len(compared), 2)
    ]
    overheads = [each[ON] / each[OFF] - 1 for each in paired]
    off = statistics.median(each[OFF] for each in paired)
    begun, through = outcome.blocks[0].completed, compared[-1].completed
    counted = counts(outcome, begun, through)
    planned, by_layers = (plan(one, outcome.profile, granularity) for granularity in Granularity)
    once = statistics.median(seconds for block in at_once if block.mode == ONCE for seconds in block.seconds)
    beside = statistics.median(seconds for block in at_once if block.mode == OFF for seconds in block.seconds)
    return Measured(
        one.name, off, statistics.median(overheads), interval(overheads)[1], statistics.mean(overheads),
        interval(overheads, middle=np.mean)[1],
        statistics.median(one[OFF] / other[OFF] - 1 for one, other in zip(paired[::2], paired[1::2], strict=False)),
        once / beside - 1,
        (outcome.processor(ON) - outcome.processor(OFF)) / off,
        sent_share(outcome, begun, through, ("in_bubbles",), ("in_bubbles", "late", "by_rate")),
        sent_share(outcome, begun, through, ("taken",), ("offered",)),
        planned.fill_bytes or 0.0, by_layers.fill_layers or 0.0,
        statistics.mean(b - a for a, b in pairwise(counted)) if len(counted) > 1 else through - begun,
        plan(one, outcome.profile, Granularity.BYTES, FULL_STATE).iterations,
        1 - statistics.mean(busy_share(each, outcome.profile.reduce_work) for each in outcome.profile.timelines),
        any(event.name == "checkpoints.rarer" for event in outcome.events[0]),
    )  # fmt: skip


def counts(outcome: Outcome, begun: int, through: int) -> list[int]:
    """The versions that counted between these; where links are disturbed there may be none."""
    return sorted(
        event.fields["iteration"] for event in outcome.events[0]
        if event.name == "node.counts" and begun <= event.fields["iteration"] <= through
    )  # fmt: skip


def sent_share(outcome: Outcome, begun: int, through: int, part: Sequence[str], whole: Sequence[str]) -> float | None:
    """Of `whole`, sums of bytes that nodes tell with each version, `part`; None where there was nothing. Of versions
    that were followed by another one by then, so were through: the last one may have gone in the blocks that send at
    once, where no gate is opened."""
    sums = [0, 0]
    for events in outcome.events:
        told = [
            event.fields for event in events
            if event.name == "node.counts" and begun <= event.fields["iteration"] <= through
        ][:-1]  # fmt: skip
        for first, last in zip(told[:1], told[-1:], strict=True):
            for place, names in enumerate((part, whole)):
                sums[place] += sum(last[name] - first[name] for name in names)
    return sums[0] / sums[1] if sums[1] else None


def plan(one: Emulated, profile: Profile, granularity: Granularity, times: int = 1) -> BubblePlan:
    """What the ranks have planned, also by layers, but for the time of capture and what goes out beside a slot; or of a
    state so many times as large."""
    job = one.job
    nodes = tuple(f"n{rank // RANKS_OF_NODE}" for rank in range(NODES * RANKS_OF_NODE))
    topology = Topology(tp=job.tp, pp=job.pp, dp=job.dp, nodes=nodes)
    layer = round(job.rank_bytes / SCALE / LAYERS) * times
    copies = plan_neighbours(nodes, pipelines(topology), [LAYERS * layer] * len(nodes)).copies
    transfers = [
        Transfer(copy.rank, copy.source, copy.receiver, copy.target, copy.nbytes, (layer,) * LAYERS) for copy in copies
    ]
    ranks = range(len(nodes))
    return plan_bubbles(
        transfers, dict(enumerate(profile.timelines)), {rank: profile.bubbles(rank) for rank in ranks},
        one.link_mbps * 1e6 / 8, Reserve(reserve_ms(one) / 1e3, reserve_ms(one) / 1e3), granularity,
        least_bytes=least_bytes(one.link_mbps * 1e6 / 8), messages=traffic(profile.timelines, pipelines(topology)),
    )  # fmt: skip


def reserve_ms(one: Emulated) -> float:
    """At both ends of a bubble, for the pipeline's own messages."""
    return RESERVE_MS * one.dilation


def for_simulator(one: Emulated, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """One line of --cluster: the times of the first pipeline's ranks, and what came of them."""
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
    """Seconds of its spans of one kind."""
    return [span.end - span.begin for span in timeline.spans if span.kind is kind]


def latency(pipeline: Sequence[Timeline], bytes_per_second: float) -> float:
    """Seconds of a message beside those of its bytes on the link: from the end of a pass to the begin of the one that
    waits for it on the next rank (backward: on the one before), the least over microbatches, for most of them meet a
    rank or a link that is busy; the median over neighbours and directions."""
    ways = [(Kind.FORWARD, ours, theirs) for ours, theirs in zip(pipeline, pipeline[1:], strict=False)]
    ways += [(Kind.BACKWARD, ours, theirs) for theirs, ours in zip(pipeline, pipeline[1:], strict=False)]
    found = []
    for kind, ours, theirs in ways:
        ends = {span.microbatch: span.end for span in ours.spans if span.kind is kind and span.chunk == 0}
        begins = {span.microbatch: span.begin for span in theirs.spans if span.kind is kind and span.chunk == 0}
        found.append(min(begins[at] - ends[at] for at in ends if at in begins))
    return max(0.0, statistics.median(found) - MESSAGE_BYTES / bytes_per_second)


def disturbed(one: Emulated, how: str) -> tuple[Emulated, int]:
    """The job, and how many times slower its links get."""
    if how == "jitter":
        return replace(one, jitter=JITTER), 1
    if how == "drift":
        return replace(one, drift=DRIFT, drift_after=DRIFT_AFTER), 1
    return one, SLOWER if how == "slow" else 1


def measure(
    chosen: Sequence[Emulated], pairs: int, seed: int, how: str, written: Path | None, raw: Path | None
) -> list[Measured]:
    """One shape after the other."""
    found = []
    hosts = range(1, NODES + 1)
    with ForkServer(cluster.PRELOAD) as server:
        for each in chosen:
            one, slower = disturbed(each, how)
            blocks = rounds(pairs, 1 if how else ONCE_ROUNDS, random.Random(seed))
            with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as folder, network(hosts) as places:
                seconds = 4.0 * one.dilation * sum(count + 1 for _, count in blocks)
                flags = ("--baft-reserve-ms", str(reserve_ms(one)))
                outcome = cluster.run(server, one, places, Path(folder), blocks, seconds, *flags, slower=slower)
            append(raw, {"shape": one.name, "blocks": [asdict(block) for block in outcome.blocks]})
            found.append(evaluate(one, outcome, pairs))
            append(written, for_simulator(one, outcome, found[-1].seconds))
            print(found[-1].row(), flush=True)
    return found


def append(file: Path | None, told: dict[str, Any]) -> None:
    """One line more, where one is wanted."""
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(told) + "\n")


def figures(found: Sequence[Measured]) -> dict[str, float | bool]:
    """For the last line."""
    told: dict[str, float | bool | None] = {
        "overhead_worst": max(one.overhead_upper for one in found),
        "overhead_mean_worst": max(one.overhead_mean_upper for one in found),
        "unplanned_overhead_worst": min(one.unplanned for one in found),
        "processor_share_worst": max(one.processor for one in found),
        "null_difference": max(abs(one.null) for one in found),
        "in_bubble_share": min((one.in_bubble for one in found if one.in_bubble is not None), default=None),
        "filled_share": min((one.filled for one in found if one.filled is not None), default=None),
        "fill_share_bytes": min(one.fill_bytes for one in found),
        "fill_share_layers": min(one.fill_layers for one in found),
        "iterations_per_checkpoint_worst": max(one.iterations for one in found),
        "iterations_full_state_worst": max(one.full_state for one in found),
        "rarer_said": any(one.rarer for one in found),
    }
    for one in found:
        for name in EACH:
            told[f"{name}_{one.name}"] = getattr(one, name)
    return {name: value for name, value in told.items() if value is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, six pairs")
    parser.add_argument("--batch", type=int, default=64, choices=(128, 64))
    parser.add_argument("--chunks", type=int, default=1, help="above 1: the interleaved schedule")
    parser.add_argument(
        "--dilation", type=int, help=f"of time (default: iterations take about {SECONDS} s in every shape)"
    )
    parser.add_argument("--shapes", nargs="+", help="those alone")
    parser.add_argument("--pairs", type=int, help=f"of blocks of {BLOCK} iterations (default {PAIRS})")
    parser.add_argument("--disturb", default="", choices=("slow", "jitter", "drift"), help="see above")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--cluster", type=Path, help="write measured iterations for benchmarks/simulate.py")
    parser.add_argument("--raw", type=Path, help="write every iteration of every block")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nodes and networks are taken down all the same
    chosen = cluster.shapes(args.batch, args.chunks, args.dilation or 1)
    if not args.dilation:
        chosen = tuple(one.lasting(SECONDS) for one in chosen)
    if args.shapes:
        chosen = tuple(one for one in chosen if one.job.name in args.shapes)
    chosen = chosen[: 1 if args.quick else None]
    print(HEAD, flush=True)
    pairs = args.pairs or (QUICK_PAIRS if args.quick else PAIRS)
    found = measure(chosen, pairs, args.seed, args.disturb, args.cluster, args.raw)
    if args.plot is not None:
        from ft_plugins.rig.bubble_pictures import draw_measured

        draw_measured([(one.name, one.overhead, one.overhead_upper, one.unplanned) for one in found], args.plot)
    print(line("bubble_overhead", figures(found)))


if __name__ == "__main__":
    main()
