"""Look at ranks that complete nothing, for signs that they work all the same: processors, devices, stacks.

The processes of a rank are its own and their children, such as workers of a data loader. A stack is asked for only
where it decides (`hang.works`): of a rank that uses a processor in a phase in which others can keep it.

Invariant: bounded in time; a rank is disturbed by no more than one signal in a look.

In: ranks, their processes. Out: when each was last seen at work (monotonic).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...snapshot.segment.progress_words import RankProgress
from . import stacks
from .hang import Signs, works

LOOK_SECONDS = 5.0  # between two looks
_STACK_SECONDS = 1.0  # for all ranks to write their stacks
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Seen:
    """Of one rank: when, the seconds of processors that its processes have used, and the stack; '' if not asked for."""

    at: float
    used: float
    stack: str


class SignsOfWork:
    """The signs of one node's ranks. For one thread."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._looked = 0.0
        self._seen: dict[int, _Seen] = {}
        self.worked: dict[int, float] = {}

    def forget(self) -> None:
        """An iteration was completed, or another incarnation starts."""
        self._seen.clear()
        self.worked.clear()

    def look(self, ranks: Sequence[RankProgress], processes: stacks.Processes) -> None:
        """Look at these ranks, if the last look was LOOK_SECONDS ago."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        table = _processes()
        seen = {rank.rank: _of_tree(table, processes[rank.rank][0]) for rank in ranks}
        busy = {
            number: (used - self._seen[number].used) / (now - self._seen[number].at) if number in self._seen else 1.0
            for number, (used, _) in seen.items()
        }
        asked = [one.rank for one in ranks if one.waits and works(one, Signs(busy[one.rank], moved=True))]
        found = stacks.of_ranks(self._run_dir, {number: processes[number] for number in asked}, _STACK_SECONDS)
        for rank in ranks:
            number, before = rank.rank, self._seen.get(rank.rank)
            used, blocked = seen[number]
            stack = found.get(number, "")
            moved = before is not None and "" not in (stack, before.stack) and stack != before.stack
            self._seen[number] = _Seen(now, used, stack or (before.stack if before else ""))
            if works(rank, Signs(busy[number] if before else 0.0, blocked, moved)):
                self.worked[number] = now


def _processes() -> dict[int, tuple[int, float, bool]]:
    """By process id: the parent, seconds of processors used, whether it waits for a device or a file system."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                fields = Path(entry.path, "stat").read_bytes().rsplit(b")", 1)[1].split()
                used = (int(fields[11]) + int(fields[12])) / _TICKS
                found[int(entry.name)] = int(fields[1]), used, fields[0] == b"D"
    return found


def _of_tree(table: dict[int, tuple[int, float, bool]], root: int) -> tuple[float, bool]:
    """Seconds of processors used by `root` and its descendants, and whether one of them is blocked."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in table.items():
        children.setdefault(parent, []).append(pid)
    used, blocked, left = 0.0, False, [root] if root in table else []
    while left:
        pid = left.pop()
        used, blocked = used + table[pid][1], blocked or table[pid][2]
        left += children.get(pid, [])
    return used, blocked
