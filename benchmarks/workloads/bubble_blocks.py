"""What copies in bubbles cost, from blocks of iterations of one run, and what went of them meanwhile. Pure.

    settle (on) | on off | off on | ...     pairs, in random order
                | once off | off once | ..  rounds in which all is sent at once

Invariant: the same seed gives the same order. Each cost is relative to the neighbouring block without protection, so
what changes slowly on a shared machine is in both.

In: blocks of an emulated job, events of its nodes. Out: `BubbleCost`; shares of bytes; iterations of a checkpoint.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ft_plugins.events import Event, catalogue
from workloads.cluster import IterationBlock
from workloads.emulated_rank import OFF, ON, ONCE
from workloads.sync_blocks import interval

BLOCK = 5  # iterations


@dataclass(frozen=True)
class BubbleCost:
    """Shares of an iteration without protection, which takes `seconds`: medians, the ends of 95% intervals above them;
    and the mean, which a few blocks decide. `null`: of one such iteration and another one, and both its ends."""

    seconds: float
    overhead: float
    overhead_upper: float
    overhead_mean: float
    overhead_mean_upper: float
    null: float
    null_lower: float
    null_upper: float
    unplanned: float


def rounds(settle: int, pairs: int, once: int, seed: int) -> list[tuple[str, int]]:
    """Mode and iterations of all blocks: first `settle` iterations, not compared."""
    order, found = random.Random(seed), [(ON, settle)]
    for mode in [ON] * pairs + [ONCE] * once:
        found += [(each, BLOCK) for each in order.sample([mode, OFF], 2)]
    return found


def compared(blocks: Sequence[IterationBlock], pairs: int) -> tuple[Sequence[IterationBlock], Sequence[IterationBlock]]:
    """The blocks of all pairs; those with rounds that send at once."""
    return blocks[1 : 1 + 2 * pairs], blocks[1 + 2 * pairs :]


def cost(blocks: Sequence[IterationBlock], pairs: int) -> BubbleCost:
    """Of the blocks in the order of `rounds`."""
    ours, at_once = compared(blocks, pairs)
    paired = [
        {block.mode: statistics.mean(block.seconds) for block in ours[at : at + 2]} for at in range(0, len(ours), 2)
    ]
    overheads = [each[ON] / each[OFF] - 1 for each in paired]
    once, off = (
        statistics.median(seconds for block in at_once if block.mode == mode for seconds in block.seconds)
        for mode in (ONCE, OFF)
    )
    nulls = [one[OFF] / other[OFF] - 1 for one, other in zip(paired[::2], paired[1::2], strict=False)]
    return BubbleCost(
        statistics.median(each[OFF] for each in paired),
        statistics.median(overheads), interval(overheads)[1],
        statistics.mean(overheads), interval(overheads, middle=np.mean)[1],
        statistics.median(nulls), *interval(nulls),
        once / off - 1,
    )  # fmt: skip


def committed_between(events: Sequence[Event], begun: int, through: int) -> list[Event]:
    """Of a node, the versions committed after so many protected iterations, until there were so many."""
    return [
        event
        for event in events
        if event.type is catalogue.VERSION_COMMITTED and begun <= event.fields["iteration"] <= through
    ]


def every(events: Sequence[Event], begun: int, through: int) -> float:
    """Iterations from one version to the next, mean; where there were no two, all."""
    at = sorted(event.fields["iteration"] for event in committed_between(events, begun, through))
    return statistics.mean(after - before for before, after in pairwise(at)) if len(at) > 1 else through - begun


def sent_share(
    nodes: Sequence[Sequence[Event]], begun: int, through: int, part: Sequence[str], whole: Sequence[str]
) -> float | None:
    """Of `whole`, sums of bytes that nodes report with each version, `part`; None where there was nothing. Of versions
    that were followed by another one by then, so were through: the last one may have gone in the blocks that send at
    once, where no gate is opened."""
    sums = [0, 0]
    for events in nodes:
        found = [event.fields for event in committed_between(events, begun, through)[:-1]]
        for first, last in zip(found[:1], found[-1:], strict=True):
            for place, names in enumerate((part, whole)):
                sums[place] += sum(last[name] - first[name] for name in names)
    return sums[0] / sums[1] if sums[1] else None
