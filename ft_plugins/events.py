"""What happened, when and to whom: one append-only stream per node; sinks subscribe.

Invariant: an event is one line of JSON, written with one `write` to a file opened with O_APPEND, so that lines of
the agent, the SMP and the trainers of a node never interleave. The stream outlives incarnations and answers
'where did the downtime go?'.

In: `Events.emit(name, **fields)`. Out: `Event` objects to every subscriber; `read(path)` gives them back; and what is
to be read in the job's own log, `say`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE_LIMIT = 64 << 20  # bytes


@dataclass(frozen=True)
class Event:
    """One thing that happened. `time` is seconds since the epoch; `rank` is None for agent and SMP.

    Who speaks is whom it is about, unless a field says otherwise: the `pid` of `smp.lost`, the `rank` of
    `worker.failed`. In the file the field stands in the speaker's place, and so it is read back.
    """

    name: str
    time: float
    node: str = ""
    rank: int | None = None
    pid: int = 0
    fields: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """The event as one line of JSON, without the newline."""
        return json.dumps(
            {
                "time": self.time,
                "name": self.name,
                "node": self.node,
                "rank": self.rank,
                "pid": self.pid,
                **self.fields,
            },
            default=str,
        )


Sink = Callable[[Event], None]


class Events:
    """The stream as one process sees it: knows who speaks, passes every event to its sinks in order."""

    def __init__(self, node: str = "", rank: int | None = None) -> None:
        self.node = node
        self.rank = rank
        self._sinks: list[Sink] = []

    def subscribe(self, sink: Sink) -> None:
        """Call `sink` with every event from now on."""
        self._sinks.append(sink)

    def emit(self, name: str, **fields: Any) -> Event:
        """Report `name`, in the form `subject.verb` (`capture.commit`, `smp.lost`), with its facts."""
        event = Event(name, time.time(), self.node, self.rank, os.getpid(), fields)
        for sink in self._sinks:
            sink(event)
        return event


def file_sink(path: Path) -> Sink:
    """A sink that appends to `path` (created 0600), one `write` a line.

    A full disk or a folder that is gone loses lines, never the job: nothing is raised. A file of FILE_LIMIT bytes makes
    room for a new one and is kept as `path` with '.1', so that no more than twice that is ever held.
    """

    def write(event: Event) -> None:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, (event.line() + "\n").encode())
                found = os.fstat(fd)
                if found.st_size > FILE_LIMIT and os.stat(path).st_ino == found.st_ino:  # nobody was quicker
                    os.replace(path, path.with_name(path.name + ".1"))
            finally:
                os.close(fd)

    return write


def say(words: str, alarm: bool = False, who: str = "ft_plugins: ") -> None:
    """One line or more for the job's log: an `alarm` to stderr, `who` says it. A full disk loses them, never the
    job."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        print(f"{who}{words}", file=sys.stderr if alarm else sys.stdout, flush=True)


def read(path: Path) -> Iterator[Event]:
    """The events of a file in the order in which they were written; a line cut short (by a full disk) is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        known = {key: entry.pop(key) for key in ("name", "time", "node", "rank", "pid")}
        yield Event(**known, fields=entry)
