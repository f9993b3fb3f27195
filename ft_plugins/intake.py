"""Values from outside this process: bounded in bytes, nesting and time, and checked against a type.

Invariant: every bound holds before what it bounds is used. What does not fit is `Unfit`, whatever it was that came;
the reader turns that into the project's error, which names the file or request and says what to do.

In: paths, bytes, plain values, calls that may hang. Out: values of the type that the reader names. Messages of other
processes are read by `parsed`, whole and once.
"""

from __future__ import annotations

import functools
import json
import os
import reprlib
import stat
import threading
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from .errors import ProtocolError

FILE_LIMIT = 1 << 20  # bytes of a small file: a thousand times what most of them hold
DEPTH = 32  # of containers in each other; what this project writes has less than ten
SHOWN = 80  # characters of a foreign value in a message
SECONDS_LIMIT = 1e9  # thirty years; a thread cannot wait for ten times as long

Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Word = Annotated[int, Field(strict=True, ge=0, lt=1 << 64)]  # a digest, a number in shared memory
Port = Annotated[int, Field(strict=True, ge=0, lt=1 << 16)]
Text = Annotated[str, Field(strict=True, max_length=4096)]
Address = Annotated[Text, AfterValidator(lambda text: str(ip_address(text)) and text)]  # no name: nothing is looked up
Seconds = Annotated[float, Field(strict=True, ge=0, le=SECONDS_LIMIT, allow_inf_nan=False)]

Flag = Annotated[bool, Field(strict=True)]

T = TypeVar("T")

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = SHOWN


class Unfit(ValueError):
    """What came is not what its reader expects."""


def open_regular(path: Path) -> int:
    """A descriptor to read a regular file with. Never waits, as for a pipe's writer. Raises OSError, Unfit."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unfit("it is no regular file")
    return descriptor


def read_bytes(path: Path, limit: int = FILE_LIMIT) -> bytes:
    """The content of a regular file of at most `limit` bytes. Raises OSError, Unfit."""
    with open(open_regular(path), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise Unfit(f"it has more than {limit} bytes")
    return content


def json_value(text: bytes | str, once: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """JSON as plain values; `once` makes an object of its pairs. Raises Unfit, also where it is nested deeper than
    DEPTH; JSONDecodeError, which is a ValueError as well, where it is no JSON at all."""
    try:
        value = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # no text; a number of thousands of digits
        raise Unfit(_nested() if isinstance(error, RecursionError) else str(error)) from error
    require_shallow(value)
    return value


def require_shallow(value: Any) -> None:
    """Raises Unfit for plain values that are nested deeper than DEPTH."""
    level = _containers([value])
    for _ in range(DEPTH):
        if not level:
            return
        level = [part for whole in level for part in _containers(whole)]
    if level:
        raise Unfit(_nested())


def _containers(whole: Any) -> list[Any]:
    """What `whole` holds that can hold something itself."""
    parts = whole.values() if type(whole) is dict else whole
    return [part for part in parts if type(part) in (dict, list)]


def _nested() -> str:
    return f"it is nested more than {DEPTH} deep"


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def typed(kind: TypeAdapter[T] | type[T], value: Any) -> T:
    """`value` as a dataclass, or as the type of an adapter. Raises Unfit, which names the place in it."""
    adapter: TypeAdapter[T] = kind if isinstance(kind, TypeAdapter) else _adapter(cast(Any, kind))
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(step)[:SHOWN] for step in problem["loc"])
        raise Unfit(f"{place or 'it'}: {problem['msg']}, found {shown(problem['input'])}") from error


def parsed(kind: type[T], message: Any, name: str = "") -> T:
    """A message from another process as a dataclass; errors call it `name`. Raises ProtocolError."""
    try:
        return typed(kind, message)
    except Unfit as error:
        raise ProtocolError(f"{name or kind.__name__}: {error}") from error


def read_json(path: Path, adapter: TypeAdapter[T], limit: int = FILE_LIMIT) -> T:
    """A file of JSON as the type of `adapter`. Raises OSError, ValueError (Unfit is one)."""
    return typed(adapter, json_value(read_bytes(path, limit)))


def shown(value: Any) -> str:
    """A foreign value for a message: its repr, cut to about SHOWN characters."""
    try:
        return _repr.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__} that is too large"


def within(seconds: float, call: Callable[[], T], what: str = "it") -> T:
    """`call()`, or TimeoutError after `seconds`: then the thread that it hangs in is left behind."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="ftp-within", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"{what} did not answer within {seconds:g} s")
    return found[0]
