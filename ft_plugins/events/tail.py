"""Follow a file of events that grows, is renamed at its limit, or is not there yet.

Invariant: every whole line is returned once, in the order in which it was written; a line that is not whole yet waits
for its end. One renaming between two looks loses nothing, at whatever moment it comes: a file stays open until it has
been read to its end and is not written any more. A file that was cut, or replaced, is read from its begin. Links and
what is no regular file are not read.

In: a path. Out: the lines, or the events, that are new since the last look.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from .stream import Damage, Event, rotated_of


class LineTail:
    """The lines of one file. Call `close` at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[BinaryIO] = []  # not read to their end, the oldest one first
        self._rest = b""  # of a line of the first one that is not whole yet
        self._begun = False

    def look(self, limit: int | None = None) -> list[bytes]:
        """The lines that are new, at most `limit` bytes; at the first look all, first those of the file that was
        renamed before. A line that is longer than `limit` comes in pieces."""
        if not self._begun:
            self._begun = True
            newest, before = _opened(self.path), _opened(rotated_of(self.path))  # the other way round, one may be lost
            if newest and before and os.path.sameopenfile(newest[0].fileno(), before[0].fileno()):
                before.pop().close()  # renamed in between
            self._files = before + newest
        found: list[bytes] = []
        left = limit
        while True:
            # looked at before one is read: a writer may append to it and rename it after that
            if not self._files or not _same(self.path, self._files[-1]):
                self._files += _opened(self.path)
            if not self._files:
                return found
            content = self._read(self._files[0], left)
            *lines, self._rest = (self._rest + content).split(b"\n")
            found += lines
            if limit is not None and len(self._rest) >= limit:
                found.append(self._rest)
                self._rest = b""
            left = None if left is None else left - len(content)
            if left == 0 or len(self._files) == 1:
                return found
            self._files.pop(0).close()
            self._rest = b""

    def _read(self, file: BinaryIO, limit: int | None) -> bytes:
        with suppress(OSError):
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)
                self._rest = b""
            return file.read(-1 if limit is None else limit)
        return b""

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files:
            file.close()
        self._files, self._rest = [], b""


class Tail:
    """The events of one file. Call `close` at the end."""

    def __init__(self, path: Path) -> None:
        self.damage = Damage()
        self._lines = LineTail(path)

    def look(self) -> list[Event]:
        """The events that are new; at the first look all, with those of the file that was renamed before."""
        return [*self.damage.usable(self._lines.look())]

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._lines.close()


def _opened(path: Path) -> list[BinaryIO]:
    """The file; empty if it is not there, or is no regular one."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return [open(descriptor, "rb")]
        os.close(descriptor)
    return []


def _same(path: Path, file: BinaryIO) -> bool:
    """Whether `path` is the open file."""
    with suppress(OSError):
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    return False
