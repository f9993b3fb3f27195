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
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ...base.intake import Count, Unfit, parsed, shown
from ...errors import ProtocolError
from ...model.progress import WorkPhase
from ...transport.protocol import packed
from ..exchange.packed_version import MaybeVersion
from ..watch.hang import Stall
from .agreement import LOST_LIMIT, Announcement, ExchangeDecision, Summary
from .standstill import Behind, Lack

MESSAGE_LIMIT = 1 << 14  # bytes of a message: a bitmap of all nodes, and the lost positions
_BITMAP = 1 << 13  # bytes: 65,536 nodes

_NUMBERS = 8  # of a stall


def _stall(value: Any) -> Stall | None:
    """A stall. Raises Unfit."""
    if value is None or isinstance(value, Stall):
        return value
    numbers = value if isinstance(value, (list, tuple)) else ()
    if len(numbers) != _NUMBERS or not all(type(one) is int and 0 <= one < 1 << 32 for one in numbers):
        raise Unfit(f"expected {_NUMBERS} numbers")
    iteration, waits, edges, rank, phase, position, even, patient = numbers
    if phase not in list(WorkPhase) or max(waits, even, patient) > 1:
        raise Unfit(f"unknown phase {phase}")
    return Stall(iteration, bool(waits), edges, rank, WorkPhase(phase), position, bool(even), bool(patient))


def _behind(value: Any) -> Behind | None:
    """What an exchange lacks. Raises Unfit."""
    if value is None or isinstance(value, Behind):
        return value
    numbers = value if isinstance(value, (list, tuple)) else ()
    if len(numbers) != 3 or not all(type(one) is int and 0 <= one < 8 * _BITMAP for one in numbers):
        raise Unfit("expected a lack and two positions")
    if numbers[0] not in list(Lack):
        raise Unfit(f"unknown lack {numbers[0]}")
    return Behind(Lack(numbers[0]), numbers[1], numbers[2])


MaybeBehind = Annotated[Behind | None, BeforeValidator(_behind)]
MaybeStall = Annotated[Stall | None, BeforeValidator(_stall)]
Lost = Annotated[tuple[Count, ...], Field(max_length=LOST_LIMIT)]
Versions = Annotated[tuple[MaybeVersion, ...], Field(min_length=7, max_length=7)]


@dataclass(frozen=True)
class _Up:
    covered: Annotated[bytes, Field(strict=True, max_length=_BITMAP)]
    begun: Count
    versions: Versions
    lost: Lost
    stall: MaybeStall
    behind: MaybeBehind


@dataclass(frozen=True)
class _Down:
    exchange: MaybeVersion
    committed: MaybeVersion
    lost: Lost
    stall: MaybeStall
    behind: MaybeBehind


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
        "lost": list(summary.lost), "stall": _packed(summary.stall), "behind": _packed_behind(summary.behind),
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
        least_committed, newest_committed, up.lost, late, up.stall, up.behind,
    )  # fmt: skip


def packed_announcement(announcement: Announcement) -> dict[str, Any]:
    """An announcement as a message."""
    decision = announcement.decision
    return {
        "do": "announce", "exchange": packed(decision.exchange), "committed": packed(decision.committed),
        "lost": list(announcement.lost), "stall": _packed(announcement.stall),
        "behind": _packed_behind(announcement.behind),
    }  # fmt: skip


def from_parent(message: Mapping[str, Any]) -> Announcement:
    """An announcement of the parent. Raises ProtocolError."""
    if message.get("do") != "announce":
        raise ProtocolError(f"unknown message of a parent: {shown(message.get('do'))}")
    down = parsed(_Down, message, "announce")
    return Announcement(ExchangeDecision(down.exchange, down.committed), down.lost, down.stall, down.behind)


def _packed(stall: Stall | None) -> list[int] | None:
    if stall is None:
        return None
    return [
        stall.iteration, int(stall.waits), stall.edges, stall.rank, int(stall.phase), stall.position, int(stall.even),
        int(stall.patient),
    ]  # fmt: skip


def _packed_behind(behind: Behind | None) -> list[int] | None:
    return None if behind is None else [int(behind.lack), behind.position, behind.target]
