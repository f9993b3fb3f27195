"""Alarms of the SMP for the job's own log: it has none itself, so a trainer of its node prints them.

Invariant: the file in the run directory holds the last words about each topic, and is written whole. A full disk costs
words, never a node: what could not be written is written with the next change. That something is over is reported to
the running incarnation, not to a later one.

In: words by topic. Out: `protocol.ALARM`, which the lowest rank of the node prints when it changes.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

from .. import files
from . import protocol

AGAIN_SECONDS = 600.0  # between two reports of a failure that goes on


class Alarms:
    """The alarms of one node. Any thread may call."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / protocol.ALARM
        self._lock = threading.Lock()
        self._words: dict[str, str] = {}
        self._over: set[str] = set()

    def say(self, about: str, words: str, over: bool = False) -> None:
        """Have `words` printed, unless they were the last ones about this. `over`: the alarm has ended."""
        with self._lock:
            self._words[about] = words
            self._over.discard(about)
            if over:
                self._over.add(about)
            self._write()

    def forget(self, *about: str) -> None:
        """A new incarnation starts: drop these topics, and all that is over."""
        with self._lock:
            for name in (*about, *self._over):
                self._words.pop(name, None)
            self._over.clear()
            self._write()

    def _write(self) -> None:
        with suppress(OSError):
            if self._words:
                files.write_json(self._path, self._words)
            else:
                self._path.unlink(missing_ok=True)


class Failing:
    """Reports something that fails repeatedly: the first failure, then one in AGAIN_SECONDS with their number, and that
    it works again. For one thread."""

    def __init__(self, alarms: Alarms, about: str) -> None:
        self._alarms = alarms
        self._about = about
        self._count = 0
        self._said = 0.0  # monotonic

    def failed(self, words: str) -> None:
        """It has failed once more."""
        self._count += 1
        now = time.monotonic()
        if self._count > 1 and now - self._said < AGAIN_SECONDS:
            return
        self._said = now
        self._alarms.say(self._about, words if self._count == 1 else f"{words}; {self._count} attempts in a row")

    def worked(self, words: str) -> None:
        """It has not failed."""
        if self._count:
            self._alarms.say(self._about, f"{words}, after {self._count} failed attempts", over=True)
        self._count = 0
