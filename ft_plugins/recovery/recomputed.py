"""Decide whether an iteration that is computed again is the one that was lost. Pure.

Whatever a recovery restores, the loop itself has to continue from there: its counters, schedules and data. Three kinds
of differences:

    it did not continue   it reads what another iteration read; or counters, schedules or learning rates differ, or
                          random number generators although the input was equal; and nothing differed before
    not reproducible      inputs, losses or states differ otherwise: a loader that is not reproducible, kernels that
                          are not deterministic, an error that only one of the two runs had
    a consequence         whatever differs after an iteration that differed

Invariant: a loop that did not continue is not captured any further, unless the user wants a warning only. An update
that was skipped in one of the runs, because its gradients were not finite, explains other counters.

In: entries of the ledger, `--ftp-on-difference`. Out: a `Difference`, None if everything known is equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..snapshot.ledger import Entry, Part

_LOOP = {Part.COUNTERS, Part.GROUPS, Part.RATE}
_DRAWN = {Part.GENERATORS, Part.DRAWN}
_INPUTS = (Part.FIRST_READ, Part.INPUT)


@dataclass(frozen=True)
class Difference:
    """An iteration that is not as it was. `parts`: what differs. `read_in`: the iteration that had read the same input,
    None for none. `ends`: the job ends before this iteration is captured."""

    iteration: int
    parts: tuple[Part, ...]
    read_in: int | None
    continued: bool
    ends: bool
    details: str

    @property
    def sentence(self) -> str:
        """What differs, for people."""
        if self.read_in is not None:
            return (
                f"iteration {self.iteration} reads what iteration {self.read_in} read, not what it read before the "
                "restore: the loop did not continue where the restored state is"
            )
        parts = [part for part in self.parts if part is not Part.FIRST_READ or Part.INPUT not in self.parts]
        names = ", ".join(part.words for part in parts)
        text = f"iteration {self.iteration} was computed again, and differs from before the restore in: {names}"
        text += f" ({self.details})" if self.details else ""
        return text if self.continued else f"{text}: the loop did not continue where the restored state is"


def judge(
    now: Entry, before: Entry, known: Mapping[int, Entry], differed: bool = False, mode: str = "auto"
) -> Difference | None:
    """Compare an iteration with its lost self.

    `known`: entries of all iterations. `differed`: an earlier iteration since the restore differed. `mode`: auto, stop
    or warn.
    """
    parts = now.differing(before)
    if not parts:
        return None
    read_in = _read_in(now, known) if parts[0] in _INPUTS and not differed else None
    continued = read_in is None and (differed or _skipped(now, before) or not _loop_differs(parts))
    ends = mode == "stop" or (mode == "auto" and not continued)
    return Difference(now.iteration, parts, read_in, continued, ends, _details(now, before, parts))


def _read_in(now: Entry, known: Mapping[int, Entry]) -> int | None:
    """The newest other iteration that read the same."""
    for part in reversed(_INPUTS):
        if part in now.digests:
            same = [
                iteration
                for iteration, entry in known.items()
                if iteration != now.iteration and entry.digests.get(part) == now.digests[part]
            ]
            if same:
                return max(same)
    return None


def _loop_differs(parts: tuple[Part, ...]) -> bool:
    if _LOOP & set(parts):
        return True
    return bool(_DRAWN & set(parts)) and not set(_INPUTS) & set(parts)


def _skipped(now: Entry, before: Entry) -> bool:
    numbers = (entry.numbers.get(part, 0.0) for entry in (now, before) for part in (Part.LOSS, Part.NORM))
    return not all(map(math.isfinite, numbers))


def _details(now: Entry, before: Entry, parts: tuple[Part, ...]) -> str:
    return ", ".join(
        f"{part.words} {now.numbers[part]!r} in place of {before.numbers[part]!r}" for part in parts if part.is_number
    )
