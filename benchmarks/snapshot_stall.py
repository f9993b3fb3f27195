"""Measure what a snapshot costs training: 1 GiB of state in one process under three loads, relative to a memcpy of it.

    python benchmarks/snapshot_stall.py [--quick]

Each load is a fixed amount of work, twice as long as the memcpy: matrix products, an Adam-like pass over memory, and a
host-bound loop of small torch operations; one compute thread. Steps with and without a snapshot alternate in random
order within one run, and the memcpy is measured again for each load. x = multiples of the memcpy:

    committed   version point -> sealed in shared memory, digests included     stall      waited for at the fence
    step_slowdown   step during a snapshot minus step without                  first      first snapshot after start

    stall_after_load            stall under matmul, right after a minute in which every core computed and every second
                                gigabyte of free memory was touched and given back
    step_memory, step_storage   with nothing else to do: version point -> sealed in shared memory -> a complete
                                checkpoint in the folder for temporary files; from a device: `gpu_snapshot.py`

CheckFreq's way is measured too, and torchsnapshot and dlrover if installed (`pip install -e .[bench]`), without their
first snapshot, which allocates memory (workloads/saving_peers.py). With nothing else to do, pairs of one of theirs and
one of ours, in random order: `over_PEER_memory_x`, complete in shared memory; `over_PEER_storage_x`, complete on the
disk of the folder for temporary files, and flushed: their seconds over ours, medians with 95% intervals.

Claims: committed <= 1.5, first within 1.5 of a later one, stall <= 0.05 under matmul, committed <= 2.5 under the
host-bound loop, both speeds >= 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baselines import GIB, memcpy
from ft_plugins.config import Config, LaunchContext
from ft_plugins.events import catalogue
from ft_plugins.session import Session
from ft_plugins.smp.serve.client import Client, ensure
from harness.plain_host import PlainHost
from workloads.running import PROGRESS, Figures, arguments, run, say
from workloads.saving_peers import MEMORY, CheckFreq, Peer, TorchSnapshot
from workloads.sync_blocks import PolicyFigure

TENSORS = 198  # as in a GPT of this size: alternately 1.35 and 9.5 MB
SIZES = (1_350_000, 9_500_000)


@dataclass(frozen=True)
class StallMeasurement:
    """Medians over the steps of one load, in multiples of the memcpy."""

    committed: float
    stall: float
    slowdown: float

    def row(self, name: str) -> str:
        return (
            f"{name:<34} committed {self.committed:6.2f}x   stall {self.stall:6.3f}x   slowdown {self.slowdown:6.2f}x"
        )


def make_state(nbytes: int) -> dict[str, torch.Tensor]:
    """Tensors of `nbytes` in total, with sizes as in a transformer."""
    left, state = nbytes, {}
    while left > 0:
        size = min(left, SIZES[len(state) % 2] // 64 * 64)
        state[f"layer{len(state):03d}"] = torch.rand(size // 4)
        left -= size
    return state


def matmul() -> Callable[[], object]:
    a, b = torch.rand(384, 384), torch.rand(384, 384)
    out = torch.empty(384, 384)
    return lambda: torch.mm(a, b, out=out)


def adam_like() -> Callable[[], object]:
    p, g, m, v = (torch.rand(1 << 20) for _ in range(4))

    def work() -> None:
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.95).addcmul_(g, g, value=0.05)
        p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)

    return work


def host_bound() -> Callable[[], object]:
    tensors = [torch.rand(16) for _ in range(64)]

    def work() -> None:
        for tensor in tensors:
            tensor.mul_(1.0001)

    return work


LOADS: dict[str, Callable[[], Callable[[], object]]] = {
    "matmul": matmul,
    "adam": adam_like,
    "host_bound": host_bound,
}


def step_of(work: Callable[[], object], duration: float) -> Callable[[], float]:
    """A step that repeats `work` for about `duration` seconds on an idle machine and returns the seconds it took."""
    repeats, took = 1, 0.0
    while took < duration / 2:
        repeats *= 2
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        took = time.perf_counter() - started
    repeats = max(1, round(repeats * duration / took))

    def step() -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        return time.perf_counter() - started

    return step


class Ours:
    """A session over a real SMP."""

    name = "ft_plugins"

    def __init__(self, state: dict[str, torch.Tensor], stack: ExitStack, *flags: str) -> None:
        self._state, self._stack = state, stack
        self._flags = ("--reft", "--ftp-prove=off", *flags)  # what is restored is looked at
        base = Path(tempfile.mkdtemp(prefix="ft-"))
        stack.callback(shutil.rmtree, base)
        job, node = f"stall{os.getpid()}", "node0"
        self._folder = folder = base / job / node  # as run directories are named: a restart finds its segment by that
        folder.mkdir(parents=True)
        ensure(folder, job, node, 60)
        self._client = stack.enter_context(Client(folder))
        stack.callback(self._client.end)
        self._client.watch(os.getpid(), 600)
        self._committed: list[float] = []
        self._iteration = 0
        self.start()

    def start(self) -> int:
        """Begin an incarnation. Returns the iteration that was restored."""
        if self._iteration:
            self.session.shutdown()
        token = self._client.fence()
        context = LaunchContext(Config.from_flags(self._flags)[0], self._folder, token, None, 0, 0, 1, 1, 0, 1)
        assert context.config is not None
        self.session = Session(PlainHost(self._state), context.config, context)
        self._stack.callback(self.session.shutdown)
        self.session._events.subscribe(
            lambda event: (
                self._committed.append(event.fields["seconds"]) if event.type is catalogue.SNAPSHOT_SEALED else None
            )
        )
        self._iteration = self.session.resume()
        return self._iteration

    def snapshot(self) -> None:
        """The version point."""
        self._iteration += 1
        self.session.iteration_end(self._iteration)

    def fence(self) -> None:
        self.session.before_update(self._iteration + 1)

    def committed(self) -> float:
        """Seconds of the last snapshot, from the version point to the seal."""
        return self._committed[-1]

    def checkpoint(self) -> float:
        """Have the last snapshot written to storage. Returns the seconds until it is complete."""
        started = time.perf_counter()
        reply = self._client.checkpoint("measured", 600)
        assert reply["state"] == "done", reply
        return time.perf_counter() - started


System = Ours | Peer


def measure_under_load(system: System, load: str, steps: int, rng: random.Random, nbytes: int) -> StallMeasurement:
    """Run steps of `load` with and without a snapshot of `nbytes` before them, in random order."""
    baseline = memcpy(nbytes)
    step = step_of(LOADS[load](), 2 * baseline)
    step()
    committed, stalls, with_snapshot, without = [], [], [], []
    order = [True] * steps + [False] * steps
    rng.shuffle(order)
    for with_capture in order:
        if not with_capture:
            without.append(step())
            continue
        started = time.perf_counter()
        system.snapshot()
        blocked = time.perf_counter() - started
        with_snapshot.append(step())
        started = time.perf_counter()
        system.fence()
        stalls.append(blocked + time.perf_counter() - started)
        committed.append(system.committed())
    slowdown = statistics.median(with_snapshot) - statistics.median(without)
    seconds = statistics.median(committed), statistics.median(stalls), slowdown
    return StallMeasurement(*(each / baseline for each in seconds))


def paired(ours: Callable[[], float], theirs: Callable[[], float], pairs: int, rng: random.Random) -> PolicyFigure:
    """Their seconds over ours: the median over pairs, each in random order, and its 95% interval."""
    ratios = []
    for _ in range(pairs):
        order = [ours, theirs]
        rng.shuffle(order)
        took = {each: each() for each in order}
        ratios.append(took[theirs] / took[ours])
    return PolicyFigure.of(ratios)


def saved(system: System) -> float:
    """Seconds until a snapshot is complete in memory, or, of a peer to storage, on the disk; nothing else to do."""
    system.snapshot()
    system.fence()
    return system.committed()


def stored(ours: Ours) -> float:
    """Seconds until a snapshot of ours is complete on the disk, nothing else to do."""
    return saved(ours) + ours.checkpoint()


def burden(seconds: float) -> None:
    """Keep every core busy, and touch memory and give it back."""
    script = (
        "import time, numpy as np\n"
        f"end = time.monotonic() + {seconds}\n"
        "while time.monotonic() < end:\n"
        "    np.ones(1 << 27).sum(); np.random.rand(512, 512) @ np.random.rand(512, 512)\n"
    )
    workers = [subprocess.Popen([sys.executable, "-c", script]) for _ in os.sched_getaffinity(0)]
    try:
        for worker in workers:
            worker.wait(seconds + 600)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def over_peers(state: dict[str, torch.Tensor], pairs: int, rng: random.Random) -> Figures:
    """The speed of saving over that of each peer, to memory and to storage."""
    installed = [name for name in MEMORY if importlib.util.find_spec(name) is not None]
    to_memory = [(f"{name}_memory", MEMORY[name], {}) for name in installed]
    to_storage: list[Any] = [("checkfreq_storage", CheckFreq, {})]
    if "torchsnapshot" in installed:
        to_storage.append(("torchsnapshot_storage", TorchSnapshot, {"storage": True}))
    figures: Figures = {"pairs": pairs}
    for name, peer, options in [*to_memory, *to_storage]:
        PROGRESS.step(f"over {name}")
        with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="ft-") as folder:
            flags = ("--reft-checkpoint-dir", folder, "--reft-checkpoint-interval", "0", "--reft-checkpoint-keep", "1")
            ours, theirs = Ours(state, stack, *flags), peer(state, stack, **options)
            save = partial(stored if name.endswith("_storage") else saved, ours)
            for _ in range(3):  # the first ones touch memory
                save()
            saved(theirs)
            figure = paired(save, partial(saved, theirs), pairs, rng)
            ends = {f"over_{name}_x_low": figure.low, f"over_{name}_x_high": figure.high}
            figures |= {f"over_{name}_x": figure.value, **ends}
            say(f"over {name}: {figure}")
    return figures


def measure(chosen: argparse.Namespace) -> Figures:
    """All figures. Prints a table."""
    torch.set_num_threads(1)
    rng = random.Random(1)
    quick, steps, nbytes = chosen.quick, 7 if chosen.quick else 25, GIB
    pairs, heavy = (2, 5.0) if chosen.quick else (15, 60.0)
    if chosen.smoke:
        steps, nbytes, heavy = 2, GIB >> 6, 0.1
    peers = {"checkfreq": CheckFreq, **{n: p for n, p in MEMORY.items() if importlib.util.find_spec(n) is not None}}
    PROGRESS.plan(2 + len(LOADS) + len(peers) * (2 if quick else len(LOADS) + 1) + 4)
    state = make_state(nbytes)
    figures: Figures = {"memcpy_seconds": memcpy(nbytes)}
    with ExitStack() as stack:
        ours = Ours(state, stack)
        figures["first_committed_x"] = saved(ours) / float(figures["memcpy_seconds"])
        saved(ours)
        for load in LOADS:
            PROGRESS.step(f"under {load}")
            measured = measure_under_load(ours, load, steps, rng, nbytes)
            say(measured.row(f"{ours.name} under {load}"))
            suffix = "" if load == "matmul" else f"_{load}"
            figures |= {f"committed{suffix}_x": measured.committed, f"stall{suffix}_x": measured.stall}
            figures[f"step_slowdown_{load}_x"] = measured.slowdown
        PROGRESS.step("after heavy load")
        burden(heavy)
        measured = measure_under_load(ours, "matmul", steps, rng, nbytes)
        say(measured.row(f"{ours.name} after heavy load"))
        figures |= {"stall_after_load_x": measured.stall, "committed_after_load_x": measured.committed}
    PROGRESS.step("by step")
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="ft-") as folder:
        flags = ("--reft-checkpoint-dir", folder, "--reft-checkpoint-interval", "0", "--reft-checkpoint-keep", "1")
        ours = Ours(state, stack, *flags)
        took = [(saved(ours), ours.checkpoint()) for _ in range(2 + pairs)][2:]  # the first two touch memory
        figures["step_samples"] = pairs
        for name, seconds in zip(("memory", "storage"), zip(*took, strict=True), strict=True):
            figures[f"step_{name}_x"] = statistics.median(seconds) / memcpy(nbytes)
            say(f"{ours.name}, to {name} with nothing else to do: {figures[f'step_{name}_x']:.2f}x")
    for name, peer in peers.items():
        with ExitStack() as stack:
            theirs = peer(state, stack)
            saved(theirs)  # allocates memory; what it still writes would be timed with the first copy
            for load in ["matmul"] if quick else LOADS:  # the peers take most of the time
                PROGRESS.step(f"{name} under {load}")
                measured = measure_under_load(theirs, load, 2 if quick else 5, rng, nbytes)
                say(measured.row(f"{name} under {load}"))
                figures |= {f"{name}_committed_{load}_x": measured.committed, f"{name}_stall_{load}_x": measured.stall}
                figures[f"{name}_step_slowdown_{load}_x"] = measured.slowdown
            PROGRESS.step(f"{name} after heavy load")
            burden(heavy)
            after = measure_under_load(theirs, "matmul", 2 if quick else 5, rng, nbytes)
            figures[f"{name}_stall_after_load_x"] = after.stall
    return figures | over_peers(state, pairs, rng)


if __name__ == "__main__":
    run("snapshot_stall", measure, arguments(__doc__, "fewer steps, peers under one load"))
