"""Golden comparison: two runs are the same when every item, every small value and every logged loss of every rank is.

Invariant: no tolerance anywhere; floats are compared as hexadecimal text, tensors by digest, names and shapes as well.

In: the files that `--state-digest` wrote and the loss logs. Out: what differs, in words; nothing for identical runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

SHOWN = 12


class Described(Protocol):
    """A run of an example: where the description of its final state and its losses are."""

    @property
    def digests(self) -> Path: ...

    @property
    def loss_log(self) -> Path: ...


def state_differences(left: Path, right: Path, ranks: int) -> list[str]:
    """Where the final states of two runs differ. `left` and `right` are the prefixes given to `--state-digest`."""
    found: list[str] = []
    for rank in range(ranks):
        ours, theirs = (json.loads(Path(f"{prefix}{rank:05d}.json").read_text()) for prefix in (left, right))
        found += [f"rank {rank}: {difference}" for difference in differing("", ours, theirs)]
    return found


def differing(place: str, left: Any, right: Any) -> Iterator[str]:
    """Each place in which two trees of plain values differ."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in sorted(left.keys() | right.keys()):
            inner = f"{place}/{key}"
            if key not in left or key not in right:
                yield f"{inner}: only in the {'second' if key not in left else 'first'}"
            else:
                yield from differing(inner, left[key], right[key])
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (ours, theirs) in enumerate(zip(left, right, strict=True)):
            yield from differing(f"{place}[{index}]", ours, theirs)
    elif left != right:
        yield f"{place}: {left!r} != {right!r}"


def losses(log: Path) -> dict[int, dict[str, Any]]:
    """The last line of each iteration in a loss log: the numbers that count, without time and incarnation."""
    found: dict[int, dict[str, Any]] = {}
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        found[entry["iteration"]] = {key: value for key, value in entry.items() if key not in ("time", "restart")}
    return found


def loss_differences(left: Path, right: Path) -> list[str]:
    """Where the loss sequences of two runs differ."""
    ours, theirs = ({str(key): value for key, value in losses(log).items()} for log in (left, right))
    return list(differing("iteration", ours, theirs))


def explain(found: list[str]) -> str:
    """The first differences, and how many there are."""
    return "\n".join([f"{len(found)} differences", *found[:SHOWN]])


def assert_identical(run: Described, golden: Described, ranks: int) -> None:
    """Raises AssertionError naming the first differences between the final states and loss sequences of two runs."""
    found = state_differences(run.digests, golden.digests, ranks) + loss_differences(run.loss_log, golden.loss_log)
    if found:
        raise AssertionError(explain(found))
