"""Alarms of the SMP in the job's own log: a trainer of its node prints them, because the SMP has no log there.

Invariant: the file in the run directory holds the newest text for each topic, and is written whole. A full disk costs
texts, never a node: what could not be written is written with the next change. That a condition has ended is reported
to the running incarnation only, not to a later one.

In: a text by topic. Out: `protocol.ALARM`, which the lowest rank of the node prints when it changes.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

from ...base import files
from ...events import EventType
from ...transport import protocol

REPEAT_SECONDS = 600.0  # between two reports of a failure that persists


class Alarms:
    """The alarms of one node. Any thread may call."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._path = run_dir / protocol.ALARM
        self._lock = threading.Lock()
        self._words: dict[str, str] = {}
        self._over: set[str] = set()

    def say(self, about: str, kind: EventType, words: str, node: str = "") -> None:
        """Have the trainers print an event of this kind, unless the last text on the topic `about` was the same.
        `node`: if it is not this one."""
        with self._lock:
            self._words[about] = kind.sentence(f"node {node or self._run_dir.name}", words)
            self._over.discard(about)
            if kind.ends:
                self._over.add(about)
            self._write()

    def forget(self, *about: str) -> None:
        """Drop these topics, and those whose condition has ended: a new incarnation starts."""
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


class RepeatedFailure:
    """Reports repeated failures of one thing: the first as `failure`, then one in REPEAT_SECONDS with their number, and
    as `success` that it works again. For one thread."""

    def __init__(self, alarms: Alarms, about: str, failure: EventType, success: EventType, node: str = "") -> None:
        self._alarms = alarms
        self._about = about
        self._failure, self._success = failure, success
        self._node = node
        self._count = 0
        self._reported = 0.0  # monotonic

    def failed(self, words: str) -> None:
        """Record a failure."""
        self._count += 1
        now = time.monotonic()
        if self._count > 1 and now - self._reported < REPEAT_SECONDS:
            return
        self._reported = now
        words = words if self._count == 1 else f"{words}; {self._count} attempts in a row"
        self._alarms.say(self._about, self._failure, words, self._node)

    def worked(self, words: str) -> None:
        """Record a success."""
        if self._count:
            words = f"{words}, after {self._count} failed attempts"
            self._alarms.say(self._about, self._success, words, self._node)
        self._count = 0
