"""How long the messages between stages are under way, as told by those that have waited for them. Pure.

    stage 1   |forward 0   |.......|forward 1 ...
    stage 2   .................|forward 0 ...         stage 2 has waited for what stage 1 had computed
                           |---|                      so long was the message on its way

While it is, the link is not idle, though both stages are: what a copy sends then delays the message, or the word that
a part of it has come. On a link that has become slow this is most of such a bubble. So BAFT reserves it, as the paper
does (section 4.2.2, figure 6); here it is measured, for each way from a rank to a neighbour, in the median: what
one message takes longer may be its ranks', a host that was busy. One that nobody has waited for is taken to be under
way as long.

A message is taken to have left when the stage that computed it was last through with a pass before it arrived: also
where a schedule sends the output of one pass after another one.

Invariant: never longer than the waits for it, in the median. Where ranks do not agree, for medians of jittering passes
are no iteration that ever was, and a message would have arrived before it was sent, it took no time. What is left free
of a bubble lies in it, and for messages is half of it at least: on a crowded machine all of a short one may look like a
message.

In: timelines, by rank, of those that are asked for and of the stages beside theirs; which ranks are a pipeline. Out:
`Traffic` by rank; bubbles without it.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..model.timeline import COMPUTE, LEAST, Bubble, Kind, Timeline, gc_paused
from .windows import Reserve

_MOST = 0.25  # of a bubble, at each of its ends
_STEP = {Kind.FORWARD: -1, Kind.BACKWARD: 1}  # from a virtual stage to the one that it waits for


@dataclass(frozen=True)
class Traffic:
    """The messages of one rank: seconds that the input of a pass was under way when it began, and that its output is,
    by the place of the pass among all spans of the timeline. What is not known is left out."""

    received: dict[int, float] = field(default_factory=dict)
    sent: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of a message that it waits for, the median; 0 where it waits for none."""
        return statistics.median(self.received.values()) if self.received else 0.0


class _Message(NamedTuple):
    """What the pass `span` of the rank at `place` needs, and `computed` at `source` has made."""

    place: int
    span: int
    source: int
    computed: int


@gc_paused()
def traffic(
    timelines: Sequence[Timeline], pipelines: Sequence[Sequence[int]], ranks: Collection[int] | None = None
) -> dict[int, Traffic]:
    """The messages of `ranks`, or of each rank, of the `pipelines`: ranks in the order of their stages.

    `timelines` by rank: those of `ranks` and of the stages beside theirs are looked at. A rank's chunks are the virtual
    stages pp, pp + PP, pp + 2 PP, ... (`Topology.stages`), and each rank has as many.
    """
    found: dict[int, Traffic] = {}
    for pipeline in pipelines:
        wanted = {place for place, rank in enumerate(pipeline) if ranks is None or rank in ranks}
        beside = {(place + step) % len(pipeline) for place in wanted for step in (-1, 0, 1)}
        lines = {place: timelines[pipeline[place]] for place in sorted(beside)}
        of_places = _of_pipeline(lines, wanted, len(pipeline))
        found |= {pipeline[place]: of_places[place] for place in sorted(wanted)}
    return found


def without_messages(bubbles: Sequence[Bubble], timeline: Timeline, own: Traffic, reserve: Reserve) -> tuple[Bubble, ...]:
    """The bubbles without the times at their ends in which messages are under way, as far as those are longer than
    `reserve`, which is kept in any case."""
    spans, found = timeline.spans, []
    for bubble in bubbles:
        before, begin, end = bubble.after, bubble.begin, bubble.end
        after, most = before + 1, _MOST * (end - begin)
        while after < len(spans) and spans[after].kind not in COMPUTE:
            after += 1
        # where a reduction lies between a pass and the bubble, its message is through
        sent = own.sent.get(before, 0.0) if before >= 0 and spans[before].end == begin else 0.0
        received = own.received.get(after, 0.0) if after < len(spans) and spans[after].begin == end else 0.0
        begin = min(end, begin + max(0.0, min(most, sent) - reserve.begin))
        found.append(Bubble(bubble.index, begin, max(begin, end - max(0.0, min(most, received) - reserve.end)), before))
    return tuple(found)


def _of_pipeline(lines: Mapping[int, Timeline], wanted: Collection[int], stages: int) -> dict[int, Traffic]:
    """By place in a pipeline of so many stages; complete for the `wanted` places."""
    ends = {place: [span.end for span in line.spans if span.kind in COMPUTE] for place, line in lines.items()}
    waits: dict[tuple[int, int], list[tuple[_Message, float]]] = defaultdict(list)  # by source and place
    sends: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    for message, waited in _messages(lines, wanted, stages):
        way = message.source, message.place
        sends[way].append(message)
        if waited >= LEAST:
            arrived = lines[message.place].spans[message.span].begin
            theirs, computed = ends[message.source], lines[message.source].spans[message.computed].end
            left = theirs[bisect_right(theirs, arrived) - 1] if computed <= arrived else arrived
            waits[way].append((message, min(waited, arrived - left)))
    found = {place: Traffic() for place in lines}
    for way, met in waits.items():
        took = statistics.median(seconds for _, seconds in met)
        found[way[1]].received.update({message.span: took for message, _ in met})
        found[way[0]].sent.update({message.computed: took for message in sends[way]})
    return found


def _messages(
    lines: Mapping[int, Timeline], wanted: Collection[int], stages: int
) -> Iterator[tuple[_Message, float]]:
    """Each message from or to a `wanted` place, and how long the rank that needs it was idle before."""
    chunks = 1 + max((span.chunk for line in lines.values() for span in line.spans), default=0)
    passes = {}
    for place, line in lines.items():
        spans = reversed(list(enumerate(line.spans)))
        # backwards: of a backward pass in two parts, the first one is what others wait for
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
