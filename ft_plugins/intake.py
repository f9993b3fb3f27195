"""Read values from outside this process: bounded in bytes, nesting and time, and checked against a type.

Invariant: every bound is checked before the value is used. Any invalid value raises `Unfit`; the reader turns that into
an error that names the file or request and says what to do.

In: paths, bytes, plain values, calls that may hang. Out: values of a given type. `parsed` reads the messages of other
processes.
"""

from __future__ import annotations

import functools
import json
import os
import reprlib
import stat
import threading
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from .errors import ProtocolError

FILE_LIMIT = 1 << 20  # bytes of a small file: a thousand times what most of them hold
_PART = 1 << 20  # bytes that are read at once
DEPTH = 32  # of nested containers; what this project writes has fewer than ten
SHOWN = 80  # characters of a foreign value in a message
SECONDS_LIMIT = 1e9  # thirty years; a thread cannot wait for ten times as long

Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Word = Annotated[int, Field(strict=True, ge=0, lt=1 << 64)]  # a digest or a number in shared memory
Port = Annotated[int, Field(strict=True, ge=0, lt=1 << 16)]
Text = Annotated[str, Field(strict=True, max_length=4096)]
Address = Annotated[Text, AfterValidator(lambda text: str(ip_address(text)) and text)]  # no name to resolve
Seconds = Annotated[float, Field(strict=True, ge=0, le=SECONDS_LIMIT, allow_inf_nan=False)]

Flag = Annotated[bool, Field(strict=True)]

T = TypeVar("T")

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


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def typed(kind: TypeAdapter[T] | type[T], value: Any) -> T:
    """`value` as a dataclass, or as the type of an adapter. Raises Unfit, which names the invalid field."""
    adapter: TypeAdapter[T] = kind if isinstance(kind, TypeAdapter) else _adapter(cast(Any, kind))
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(step)[:SHOWN] for step in problem["loc"])
        raise Unfit(f"{place or 'it'}: {problem['msg']}, found {shown(problem['input'])}") from error


def parsed(kind: type[T], message: Any, name: str = "") -> T:
    """A message from another process as a dataclass, called `name` in errors. Raises ProtocolError."""
    try:
        return typed(kind, message)
    except Unfit as error:
        raise ProtocolError(f"{name or kind.__name__}: {error}") from error


def read_json(path: Path, adapter: TypeAdapter[T], limit: int = FILE_LIMIT) -> T:
    """A JSON file as the type of `adapter`. Raises OSError, ValueError (Unfit is one)."""
    return typed(adapter, json_value(read_bytes(path, limit)))


def shown(value: Any) -> str:
    """An outside value for a message: its repr, cut to about SHOWN characters."""
    try:
        return _repr.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__} that is too large"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two blocks of plain values, key by key; '' for nothing."""
    return ", ".join(
        f"{shown(key)[1:-1]}: {shown(before.get(key))} -> {shown(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if json.dumps(before.get(key), sort_keys=True) != json.dumps(now.get(key), sort_keys=True)
    )


def within(seconds: float, call: Callable[[], T], what: str = "it") -> T:
    """The result of `call()`. Raises TimeoutError after `seconds`, and abandons the thread in which it hangs."""
    results: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="ftp-within", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not results:
        raise TimeoutError(f"{what} did not answer within {seconds:g} s")
    return results[0]
