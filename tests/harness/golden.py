"""Compare a run with its golden run: every state item, every small value and every logged loss of every rank.

Invariant: there is no tolerance. Floats are compared as hexadecimal text, tensors by digest, name and shape.

In: the files that `--state-digest` wrote and the loss logs. Out: the differences in words; none for identical runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from ft_plugins.rehearse.transcripts import leaves

SHOWN = 12


class ComparableRun(Protocol):
    """A run of an example: the files that describe its final state and its losses."""

    @property
    def digests(self) -> Path: ...

    @property
    def loss_log(self) -> Path: ...


def state_differences(left: Path, right: Path, ranks: int) -> list[str]:
    """The differences between two final states. `left` and `right` are the prefixes given to `--state-digest`."""
    differences: list[str] = []
    for rank in range(ranks):
        ours, theirs = (json.loads(Path(f"{prefix}{rank:05d}.json").read_text()) for prefix in (left, right))
        differences += [f"rank {rank}: {difference}" for difference in tree_differences("", ours, theirs)]
    return differences


def tree_differences(place: str, left: Any, right: Any) -> Iterator[str]:
    """Each place in which two trees of plain values differ."""
    ours, theirs = dict(leaves(place, left)), dict(leaves(place, right))
    for each in sorted(ours.keys() | theirs.keys()):
        if each not in ours or each not in theirs:
            yield f"{each}: only in the {'second' if each not in ours else 'first'}"
        elif ours[each] != theirs[each]:
            yield f"{each}: {ours[each]!r} != {theirs[each]!r}"


def losses(log: Path) -> dict[int, dict[str, Any]]:
    """The last line of each iteration in a loss log, without time and incarnation."""
    by_iteration: dict[int, dict[str, Any]] = {}
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        numbers = {key: value for key, value in entry.items() if key not in ("time", "restart")}
        by_iteration[entry["iteration"]] = numbers
    return by_iteration


def loss_differences(left: Path, right: Path) -> list[str]:
    """The differences between the loss sequences of two runs."""
    ours, theirs = ({str(key): value for key, value in losses(log).items()} for log in (left, right))
    return list(tree_differences("iteration", ours, theirs))


def explain(differences: list[str]) -> str:
    """The number of differences and the first few of them."""
    return "\n".join([f"{len(differences)} differences", *differences[:SHOWN]])


def assert_identical(run: ComparableRun, golden: ComparableRun, ranks: int) -> None:
    """Raises AssertionError with the first differences if the final states or loss sequences of two runs differ."""
    differences = state_differences(run.digests, golden.digests, ranks)
    differences += loss_differences(run.loss_log, golden.loss_log)
    if differences:
        raise AssertionError(explain(differences))
