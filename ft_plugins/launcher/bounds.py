"""What may stand in requests, replies and files of the rendezvous: the kinds of their fields. Pure.

Invariant: whatever passes is short, printable and in a range that leaves room to count on.

In: a dataclass of this package and plain values of a peer or a file. Out: the dataclass. Raises ProtocolError.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, StringConstraints, TypeAdapter, ValidationError

from ..config.schema import NAME_PATTERN
from ..errors import ConfigError, ProtocolError
from .endpoint import Endpoint

LIMIT = 1 << 32  # what counts rounds, ranks and generations comes nowhere near
PLAUSIBLE = 1 << 30  # of rounds that a node says it has seen: one a second for 34 years
REMEMBERED = 1 << 29  # of rounds in a file, so that nodes that go on from there are still plausible to others
MOST_NODES = 1 << 13  # that take part in a round, or wait as spares; twice as many as one port has connections

T = TypeVar("T")


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected printable characters")
    return text


def _place(text: str) -> str:
    try:
        Endpoint.read(_printable(text))
    except ConfigError as error:
        raise ValueError("expected host:port") from error
    return text


Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Token = Annotated[str, StringConstraints(pattern=r"^[\w.-]{1,64}$")]
Where = Annotated[str, StringConstraints(max_length=300), AfterValidator(_place)]
Reason = Annotated[str, StringConstraints(max_length=1000), AfterValidator(_printable)]
Count = Annotated[int, Field(strict=True, ge=0, le=LIMIT)]
Seen = Annotated[int, Field(strict=True, ge=0, le=PLAUSIBLE)]
Workers = Annotated[int, Field(strict=True, ge=0, le=1 << 16)]  # of one node; thousands of nodes stay below LIMIT
Flag = Annotated[bool, Field(strict=True)]


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read(kind: type[T], given: Any) -> T:
    """A dataclass of ours from a map. Raises ProtocolError."""
    try:
        known: Any = kind
        found: T = _adapter(known).validate_python(given)
        return found
    except ValidationError as error:
        first = error.errors(include_input=False, include_context=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ProtocolError(f"{kind.__name__}: {where}: {first['msg']}") from None
