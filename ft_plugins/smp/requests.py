"""Requests to an SMP as types: every field is there, of its kind and within its range, or a ProtocolError says which is
not.

In: a message of `protocol`, a map of plain values. Out: frozen dataclasses, numbers of seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter

from ..errors import ProtocolError
from ..intake import Address, Count, Port, Seconds, Unfit, typed
from ..snapshot.slots import Version
from .readers import read_version

Endpoint = tuple[Address, Port]
Key = tuple[Count, Count, Count]  # section, stripe, which
Exponent = Annotated[int, Field(strict=True, ge=0, lt=255)]
OfVersion = Annotated[Version, BeforeValidator(read_version)]

T = TypeVar("T")


@dataclass(frozen=True)
class Rebuild:
    """What it takes to put a slot back together: the node that has it whole, or who holds what lay at each position."""

    version: OfVersion
    holders: tuple[tuple[Count, Address, Port], ...]
    lost: tuple[Count, ...]
    source: Endpoint | None = None


@dataclass(frozen=True)
class Begin:
    """A sender asks what of its part is here: for which nodes of which sections, of which ranks."""

    version: OfVersion
    nodes: tuple[tuple[Count, Count], ...]
    ranks: tuple[Count, ...]


@dataclass(frozen=True)
class Take:
    """A frame of a node's data for a parity block."""

    version: OfVersion
    key: Key
    node: Count
    at: Count
    exponent: Exponent


@dataclass(frozen=True)
class Copy:
    """A part of a rank's copy."""

    version: OfVersion
    rank: Count
    at: Count
    total: Count


@dataclass(frozen=True)
class ReadWhole:
    """A copy, or small state and digests of a slot, from `offset` on."""

    version: OfVersion
    rank: Count
    offset: Count


@dataclass(frozen=True)
class ReadParity:
    """Bytes of a parity block."""

    version: OfVersion
    key: Key


REBUILD, BEGIN, TAKE, COPY = TypeAdapter(Rebuild), TypeAdapter(Begin), TypeAdapter(Take), TypeAdapter(Copy)
READ_WHOLE, READ_PARITY = TypeAdapter(ReadWhole), TypeAdapter(ReadParity)
ADDRESS = TypeAdapter(Address)
VERSION, ENDPOINT, ENDPOINTS = TypeAdapter(OfVersion), TypeAdapter(Endpoint), TypeAdapter(tuple[Endpoint, ...])
_SECONDS = TypeAdapter(Seconds)


def read(adapter: TypeAdapter[T], message: dict[str, Any]) -> T:
    """The fields of a request. Raises ProtocolError."""
    try:
        return typed(adapter, message)
    except Unfit as error:
        raise ProtocolError(f"{message.get('do')}: {error}") from error


def field(adapter: TypeAdapter[T], message: dict[str, Any], name: str) -> T:
    """One field of a request. Raises ProtocolError."""
    try:
        return typed(adapter, message.get(name))
    except Unfit as error:
        raise ProtocolError(f"{message.get('do')}: field '{name}': {error}") from error


def seconds(message: dict[str, Any], name: str) -> float:
    """A field that says how long. Raises ProtocolError."""
    return field(_SECONDS, message, name)
