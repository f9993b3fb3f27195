"""How many processors of this node were idle since the last look, and how long a process has used them.

Invariant: only those count that this process, and so the ranks that it starts, may use: those that it is bound to, and
within the share that its control groups (version 2) allow.

In: files of the kernel. Out: cores, seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_STAT = Path("/proc/stat")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_TICKS = os.sysconf("SC_CLK_TCK")  # a second


class IdleProcessors:
    """Looks at the kernel's counters."""

    def __init__(self) -> None:
        self._idle = self._all = 0
        self._at = 0.0
        self._used: dict[Path, float] = {}

    def begin(self) -> None:
        """Count from now on."""
        self._idle, self._all = _counters()
        self._at, self._used = time.monotonic(), {group: used for group, _, used in _quotas()}

    def cores(self, own: float) -> float:
        """Idle cores on average since the last look; `own` seconds of a core, used meanwhile, count as idle."""
        idle_before, all_before, at, used_before = self._idle, self._all, self._at, self._used
        quotas = list(_quotas())
        self._idle, self._all = _counters()
        self._at, self._used = time.monotonic(), {group: used for group, _, used in quotas}
        passed, seconds = self._all - all_before, self._at - at
        if passed <= 0 or seconds <= 0:
            return 0.0
        cores = (self._idle - idle_before + own * _TICKS) * len(_allowed()) / passed
        for group, allowed, used in quotas:
            if group in used_before:
                cores = min(cores, allowed - (used - used_before[group] - own) / seconds)
        return cores


def _allowed() -> set[int]:
    return os.sched_getaffinity(0)


def _counters() -> tuple[int, int]:
    """Ticks since boot of the cores that this process may use: idle ones, all."""
    names = {f"cpu{number}" for number in _allowed()}
    lines = [line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu")]
    own = [words for words in lines if words[0] in names] or lines[:1]
    ticks = [[int(word) for word in words[1:9]] for words in own]
    return sum(each[3] + each[4] for each in ticks), sum(map(sum, ticks))


def _quotas() -> Iterator[tuple[Path, float, float]]:
    """The control groups of this process that limit its processors: cores that they allow, seconds that they have
    used."""
    with suppress(OSError):  # no control groups
        for line in _OWN_CGROUPS.read_text().splitlines():
            hierarchy, _, path = line.split(":", 2)
            if hierarchy == "0":
                group = _CGROUPS / path.lstrip("/")
                for folder in (group, *group.parents):
                    with suppress(OSError, ValueError, KeyError):  # missing, or 'max'
                        quota, period = map(int, (folder / "cpu.max").read_text().split())
                        stat = dict(row.split() for row in (folder / "cpu.stat").read_text().splitlines())
                        yield folder, quota / period, int(stat["usage_usec"]) / 1e6
                    if folder == _CGROUPS:
                        return


def used_seconds(pid: int) -> float:
    """Seconds for which a process has used a core; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS
