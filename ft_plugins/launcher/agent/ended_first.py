"""Have the kernel end this process before others when memory runs out, until it is needed.

Invariant: while a standby waits, no rank dies for its memory. What was set before is set again before the process
becomes a rank.

In: the kernel's file. Out: a reason if it cannot be undone.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_FILE = Path("/proc/self/oom_score_adj")
_FIRST = "1000"


class EndedFirst:
    """From its construction until `undo`."""

    def __init__(self) -> None:
        self._before = ""
        with contextlib.suppress(OSError):
            self._before = _FILE.read_text().strip()
            _FILE.write_text(_FIRST)

    def undo(self) -> str:
        """Why the process still ends before others; '' if it does not. Idempotent."""
        if not self._before:
            return ""
        try:
            _FILE.write_text(self._before)
            now = _FILE.read_text().strip()
        except OSError as error:
            return f"the kernel would end it before others when memory runs out ({error})"
        return "" if now == self._before else f"its oom_score_adj is {now}, that of a rank {self._before}"
