"""The table of all benchmarks: under which conditions a figure is published, and as what. Pure.

A figure comes from a whole run, and stands next to how it came about. What a row needs (a device, cases enough for a
'worst' or 'least', a setting that harms a peer) and a run lacks is 'not measured here', with the reason. A goal is
reached only if no peer does better in the same run.

In: the last lines of whole runs by benchmark (benchmarks/baseline.json). Out: Markdown: the page `docs/results.md`, and
the lines of README.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Lines = Mapping[str, Mapping[str, Any]]  # the last line of each benchmark
Values = Mapping[str, float | bool]
How = Literal["measured", "emulated", "simulated", "computed"]
_NONE = "-"


@dataclass(frozen=True)
class Need:
    """What a run must have shown for a row to be published: `figure` at least `least`. `reason` says what it lacks;
    {} in it is the run's value."""

    figure: str
    least: float
    reason: str

    def lacking(self, figures: Values) -> str:
        """The reason why `figures` do not suffice; '' if they do."""
        value = float(figures.get(self.figure, 0.0))
        return "" if value >= self.least else self.reason.format(f"{value:g}")


@dataclass(frozen=True)
class ResultRow:
    """One figure of the table. `least`, `most`: the goal; `limit`: what the machine or the setting allows, a number or
    another figure; `peers`: figures of others in the same run, by name; `paper`: what it has; `share`: shown in %;
    `spread`: shown with the ends of its 95% interval, the figures FIGURE_low and FIGURE_high."""

    benchmark: str
    figure: str
    meaning: str
    least: float | None = None
    most: float | None = None
    limit: float | str | None = None
    peers: Mapping[str, str] | None = None
    paper: str = ""
    share: bool = False
    headline: bool = False
    how: How = "measured"
    needs: tuple[Need, ...] = ()
    spread: bool = False
    since: str = "2026-11-27"

    @property
    def goal(self) -> str:
        """As text."""
        if self.most is not None and self.most == self.least:
            return self.text(self.most)
        if self.most is not None:
            return f"at most {self.text(self.most)}"
        return f"at least {self.text(self.least)}" if self.least is not None else _NONE

    def text(self, value: float | bool | None) -> str:
        """A value as text."""
        if value is None or isinstance(value, bool):
            return {None: _NONE, True: "yes", False: "no"}[value]
        return f"{100 * value:.3g}%" if self.share else f"{value:.3g}"

    def holds(self, value: float | bool) -> bool:
        """Whether the goal is reached, whatever peers do."""
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)

    def cells(self, lines: Lines) -> tuple[str, ...]:
        """Figure, how, limit, best peer, paper, goal, here."""
        figures: Values = lines.get(self.benchmark, {}).get("figures", {})
        name, best = self._best_peer(figures)
        peer = f"{self.text(best)} ({name})" if name else _NONE
        return (
            *(self.meaning, self.how, self.text(self._limit(figures)), peer, self.paper or _NONE),
            *(f"{self.goal} ({self.since})" if self.goal != _NONE else _NONE, self._here(figures)),
        )

    def _limit(self, figures: Values) -> Any:
        return figures.get(self.limit) if isinstance(self.limit, str) else self.limit

    def _best_peer(self, figures: Values) -> tuple[str, float | bool | None]:
        found = {name: figures[figure] for name, figure in (self.peers or {}).items() if figure in figures}
        if not found:
            return "", None
        best = (max if self.least is not None else min)(found, key=found.__getitem__)
        return best, found[best]

    def _here(self, figures: Values) -> str:
        value = figures.get(self.figure)
        if value is None:
            return f"not measured here: {'the run is from before this figure' if figures else 'no whole run'}"
        for need in self.needs:
            if reason := need.lacking(figures):
                return f"not measured here: {reason}"
        text = self.text(value)
        if self.spread:
            low, high = (self.text(figures.get(f"{self.figure}_{end}")) for end in ("low", "high"))
            text += f" ({low} to {high})"
        if self.goal == _NONE or not self.holds(value):
            return text if self.goal == _NONE else f"{text}, missed"
        if (limit := self._limit(figures)) is not None and self.least is not None and value > limit:
            return f"{text}, beyond the limit"
        name, best = self._best_peer(figures)
        if best is not None and (best < value if self.most is not None else best > value):
            return f"{text}, behind {name}"
        return f"**{text}**"


_HEAD = (
    "| figure | how | limit | best peer, same run | paper | goal (set on) | here |",
    "|---|---|---|---|---|---|---|",
)
_PAGE = """\
<!-- Generated by `python benchmarks/all.py`; do not edit. -->
# Results

All figures are of whole runs. *How*: *measured* with real processes, sockets and compute; *emulated*: all of it real
but compute, which sleeps; *simulated* by a model of a pipeline or a network; *computed* from plans or other figures.
*Limit* is what the machine or the setting allows at best; a *peer* was measured in the same run, to the same end point;
figures in bold reach their *goal*, and no peer does better. `--help` of each benchmark says what its figures are. All
of them, one after another, on a machine that does nothing else, as root because links are throttled:

```bash
python benchmarks/all.py
```
"""


def page(rows: Sequence[ResultRow], lines: Lines, pictures: Sequence[str] = ()) -> str:
    """The page of all figures. `lines`: of whole runs. `pictures`: their addresses."""
    return "\n".join(_page(rows, lines, pictures)).rstrip("\n") + "\n"


def headlines(rows: Sequence[ResultRow], lines: Lines) -> str:
    """The lines for README: not of figures whose commit is unknown."""
    unknown = [name for name, line in lines.items() if "unknown" in str(line.get("commit"))]
    return "\n".join([*_HEAD, *_table([row for row in rows if row.headline and row.benchmark not in unknown], lines)])


def _page(rows: Sequence[ResultRow], lines: Lines, pictures: Sequence[str]) -> Iterator[str]:
    yield _PAGE
    for name in dict.fromkeys(row.benchmark for row in rows):
        yield f"## {name}\n"
        if name in lines:
            yield f"{_where(lines[name])}\n"
        yield from (*_HEAD, *_table([row for row in rows if row.benchmark == name], lines), "")
        yield from (f"![{Path(each).stem}]({each})\n" for each in pictures if Path(each).parent.name == name)


def _table(rows: Sequence[ResultRow], lines: Lines) -> Iterator[str]:
    return (f"| {' | '.join(row.cells(lines))} |" for row in rows)


def _where(line: Mapping[str, Any]) -> str:
    """How and on what the figures of a benchmark were measured."""
    machine, figures = line["machine"], line["figures"]
    taken = figures.get("others_share", 0.0) + figures.get("stolen_share", 0.0)
    others = f", of whose time other programs and SMPs took {taken:.0%}" if "others_share" in figures else ""
    return (
        f"{line['date']}, commit {line.get('commit', 'unknown')}, {machine['cores']} cores of {machine['cpu']}{others};"
        f" Python {line['versions']['python']}, torch {line['versions'].get('torch', '-')}"
    )
