"""Run one benchmark: its arguments, what it needs, how far it is, its last line.

Invariant: what is missing is named before anything is measured, with the command that installs it. Progress goes to
standard error, once a second on a terminal, else once for each step and every half minute. Standard output is for
figures; its last line is one JSON object.

In: a benchmark's name, its function from arguments to figures, its arguments. Out: the last line; with --output FOLDER
also FOLDER/NAME.json.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ft_plugins.errors import FtError
from ft_plugins.rehearse.driver import raising_signals
from harness.emulated_nodes import network

Figures = dict[str, float | bool]
Measure = Callable[[argparse.Namespace], Mapping[str, float | bool]]
ROOT = Path(__file__).resolve().parents[2]
VERSIONS_OF = ("torch", "numpy", "xxhash", "megatron-core", "deepspeed", "torchsnapshot", "dlrover", "llvmlite")
_MODULES = {"scikit-learn": "sklearn"}  # by package, where the names differ
_BAR = 24  # characters
_QUIET_SECONDS = 30.0  # between two lines on what is no terminal


@dataclass(frozen=True)
class Benchmark:
    """What one needs: about so many seconds, and with --quick, on two idle cores; packages; links to throttle."""

    seconds: float
    quick: float
    packages: tuple[str, ...] = ()
    links: bool = False

    def missing(self, smoke: bool = False) -> str:
        """What this machine lacks, and what to do; '' for nothing. `smoke`: no packages, which are for data."""
        packages = () if smoke else self.packages
        absent = [name for name in packages if importlib.util.find_spec(_MODULES.get(name, name)) is None]
        if absent:
            command = f"{sys.executable} -m pip install --constraint launch/constraints.txt --editable '.[bench]'"
            return f"needs {', '.join(absent)}, not installed; run in {ROOT}: {command}"
        if not self.links:
            return ""
        try:
            with network([1]) as (host,):
                if not host.namespace:
                    return "needs network namespaces; run it as root, or with CAP_NET_ADMIN, and with iproute2"
                host.throttle(1000.0)
        except (OSError, subprocess.SubprocessError) as error:
            return f"needs links that `tc` can throttle, and it cannot: {error}"
        return ""


_DIGITS = ("scikit-learn",)
BENCHMARKS = {
    "snapshot_stall": Benchmark(600, 110),
    "gpu_snapshot": Benchmark(240, 60),
    "double_capture": Benchmark(270, 70),
    "ledger_cost": Benchmark(60, 40),
    "watch_cost": Benchmark(180, 50),
    "parity": Benchmark(180, 50),
    "recovery": Benchmark(800, 170),
    "bubble_overhead": Benchmark(6500, 175, links=True),
    "simulate": Benchmark(60, 20),
    "sync_overhead": Benchmark(840, 160, links=True),
    "sdc": Benchmark(1300, 170, _DIGITS),
    "local_sgd": Benchmark(1350, 160, links=True),
    "local_sgd_quality": Benchmark(3400, 170, _DIGITS),
    "dreamddp": Benchmark(4200, 175, _DIGITS, links=True),
    "dreamddp_quality": Benchmark(2000, 150, _DIGITS),
    "scale": Benchmark(600, 120),
}


def arguments(description: str | None, quick: str) -> argparse.ArgumentParser:
    """The arguments that all benchmarks have. `quick`: what is measured less often."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{quick}; at most 3 minutes on two idle cores")
    parser.add_argument("--smoke", action="store_true", help="as little as possible, for tests: figures say nothing")
    parser.add_argument("--output", type=Path, help="folder for figures and pictures")
    return parser


def run(name: str, measure: Measure, parser: argparse.ArgumentParser) -> None:
    """Measure, and print the last line; one line and status 1 if that cannot be."""
    chosen, benchmark = parser.parse_args(), BENCHMARKS[name]
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen.quick |= chosen.smoke
    if lacking := benchmark.missing(chosen.smoke):
        sys.exit(f"{name}: {lacking}")
    if chosen.output is not None:
        chosen.output.mkdir(parents=True, exist_ok=True)
    with raising_signals():
        use = ProcessorUse()
        PROGRESS.start(benchmark.quick if chosen.quick else benchmark.seconds)
        try:
            figures = {**measure(chosen), **use.figures()}
        except FtError as error:
            sys.exit(f"{name}: {error}")
        finally:
            PROGRESS.end()
    text = last_line(name, figures, chosen.quick)
    if chosen.output is not None:
        (chosen.output / f"{name}.json").write_text(text + "\n")
    print(text)


