"""Timelines as they travel: plain values, and of a whole job unpacked one by one as they are asked for.

A rank looks at those of the nodes that share its links, and of the stages beside theirs. To make objects of all spans
of a thousand ranks would take seconds, in which all of them stand still.

Invariant: what is unpacked is what was packed. In: timelines. Out: plain values, and timelines again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import msgpack

from ..model.timeline import Kind, Span, Timeline

_KINDS = tuple(Kind)


def pack(timeline: Timeline) -> list[object]:
    """A timeline as plain values."""
    spans = [[_KINDS.index(one.kind), one.begin, one.end, one.microbatch, one.chunk] for one in timeline.spans]
    return [timeline.rank, timeline.seconds, spans, list(timeline.memory), list(timeline.leads)]


def unpack(values: Sequence[object]) -> Timeline:
    """The timeline that was packed."""
    rank, seconds, spans, memory, leads = values
    found = tuple(Span(_KINDS[kind], *rest) for kind, *rest in spans)  # type: ignore[attr-defined]
    return Timeline(rank, seconds, found, tuple(memory), tuple(leads))  # type: ignore[arg-type]


class Packed(Sequence[Timeline]):
    """Timelines by rank, of which only those that are asked for are unpacked, each once."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        """What `pack` has made of each, in MessagePack."""
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
            self.unpacked[place] = unpack(msgpack.unpackb(self._parts[place], use_list=False))
        return self.unpacked[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # it would unpack all of them
