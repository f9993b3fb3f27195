"""Compare the whole numbers that objects of modules keep, after a restore: those that have begun again are named.

They change in each iteration, also rightly, as a program's arguments count its steps. So only at the first version
point after a restore is each compared: it began again if it is what it was at the job's first one, or has turned back
towards it.

In: whole numbers by quoted path at version points. Out: plain values for a version; words, '' for none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .script.suspended import ROOM, Values, begun_again, that_fit

_MOST = 256  # of a version


class ObjectCounts:
    """Of one model."""

    def __init__(self) -> None:
        self._begun = False
        self._first: Values = {}  # at the job's first version point
        self._expected: Values = {}  # of the restored version, until it is there again
        self._left_out = ""  # one that is not compared

    def captured(self, counts: Values, moved: set[str]) -> tuple[dict[str, Any], str]:
        """At a version point: what a version has of them, and what has begun again. `moved`: the paths of those that
        have changed; it is emptied once, at the first version point."""
        if not self._begun:
            self._begun, self._first = True, {**counts, **self._first}
            moved.clear()
        known = {path: was for path, was in self._expected.items() if path in counts}
        words = begun_again(self._first, known, counts)
        moved.update(known)
        # what an object makes only later is compared then
        self._expected = {path: was for path, was in self._expected.items() if path not in counts}
        changed: Values = {
            path: counts[path] for path in sorted(moved) if counts[path] != self._first.setdefault(path, counts[path])
        }
        fitting = that_fit(changed, _MOST)
        left_out = next((path for path in changed if path not in fitting), "")
        if left_out and not self._left_out:
            words = words or (
                f"{len(changed)} whole numbers of objects in modules change, and a version has room for "
                f"{len(fitting)}: after a restore {left_out} and others are not compared"
            )
        self._left_out = self._left_out or left_out
        return {"first": {path: self._first[path] for path in fitting}, "last": fitting}, words

    @staticmethod
    def reserved() -> dict[str, Any]:
        """As large as what a version has."""
        return {"first": {}, "last": {}, "reserve": bytes(2 * ROOM)}

    def restored(self, saved: Mapping[str, Any]) -> None:
        self._begun = False
        self._first, self._expected = dict(saved["first"]), dict(saved["last"])