def say(text: str) -> None:
    """Print a line of figures, over the bar."""
    PROGRESS.clear()
    print(text, flush=True)


# ---- how far it is ----


def seconds_left(expected: float, steps: float, done: float, took: float, step: float, since: float) -> float:
    """How long the rest takes. Pure.

    `expected`: seconds of all `steps` on two idle cores. Those that are `done` took `took` seconds; the present one
    has the weight `step` and began `since` seconds ago.
    """
    each = took / done if done else expected / steps
    present = max(each * step - since, each * step / 10)  # one that takes longer than expected has not ended yet
    return present + each * max(steps - done - step, 0.0)


class Progress:
    """A bar on standard error; silent until started. The time left is scaled by how long the steps took that have
    ended."""

    def __init__(self) -> None:
        self._expected, self._steps, self._done, self._step, self._what = 0.0, 1.0, 0.0, 0.0, "starting"
        self._began = self._since = self._shown = time.monotonic()
        self._over = threading.Event()
        self._terminal = sys.stderr.isatty()

    def start(self, expected: float) -> None:
        """Show it from now on. `expected`: seconds of the whole on two idle cores."""
        self._began = self._since = time.monotonic()
        self._expected = expected
        threading.Thread(target=self._tick, daemon=True).start()
        self._show()

    def plan(self, steps: float) -> None:
        """So many steps are to come."""
        self._steps = self._done + self._step + steps

    def step(self, what: str, weight: float = 1.0) -> None:
        """The next step begins, which is `weight` of them."""
        self._done, self._step, self._what, self._since = self._done + self._step, weight, what, time.monotonic()
        self._show()

    def end(self) -> None:
        """All steps have ended."""
        self.clear()
        self._over.set()

    def clear(self) -> None:
        """Remove the bar from a terminal."""
        if self._expected and self._terminal:
            os.write(2, b"\r\x1b[K")

    def text(self) -> str:
        """The bar."""
        now = time.monotonic()
        passed, took, since = now - self._began, self._since - self._began, now - self._since
        left = seconds_left(self._expected, self._steps, self._done, took, self._step, since)
        share = passed / max(passed + left, 1e-9)
        return f"{share:4.0%} [{'#' * round(share * _BAR):.<{_BAR}}] about {duration(left)} left: {self._what}"

    def _tick(self) -> None:
        while not self._over.wait(1.0):
            if self._terminal or time.monotonic() - self._shown > _QUIET_SECONDS:
                self._show()

    def _show(self) -> None:
        if self._expected:
            self._shown = time.monotonic()
            text = f"\r{self.text()}\x1b[K" if self._terminal else f"{self.text()}\n"
            os.write(2, text.encode())  # not sys.stderr, whose lock a rank forked meanwhile would inherit


def duration(seconds: float) -> str:
    """A duration as text."""
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"


PROGRESS = Progress()


# ---- the last line ----


def last_line(benchmark: str, figures: Mapping[str, float | bool], quick: bool = False) -> str:
    """One JSON object with figures, versions, machine and date. Figures are rounded to four significant digits."""
    shown = {name: value if isinstance(value, bool) else float(f"{value:.4g}") for name, value in figures.items()}
    versions = {"python": platform.python_version()}
    for package in VERSIONS_OF:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    today = datetime.date.today().isoformat()
    return json.dumps(
        {"benchmark": benchmark, "quick": quick, "figures": shown, "versions": versions, "machine": machine(),
         "date": today}
    )  # fmt: skip


def machine() -> dict[str, object]:
    """The machine that the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(names, platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
    }


class ProcessorUse:
    """What the machine's processors did since this was made: a shared machine disturbs what is measured on it."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float, float]:
        """Seconds: all; busy; stolen by the hypervisor; of this process and its children that have ended."""
        user, nice, system, idle, waiting, irq, softirq, steal = map(
            float, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        busy, ours = user + nice + system + irq + softirq, os.times()
        ticks = os.sysconf("SC_CLK_TCK")
        return (busy + idle + waiting + steal) / ticks, busy / ticks, steal / ticks, sum(ours[:4])

    def figures(self) -> dict[str, float]:
        """Shares of the processors' time: stolen; taken by others (what the kernel does for us in interrupts included);
        ours. And the load average of the last 15 minutes."""
        every, busy, steal, ours = (now - then for now, then in zip(self._now(), self._before, strict=True))
        shares = {"stolen_share": steal, "others_share": max(0.0, busy - ours), "own_share": ours}
        return {name: seconds / max(every, 1e-9) for name, seconds in shares.items()} | {"load": os.getloadavg()[2]}
