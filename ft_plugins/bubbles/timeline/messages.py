"""Estimate how long messages between pipeline stages take, from the waits for them in timelines. Pure.

    stage 1   |forward 0   |.......|forward 1 ...
    stage 2   .................|forward 0 ...         stage 2 waits for the output of stage 1
                           |---|                      time of the message

Meanwhile both stages are idle but the link is not: a copy sent then delays the message or its acknowledgement. On a
slow link this is most of such a bubble. So BAFT reserves it, as in the paper (section 4.2.2, figure 6), but measured:
the median for each direction between a rank and a neighbour, because a single long message may be due to a busy host.
A message that no rank waits for is assumed to take that median too.

A message is assumed to leave at the last end of a pass on its sender before it arrives, even if the schedule sends the
output of one pass after another pass.

Invariant: never longer than the waits for it, in the median. Timelines are medians of jittering passes, so a message
may seem to arrive before it was sent; its time is 0 then. Messages take at most half of a bubble: on a crowded machine
all of a short one may look like a message.

In: timelines, by rank, of the requested ranks and their neighbouring stages; the ranks of each pipeline. Out: `Traffic`
by rank; bubbles without it.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...model.timeline import COMPUTE, LEAST, Bubble, Kind, Timeline, gc_paused
from ..windows import Reserve

_MOST = 0.25  # largest part of a bubble for messages, at each end
_STEP = {Kind.FORWARD: -1, Kind.BACKWARD: 1}  # from a virtual stage to the one it waits for


@dataclass(frozen=True)
class Traffic:
    """Seconds of the messages of one rank: of the input and of the output of each pass, by the index of the pass among
    all spans of the timeline. Unknown ones are left out."""

    received: dict[int, float] = field(default_factory=dict)
    sent: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The median of the messages that the rank waits for; 0 if there are none."""
        return statistics.median(self.received.values()) if self.received else 0.0


class _Message(NamedTuple):
    """The input of pass `span` at `place` in the pipeline, which is the output of pass `computed` at `source`."""

    place: int
    span: int
    source: int
    computed: int


@gc_paused()
def traffic(
    timelines: Sequence[Timeline], pipelines: Sequence[Sequence[int]], ranks: Collection[int] | None = None
) -> dict[int, Traffic]:
    """The messages of `ranks`, or of all, in `pipelines`: each the ranks in the order of their stages.

    `timelines` by rank; only those of `ranks` and their neighbouring stages are read. A rank's chunks are the virtual
    stages pp, pp + PP, pp + 2 PP, ...; all ranks have equally many.
    """
    by_rank: dict[int, Traffic] = {}
    for pipeline in pipelines:
        wanted = {place for place, rank in enumerate(pipeline) if ranks is None or rank in ranks}
        needed = {(place + step) % len(pipeline) for place in wanted for step in (-1, 0, 1)}
        lines = {place: timelines[pipeline[place]] for place in sorted(needed)}
        by_place = _of_pipeline(lines, wanted, len(pipeline))
        by_rank |= {pipeline[place]: by_place[place] for place in sorted(wanted)}
    return by_rank


def without_messages(
    bubbles: Sequence[Bubble], timeline: Timeline, own: Traffic, reserve: Reserve
) -> tuple[Bubble, ...]:
    """The bubbles without the time of messages at both ends, as far as it exceeds `reserve`, which is taken later."""
    spans, free = timeline.spans, []
    for bubble in bubbles:
        before, begin, end = bubble.after, bubble.begin, bubble.end
        after, most = before + 1, _MOST * (end - begin)
        while after < len(spans) and spans[after].kind not in COMPUTE:
            after += 1
        # if a reduction lies between a pass and the bubble, the message is already through
        sent = own.sent.get(before, 0.0) if before >= 0 and spans[before].end == begin else 0.0
        received = own.received.get(after, 0.0) if after < len(spans) and spans[after].begin == end else 0.0
        begin = min(end, begin + max(0.0, min(most, sent) - reserve.begin))
        free.append(Bubble(bubble.index, begin, max(begin, end - max(0.0, min(most, received) - reserve.end)), before))
    return tuple(free)


def _of_pipeline(lines: Mapping[int, Timeline], wanted: Collection[int], stages: int) -> dict[int, Traffic]:
    """Traffic by place in a pipeline of `stages`; complete for the `wanted` places."""
    ends = {place: [span.end for span in line.spans if span.kind in COMPUTE] for place, line in lines.items()}
    waits: dict[tuple[int, int], list[tuple[_Message, float]]] = defaultdict(list)  # by source and place
    sends: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    for message, waited in _messages(lines, wanted, stages):
        way = message.source, message.place
        sends[way].append(message)
        if waited >= LEAST:
            arrived = lines[message.place].spans[message.span].begin
            source_ends, computed = ends[message.source], lines[message.source].spans[message.computed].end
            left = source_ends[bisect_right(source_ends, arrived) - 1] if computed <= arrived else arrived
            waits[way].append((message, min(waited, arrived - left)))
    by_place = {place: Traffic() for place in lines}
    for way, met in waits.items():
        took = statistics.median(seconds for _, seconds in met)
        by_place[way[1]].received.update({message.span: took for message, _ in met})
        by_place[way[0]].sent.update({message.computed: took for message in sends[way]})
    return by_place


def _messages(lines: Mapping[int, Timeline], wanted: Collection[int], stages: int) -> Iterator[tuple[_Message, float]]:
    """Each message from or to a `wanted` place, and how long its receiver was idle before."""
    chunks = 1 + max((span.chunk for line in lines.values() for span in line.spans), default=0)
    passes = {}
    for place, line in lines.items():
        spans = reversed(list(enumerate(line.spans)))
        # reversed: of a backward pass in two parts, other ranks wait for the first
        passes[place] = {(s.kind, s.microbatch, s.chunk): index for index, s in spans if s.kind in _STEP}
    for place, line in lines.items():
        idle_since = 0.0
        for index, span in enumerate(line.spans):
            if span.kind not in COMPUTE:
                continue
            waited, idle_since = span.begin - idle_since, span.end
            virtual = span.chunk * stages + place + _STEP.get(span.kind, 0)
            chunk, source = divmod(virtual, stages)
            if span.kind in _STEP and 0 <= chunk < chunks and (place in wanted or source in wanted):
                computed = passes[source].get((span.kind, span.microbatch, chunk))
                if computed is not None and passes[place][span.kind, span.microbatch, span.chunk] == index:
                    yield _Message(place, index, source, computed), waited
