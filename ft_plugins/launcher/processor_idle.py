"""How many processors of this node were idle since the last look, and how long a process has used them."""

from __future__ import annotations

import os
from pathlib import Path

_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")  # a second


class IdleProcessors:
    """Looks at the kernel's counters."""

    def __init__(self) -> None:
        self._idle = self._all = 0

    def begin(self) -> None:
        """Count from now on."""
        self._idle, self._all = _counters()

    def cores(self, own: float) -> float:
        """Idle cores on average since the last look; `own` seconds of a core, used meanwhile, count as idle."""
        idle, whole = _counters()
        passed = whole - self._all
        cores = (idle - self._idle + own * _TICKS) * (os.cpu_count() or 1) / passed if passed > 0 else 0.0
        self._idle, self._all = idle, whole
        return cores


def _counters() -> tuple[int, int]:
    """Ticks of all cores since boot: idle ones, all."""
    ticks = [int(word) for word in _STAT.read_text().partition("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def used_seconds(pid: int) -> float:
    """Seconds for which a process has used a core; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS
