"""Count the events of a node, by following the two files of its history.

Invariant: each line is counted once, also when a file is renamed because it is full; no call reads more than it is
allowed to. Summaries of routine events are not counted: the events themselves are, in the file of recent ones. What was
removed from a full history before it was read is not known, so a count may begin again at a smaller value when another
process counts.

In: the path of a history. Out: `Counts`. A damaged line or file is passed over; nothing is raised.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..events import Severity, catalogue, recent_of
from ..events.stream import event_of, name_in
from ..events.tail import LineTail

READ_BYTES = 4 << 20  # of each file at once, so that a scrape ends in time; the rest is read at the next one

Key = tuple[str, str, int | None]  # name of the event; its field, empty for how often it came; rank that reported it


@dataclass(frozen=True)
class Counts:
    """How often events came, and sums of their fields. `alarm`: the newest one that no later event has ended."""

    values: Mapping[Key, float]
    alarm: str = ""

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
        self._alarm = ""

    def read(self, limit: int | None = READ_BYTES) -> Counts:
        """The counts so far. `limit`: bytes to read of each file; None: all that there is."""
        for file in self._files:
            for line in file.look(limit):
                self._add(line)
        return Counts(dict(self._values), self._alarm)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files:
            file.close()

    def _add(self, line: bytes) -> None:
        name = name_in(line)
        kind = catalogue.EVENTS.get(name)
        if kind is not None and kind.severity is Severity.ALARM:
            self._alarm = name
        elif kind is not None and self._alarm in kind.ends:
            self._alarm = ""
        elif kind is None:  # damaged, or of another version; names without end would take memory
            return
        fields = self._summed.get(name)
        if fields is None:
            self._grow((name, "", None), 1)
            return
        if (event := event_of(line)) is None:
            return
        self._grow((name, "", event.rank), 1)
        for field in fields:
            value = event.fields.get(field)
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._grow((name, field, event.rank), float(value))

    def _grow(self, key: Key, amount: float) -> None:
        self._values[key] = self._values.get(key, 0) + amount
