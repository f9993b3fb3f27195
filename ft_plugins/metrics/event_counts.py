"""Count the events of a node, by following the two files of its history.

Invariant: each line is counted once, also when a file is renamed because it is full; no call reads more than it is
allowed to. Summaries of routine events are not counted: the events themselves are, in the file of recent ones. What was
removed from a full history before it was read is not known, so a count may begin again at a smaller value when another
process counts.

In: the path of a history. Out: `Counts`. A damaged line or file is passed over; nothing is raised.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..events import Event, Severity, catalogue, recent_of
from ..events.stream import event_of, name_in
from ..events.tail import LineTail

READ_BYTES = 4 << 20  # of each file at once, so that a scrape ends in time; the rest is read at the next one

Key = tuple[str, str, int | None]  # name of the event; its field, empty for how often it came; rank that reported it


@dataclass(frozen=True)
class Counts:
    """How often events came, and sums of their fields. `alarm`: the one that stands, see `events.standing_alarm`.
    `alarm_ages`: of the newest alarm of each name, in seconds."""

    values: Mapping[Key, float]
    alarm: str = ""
    alarm_ages: Mapping[str, float] = field(default_factory=dict)

    def of(self, event: str, field: str = "") -> dict[int | None, float]:
        """By rank; empty if the event never came."""
        return {rank: value for (name, part, rank), value in self.values.items() if (name, part) == (event, field)}


class EventCounts:
    """Counts that grow with a history, whose files stay open. For one thread."""

    def __init__(self, path: Path, summed: Mapping[str, Collection[str]]) -> None:
        """`summed`: by name of an event, the fields of which sums are wanted."""
        self._files = [LineTail(path), LineTail(recent_of(path))]
        self._summed = summed
        self._values: dict[Key, float] = {}
        self._alarm, self._fenced = "", False  # the one that stands; whether an incarnation has begun since
        self._alarm_times: dict[str, float] = {}  # by name: of the newest, in seconds since the epoch

    def read(self, limit: int | None = READ_BYTES) -> Counts:
        """The counts so far. `limit`: bytes to read of each file; None: all that there is."""
        for file in self._files:
            for line in file.look(limit):
                self._add(line)
        return Counts(
            dict(self._values), self._alarm,
            {name: max(0.0, time.time() - when) for name, when in self._alarm_times.items()},
        )  # fmt: skip

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files:
            file.close()

    def _add(self, line: bytes) -> None:
        name = name_in(line)
        kind = catalogue.EVENTS.get(name)
        if kind is None:  # damaged, or of another version; names without end would take memory
            return
        is_alarm, summed = kind.severity is Severity.ALARM, self._summed.get(name)
        event = event_of(line) if is_alarm or summed is not None else Event(name, 0.0)  # parsed only if needed
        if event is None:
            return
        if is_alarm:
            self._alarm, self._fenced, self._alarm_times[name] = name, False, event.time
        elif self._alarm in kind.ends or self._fenced and kind is catalogue.RANKS_RESUMED:
            self._alarm = ""
        self._fenced |= kind is catalogue.INCARNATION_FENCED
        self._grow((name, "", event.rank), 1)
        for part in summed or ():
            value = event.fields.get(part)
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._grow((name, part, event.rank), float(value))

    def _grow(self, key: Key, amount: float) -> None:
        self._values[key] = self._values.get(key, 0) + amount
