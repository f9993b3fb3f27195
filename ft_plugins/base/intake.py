"""Read values from outside this process: bounded in bytes, nesting and time, and checked against a type.

Invariant: every bound is checked before the value is used. Any invalid value raises `Unfit`; the reader turns that into
an error that names the file or request and says what to do.

In: paths, bytes, plain values, calls that may hang. Out: values of a given type. `parsed` reads the messages of other
processes.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from ..errors import ProtocolError
from .outside_values import DEPTH as DEPTH
from .outside_values import FILE_LIMIT, SHOWN, Unfit, json_value, read_bytes, shown
from .outside_values import open_regular as open_regular
from .outside_values import require_shallow as require_shallow

SECONDS_LIMIT = 1e9  # thirty years; a thread cannot wait for ten times as long

Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Word = Annotated[int, Field(strict=True, ge=0, lt=1 << 64)]  # a digest or a number in shared memory
Port = Annotated[int, Field(strict=True, ge=0, lt=1 << 16)]
Text = Annotated[str, Field(strict=True, max_length=4096)]
RunIdentity = Annotated[str, Field(strict=True, pattern="^([0-9a-f]{32})?$")]  # of a run; '' if unknown
Address = Annotated[Text, AfterValidator(lambda text: str(ip_address(text)) and text)]  # no name to resolve
Seconds = Annotated[float, Field(strict=True, ge=0, le=SECONDS_LIMIT, allow_inf_nan=False)]

Flag = Annotated[bool, Field(strict=True)]

T = TypeVar("T")

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
