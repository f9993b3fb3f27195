"""Which variables of the environment modules read and set while they are imported.

Invariant: reading is noted by name; copying the whole environment reads none. In: Python code that uses `os.environ` or
`os.getenv`; what libraries in C read is not seen. Out: names, and what was set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


class EnvironmentReads:
    """Notes within `watching`. `before`: the environment when this was constructed."""

    def __init__(self) -> None:
        self.before = dict(os.environ)
        self._names: set[bytes] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what is used meanwhile."""
        noting = _NotingDict(cast(Any, os.environ)._data, self._names)
        _use(noting)
        try:
            yield
        finally:
            _use(dict(noting.items()))

    @property
    def used(self) -> set[str]:
        """The names that were read, set or removed so far."""
        return {os.fsdecode(name) for name in self._names}

    def written(self) -> dict[str, str | None]:
        """What modules have set; None: removed."""
        names = self.before.keys() | os.environ.keys()
        return {name: os.environ.get(name) for name in names if self.before.get(name) != os.environ.get(name)}


class _NotingDict(dict[bytes, bytes]):
    def __init__(self, content: dict[bytes, bytes], names: set[bytes]) -> None:
        super().__init__(content)
        self._names = names
        self._copied: list[bytes] = []  # names that an iteration reads next, the first one last

    def __iter__(self) -> Iterator[bytes]:
        names = list(super().__iter__())
        self._copied = names[::-1]
        return iter(names)

    def __getitem__(self, name: bytes) -> bytes:
        if self._copied and self._copied[-1] == name:
            self._copied.pop()
        else:
            self._copied.clear()
            self._names.add(name)
        return super().__getitem__(name)

    def __setitem__(self, name: bytes, value: bytes) -> None:
        self._names.add(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: bytes) -> None:
        self._names.add(name)
        super().__delitem__(name)


def _use(content: dict[bytes, bytes]) -> None:
    for environ in (os.environ, os.environb):
        cast(Any, environ)._data = content
