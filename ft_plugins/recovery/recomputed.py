"""Decide whether an iteration that is computed again is the one that was lost. Pure.

Whatever a recovery restores, the loop itself has to continue from there: its counters, schedules and data. Three kinds
of differences:

    it did not continue   it reads what another iteration read; its update has another learning rate, or its counters
                          differ; its schedules differ although its loss or gradient norm is equal; its random numbers
                          differ although its inputs are equal
    not reproducible      anything else: a loader that is not reproducible, kernels that are not deterministic, an error
                          that only one of the two runs had
    a consequence         whatever may follow from numbers that differed before; inputs never do

Invariant: a loop that did not continue is not captured any further, unless the user wants a warning only. What kernels
compute may change schedules (on a plateau of the loss) and counters (of skipped updates), so it never ends a job alone.

In: entries of the ledger, `--ftp-on-difference`. Out: a `LoopDifference`, None if everything known is equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..snapshot.segment.ledger import LedgerEntry, LedgerPart

_INPUTS = (LedgerPart.FIRST_READ, LedgerPart.INPUT)
_OUTCOMES = (LedgerPart.LOSS, LedgerPart.NORM)
_SCHEDULES = {LedgerPart.SCHEDULE, LedgerPart.GROUPS}
_DRAWN = {LedgerPart.GENERATORS, LedgerPart.DRAWN}


@dataclass(frozen=True)
class LoopDifference:
    """An iteration that is not as it was. `parts`: what differs. `read_in`: the iteration that had read the same input,
    None for none. `ends`: the job ends before this iteration is captured."""

    iteration: int
    parts: tuple[LedgerPart, ...]
    read_in: int | None
    continued: bool
    ends: bool
    details: str

    @property
    def sentence(self) -> str:
        if self.read_in is not None:
            return (
                f"iteration {self.iteration} reads what iteration {self.read_in} read, not what it read before the "
                "restore: the loop did not continue where the restored state is"
            )
        parts = [p for p in self.parts if p is not LedgerPart.FIRST_READ or LedgerPart.INPUT not in self.parts]
        names = ", ".join(part.words for part in parts)
        text = f"iteration {self.iteration} was computed again, and differs from before the restore in: {names}"
        text += f" ({self.details})" if self.details else ""
        return text if self.continued else f"{text}: the loop did not continue where the restored state is"


def judge(
    now: LedgerEntry, before: LedgerEntry, known: Mapping[int, LedgerEntry], differed: Collection[LedgerPart] = (),
    mode: str = "auto",
) -> LoopDifference | None:  # fmt: skip
    """Compare an iteration with its lost self.

    `known`: entries of all iterations. `differed`: what differed since the restore, in earlier iterations or earlier in
    this one. `mode`: auto, stop or warn.
    """
    parts = now.differing(before)
    if not parts:
        return None
    read_in = None if set(_INPUTS) & set(differed) else _read_in(now, parts, known)
    continued = read_in is None and (bool(differed) or not _loop_differs(now, before, parts))
    ends = mode == "stop" or (mode == "auto" and not continued)
    return LoopDifference(now.iteration, parts, read_in, continued, ends, _details(now, before, parts))


def _read_in(now: LedgerEntry, parts: Collection[LedgerPart], known: Mapping[int, LedgerEntry]) -> int | None:
    """The newest other iteration that read the same, by the inputs that differ."""
    for part in reversed(_INPUTS):
        if part in parts:
            same = [
                iteration
                for iteration, entry in known.items()
                if iteration != now.iteration and entry.digests.get(part) == now.digests[part]
            ]
            if same:
                return max(same)
    return None


def _loop_differs(now: LedgerEntry, before: LedgerEntry, parts: Collection[LedgerPart]) -> bool:
    """Whether it shows that the loop did not continue, if nothing differed before."""
    if _skipped(now, before):
        return False
    if LedgerPart.RATE in parts or LedgerPart.COUNTERS in parts:
        return True
    outcomes = [part for part in _OUTCOMES if part in now.numbers and part in before.numbers]
    if _SCHEDULES & set(parts) and outcomes and not set(outcomes) & set(parts):
        return True
    read = LedgerPart.INPUT in now.digests and LedgerPart.INPUT in before.digests
    return bool(_DRAWN & set(parts)) and read and not set(_INPUTS) & set(parts)


def _skipped(now: LedgerEntry, before: LedgerEntry) -> bool:
    """Whether only one of them may have made its update: a loss or a norm is not finite."""
    numbers = (entry.numbers.get(part, 0.0) for entry in (now, before) for part in _OUTCOMES)
    return not all(map(math.isfinite, numbers))


def _details(now: LedgerEntry, before: LedgerEntry, parts: Collection[LedgerPart]) -> str:
    return ", ".join(
        f"{part.words} {now.numbers[part]!r} in place of {before.numbers[part]!r}" for part in parts if part.is_number
    )
