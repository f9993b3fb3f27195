"""Field types of the rendezvous' requests, replies and files. Pure.

Invariant: a value that passes is short, printable and in a range that leaves room to count on.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from ..config.schema import NAME_PATTERN
from ..errors import ConfigError
from .endpoint import Endpoint

LIMIT = 1 << 32  # what counts rounds, ranks and generations comes nowhere near
PLAUSIBLE = 1 << 30  # of rounds that a node says it has seen: one a second for 34 years
REMEMBERED = 1 << 29  # of rounds in a file, so that nodes that go on from there are still plausible to others
MOST_NODES = 1 << 13  # that take part in a round, or wait as spares; twice as many as one port has connections


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
