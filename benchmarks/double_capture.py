"""Measure what local parity of replicas costs at capture, and what it saves in the exchange.

    python benchmarks/double_capture.py [--quick] [--device cuda]

512 MiB of state are replicated on n nodes with one rank each. One rank, alone in its process, captures its share
alternately without parity (data_seconds) and with it. Seconds are the process's processor time, since the machine is
shared; with a device, where capture waits, wall time. Medians; x = with parity / without:

    double_n    from version point to seal; twice the bytes are read, digested and (except one source) added up
    parity_n    bytes of parity in a slot, in multiples of the data
    sent_n      bytes that the node sends per version, in multiples of its share: compared digests, small state and
                digest tables; an exchange of the whole share would be 1
    weak_n      speed of saving, the whole state over the seconds of a share, over that of one node, over n: 1 if n
                nodes, each with a memory of its own, save n times as fast
    strong_n    the same for a pipeline of n stages without replicas: the largest stage's seconds
    weak_scaling, strong_scaling      of the largest n; computed, as each share is measured alone
    groups      how many n

Claims: double <= 2.5 for every n, sent <= 0.01, weak_scaling >= 0.78 (REFT: 18.74 times from 1 to 24 replicas).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise

import torch

from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.snapshot.capture.capture import Capture
from ft_plugins.snapshot.capture.double import with_parity
from ft_plugins.snapshot.capture.layout import Layout, plan_layout
from ft_plugins.snapshot.segment.paths import path_of, remove
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Version
from snapshot_stall import make_state
from workloads.running import PROGRESS, Figures, arguments, run, say

NBYTES = 512 << 20
BUCKET = 4 << 20
SMALL = 64 << 10
CHECK_BYTES = 32  # sent for each source of parity


class TimedCapture:
    """A segment and the capture into it."""

    def __init__(
        self, stack: ExitStack, layout: Layout, state: dict[str, torch.Tensor], name: str, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        nbytes, parity = layout.nbytes + layout.parity_nbytes, layout.parity_nbytes
        job = f"double{os.getpid()}{name}"
        create(
            path_of(job, "n", 0),
            Shape(nbytes, SMALL, len(layout.ranges), 1, 3, parity, layout.source_digest_count), 0, {},
        )  # fmt: skip
        stack.callback(remove, job, "n")
        self._segment = Segment(path_of(job, "n", 0), populate=True)
        stack.callback(self._segment.close)
        self._segment.ranges, self._segment.header.token = layout.ranges, 1
        self._capture = Capture(self._segment, layout, lambda: state, 1)
        stack.callback(self._capture.close)
        self._iteration = 0

    def seconds(self) -> float:
        """Seconds of one capture."""
        self._iteration += 1
        self._segment.header.await_version(Version(1, self._iteration))  # so that its parity is computed
        started = self._clock()
        self._capture.start(Version(1, self._iteration), b"small")
        self._capture.wait()
        return self._clock() - started


def inventory_of(state: dict[str, torch.Tensor], count: int) -> Inventory:
    """State that `count` ranks replicate."""
    ranks = tuple(range(count))
    return Inventory.of(
        0, [Item(n, "float32", tuple(t.shape), t.nbytes, Role.PARAMETER, ranks) for n, t in state.items()]
    )


def largest_stage(state: dict[str, torch.Tensor], stages: int) -> dict[str, torch.Tensor]:
    """Of as many tensors in each stage, in order, those of the stage with most bytes."""
    names = list(state)
    cuts = [len(names) * number // stages for number in range(stages + 1)]
    parts = [names[begin:end] for begin, end in pairwise(cuts)]
    return {name: state[name] for name in max(parts, key=lambda part: sum(state[name].nbytes for name in part))}


def share_seconds(state: dict[str, torch.Tensor], count: int, repeats: int, clock: Callable[[], float]) -> float:
    """Seconds in which one of `count` nodes captures its share."""
    layout = plan_layout(inventory_of(state, count), tuple(f"n{number}" for number in range(count)), BUCKET)
    with ExitStack() as stack:
        capture = TimedCapture(stack, layout, state, "s", clock)
        return statistics.median([capture.seconds() for _ in range(repeats)][3:])


def measure(chosen: argparse.Namespace) -> Figures:
    """All figures. Prints a table."""
    torch.set_num_threads(1)
    quick, device = chosen.quick, chosen.device
    made = make_state(NBYTES >> 5 if chosen.smoke else NBYTES)
    state = {name: tensor.to(device) for name, tensor in made.items()}
    clock = time.process_time if device == "cpu" else time.perf_counter
    figures: Figures = {}
    counts = (2,) if chosen.smoke else (2, 4) if quick else (2, 3, 4, 8, 16)
    stages, repeats = counts if chosen.smoke else counts[:2] if quick else (2, 4, 8), 8 if quick else 25
    PROGRESS.plan(len(counts) + len(stages) + 1)
    for count in counts:
        PROGRESS.step(f"{count} nodes")
        nodes, ranks = tuple(f"n{number}" for number in range(count)), tuple(range(count))
        plain = plan_layout(inventory_of(state, count), nodes, BUCKET)
        layout = with_parity(plain, nodes, [ranks], 1, BUCKET)
        with ExitStack() as stack:
            without_parity = TimedCapture(stack, plain, state, "p", clock)
            with_both = TimedCapture(stack, layout, state, "d", clock)
            pairs = [(without_parity.seconds(), with_both.seconds()) for _ in range(repeats)][3:]
        data, double = (statistics.median(column) for column in zip(*pairs, strict=True))
        digests = len(layout.ranges) + layout.source_digest_count
        sent = (layout.source_digest_count * CHECK_BYTES + 8 * digests + SMALL) / layout.nbytes
        say(
            f"n = {count:2d}: share {layout.nbytes >> 20:4d} MiB in {data * 1e3:7.1f} ms; with parity "
            f"{double / data:5.2f}x and {layout.parity_nbytes / layout.nbytes:5.3f} more bytes; sent {sent:.5f}"
        )
        figures |= {f"data_seconds_{count}": data, f"double_{count}": double / data}
        figures |= {f"parity_{count}": layout.parity_nbytes / layout.nbytes, f"sent_{count}": sent}
    PROGRESS.step("one node")
    whole = share_seconds(state, 1, repeats, clock)
    for count in counts:
        figures[f"weak_{count}"] = whole / figures[f"data_seconds_{count}"] / count
    for count in stages:
        PROGRESS.step(f"{count} stages")
        figures[f"strong_{count}"] = whole / share_seconds(largest_stage(state, count), 1, repeats, clock) / count
    figures["groups"] = len(counts)
    figures |= {"weak_scaling": figures[f"weak_{counts[-1]}"], "strong_scaling": figures[f"strong_{stages[-1]}"]}
    say("   ".join(f"{name} {value:.3f}" for name, value in figures.items() if name.startswith(("weak", "strong"))))
    for name in ("double", "sent"):
        figures[f"{name}_worst"] = max(figures[f"{name}_{count}"] for count in counts)
    return figures


if __name__ == "__main__":
    parser = arguments(__doc__, "fewer groups and repetitions")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device of the state")
    run("double_capture", measure, parser)
