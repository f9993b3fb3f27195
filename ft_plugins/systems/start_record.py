"""Where the time of a start went: each rank notes its steps, and the first rank of each node reports them once.

Invariant: one event for each node and start, however many ranks it has, of when the last rank passed each step. Ranks
send nothing: they append a line to a file of the run directory. From the first completed iteration on this costs one
comparison an iteration, and a missing or damaged file costs the report, never the job.

In: `stamps`. Out: `ranks.resumed`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import intake, stamps
from ..base.files import private
from ..base.intake import Count, Seconds
from ..config import LaunchContext
from ..events import Events, catalogue

_FILE = "starts"


@dataclass(frozen=True)
class RankStart:
    """The steps of one rank's start; see `stamps`. `clock`, `processor`: seconds by step."""

    token: Count
    rank: Count
    clock: Mapping[str, Seconds]
    processor: Mapping[str, Seconds]
    grouped: Seconds


class StartRecord:
    """The start of one rank, from `attach` to its first completed iteration."""

    def __init__(self, context: LaunchContext, events: Events) -> None:
        stamps.pass_step("built")
        self._context, self._events = context, events
        self._file = None if context.run_dir is None else context.run_dir / _FILE
        self._lineage = 0

    def restored(self, lineage: int) -> None:
        stamps.pass_step("restored")
        self._lineage = lineage
        if self._file is not None:
            taken, context = stamps.taken(), self._context
            with contextlib.suppress(OSError):
                _append(self._file, [context.token, context.rank, taken.clock, taken.processor, taken.grouped])

    def completed(self, iteration: int) -> None:
        """The first iteration is completed: on the first rank of a node, report what its ranks have noted. They have
        all loaded their state, without which there is no iteration; one that trains on its own may be missing."""
        stamps.pass_step("completed")
        file = self._file
        if file is None or self._context.local_rank:
            return
        ranks = {one.rank: one for one in _read(file) if one.token == self._context.token}
        with contextlib.suppress(OSError):
            file.unlink()
        if self._context.rank not in ranks:
            return
        self._events.emit(
            catalogue.RANKS_RESUMED, restart=self._context.restart, token=self._context.token, lineage=self._lineage,
            iteration=iteration, completed=_shown(stamps.taken().clock["completed"]), **last_of(list(ranks.values())),
        )  # fmt: skip


def last_of(ranks: Sequence[RankStart]) -> dict[str, Any]:
    """When the last of `ranks` had passed each step. Pure.

    How long process groups took is that of the rank that came to them last: the others waited for it there.
    """
    facts: dict[str, Any] = {"count": len(ranks), "joining": None, "grouped": 0.0}
    for step in stamps.STEPS:
        passed = [one.clock[step] for one in ranks if step in one.clock]
        if passed:
            facts[step] = _shown(max(passed))
    joined = [one for one in ranks if "joining" in one.clock]
    if joined:
        facts["grouped"] = _shown(max(joined, key=lambda one: one.clock["joining"]).grouped)
    used = {step: sum(one.processor.get(step, 0.0) for one in ranks) for step in stamps.STEPS}
    known = [step for step in stamps.STEPS if used[step]]
    before = [0.0, *(used[step] for step in known)]
    facts["processor"] = {step: _shown(used[step] - earlier) for step, earlier in zip(known, before, strict=False)}
    return facts


def _append(path: Path, fields: Sequence[Any]) -> None:
    with open(path, "ab", buffering=0, opener=private) as file:
        file.write((json.dumps(fields) + "\n").encode())


def _read(path: Path) -> list[RankStart]:
    """The lines that make sense, [] without the file."""
    ranks: list[RankStart] = []
    with contextlib.suppress(OSError, intake.Unfit):
        for line in intake.read_bytes(path).splitlines():
            with contextlib.suppress(ValueError, TypeError):
                names = ("token", "rank", "clock", "processor", "grouped")
                fields = dict(zip(names, intake.json_value(line), strict=True))
                ranks.append(intake.typed(RankStart, fields))
    return ranks


def _shown(seconds: float) -> float:
    return round(seconds, 4)
