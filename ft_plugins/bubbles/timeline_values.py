"""One rank's iteration and what is planned in it, as plain values for an event, from which a picture is drawn.

    spans     [kind, begin, end]            forward, backward, update, reduce: in order
    bubbles   [index, begin, end]
    windows   [bubble, begin, end, bytes]   what may go in them, in any iteration; of several bubbles after one span
                                            `bubble` is the first, under which a gate counts all that goes there

Invariant: bounded, however long the schedule is: of more than `MOST` of a kind the first ones, and how many were left
out. Times in seconds since the iteration began, to ten microseconds.

In: a timeline, its bubbles, the plan of its rank. Out: fields of an event; `Row` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..model.timeline import COMPUTE, Bubble, Kind, Timeline
from .plan import SenderPlan

MOST = 512
_DIGITS = 5
_SHOWN = COMPUTE | {Kind.REDUCE}


@dataclass(frozen=True)
class Window:
    """A time in which so many bytes may go."""

    bubble: int
    begin: float
    end: float
    nbytes: int


@dataclass(frozen=True)
class Row:
    """A rank's iteration, as it was told."""

    rank: int
    seconds: float
    spans: tuple[tuple[Kind, float, float], ...]
    bubbles: tuple[tuple[int, float, float], ...]
    windows: tuple[Window, ...]
    nbytes: int  # of its copy
    receiver: int
    reason: str = ""  # why no bubble carries it

    @classmethod
    def read(cls, rank: int, fields: Mapping[str, Any]) -> Row:
        """What `shown` has made."""
        return cls(
            rank,
            fields["seconds"],
            tuple((Kind(kind), begin, end) for kind, begin, end in fields["spans"]),
            tuple((index, begin, end) for index, begin, end in fields["bubbles"]),
            tuple(Window(*window) for window in fields["windows"]),
            fields["bytes"],
            fields["receiver"],
            fields["reason"],
        )


def shown(timeline: Timeline, bubbles: Sequence[Bubble], plan: SenderPlan) -> dict[str, Any]:
    """What an event says of it."""
    spans = [
        [span.kind.value, round(span.begin, _DIGITS), round(span.end, _DIGITS)]
        for span in timeline.spans
        if span.kind in _SHOWN
    ]
    idle = [[one.index, round(one.begin, _DIGITS), round(one.end, _DIGITS)] for one in bubbles]
    counted = {one.after: one.bubble for one in reversed(plan.every)}
    windows = [
        [
            counted[one.after], *(round(timeline.opens(one.after) + at, _DIGITS) for at in (one.begin, one.deadline)),
            one.nbytes,
        ]
        for one in plan.every
    ]  # fmt: skip
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
