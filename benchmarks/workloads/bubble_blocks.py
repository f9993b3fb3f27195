"""Compute the cost of copies in bubbles, and the bytes sent, from blocks of iterations of one run. Pure.

    settle (on) | on off | off on | ...     pairs, in random order
                | once off | off once | ..  rounds that send everything at once

Invariant: the same seed gives the same order. Each cost is relative to the neighbouring unprotected block, so slow
changes of a shared machine cancel.

In: blocks of an emulated job, events of its nodes. Out: `BubbleCost`; shares of bytes; iterations per checkpoint.
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
    """Shares of an unprotected iteration of `seconds`: medians and upper ends of their 95% intervals; also the mean,
    which a few blocks dominate. `null`: of two unprotected iterations, with both ends of its interval."""

    seconds: float
    overhead: float
    overhead_upper: float
    overhead_mean: float
    overhead_mean_upper: float
    null: float
    null_lower: float
    null_upper: float
    unplanned: float | None  # unknown without such rounds


def rounds(settle: int, pairs: int, once: int, seed: int) -> list[tuple[str, int]]:
    """Mode and iterations of all blocks. The first block, of `settle` iterations, is not compared."""
    order, blocks = random.Random(seed), [(ON, settle)]
    for mode in [ON] * pairs + [ONCE] * once:
        blocks += [(each, BLOCK) for each in order.sample([mode, OFF], 2)]
    return blocks


def compared(blocks: Sequence[IterationBlock], pairs: int) -> tuple[Sequence[IterationBlock], Sequence[IterationBlock]]:
    """The blocks of all pairs, and those of the rounds that send at once."""
    return blocks[1 : 1 + 2 * pairs], blocks[1 + 2 * pairs :]


def cost(blocks: Sequence[IterationBlock], pairs: int) -> BubbleCost:
    """The cost, from blocks in the order of `rounds`."""
    ours, at_once = compared(blocks, pairs)
    paired = [
        {block.mode: statistics.mean(block.seconds) for block in ours[at : at + 2]} for at in range(0, len(ours), 2)
    ]
    overheads = [each[ON] / each[OFF] - 1 for each in paired]
    once, off = (
        [seconds for block in at_once if block.mode == mode for seconds in block.seconds] for mode in (ONCE, OFF)
    )
    nulls = [one[OFF] / other[OFF] - 1 for one, other in zip(paired[::2], paired[1::2], strict=False)]
    return BubbleCost(
        statistics.median(each[OFF] for each in paired),
        statistics.median(overheads), interval(overheads)[1],
        statistics.mean(overheads), interval(overheads, middle=np.mean)[1],
        statistics.median(nulls), *interval(nulls),
        statistics.median(once) / statistics.median(off) - 1 if once else None,
    )  # fmt: skip


def committed_between(events: Sequence[Event], first: int, last: int) -> list[Event]:
    """The commits of a node for iterations `first` to `last`."""
    return [
        event
        for event in events
        if event.type is catalogue.VERSION_COMMITTED and first <= event.fields["iteration"] <= last
    ]


def commit_interval(events: Sequence[Event], first: int, last: int) -> float:
    """Mean iterations from one committed version to the next; with fewer than two, all iterations."""
    at = sorted(event.fields["iteration"] for event in committed_between(events, first, last))
    return statistics.mean(after - before for before, after in pairwise(at)) if len(at) > 1 else last - first


def sent_share(
    nodes: Sequence[Sequence[Event]], first: int, last: int, part: Sequence[str], whole: Sequence[str]
) -> float | None:
    """The share of the byte counts `part` in the byte counts `whole`, which nodes report per version; None for 0 bytes.

    Leaves out the last version: it may have been sent in the blocks that send at once, which open no gate.
    """
    sums = [0, 0]
    for events in nodes:
        fields = [event.fields for event in committed_between(events, first, last)[:-1]]
        for begin, end in zip(fields[:1], fields[-1:], strict=True):
            for index, names in enumerate((part, whole)):
                sums[index] += sum(end[name] - begin[name] for name in names)
    return sums[0] / sums[1] if sums[1] else None
