"""Merge what ranks measured of their layers into one profile of the job. Pure.

A row has, for each module of the job in one order, seconds of forward, of backward, of averaging, and bytes; NaN where
a rank does not hold the module or has not measured it; and last the seconds for which a period waited for averaging.

    over the replicas (ranks of a sync group)   median of computing; the least of averaging and waiting, because all but
                                                the last replica to arrive also wait for it
    over the ranks of a replica                 the largest: the slowest one is waited for

Invariant: all ranks of the job merge the same rows to the same profile.

In: rows. Out: merged rows, `LayerTimes` by module."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from .layer_profile import LayerTimes

Row = npt.NDArray[np.float64]
COLUMNS = 4  # of a module


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
