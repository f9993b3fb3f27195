"""The stream of events: one append-only file per node, and sinks that subscribe to it.

Invariant: an event is one line of JSON, written with one `write` to a file opened with O_APPEND, so that lines of
the agent, the SMP and the trainers of a node never interleave. The stream outlives incarnations and answers
'where did the downtime go?': routine events are summarised in it, so that they do not displace the rest.

In: `Events.emit(catalogue.X, **fields)`. Out: `Event` objects to every subscriber; `read(path)` gives them back;
alarms in the job's own log (`log_sink`, `say`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from . import catalogue
from .declaration import EventType, Severity

FILE_LIMIT = 32 << 20  # bytes of the history
RECENT_LIMIT = 16 << 20  # bytes of routine events, one by one
SUMMED = 100  # routine events of one name in a summary
_BLOCK = 1 << 16  # bytes read at once from the end of a history
_KINDS = {"name": str, "node": str, "rank": int | None, "pid": int | str}  # in a line; fields may replace a pid
_LATEST = 253402300800.0  # the year 10000, in seconds since the epoch
_NAMED = re.compile(rb'\{"time": [^,]*, "name": "([^"]*)"')  # the begin of a line


@dataclass(frozen=True)
class Event:
    """One thing that happened. `time` is seconds since the epoch; `rank` is None for agent and SMP.

    By default an event describes its sender. A field of the same name (the `pid` of `smp.lost`, the `rank` of
    `worker.failed`) replaces the sender's in the file, and when it is read back.
    """

    name: str
    time: float
    node: str = ""
    rank: int | None = None
    pid: int = 0
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def type(self) -> EventType | None:
        """Its declaration; None for a name that this version does not know."""
        return catalogue.EVENTS.get(self.name)

    def sentence(self) -> str:
        """The event for the job's log."""
        where = f"node {self.node}"
        if self.rank is not None:
            where = f"rank {self.rank} ({where})" if self.node else f"rank {self.rank}"
        kind = self.type
        if kind is None:
            return f"{self.name}: {where}"
        facts = ", ".join(f"{key} {value}" for key, value in self.fields.items())
        reason = self.fields.get("reason") or (f"{kind.what.rstrip('.')} ({facts})" if facts else kind.what)
        return kind.sentence(where, str(reason))

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
    """The stream as one process sees it: adds the sender, passes every event to its sinks in order."""

    strict: ClassVar[bool] = False  # refuse undeclared fields; only in tests: an event must never end a healthy job

    def __init__(self, node: str = "", rank: int | None = None) -> None:
        self.node = node
        self.rank = rank
        self._sinks: list[Sink] = []

    def subscribe(self, sink: Sink) -> None:
        """Call `sink` with every event from now on."""
        self._sinks.append(sink)

    def emit(self, kind: EventType, /, **fields: Any) -> Event:
        """Report an event of the catalogue with its facts. Raises ValueError for undeclared fields, if `strict`."""
        if self.strict and (problem := kind.problem(fields)):
            raise ValueError(f"event {problem}")
        event = Event(kind.name, time.time(), self.node, self.rank, os.getpid(), fields)
        for sink in self._sinks:
            sink(event)
        return event


def log_sink(who: str = "ft_plugins: ") -> Sink:
    """A sink that prints alarms and their ends in the job's log. What all ranks report, rank 0 prints."""

    def write(event: Event) -> None:
        kind = event.type
        if kind is None or not kind.printed or event.rank and (kind.once or event.fields.get("echo")):
            return
        say(event.sentence(), alarm=True, who=who)

    return write


def file_sink(path: Path) -> Sink:
    """A sink that appends to `path`; routine events to `recent_of(path)`, and in `path` a `routine.summed` stands for
    up to SUMMED of them, written no later than the next event that is not routine.

    A full disk or a missing folder loses lines; nothing is raised. A file that has reached its limit is renamed with
    the suffix '.1', so the files never take more than twice both limits.
    """
    recent = recent_of(path)
    summaries: dict[str, _Summary] = {}
    lock = threading.Lock()

    def write(event: Event) -> None:
        with lock:
            if event.type is None or event.type.severity is not Severity.ROUTINE:
                for summary in summaries.values():
                    _append(path, summary.event(), FILE_LIMIT)
                summaries.clear()
                _append(path, event, FILE_LIMIT)
                return
            _append(recent, event, RECENT_LIMIT)
            summary = summaries.setdefault(event.name, _Summary(event))
            summary.add(event)
            if summary.count >= SUMMED:
                _append(path, summaries.pop(event.name).event(), FILE_LIMIT)

    return write


def recent_of(path: Path) -> Path:
    """The file of the newest single routine events, for the history in `path`."""
    return path.with_name(f"{path.stem}.recent{path.suffix}")


def rotated_of(path: Path) -> Path:
    """The name that a file gets when it has reached its limit."""
    return path.with_name(path.name + ".1")


