"""Messages between neighbours in the tree of SMPs, on the connections that `join` requests have opened.

Invariant: bounded, and parsed completely before use. No message has an answer of its own.

    up     {"do": "summary", "covered": bitmap, "begun": n, "versions": seven, "lost": [...], "stall": stall}
           | {"do": "leave"}
    down   {"do": "announce", "exchange": version, "committed": version, "lost": [...], "stall": stall}
    stall  null | [iteration, waits, edges, rank, phase, position, even, patient]

In, out: `Summary`, `Announcement`; messages of `protocol`, maps of plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ...base.intake import Count, Unfit, parsed, shown
from ...errors import ProtocolError
from ...model.progress import WorkPhase
from ...transport.protocol import packed
from ..watch.hang import Stall
from .agreement import LOST_LIMIT, Announcement, ExchangeDecision, Summary
from .protection import MaybeVersion
from .standstill import Behind, Lack

MESSAGE_LIMIT = 1 << 14  # bytes of a message: a bitmap of all nodes, and the lost positions
_BITMAP = 1 << 13  # bytes: 65,536 nodes


def _integer(value: object) -> object:
    if type(value) is not int:
        raise Unfit("expected an integer")
    return value


Integer = BeforeValidator(_integer)
Number = Annotated[int, Integer, Field(ge=0, lt=1 << 32)]
Position = Annotated[int, Integer, Field(ge=0, lt=8 * _BITMAP)]
Bit = Annotated[bool, Integer]
Phase = Annotated[WorkPhase, Integer]
Missing = Annotated[Lack, Integer]
StallNumbers = tuple[Number, Bit, Number, Number, Phase, Number, Bit, Bit]  # the fields of a `Stall`
BehindNumbers = tuple[Missing, Position, Position]  # of a `Behind`
Lost = Annotated[tuple[Count, ...], Field(max_length=LOST_LIMIT)]
Versions = Annotated[tuple[MaybeVersion, ...], Field(min_length=7, max_length=7)]


@dataclass(frozen=True)
class _Up:
    covered: Annotated[bytes, Field(strict=True, max_length=_BITMAP)]
    begun: Count
    versions: Versions
    lost: Lost
    stall: StallNumbers | None
    behind: BehindNumbers | None


@dataclass(frozen=True)
class _Down:
    exchange: MaybeVersion
    committed: MaybeVersion
    lost: Lost
    stall: StallNumbers | None
    behind: BehindNumbers | None


LEAVE: Mapping[str, Any] = {"do": "leave"}  # this child reports to another node from now on


def packed_summary(summary: Summary) -> dict[str, Any]:
    """A summary as a message."""
    versions = (
        summary.exchange, summary.missed, summary.least_encoded, summary.newest_encoded, summary.least_committed,
        summary.newest_committed, summary.late,
    )  # fmt: skip
    covered = summary.covered.to_bytes((summary.covered.bit_length() + 7) // 8, "little")
    return {
        "do": "summary", "covered": covered, "begun": summary.begun, "versions": list(map(packed, versions)),
        "lost": list(summary.lost), "stall": _packed(summary.stall), "behind": _packed(summary.behind),
    }  # fmt: skip


def from_child(message: Mapping[str, Any]) -> Summary | None:
    """A summary from a child; None if it leaves. Raises ProtocolError."""
    if message.get("do") == "leave":
        return None
    if message.get("do") != "summary":
        raise ProtocolError(f"unknown message of a child: {shown(message.get('do'))}")
    up = parsed(_Up, message, "summary")
    exchange, missed, least_encoded, newest_encoded, least_committed, newest_committed, late = up.versions
    return Summary(
        int.from_bytes(up.covered, "little"), up.begun, exchange, missed, least_encoded, newest_encoded,
        least_committed, newest_committed, up.lost, late, *_read(up),
    )  # fmt: skip


def packed_announcement(announcement: Announcement) -> dict[str, Any]:
    """An announcement as a message."""
    decision = announcement.decision
    return {
        "do": "announce", "exchange": packed(decision.exchange), "committed": packed(decision.committed),
        "lost": list(announcement.lost), "stall": _packed(announcement.stall),
        "behind": _packed(announcement.behind),
    }  # fmt: skip


def from_parent(message: Mapping[str, Any]) -> Announcement:
    """An announcement of the parent. Raises ProtocolError."""
    if message.get("do") != "announce":
        raise ProtocolError(f"unknown message of a parent: {shown(message.get('do'))}")
    down = parsed(_Down, message, "announce")
    return Announcement(ExchangeDecision(down.exchange, down.committed), down.lost, *_read(down))


def _packed(what: Stall | Behind | None) -> list[int] | None:
    return None if what is None else list(map(int, astuple(what)))


def _read(message: _Up | _Down) -> tuple[Stall | None, Behind | None]:
    return Stall(*message.stall) if message.stall else None, Behind(*message.behind) if message.behind else None
