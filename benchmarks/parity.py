"""Measure the throughput of parity encoding and decoding, relative to an in-place XOR of one array.

    python benchmarks/parity.py [--quick]

A group of n nodes holds 128 MiB in streams of nearly equal size, in aligned memory like segments. Stripes and reads
follow the package's own placement and decoding plan. x = source bytes per second, in multiples of the baseline,
`np.bitwise_xor(p, a, out=p)` in blocks of 256 KiB (bytes of `a` per second). Each run is measured between two runs of
the baseline; a figure is the median of these ratios, the worst over all n. Seconds are the thread's processor time:
nothing here waits, and the machine is shared.

    encode          RAIM5, n = 3..8: all parities of all stripes, in place
    decode          all data and parity of one lost node; the digest of every frame read is verified
    double_encode   RAIM6, n = 4..8: P and Q
    double_decode   all data and parity of two lost nodes, adjacent and apart; the worse

`_numpy`: without llvmlite. `extra_stripes`: peak of temporary allocations, in parity blocks. `compile_seconds`: the
slowest first call of a kernel.

Claims: encode >= 0.9, decode >= 0.7, double_encode >= 0.8 and double_decode >= 0.7 with llvmlite, double_encode >= 0.25
without, extra_stripes <= 1.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from baselines import xor_work
from ft_plugins.redundancy import blocked, kernels
from ft_plugins.redundancy.field import power
from ft_plugins.redundancy.kernels import Loops
from ft_plugins.redundancy.parity import Placement, Stripe, StripeRebuild, place_parity, plan_decode
from ft_plugins.transport.frame_codec import PAYLOAD_LIMIT
from workloads.running import PROGRESS, Figures, arguments, run, say

GROUP_BYTES = 128 << 20  # four times the last-level cache of the reference machine
FRAME_BYTES = PAYLOAD_LIMIT  # verified and added at once, as in a rebuild
SIZES = {1: range(3, 9), 2: range(4, 9)}  # n, by number of lost nodes

Bytes = npt.NDArray[np.uint8]


def aligned(nbytes: int) -> Bytes:
    """Zeroed memory aligned to a cache line, already mapped."""
    memory: Bytes = torch.zeros(nbytes, dtype=torch.uint8).numpy()
    return memory


@dataclass(frozen=True)
class Group:
    """A sharding group with all its bytes. `digests`: by (stripe, kind, which), one per frame."""

    placement: Placement
    streams: list[Bytes]
    parity: list[Bytes]  # by node
    digests: dict[tuple[int, str, int], list[int]]

    @classmethod
    def of(cls, nodes: int, losses: int, pool: Bytes) -> Group:
        """`nodes` streams cut from the pool, each a little shorter than the previous one; parity is zero."""
        size = len(pool) // nodes // 64 * 64
        streams = [pool[size * node : size * (node + 1) - 1000 * node] for node in range(nodes)]
        placement = place_parity([stream.size for stream in streams], losses)
        parity = [aligned(len(placement.parities_on(node)) * placement.block) for node in range(nodes)]
        return cls(placement, streams, parity, {})

    def parity_of(self, stripe: int, which: int) -> Bytes:
        """The memory of a parity."""
        node, block = self.placement.stripes[stripe].parity_nodes[which], self.placement.block
        at = self.placement.parities_on(node).index((stripe, which)) * block
        return self.parity[node][at : at + block]

    def bytes_of(self, stripe: Stripe, kind: str, which: int) -> Bytes:
        """The memory of a piece of data or of a parity."""
        if kind == "parity":
            return self.parity_of(stripe.index, which)
        (piece,) = [piece for piece in stripe.data if piece.node == which]
        return self.streams[which][piece.start : piece.stop]

    def encode(self, loops: Loops | None) -> None:
        """Encode all parities."""
        for stripe in self.placement.stripes:
            pieces = [self.streams[piece.node][piece.start : piece.stop] for piece in stripe.data]
            parities = [self.parity_of(stripe.index, which) for which in range(len(stripe.parity_nodes))]
            factors = [[power(which * piece.exponent) for piece in stripe.data] for which in range(len(parities))]
            kernels.combine_into(parities, pieces, factors, overwrite=True, loops=loops)

    def digest(self) -> None:
        """Compute the digests of everything that decoding can read."""
        for stripe in self.placement.stripes:
            sources = [("data", piece.node) for piece in stripe.data]
            for kind, which in sources + [("parity", which) for which in range(len(stripe.parity_nodes))]:
                memory = self.bytes_of(stripe, kind, which)
                self.digests[stripe.index, kind, which] = [
                    xxhash.xxh3_64_intdigest(memory[at : at + FRAME_BYTES].data)
                    for at in range(0, memory.size, FRAME_BYTES)
                ]


@dataclass(frozen=True)
class StripeDecode:
    """The lost blocks of a stripe that have bytes, and what they are computed from."""

    targets: list[Bytes]
    sources: list[Bytes]
    digests: list[list[int]]  # of each source, one per frame
    factors: list[list[int]]


class Decode:
    """Rebuilds lost nodes of a group into separate memory, all lost blocks of a stripe in one pass."""

    def __init__(self, group: Group, lost: tuple[int, ...]) -> None:
        self._group = group
        self._targets: dict[StripeRebuild, Bytes] = {}
        self._stripes = [
            self._stripe(group.placement.stripes[index], list(rebuilds))
            for index, rebuilds in itertools.groupby(plan_decode(group.placement, lost), lambda one: one.stripe)
        ]
        self.nbytes = sum(source.size for stripe in self._stripes for source in stripe.sources)

    def _stripe(self, stripe: Stripe, rebuilds: list[StripeRebuild]) -> StripeDecode:
        targets = [aligned(self._group.bytes_of(stripe, *rebuild.wanted).size) for rebuild in rebuilds]
        self._targets.update(zip(rebuilds, targets, strict=True))
        members = list(dict.fromkeys(source[:2] for rebuild in rebuilds for source in rebuild.sources))
        factors = [{source[:2]: source[2] for source in rebuild.sources} for rebuild in rebuilds]
        return StripeDecode(
            targets,
            [self._group.bytes_of(stripe, *member) for member in members],
            [self._group.digests[(stripe.index, *member)] for member in members],
            [[row.get(member, 0) for member in members] for row in factors],
        )

    def run(self, loops: Loops | None) -> None:
        """Decode everything, frame by frame. Each frame is verified once, right before it is used."""
        for stripe in self._stripes:
            longest = max(target.size for target in stripe.targets)
            for number, start in enumerate(range(0, longest, FRAME_BYTES)):
                stop = start + FRAME_BYTES
                frames = [source[start:stop] for source in stripe.sources]
                for frame, digests in zip(frames, stripe.digests, strict=True):
                    assert not frame.size or xxhash.xxh3_64_intdigest(frame.data) == digests[number]
                kernels.combine_into(
                    [target[start:stop] for target in stripe.targets],
                    [frame[: longest - start] for frame in frames],
                    stripe.factors,
                    overwrite=True,
                    loops=loops,
                )

    def check(self) -> None:
        """Assert that the decoded bytes equal the lost ones."""
        for rebuild, target in self._targets.items():
            stripe = self._group.placement.stripes[rebuild.stripe]
            assert np.array_equal(target, self._group.bytes_of(stripe, *rebuild.wanted)), rebuild.wanted


def seconds_of(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def peak_of(work: Callable[[], object]) -> int:
    """Peak of allocated bytes."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def ratio(work: Callable[[], object], nbytes: int, baseline: Callable[[], object], size: int, rounds: int) -> float:
    """Throughput of `work`, which processes `nbytes`, in multiples of that of the baseline, which processes `size`."""
    ratios = []
    before = seconds_of(baseline)
    for _ in range(rounds):
        took, after = seconds_of(work), seconds_of(baseline)
        ratios.append((before + after) / 2 / size * nbytes / took)
        before = after
    return statistics.median(ratios)


