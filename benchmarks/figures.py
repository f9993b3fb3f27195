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

_PACKAGES = ("torch", "numpy", "xxhash", "megatron-core", "deepspeed", "torchsnapshot", "dlrover", "numba")


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
