"""What a rank that ended leaves outside of its own words: kills by the kernel for lack of memory, NCCL's flight record.

Invariant: bounded reads that never fail; what cannot be read is None or ''.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ...snapshot.segment import paths

_RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # torch's; the path without the rank
_BYTES = 1 << 16  # of a counter's file


def oom_kills() -> int | None:
    """How many processes of this node's control group the kernel has killed for lack of memory; None if unknown."""
    with suppress(OSError, ValueError):
        for file in _counters():
            with suppress(OSError), file.open() as opened:
                lines = dict(line.split(None, 1) for line in opened.read(_BYTES).splitlines() if " " in line)
                if "oom_kill" in lines:
                    return int(lines["oom_kill"])
    return None


def oom_kills_since(before: int | None) -> int | None:
    """How many more than `before`; None if one of the counts is unknown."""
    now = oom_kills()
    return None if now is None or before is None else max(0, now - before)


def _counters() -> Iterator[Path]:
    """The files that may hold the counter, the most specific one first: a container may see only a parent."""
    for line in paths.OWN_CGROUPS.read_text().splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            mount, name = paths.CGROUPS, "memory.events"
        elif "memory" in controllers.split(","):
            mount, name = paths.CGROUPS / "memory", "memory.oom_control"
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder / name
            if folder == mount:
                break


def flight_record(rank: int, since: float, environment: Mapping[str, str] = os.environ) -> str:
    """The file with the flight record that NCCL of `rank` wrote `since` (seconds since the epoch); '' if none."""
    for prefix in filter(None, map(environment.get, _RECORDS)):
        path = f"{prefix}{rank}"
        with suppress(OSError):
            if os.stat(path).st_mtime >= since:
                return path
    return ""
