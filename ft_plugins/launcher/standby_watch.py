"""What imports do besides: which variables of the environment they read, and what they must not do early.

Invariant: nothing that a running rank uses is changed by a standby. An import that would overwrite a file or connect
to a server is stopped, and the standby is not used.

In: this process. Out: names that were read; why an import may not be done ahead of time.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

_READERS = ("os", "collections.abc", "_collections_abc")  # modules between `os.environ` and the code that reads it
_OURS = "ft_plugins."  # reads what is handed over when it is called, not when it is imported
_WRITING = os.O_WRONLY | os.O_RDWR
_INTERNET = (socket.AF_INET, socket.AF_INET6)


class EnvironmentWatch:
    """Notes the names that Python code reads of `os.environ`. Copying or searching all of it reads none."""

    def __init__(self) -> None:
        self.before = dict(os.environ)
        self._noted = _NotingDict(cast(Any, os.environ)._data)
        self._use(self._noted)

    def read(self) -> set[str]:
        """The names that were read since the last call."""
        found, self._noted.names = self._noted.names, set()
        return {os.fsdecode(name) for name in found}

    def end(self) -> dict[str, str | None]:
        """Stop; returns what the imports have set, None for what they have removed."""
        self._use(dict(self._noted))
        names = [name for name in {**self.before, **os.environ} if self.before.get(name) != os.environ.get(name)]
        return {name: os.environ.get(name) for name in names}

    def _use(self, content: dict[bytes, bytes]) -> None:
        for environ in (os.environ, os.environb):
            cast(Any, environ)._data = content


class _NotingDict(dict[bytes, bytes]):
    def __init__(self, content: dict[bytes, bytes]) -> None:
        super().__init__(content)
        self.names: set[bytes] = set()
        self._copied: deque[bytes] = deque()  # names that an iteration reads next, in this order

    def __iter__(self) -> Iterator[bytes]:
        names = list(super().__iter__())
        self._copied = deque(names)
        return iter(names)

    def __getitem__(self, name: bytes) -> bytes:
        if self._copied and self._copied[0] == name:
            self._copied.popleft()
        else:
            self._copied.clear()
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__") in _READERS:
                frame = frame.f_back
            if not str(frame.f_globals.get("__name__")).startswith(_OURS):
                self.names.add(name)
        return super().__getitem__(name)


class ImportGuard:
    """An audit hook that stops what an import may not do ahead of time, while it is `on`."""

    def __init__(self) -> None:
        self.on = True
        self.stopped = ""  # the first thing that was stopped
        self._caches = [Path(each).resolve() for each in (tempfile.gettempdir(), "/tmp", "/dev", "/proc")]
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING and isinstance(path, str | bytes | os.PathLike):
                name = os.fsdecode(path)
                if os.path.isfile(name) and not self._is_cache(Path(name)):
                    self._stop(f"an import writes to the file {name}")
        elif event == "socket.connect" and arguments[0].family in _INTERNET:
            self._stop(f"an import connects to {arguments[1]}")

    def _is_cache(self, path: Path) -> bool:
        """Whether several processes may write a file: compiled code, temporary files, caches in the home folder."""
        whole = path.resolve()
        if "__pycache__" in whole.parts or any(folder in whole.parents for folder in self._caches):
            return True
        home = os.path.expanduser("~")
        return whole.is_relative_to(home) and whole.relative_to(home).parts[0].startswith(".")

    def _stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason
        raise PermissionError(f"{reason}, which a standby worker must not do")


def connected() -> bool:
    """Whether this process holds a socket of the internet, bound, listening or connected."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(link).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as found:
                if found.family in _INTERNET:
                    return True
        except OSError:  # closed meanwhile
            continue
    return False
