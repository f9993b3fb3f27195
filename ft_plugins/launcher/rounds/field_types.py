"""Field types of the rendezvous' requests, replies and files. Pure.

Invariant: a value that passes is short, printable and in a range that leaves room to increment it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from ...base.run_directories import NAME_PATTERN
from ...errors import ConfigError, printable
from ..rendezvous.endpoint import Endpoint

LIMIT = 1 << 32  # rounds, ranks and generations stay far below
PLAUSIBLE = 1 << 30  # maximum for a round that another node reports: one a second for 34 years
REMEMBERED = 1 << 29  # maximum for a round in a file: other nodes still accept the rounds that follow
REASON_LIMIT = 1000  # characters
MOST_NODES = 1 << 13  # in a round, or waiting as spares; twice as many as one port has connections


def reason_text(text: str) -> str:
    """`text` as a `Reason`: one line, printable, cut."""
    return printable(" ".join(text.split()))[:REASON_LIMIT]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected printable characters")
    return text


def _endpoint(text: str) -> str:
    try:
        Endpoint.read(_printable(text))
    except ConfigError as error:
        raise ValueError("expected host:port") from error
    return text


Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Token = Annotated[str, StringConstraints(pattern=r"^[\w.-]{1,64}$")]
EndpointText = Annotated[str, StringConstraints(max_length=300), AfterValidator(_endpoint)]
Reason = Annotated[str, StringConstraints(max_length=REASON_LIMIT), AfterValidator(_printable)]
Count = Annotated[int, Field(strict=True, ge=0, le=LIMIT)]
Reported = Annotated[int, Field(strict=True, ge=0, le=PLAUSIBLE)]  # a round or generation, by another node
Wait = Annotated[float, Field(strict=True, ge=0, le=60, allow_inf_nan=False)]  # seconds
Workers = Annotated[int, Field(strict=True, ge=0, le=1 << 16)]  # of one node; thousands of nodes stay below LIMIT
