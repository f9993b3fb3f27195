"""Measure what it costs that a job is watched: its metrics, and the events from which they come.

    python benchmarks/watch_cost.py [--quick]

A protected job of one rank trains. Stretches in which its metrics are scraped many times a second alternate with
stretches in which they are not, and in each the processor time of the snapshot management process is read; it serves
the metrics, so the rank is not involved. Medians over pairs of stretches:

    scrape_milliseconds   of the SMP's processor, for each scrape
    scrape_share          the same, scraped every 15 seconds, as a share of one core
    events                that the rank emits in an iteration
    emit_microseconds     of the rank's thread, for each, measured in this process with such an event
    emit_share            all of them, as a share of an iteration of one second
    scalars_milliseconds  of the processor of a rank that writes scalars, for each time: what its framework's writer
                          takes is left out
    scalars_share         the same, as often as is the default, as a share of one core

Claim: scrape_share + emit_share + scalars_share <= 0.001 (`share`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from ft_plugins.config import Config
from ft_plugins.events import Events, catalogue
from ft_plugins.events.stream import file_sink, log_sink
from ft_plugins.metrics.exposition import counts_of, node_of
from ft_plugins.metrics.scalars import scalars_of
from ft_plugins.rehearse.driver import free_port
from ft_plugins.smp.serve.local_connection import LocalConnection
from harness import fills  # noqa: F401 - the entry of the job, imported before ranks are forked
from harness.emulated_nodes import destroy
from harness.fills_runs import FillsRun
from harness.forkserver import ForkServer, RunningJob
from harness.job_control import Entry, entries, wait_for
from workloads.running import PROGRESS, Figures, arguments, run

BOUND = 120.0  # seconds, for any wait
ENDLESS, SECONDS, MIB = 1_000_000, 0.2, 16  # iterations; of one; state of the rank
EVERY = 15.0  # seconds between two scrapes, as Prometheus makes them where nothing else is said
A_SECOND = 20  # scrapes while they are measured
EMITTED, LOOKS = 2000, 50


@contextmanager
def watched(folder: Path, port: int) -> Iterator[RunningJob]:
    """A protected job that serves metrics and has captured a few versions."""
    flags = ("--reft", "--ftp-metrics", str(port))
    spec = FillsRun(f"watch{os.getpid()}", folder, ENDLESS, mib=MIB, seconds=SECONDS, flags=flags).spec()
    with ForkServer(("harness.fills",)) as server:
        job = server.start(spec)
        try:
            wait_for(spec.run_dir / "events.jsonl", lambda lines: newest(lines) > 5, BOUND)
            yield job
        finally:
            destroy(job)


def newest(lines: Sequence[Entry]) -> int:
    """The last iteration of any event."""
    return max((int(line.get("iteration") or 0) for line in lines), default=0)


def processor_of(pid: int) -> float:
    """Seconds that a process has run."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def stretch(pid: int, port: int, seconds: float, scrapes: bool) -> tuple[float, int]:
    """Processor seconds of the SMP over some seconds, and scrapes in them."""
    before, began, count = processor_of(pid), time.monotonic(), 0
    while (now := time.monotonic()) - began < seconds:
        if scrapes:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=BOUND) as reply:
                assert b"ftp_iteration" in reply.read()
            count += 1
        time.sleep(max(0.0, 1 / A_SECOND - (time.monotonic() - now)))
    return processor_of(pid) - before, count


def emit_seconds(folder: Path) -> float:
    """Seconds for which the emission of a routine event keeps its thread."""
    events = Events("watch", 0)
    events.subscribe(file_sink(folder / "events.jsonl"))
    events.subscribe(log_sink())
    took = []
    for step in range(EMITTED):
        began = time.perf_counter()
        events.emit(catalogue.SNAPSHOT_SEALED, lineage=1, iteration=step, seconds=0.01, bytes=1 << 20, slot=0)
        took.append(time.perf_counter() - began)
    return statistics.fmean(took)


def look_seconds(run_dir: Path) -> float:
    """Processor seconds of one look at the SMP and at new events, as `systems.scalar_report` takes it: a median."""
    counts, took = counts_of(run_dir), []
    for _ in range(LOOKS):
        began = time.process_time()
        with LocalConnection(run_dir, BOUND) as connection:
            scalars = scalars_of(node_of(run_dir, connection.status(), counts))
        took.append(time.process_time() - began)
        assert scalars
    return statistics.median(took)


def measure(chosen: argparse.Namespace) -> Figures:
    """The figures."""
    seconds, pairs = (1.0, 2) if chosen.smoke else (5.0, 3) if chosen.quick else (10.0, 8)
    folder = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
    try:
        port, costs = free_port(), []
        with watched(folder, port) as job:
            pid = int((job.spec.run_dir / "smp.lock").read_text())
            PROGRESS.plan(pairs)
            for pair in range(pairs):
                PROGRESS.step(f"pair {pair + 1}")
                without, _ = stretch(pid, port, seconds, scrapes=False)
                scraped, count = stretch(pid, port, seconds, scrapes=True)
                costs.append((scraped - without) / count)
            look = look_seconds(job.spec.run_dir)
            recent = entries(job.spec.run_dir / "events.jsonl")
        own = [line for line in recent if line.get("rank") == 0 and line.get("iteration")]
        steps = {line["iteration"] for line in own}
        events = len(own) / max(1, len(steps))
        emit = emit_seconds(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    scrape = statistics.median(costs)
    scalars = look / Config().scalar_seconds
    share = scrape / EVERY + emit * events + scalars
    return {
        "scrape_milliseconds": scrape * 1e3, "scrape_share": scrape / EVERY, "events": events,
        "emit_microseconds": emit * 1e6, "emit_share": emit * events, "scalars_milliseconds": look * 1e3,
        "scalars_share": scalars, "share": share, "held": share <= 0.001,
    }  # fmt: skip


if __name__ == "__main__":
    run("watch_cost", measure, arguments(__doc__, "fewer and shorter stretches"))
