"""Read values from outside this process, bounded in bytes and nesting, as plain values. Imports nothing that is slow.

Invariant: every bound is checked before the value is used. Any invalid value raises `Unfit`; the reader turns that into
an error that names the file or request and says what to do. `intake` checks values against types.

In: paths, bytes, plain values. Out: bytes, plain values, texts for messages.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE_LIMIT = 1 << 20  # bytes of a small file: a thousand times what most of them hold
_PART = 1 << 20  # bytes that are read at once
DEPTH = 32  # of nested containers; what this project writes has fewer than ten
SHOWN = 80  # characters of a foreign value in a message

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = SHOWN


class Unfit(ValueError):
    """A value is not what its reader expects."""


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file. Never blocks, for example on a pipe. Raises OSError, Unfit."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unfit("it is not a regular file")
    return descriptor


def read_bytes(path: Path, limit: int = FILE_LIMIT) -> bytes:
    """The content of a regular file of at most `limit` bytes. Raises OSError, Unfit. Memory is allocated for what the
    file has, not for the limit."""
    content = bytearray()
    with open(open_regular(path), "rb") as file:
        while part := file.read(min(_PART, limit + 1 - len(content))):
            content += part
            if len(content) > limit:
                raise Unfit(f"it has more than {limit} bytes")
    return bytes(content)


def json_value(text: bytes | str, once: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """JSON as plain values; `once` makes an object of its pairs. Raises Unfit, also for values nested deeper than
    DEPTH, and JSONDecodeError, which is a ValueError too, for text that is not JSON."""
    try:
        value = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # not text, or a number of thousands of digits
        raise Unfit(_nested() if isinstance(error, RecursionError) else str(error)) from error
    require_shallow(value)
    return value


def require_shallow(value: Any) -> None:
    """Raises Unfit for plain values nested deeper than DEPTH."""
    level = _containers([value])
    for _ in range(DEPTH):
        if not level:
            return
        level = [part for whole in level for part in _containers(whole)]
    if level:
        raise Unfit(_nested())


def _containers(whole: Any) -> list[Any]:
    """The containers directly inside `whole`."""
    parts = whole.values() if type(whole) is dict else whole
    return [part for part in parts if type(part) in (dict, list)]


def _nested() -> str:
    return f"it is nested more than {DEPTH} deep"


def shown(value: Any) -> str:
    """An outside value for a message: its repr, cut to about SHOWN characters."""
    try:
        return _repr.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__} that is too large"
