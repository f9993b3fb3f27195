"""Lines about the nodes of a job, those with the same content once: 'nodes 0-511 (512 nodes): ...'. Pure.

Invariant: the number of lines is bounded, and the cost is linear in the number of nodes. A few nodes are named, many
are given as runs of their positions.

In: a text for each node. Out: lines.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

Kind = TypeVar("Kind", bound=Hashable)

SHOWN = 8  # entries of a list in a table
_NAMED = 4  # nodes that are named; more are given by position


def grouped(kinds: Iterable[Kind]) -> dict[Kind, list[int]]:
    """The places at which each kind occurs, in the order of their first places."""
    places: dict[Kind, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    return places


def runs(numbers: Sequence[int]) -> list[str]:
    """Ascending numbers as runs: '0-2', '5'."""
    parts = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda entry: entry[1] - entry[0])]
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in parts]


def shortened(entries: Sequence[str]) -> list[str]:
    """The first entries of a long list, and how many more there are."""
    return [*entries[:SHOWN], *([f"and {len(entries) - SHOWN} more"] if len(entries) > SHOWN else [])]


def node_label(positions: Sequence[int], names: Sequence[str]) -> str:
    """'node a', 'nodes a, b', or, for more than a few, 'nodes 0-511 (512 nodes)': by position."""
    if len(positions) == 1:
        return f"node {names[positions[0]]}"
    if len(positions) <= _NAMED:
        return f"nodes {', '.join(names[position] for position in positions)}"
    return f"nodes {', '.join(shortened(runs(positions)))} ({len(positions)} nodes)"


def node_lines(texts: Iterable[str], names: Sequence[str]) -> list[str]:
    """A line for each kind of text, which is that of one node; `names[position]` are the nodes."""
    places = grouped(texts)
    lines = [
        f"  {node_label(positions, names)}: {'each ' if len(positions) > 1 else ''}{text}"
        for text, positions in list(places.items())[:SHOWN]
    ]
    return [*lines, *more_kinds(list(places.values())[SHOWN:])]


def more_kinds(left_out: Sequence[Sequence[int]]) -> list[str]:
    """A line on the kinds of nodes that a table leaves out; none if there are none."""
    nodes = sum(map(len, left_out))
    return [f"  ... and {len(left_out)} more kinds of nodes ({nodes} nodes)"] if left_out else []
