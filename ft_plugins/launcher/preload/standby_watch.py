"""What imports do besides: which variables of the environment they read and set, and whether they are connected.

Invariant: reading is noted by name; copying or searching the whole environment reads none. What the script's own
statements set is distinguished from what modules set, because the script is executed again and modules are not.

In: this process. Out: names that were read, what modules have set.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

_PASSING = ("os", "collections.abc", "_collections_abc", __name__)  # between this and the code that uses `os.environ`
_OURS = "ft_plugins."  # reads what is handed over when it is called, not when it is imported
_SCRIPT = "__main__"
INTERNET = (socket.AF_INET, socket.AF_INET6)


class EnvironmentWatch:
    """Notes the names that Python code reads and sets of `os.environ`."""

    def __init__(self) -> None:
        self.before = dict(os.environ)
        self._noted = _NotingDict(cast(Any, os.environ)._data)
        self._use(self._noted)

    def read(self) -> set[str]:
        """The names that were read since the last call."""
        found, self._noted.names = self._noted.names, set()
        return {os.fsdecode(name) for name in found}

    def end(self) -> dict[str, str | None]:
        """Stop; returns what modules have set, None for what they have removed."""
        self._use(dict(self._noted.items()))
        names = [name for name in {**self.before, **os.environ} if self.before.get(name) != os.environ.get(name)]
        again = {os.fsdecode(name) for name in self._noted.of_script - self._noted.of_modules}
        return {name: os.environ.get(name) for name in names if name not in again}

    def conflict(self) -> str:
        """A variable that the script uses and modules set: the second time it would find another value. '' for none."""
        both = (self._noted.of_script | self._noted.read_by_script) & self._noted.of_modules
        return os.fsdecode(min(both)) if both else ""

    def _use(self, content: dict[bytes, bytes]) -> None:
        for environ in (os.environ, os.environb):
            cast(Any, environ)._data = content


class _NotingDict(dict[bytes, bytes]):
    def __init__(self, content: dict[bytes, bytes]) -> None:
        super().__init__(content)
        self.names: set[bytes] = set()  # that were read
        self.read_by_script: set[bytes] = set()
        self.of_script: set[bytes] = set()  # set or removed by the script's own statements
        self.of_modules: set[bytes] = set()  # by any other code
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
            user = _user()
            if not user.startswith(_OURS):
                self.names.add(name)
            if user == _SCRIPT:
                self.read_by_script.add(name)
        return super().__getitem__(name)

    def __setitem__(self, name: bytes, value: bytes) -> None:
        self._written(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: bytes) -> None:
        self._written(name)
        super().__delitem__(name)

    def _written(self, name: bytes) -> None:
        (self.of_script if _user() == _SCRIPT else self.of_modules).add(name)


def _user() -> str:
    """The module whose code uses `os.environ`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _PASSING:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def connected() -> bool:
    """Whether this process holds a socket of the internet, bound, listening or connected."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(link).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as found:
                if found.family in INTERNET:
                    return True
        except OSError:  # closed meanwhile
            continue
    return False
