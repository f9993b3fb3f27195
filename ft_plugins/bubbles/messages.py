"""How long a message between stages is under way, as told by those that have waited for one. Pure.

    stage 1   |forward 0   |.......|forward 1 ...
    stage 2   .................|forward 0 ...         stage 2 has waited for what stage 1 had computed
                           |---|                      so long was the message on its way

While it is, the link is not idle, though both stages are: what a copy sends then delays the message, or the word that
a part of it has come. On a link that has become slow this is most of such a bubble. So BAFT reserves it, as the paper
does (section 4.2.2, figure 6); here it is measured.

A message is taken to have left when the stage that computed it was last through with a pass before it arrived: also
where a schedule sends the output of one pass after another one. What has not been waited for tells nothing.

Invariant: never longer than a wait. Where ranks do not agree, for medians of jittering passes are no iteration that
ever was, and a message would have arrived before it was sent, it took no time.

In: the timelines of all ranks, which ranks are a pipeline. Out: seconds.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..model.timeline import COMPUTE, LEAST, Kind, Timeline

_STEP = {Kind.FORWARD: -1, Kind.BACKWARD: 1}  # from a virtual stage to the one that it waits for


def message_seconds(timelines: Sequence[Timeline], pipelines: Sequence[Sequence[int]]) -> float:
    """Of the slowest rank to be reached, what its messages take in the median; 0 where nobody waits for one.

    `timelines` by rank; `pipelines`: ranks in the order of their stages. A rank's chunks are the virtual stages pp,
    pp + PP, pp + 2 PP, ... as `Topology.stages` has them.
    """
    chunks = 1 + max((span.chunk for one in timelines for span in one.spans), default=0)
    found = []
    for pipeline in pipelines:
        stages = [_Passes.of(timelines[rank]) for rank in pipeline]
        for place, rank in enumerate(pipeline):
            took = list(_waits(timelines[rank], place, stages, chunks))
            if took:
                found.append(statistics.median(took))
    return max(found, default=0.0)


@dataclass(frozen=True)
class _Passes:
    """When a rank was through with what: by kind, microbatch and chunk, and ascending."""

    end: dict[tuple[Kind, int, int], float]
    ends: list[float]

    @staticmethod
    def of(timeline: Timeline) -> _Passes:
        spans = [span for span in timeline.spans if span.kind in COMPUTE]
        # backwards: of a backward pass in two parts, the first one is what others wait for
        first = {(span.kind, span.microbatch, span.chunk): span.end for span in reversed(spans)}
        return _Passes(first, [span.end for span in spans])


def _waits(timeline: Timeline, place: int, stages: Sequence[_Passes], chunks: int) -> Iterator[float]:
    """Of each message that the rank at `place` has waited for, how long that was under way."""
    idle_since = 0.0
    for span in timeline.spans:
        if span.kind not in COMPUTE:
            continue
        waited, idle_since = span.begin - idle_since, span.end
        virtual = span.chunk * len(stages) + place + _STEP.get(span.kind, 0)
        if waited < LEAST or span.kind not in _STEP or not 0 <= virtual < chunks * len(stages):
            continue
        chunk, source = divmod(virtual, len(stages))
        computed = stages[source].end.get((span.kind, span.microbatch, chunk))
        if computed is not None:
            ends = stages[source].ends
            left = ends[bisect_right(ends, span.begin) - 1] if computed <= span.begin else span.begin
            yield min(waited, span.begin - left)
