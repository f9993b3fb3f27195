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

`_numpy`: without numba. `extra_stripes`: peak of temporary allocations, in parity blocks. `compile_seconds`: the
slowest first call of a kernel.

Claims: encode >= 0.9, decode >= 0.7, double_encode >= 0.8 with numba and >= 0.25 without, extra_stripes <= 1.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
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
from figures import line
from ft_plugins.redundancy import blocked, kernels
from ft_plugins.redundancy.kernels import Loops
from ft_plugins.redundancy.parity import Placement, Stripe, place_parity, plan_decode

GROUP_BYTES = 128 << 20  # four times the last-level cache of the reference machine
FRAME_BYTES = 512 << 10  # verified and added at once, so that source and target frame stay in cache
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

    def encode(self, loops: Loops) -> None:
        """Encode all parities."""
        for stripe in self.placement.stripes:
            pieces = [self.streams[piece.node][piece.start : piece.stop] for piece in stripe.data]
            parities = [self.parity_of(stripe.index, which) for which in range(len(stripe.parity_nodes))]
            if len(parities) == 1:
                kernels.xor_many_into(*parities, pieces, overwrite=True, loops=loops)
            else:
                exponents = [piece.exponent for piece in stripe.data]
                kernels.pq_into(*parities, pieces, exponents, overwrite=True, loops=loops)

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
class Use:
    """The use of a source for one target. `first`: it overwrites the target."""

    target: Bytes
    factor: int
    first: bool


class Decode:
    """Rebuilds lost nodes of a group into separate memory."""

    def __init__(self, group: Group, lost: tuple[int, ...]) -> None:
        self._group = group
        plan = plan_decode(group.placement, lost)
        self._stripes = [list(group) for _, group in itertools.groupby(plan, key=lambda rebuild: rebuild.stripe)]
        self._targets = {}
        for rebuild in plan:
            original = group.bytes_of(group.placement.stripes[rebuild.stripe], *rebuild.wanted)
            self._targets[rebuild] = aligned(original.size)
        read = {(rebuild.stripe, kind, which) for rebuild in plan for kind, which, _ in rebuild.sources}
        self.nbytes = sum(
            group.bytes_of(group.placement.stripes[stripe], kind, which).size for stripe, kind, which in read
        )

    def run(self, loops: Loops) -> None:
        """Decode everything, frame by frame. A frame is verified when it is first added."""
        for rebuilds in self._stripes:
            stripe = self._group.placement.stripes[rebuilds[0].stripe]
            uses: dict[tuple[str, int], list[Use]] = {}
            for rebuild in rebuilds:
                for number, (kind, which, factor) in enumerate(rebuild.sources):
                    uses.setdefault((kind, which), []).append(Use(self._targets[rebuild], factor, number == 0))
            sources = [
                (self._group.bytes_of(stripe, *source), self._group.digests[(stripe.index, *source)], used)
                for source, used in uses.items()
            ]
            for number, start in enumerate(range(0, self._group.placement.block, FRAME_BYTES)):
                for source, digests, used in sources:
                    frame = source[start : start + FRAME_BYTES]
                    buckets = [(0, frame.size, digests[number])] if frame.size else []
                    for use in used:
                        part = use.target[start : start + FRAME_BYTES]
                        if use is used[0]:
                            kernels.digest_xor_into(part, frame, buckets, use.factor, overwrite=use.first, loops=loops)
                        else:
                            fitting = frame[: part.size]
                            kernels.scale_xor_into(part, fitting, use.factor, overwrite=use.first, loops=loops)

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


def ratio(work: Callable[[], object], nbytes: int, baseline: Callable[[], object], rounds: int) -> float:
    """Throughput of `work`, which processes `nbytes`, in multiples of the baseline's."""
    ratios = []
    before = seconds_of(baseline)
    for _ in range(rounds):
        took, after = seconds_of(work), seconds_of(baseline)
        ratios.append((before + after) / 2 / GROUP_BYTES * nbytes / took)
        before = after
    return statistics.median(ratios)


def compile_seconds(count: int) -> float:
    """The slowest first call of a kernel for `count` sources."""
    sources = [np.zeros(64, dtype=np.uint8) for _ in range(count)]
    p, q = np.zeros((2, 64), dtype=np.uint8)
    return max(
        seconds_of(lambda: kernels.scale_xor_into(q, p, 2)),
        seconds_of(lambda: kernels.xor_many_into(p, sources)),
        seconds_of(lambda: kernels.pq_into(p, q, sources, range(count))),
    )


def measure_group(
    nodes: int, losses: int, pool: Bytes, baseline: Callable[[], object], rounds: int
) -> dict[str, float]:
    """The figures of one n, in multiples of the baseline."""
    group = Group.of(nodes, losses, pool)
    all_loops = {"": kernels.LOOPS, "_numpy": blocked}
    prefix = "" if losses == 1 else "double_"
    group.encode(kernels.LOOPS)  # compiles
    figures = {"extra_stripes": peak_of(partial(group.encode, kernels.LOOPS)) / group.placement.block}
    group.digest()
    patterns = [(0,)] if losses == 1 else [(0, 1), (0, nodes // 2)]
    decodes = [Decode(group, lost) for lost in patterns]
    works: dict[str, list[tuple[Callable[[Loops], None], int]]] = {
        f"{prefix}encode": [(group.encode, sum(group.placement.sizes))],
        f"{prefix}decode": [(decode.run, decode.nbytes) for decode in decodes],
    }
    for decode in decodes:
        decode.run(kernels.LOOPS)
        peak = peak_of(partial(decode.run, kernels.LOOPS))
        figures["extra_stripes"] = max(figures["extra_stripes"], peak / group.placement.block)
        decode.check()
    for name, variants in works.items():
        for suffix, loops in all_loops.items():
            slow = loops is blocked and name == "double_decode"  # ten times as long as anything else
            times = max(1, rounds // 5) if slow else rounds
            figures[f"{name}{suffix}_x"] = min(
                ratio(partial(work, loops), nbytes, baseline, times) for work, nbytes in variants
            )
    for decode in decodes:
        decode.check()  # the result of NumPy, which ran last
    shown = "   ".join(f"{name.removesuffix('_x')} {x:.2f}x" for name, x in figures.items() if name.endswith("_x"))
    print(f"n={nodes} losses={losses}   {shown}", flush=True)
    return figures


def measure(quick: bool) -> dict[str, float | bool]:
    """All figures, the worst over n. Prints a table."""
    torch.set_num_threads(1)
    pool = aligned(GROUP_BYTES)
    pool[:] = np.frombuffer(np.random.default_rng(1).bytes(GROUP_BYTES), dtype=np.uint8)
    baseline = xor_work(GROUP_BYTES)
    compiled = kernels.LOOPS is not blocked
    figures: dict[str, float] = {}
    if compiled:
        figures["compile_seconds"] = compile_seconds(max(SIZES[2]) - 2)
    for losses, sizes in SIZES.items():
        for nodes in sizes:
            for name, x in measure_group(nodes, losses, pool, baseline, 5 if quick else 25).items():
                worst = min if name.endswith("_x") else max
                figures[name] = worst(figures.get(name, x), x)
    return {"numba": compiled, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; ends within 50 s on 2 cores")
    print(line("parity", measure(parser.parse_args().quick)))


if __name__ == "__main__":
    sys.exit(main())
