"""How long layers took: of each module in one iteration, from its edges; and of all ranks, as one profile. Pure.

The time between two edges belongs to the module that is innermost then: begun last, not ended. So an outer module has
what none of its inner ones has, and no time is counted twice. Everything within a backward is backward, also the
forwards of a recomputation. Edges may be missing: a begin of what is open makes it the innermost, an end of what is not
is ignored, and what never ends is closed by the end of the iteration. An edge that seems earlier than the one before it
is taken as simultaneous.

A row has, for each module of the job in one order, seconds of forward, of backward, of averaging, and bytes; NaN where
a rank does not hold the module or has not measured it; and last the seconds for which a period waited for averaging.

    over the replicas (ranks of a sync group)   median of computing; the least of averaging and waiting, because all but
                                                the last replica to arrive also wait for it
    over the ranks of a replica                 the largest: the slowest one is waited for

Invariant: the times of all modules add up to the time between the first edge and the end of the iteration at most. All
ranks of the job merge the same rows to the same profile.

In: edges in the order in which they were reported, seconds of one clock; rows. Out: times by module; merged rows,
`LayerTimes` by module.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

import numpy as np
import numpy.typing as npt

from .layer_profile import LayerTimes

Row = npt.NDArray[np.float64]
COLUMNS = 4  # of a module


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


@dataclass(frozen=True)
class ModuleSamples:
    """What one rank measured of a module: seconds, by iteration; its bytes."""

    forward: Sequence[float]
    backward: Sequence[float]
    averaging: Sequence[float]
    nbytes: int


def row_of(modules: Sequence[str], samples: Mapping[str, ModuleSamples], waited: Sequence[float], period: int) -> Row:
    """The row of one rank: medians; `waited` by iteration."""
    row = np.full(len(modules) * COLUMNS + 1, np.nan)
    for number, name in enumerate(modules):
        if one := samples.get(name):
            times = (one.forward, one.backward, one.averaging)
            row[number * COLUMNS : (number + 1) * COLUMNS] = [*map(_median, times), one.nbytes]
    row[-1] = sum(waited) / len(waited) * period if waited else np.nan
    return row


def _median(seconds: Sequence[float]) -> float:
    return median(seconds) if seconds else np.nan


def over_replicas(rows: Row) -> Row:
    """Merge the rows of a sync group, (M, n)."""
    merged = _without_warnings(np.nanmin, rows)
    computing = _without_warnings(np.nanmedian, rows)
    for column in (0, 1):
        merged[column:-1:COLUMNS] = computing[column:-1:COLUMNS]
    return merged


def over_ranks(rows: Row) -> Row:
    """Merge the rows of the ranks of a replica, each merged over replicas, (R, n)."""
    return _without_warnings(np.nanmax, rows)


def times_of(modules: Sequence[str], row: Row) -> tuple[dict[str, LayerTimes], float]:
    """The times of each module in a merged row, 0 where none was measured; the seconds for which a period waited."""
    known = np.nan_to_num(row, nan=0.0).tolist()
    times = {}
    for number, name in enumerate(modules):
        forward, backward, averaging, nbytes = known[number * COLUMNS : (number + 1) * COLUMNS]
        times[name] = LayerTimes(name, forward, backward, averaging, int(nbytes))
    return times, known[-1]


def _without_warnings(merge: np.ufunc | object, rows: Row) -> Row:
    """Merge the columns; NaN for a column of NaN, of which numpy warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(merge(rows, axis=0))  # type: ignore[operator]
