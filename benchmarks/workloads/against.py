"""Compare the figures of two checkouts, or of a run with the baseline: which have become worse. Pure.

A ratio above 1 is worse: seconds over seconds where less is better, the inverse where more is. Worse means that the
whole 95% interval of the ratios of interleaved pairs lies beyond 1.05; one run has no interval, so its ratio is shown
and decides nothing.

In: rows, last lines of both. Out: `FigureComparison`s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from workloads.results import Lines, ResultRow, Values
from workloads.sync_blocks import PolicyFigure

WORSE = 1.05
LEAST_PAIRS = 3  # below that an interval says nothing


@dataclass(frozen=True)
class FigureComparison:
    """A figure of a row in both: the ratio, above 1 if it has become worse, with its interval if there are pairs."""

    row: ResultRow
    ratio: float
    low: float = 0.0
    high: float = math.inf

    @property
    def worse(self) -> bool:
        """Whether it has become worse for certain."""
        return self.low > WORSE

    def __str__(self) -> str:
        ends = f" ({self.low:.3g} to {self.high:.3g})" if self.high < math.inf else ", one run"
        verdict = "   WORSE" if self.worse else ""
        return f"{self.row.benchmark}.{self.row.figure}: {self.ratio:.3g}{ends}{verdict}"


def compared(rows: Sequence[ResultRow], pairs: Sequence[tuple[Lines, Lines]]) -> list[FigureComparison]:
    """All rows with a goal that both have, published or not. `pairs`: the last lines of this checkout, and of the
    other."""
    found = []
    for row in rows:
        ratios = [ratio for ours, theirs in pairs if (ratio := _ratio(row, _figures(row, ours), _figures(row, theirs)))]
        if not ratios:
            continue
        if len(ratios) < LEAST_PAIRS:
            found.append(FigureComparison(row, sorted(ratios)[len(ratios) // 2]))
            continue
        figure = PolicyFigure.of(ratios)
        found.append(FigureComparison(row, figure.value, figure.low, figure.high))
    return found


def _figures(row: ResultRow, lines: Lines) -> Values:
    figures: Values = lines.get(row.benchmark, {}).get("figures", {})
    return figures


def _ratio(row: ResultRow, ours: Values, theirs: Values) -> float:
    """0 if there is none."""
    if (row.most is None and row.least is None) or row.figure not in ours or row.figure not in theirs:
        return 0.0
    one, other = float(ours[row.figure]), float(theirs[row.figure])
    if one == other:
        return 1.0
    above, below = (one, other) if row.most is not None else (other, one)
    return above / below if below > 0 and above > 0 else math.inf if above > 0 else 0.0
