"""Seconds of forward and of backward of each module in one iteration, from when they began and ended. Pure.

The time between two edges belongs to the module that is innermost then: begun last, not ended. So an outer module has
what none of its inner ones has, and no time is counted twice. Time in which no module is open belongs to none.

Everything within a backward is backward, also the forwards of a recomputation. Microbatches add up, in whatever order
a pipeline runs their forwards and backwards.

Invariant: the times of all modules add up to the time between the first edge and the end of the iteration at most.
Edges may be missing: a begin of what is open makes it the innermost, an end of what is not is ignored, and what never
ends is closed by the end of the iteration. An edge that seems earlier than the one before it is taken as simultaneous.

In: edges in the order in which they were reported, seconds of one clock. Out: times by module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class EdgeKind(str, Enum):
    """What a `model.reduction.ModuleEdges` receives."""

    FORWARD_BEGIN = "forward begin"
    FORWARD_END = "forward end"
    BACKWARD_BEGIN = "backward begin"
    BACKWARD_END = "backward end"


_BEGINS = (EdgeKind.FORWARD_BEGIN, EdgeKind.BACKWARD_BEGIN)
_BACKWARD = (EdgeKind.BACKWARD_BEGIN, EdgeKind.BACKWARD_END)


@dataclass(frozen=True)
class TimedEdge:
    """A forward or backward of a module that began or ended at `seconds`."""

    kind: EdgeKind
    module: str
    seconds: float


@dataclass(frozen=True)
class ModuleTimes:
    """Seconds of one module in an iteration."""

    forward: float = 0.0
    backward: float = 0.0


def module_times(edges: Iterable[TimedEdge], end: float) -> Mapping[str, ModuleTimes]:
    """The times of all modules that have edges, in the order of their first ones. `end`: of the iteration, in the
    seconds of the edges; later ones are ignored. Cost: linear in edges."""
    times: dict[str, list[float]] = {}
    running: OrderedDict[tuple[bool, str], None] = OrderedDict()  # (whether a backward, module), the innermost last
    backwards = 0  # of `running`
    before = None  # the time up to which all time has been assigned
    for edge in edges:
        backward = edge.kind in _BACKWARD
        times.setdefault(edge.module, [0.0, 0.0])
        now = min(edge.seconds, end)
        if before is not None and now > before and running:
            _, innermost = next(reversed(running))
            times[innermost][backwards > 0] += now - before
        before = now if before is None else max(now, before)
        key = backward, edge.module
        if edge.kind in _BEGINS:
            backwards += backward and key not in running
            running[key] = None
            running.move_to_end(key)
        elif key in running:
            del running[key]
            backwards -= backward
    if before is not None and end > before and running:
        _, innermost = next(reversed(running))
        times[innermost][backwards > 0] += end - before
    return {module: ModuleTimes(*seconds) for module, seconds in times.items()}