def compile_seconds(count: int) -> float:
    """The slowest first call of a kernel for `count` sources."""
    sources = [np.zeros(64, dtype=np.uint8) for _ in range(count)]
    p, q = np.zeros((2, 64), dtype=np.uint8)
    one, two = [1] * count, [2] * count
    kinds = ([one], [two], [one, two], [two, two])
    return max(seconds_of(partial(kernels.combine_into, [p, q][: len(rows)], sources, rows)) for rows in kinds)


def measure_group(
    nodes: int, losses: int, pool: Bytes, baseline: Callable[[], object], rounds: int
) -> dict[str, float]:
    """The figures of one n, in multiples of the baseline."""
    group = Group.of(nodes, losses, pool)
    all_loops = {"": None, "_numpy": blocked}
    prefix = "" if losses == 1 else "double_"
    group.encode(None)  # compiles
    figures = {"extra_stripes": peak_of(partial(group.encode, None)) / group.placement.block}
    group.digest()
    patterns = [(0,)] if losses == 1 else [(0, 1), (0, nodes // 2)]
    decodes = [Decode(group, lost) for lost in patterns]
    works: dict[str, list[tuple[Callable[[Loops | None], None], int]]] = {
        f"{prefix}encode": [(group.encode, sum(group.placement.sizes))],
        f"{prefix}decode": [(decode.run, decode.nbytes) for decode in decodes],
    }
    for decode in decodes:
        decode.run(None)
        peak = peak_of(partial(decode.run, None))
        figures["extra_stripes"] = max(figures["extra_stripes"], peak / group.placement.block)
        decode.check()
    for name, variants in works.items():
        for suffix, loops in all_loops.items():
            slow = loops is blocked and name == "double_decode"  # many times as long as anything else
            times = max(1, rounds // 5) if slow else rounds
            figures[f"{name}{suffix}_x"] = min(
                ratio(partial(work, loops), nbytes, baseline, pool.size, times) for work, nbytes in variants
            )
    for decode in decodes:
        decode.check()  # the result of NumPy, which ran last
    shown = "   ".join(f"{name.removesuffix('_x')} {x:.2f}x" for name, x in figures.items() if name.endswith("_x"))
    say(f"n={nodes} losses={losses}   {shown}")
    return figures


def measure(chosen: argparse.Namespace) -> Figures:
    """All figures, the worst over n. Prints a table."""
    torch.set_num_threads(1)
    size, rounds = (GROUP_BYTES >> 5, 1) if chosen.smoke else (GROUP_BYTES, 5 if chosen.quick else 25)
    pool = aligned(size)
    pool[:] = np.frombuffer(np.random.default_rng(1).bytes(size), dtype=np.uint8)
    baseline = xor_work(size)
    compiled = kernels.fastest_loops() is not blocked
    figures: dict[str, float] = {}
    if compiled:
        figures["compile_seconds"] = compile_seconds(max(SIZES[2]) - 2)
    groups = {1: range(3, 4), 2: range(4, 5)} if chosen.smoke else SIZES
    PROGRESS.plan(sum(map(len, groups.values())))
    for losses, sizes in groups.items():
        for nodes in sizes:
            PROGRESS.step(f"{nodes} nodes, {losses} lost")
            for name, x in measure_group(nodes, losses, pool, baseline, rounds).items():
                worst = min if name.endswith("_x") else max
                figures[name] = worst(figures.get(name, x), x)
    return {"compiled": compiled, **figures}


if __name__ == "__main__":
    run("parity", measure, arguments(__doc__, "fewer rounds"))
