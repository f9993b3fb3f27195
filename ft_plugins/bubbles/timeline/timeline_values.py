"""Timelines as plain values: packed for other ranks, and for the event from which a picture is drawn.

Packed timelines of a job are unpacked one by one on demand: a rank needs those of the nodes that share its links, and
of their neighbouring stages, and may have no others. Unpacking a thousand ranks would stall all of them for seconds.
Packing is lossless.

In an event:

    spans     [kind, begin, end]            forward, backward, update, reduce: in order
    bubbles   [index, begin, end]
    windows   [bubble, begin, end, bytes]   bytes that may be sent, in any iteration; `bubble`: of several after one
                                            span the first; a gate counts all bytes sent after that span under it

The first `MOST` of each list, and how many were left out, so the event is bounded. Times in seconds since the iteration
began, to ten microseconds. `Row` reads it.

In: timelines; bubbles and the plan of a rank. Out: plain values, and timelines or rows again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import msgpack

from ...errors import FtError
from ...model.timeline import COMPUTE, Bubble, Kind, Span, Timeline
from ..bubble_plan import SenderPlan

_KINDS = tuple(Kind)


def pack(timeline: Timeline) -> list[object]:
    spans = [[_KINDS.index(one.kind), one.begin, one.end, one.microbatch, one.chunk] for one in timeline.spans]
    return [timeline.rank, timeline.seconds, spans, list(timeline.memory), list(timeline.leads)]


def unpack(values: Sequence[object]) -> Timeline:
    rank, seconds, spans, memory, leads = values
    unpacked = tuple(Span(_KINDS[kind], *rest) for kind, *rest in spans)  # type: ignore[attr-defined]
    return Timeline(rank, seconds, unpacked, tuple(memory), tuple(leads))  # type: ignore[arg-type]


class Packed(Sequence[Timeline]):
    """Timelines by rank, each unpacked once, when first read."""

    def __init__(self, parts: Sequence[bytes | None]) -> None:
        """`parts`: the result of `pack` for each rank, in MessagePack; None for a rank whose timeline is not here:
        reading it raises FtError."""
        self._parts = parts
        self.unpacked: dict[int, Timeline] = {}

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, at: int) -> Timeline: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Timeline, ...]: ...
    def __getitem__(self, at: int | slice) -> Timeline | tuple[Timeline, ...]:
        if isinstance(at, slice):
            return tuple(self[place] for place in range(*at.indices(len(self))))
        place = range(len(self))[at]
        if place not in self.unpacked:
            if (part := self._parts[place]) is None:
                raise FtError(f"the timeline of rank {place} is not here: no plan of this rank reads it")
            self.unpacked[place] = unpack(msgpack.unpackb(part, use_list=False))
        return self.unpacked[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # it would unpack all of them


MOST = 512
_DIGITS = 5
_SHOWN = COMPUTE | {Kind.REDUCE}


@dataclass(frozen=True)
class Window:
    """A time in which `nbytes` may be sent."""

    bubble: int
    begin: float
    end: float
    nbytes: int


@dataclass(frozen=True)
class Row:
    """A rank's iteration, as read from its event."""

    rank: int
    seconds: float
    spans: tuple[tuple[Kind, float, float], ...]
    bubbles: tuple[tuple[int, float, float], ...]
    windows: tuple[Window, ...]
    nbytes: int  # of its copy
    receiver: int
    reason: str = ""  # why bubbles do not carry it; '' if they do

    @classmethod
    def read(cls, rank: int, fields: Mapping[str, Any]) -> Row:
        """The row in the fields that `shown` made."""
        return cls(
            rank, fields["seconds"], tuple((Kind(kind), begin, end) for kind, begin, end in fields["spans"]),
            tuple((index, begin, end) for index, begin, end in fields["bubbles"]),
            tuple(Window(*window) for window in fields["windows"]), fields["bytes"], fields["receiver"],
            fields["reason"],
        )  # fmt: skip


def shown(timeline: Timeline, bubbles: Sequence[Bubble], plan: SenderPlan) -> dict[str, Any]:
    """The fields of the event: see the module."""
    spans = [
        [span.kind.value, round(span.begin, _DIGITS), round(span.end, _DIGITS)]
        for span in timeline.spans
        if span.kind in _SHOWN
    ]
    idle = [[one.index, round(one.begin, _DIGITS), round(one.end, _DIGITS)] for one in bubbles]
    first_bubble = {grant.after: grant.bubble for grant in reversed(plan.every)}
    windows = [
        [
            first_bubble[grant.after],
            *(round(timeline.opens_at(grant.after) + at, _DIGITS) for at in (grant.begin, grant.deadline)),
            grant.nbytes,
        ]
        for grant in plan.every
    ]
    return {
        "seconds": timeline.seconds,
        "spans": spans[:MOST],
        "bubbles": idle[:MOST],
        "windows": windows[:MOST],
        "left_out": sum(max(0, len(those) - MOST) for those in (spans, idle, windows)),
        "bytes": plan.transfer.nbytes,
        "receiver": plan.transfer.receiver,
        "reason": plan.reason,
    }
