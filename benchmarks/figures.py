"""The last line of every benchmark: one JSON object with figures, versions, machine and date.

In: a benchmark's name and its figures. Out: a line of JSON, for the caller to print.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

_PACKAGES = ("torch", "numpy", "xxhash", "megatron-core", "deepspeed", "torchsnapshot", "dlrover", "llvmlite")


def versions(packages: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """The versions of Python and of the installed packages."""
    installed = {"python": platform.python_version()}
    for package in packages:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def machine() -> dict[str, object]:
    """The machine that the figures were measured on."""
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": pages * size,
        "kernel": platform.release(),
    }


def line(benchmark: str, figures: Mapping[str, float | bool]) -> str:
    """The last line. Figures are rounded to four significant digits."""
    shown = {name: value if isinstance(value, bool) else float(f"{value:.4g}") for name, value in figures.items()}
    return json.dumps(
        {
            "benchmark": benchmark,
            "figures": shown,
            "versions": versions(),
            "machine": machine(),
            "date": datetime.date.today().isoformat(),
        }
    )


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
        return {name: seconds / every for name, seconds in shares.items()} | {"load": os.getloadavg()[2]}
