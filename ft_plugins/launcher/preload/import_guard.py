"""Stop what an import may not do ahead of time, while ranks of the same job run.

Invariant: nothing that a running rank uses is changed. An import that would overwrite, rename or remove a file that it
has not made itself, take a lock, or connect to a server is stopped, and the standby is not used. A lock is a file that
must not exist: a process that makes one and is killed leaves it, and ranks would wait for it for ever.

In: audit events of Python; what libraries written in C do is not seen. Out: the first thing that was stopped, the files
that were read.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from .standby_watch import INTERNET

_WRITING = os.O_WRONLY | os.O_RDWR
_REMOVING = ("os.remove", "os.rmdir", "shutil.rmtree", "os.truncate")  # their first argument is the path
_IN_FOLDER = ("os.remove", "os.rmdir")  # their second argument is the folder, -1 for none
_KERNEL = ("/proc", "/sys", "/dev")  # no files of a job, but /dev/shm
_SHARED_MEMORY = "/dev/shm"


class ImportGuard:
    """An audit hook that acts while it is `on`."""

    def __init__(self) -> None:
        self.on = True
        self.stopped = ""  # the first thing that was stopped
        self._read: set[str] = set()
        self._made: set[Path] = set()  # by this process: files and folders
        chosen = tempfile.tempdir
        self._temporary = [Path(each).resolve() for each in (tempfile.gettempdir(), "/tmp")]
        tempfile.tempdir = chosen  # the script chooses, and may have set TMPDIR
        sys.addaudithook(self._audit)

    def files(self) -> set[str]:
        """The files that were read, those apart that several processes may write."""
        return {name for name in list(self._read) if os.path.isfile(name) and not self._is_shared(Path(name))}

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and isinstance(path, str | bytes | os.PathLike):
                self._open(os.path.abspath(os.fsdecode(path)), flags)
        elif event in _REMOVING and isinstance(arguments[0], str | bytes | os.PathLike):
            if event in _IN_FOLDER and arguments[1] != -1:
                return  # a part of a tree
            self._change(os.fsdecode(arguments[0]), "removes")
        elif event == "os.rename":
            self._rename(os.fsdecode(arguments[0]), os.fsdecode(arguments[1]))
        elif event == "os.mkdir" and not os.path.lexists(arguments[0]):
            self._made.add(Path(os.path.abspath(os.fsdecode(arguments[0]))).resolve())
        elif event == "socket.connect" and arguments[0].family in INTERNET:
            self._stop(f"an import connects to {arguments[1]}")

    def _open(self, name: str, flags: int) -> None:
        if not flags & (_WRITING | os.O_CREAT):
            if "__pycache__" not in name:
                self._read.add(name)
        elif not os.path.lexists(name):
            if flags & os.O_EXCL and "lock" in os.path.basename(name).lower():
                self._stop(f"an import takes the lock {name}")
            self._made.add(Path(name).resolve())
        elif os.path.isfile(name):
            whole = Path(name).resolve()
            added = self._is_temporary(whole) and not (flags & os.O_TRUNC and os.path.getsize(name))
            if not added and not self._is_own(whole) and not self._is_shared(whole):
                self._stop(f"an import writes to the file {name}")

    def _change(self, name: str, what: str) -> None:
        whole = Path(os.path.abspath(name)).resolve()
        if os.path.lexists(name) and not self._is_own(whole) and not self._is_shared(whole):
            self._stop(f"an import {what} {name}")

    def _rename(self, name: str, other: str) -> None:
        self._change(name, "renames")
        whole = Path(os.path.abspath(other)).resolve()
        if not self._is_temporary(whole):
            self._change(other, "replaces")
        self._made.add(whole)

    def _is_own(self, path: Path) -> bool:
        return path in self._made or any(folder in self._made for folder in path.parents)

    def _is_temporary(self, path: Path) -> bool:
        return any(folder in path.parents for folder in self._temporary)

    def _is_shared(self, path: Path) -> bool:
        """Whether several processes may write a file: compiled code, files of the kernel, caches in the home folder."""
        whole = path.resolve()
        if "__pycache__" in whole.parts:
            return True
        if any(whole.is_relative_to(each) for each in _KERNEL):
            return not whole.is_relative_to(_SHARED_MEMORY)
        home = os.path.expanduser("~")
        return whole.is_relative_to(home) and "".join(whole.relative_to(home).parts[:1]).startswith(".")

    def _stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason
        raise PermissionError(f"{reason}, which a standby worker must not do")
