"""Follow a file of events that grows, is renamed at its limit, or is not there yet.

Invariant: every whole line is returned once, in the order in which it was written; a line that is not whole yet waits
for its end. One renaming between two looks loses nothing. A file that was cut, or replaced, is read from its begin.

In: a path. Out: the events that are new since the last look.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from .stream import Damage, Event, events_in, rotated_of


class Tail:
    """The events of one file. Call `close` at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = Damage()
        self._file: BinaryIO | None = None
        self._rest = b""  # of a line that is not whole yet
        self._begun = False

    def look(self) -> list[Event]:
        """The events that are new; at the first look all, with those of the file that was renamed before."""
        found: list[Event] = []
        if not self._begun:
            self._begun = True
            self._open()
            before = rotated_of(self.path)
            if self._file is None or not _same(before, self._file):  # else it has been renamed just now
                found += events_in(before, self.damage)
        while True:
            found += self._read()
            if self._file is not None and _same(self.path, self._file):
                return found
            self.close()
            self._open()
            if self._file is None:
                return found

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    def _open(self) -> None:
        with suppress(OSError):
            self._file = self.path.open("rb")

    def _read(self) -> list[Event]:
        if self._file is None:
            return []
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._rest = b""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [*self.damage.usable(lines)]


def _same(path: Path, file: BinaryIO) -> bool:
    """Whether `path` is the open file."""
    with suppress(OSError):
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    return False