class _Summary:
    """Routine events of one name and one process."""

    def __init__(self, event: Event) -> None:
        self._newest = self._longest = self._oldest = event
        self._sums: dict[str, float] = {}
        self.count = 0

    def add(self, event: Event) -> None:
        """Add one more event."""
        self.count += 1
        self._newest = event
        for key in ("seconds", "bytes"):
            if key in event.fields:
                self._sums[key] = self._sums.get(key, 0) + event.fields[key]
        if event.fields.get("seconds", 0.0) > self._longest.fields.get("seconds", 0.0):
            self._longest = event

    def event(self) -> Event:
        """The summary event: how many, the first and last iteration, sums, and the longest one."""
        newest, longest = self._newest, self._longest.fields
        facts: dict[str, Any] = {"of": newest.name, "count": self.count}
        facts |= {"first": self._oldest.fields.get("iteration"), "last": newest.fields.get("iteration")}
        if "seconds" in self._sums:
            facts |= {"longest": longest["seconds"], "longest_at": longest.get("iteration")}
        return Event(
            catalogue.ROUTINE_SUMMED.name, newest.time, newest.node, newest.rank, newest.pid, facts | self._sums
        )


def _append(path: Path, event: Event, limit: int) -> None:
    """Append one line to the regular file `path` (created 0600); not to a link or a pipe. Never raises or waits."""
    with contextlib.suppress(OSError):
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        fd = os.open(path, how, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return
            os.write(fd, (event.line() + "\n").encode())
            status = os.fstat(fd)
            if status.st_size > limit and os.stat(path).st_ino == status.st_ino:  # no other process has renamed it
                os.replace(path, rotated_of(path))
        finally:
            os.close(fd)


def say(words: str, alarm: bool = False, who: str = "ft_plugins: ") -> None:
    """Print to the job's log, prefixed by `who`; an `alarm` goes to stderr. Nothing is raised if the disk is full."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
        print(f"{who}{words}", file=sys.stderr if alarm else sys.stdout, flush=True)


@dataclass
class Damage:
    """How many lines were left out by those who read: a full disk cut them short, or they do not fit the catalogue."""

    lines: int = 0

    def usable(self, lines: Iterable[bytes]) -> Iterator[Event]:
        """The events of these lines; counts the others."""
        for line in lines:
            if (event := event_of(line)) is not None:
                yield event
            elif line:
                self.lines += 1

    def __str__(self) -> str:
        return f"{self.lines} damaged event{'' if self.lines == 1 else 's'} left out"


def read(path: Path, damage: Damage | None = None) -> Iterator[Event]:
    """The events of a history and of its recent routine events, by time, also of the files that were renamed at their
    limits, without damaged lines, which `damage` counts."""
    history, recent = (
        [*events_in(rotated_of(file), damage), *events_in(file, damage)] for file in (path, recent_of(path))
    )
    yield from sorted([*recent, *history], key=lambda event: event.time) if recent else history


def events_in(path: Path, damage: Damage | None = None) -> Iterator[Event]:
    """The events of one file, in the order in which they were written; none of what is no regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not wait for a writer
    except (FileNotFoundError, NotADirectoryError):
        return
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return
        lines = file.read().split(b"\n")
    yield from (damage or Damage()).usable(lines[:-1])  # the last one is empty, or not whole yet


def event_of(line: bytes) -> Event | None:
    """The event of one line; None for a damaged one: one that is not whole, or does not fit the catalogue. All that
    reads events reads them here."""
    try:
        entry = json.loads(line)
        kind = catalogue.EVENTS.get(entry["name"])
        # a node's event has no rank, also where one of a rank declares it
        facts = {key: value for key, value in entry.items() if key != "rank" or value is not None}
        fits = kind is None or kind.fits(facts)
        known = {key: entry.pop(key) for key in ("name", "time", "node", "rank", "pid")}
        fits = fits and 0 <= known["time"] < _LATEST and all(isinstance(known[key], of) for key, of in _KINDS.items())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    return Event(**known, fields=entry) if fits else None


def name_in(line: bytes) -> str:
    """The name of the event of one line, which is not parsed; '' for a damaged one."""
    named = _NAMED.match(line)
    return named[1].decode(errors="replace") if named else ""


def standing_alarm(path: Path) -> Event | None:
    """The newest alarm of a history that no later event has ended, and that is not of an incarnation after which
    another one has completed an iteration; None if there is none. Reads from the end."""
    ended: set[str] = set()
    resumed = False
    for line in _backwards(path):
        kind = catalogue.EVENTS.get(name_in(line))
        if kind is None:
            continue
        if resumed and kind is catalogue.INCARNATION_FENCED:
            return None
        resumed |= kind is catalogue.RANKS_RESUMED
        if kind.severity is Severity.ALARM and (event := event_of(line)) is not None:
            return None if event.name in ended else event
        ended.update(kind.ends)
    return None


def newest_proof(path: Path) -> Event | None:
    """What the incarnation that began last has shown of its restore; None for nothing yet. Reads from the end."""
    for line in _backwards(path):
        kind = catalogue.EVENTS.get(name_in(line))
        if kind is catalogue.INCARNATION_FENCED:
            return None
        if kind in (catalogue.RESUME_PROVEN, catalogue.RESUME_UNPROVEN) and (event := event_of(line)) is not None:
            return event
    return None


def _backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file, the last one first, without one that was cut short."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        left = file.seek(0, os.SEEK_END)
        rest, whole = b"", False  # the end of a line whose begin is not read yet; whether a line's end was read
        while left:
            size = min(_BLOCK, left)
            left = file.seek(left - size)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            if not whole:
                rest, lines, whole = (rest, lines[:-1], True) if lines else (b"", [], False)
            yield from reversed(lines)
        if whole and rest:
            yield rest
