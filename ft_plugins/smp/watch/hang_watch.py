"""Watch the progress of a node's ranks: report a hang with stacks and have the job restart; name slow ranks.

On a single node the verdict on its ranks (`hang`) is that on the job. On several nodes each reports its own up the tree
of SMPs, and the root announces a hang of all to all: a rank of another node may be in a long phase that is not seen
here. Each has its workers restart only when the others have had time to write stacks, as the first one ends the ranks
of all. If the SMPs do not know each other, each node decides for itself, with more patience.

Invariant: decides nothing itself; one hang is reported once per incarnation, after stacks have been written. What
happened while this process did not run either (a suspended machine) is left out.

A job that may only be waiting for a rank at work is an alarm, from the node of that rank. Once no rank lives, as after
an orderly end, a refusal or the end of ft-run, there is nothing to watch. If ft-run waits for the ranks of other nodes
then, these may hang, so this node hides no hang of theirs.

Signs of work are of a rank's own process and its children, such as workers of a data loader. A stack is asked for only
where it decides (`hang.works`): of a rank that uses a processor in a phase in which others can keep it. A rank is
disturbed by no more than one signal in a look.

In: segments, the tree. Out: `job.hung`, `job.waiting`, `job.advanced`, `rank.slowed` and `rank.recovered` events; the
lost ranks, and WAITING_FILE, for the agent.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...base import files
from ...events import catalogue
from ...snapshot.segment.progress_words import RankProgress, read
from ..serve.node_context import NodeContext
from . import liveness, stacks
from .hang import (
    HANG,
    HangVerdict,
    Signs,
    SlowRank,
    Stall,
    culprits,
    judge,
    slow_ranks,
    stall_of_ended,
    usual_seconds,
    works,
)
from .job_history import FtRunPhase, read_note

LOOK_SECONDS = 5.0  # between two looks
_SIGN_SECONDS = 1.0  # for all ranks to write their stacks
PAUSED_SECONDS = 5.0  # between two looks: this process did not run
TOGETHER_SECONDS = 2.0  # on several nodes, from the announcement on: the first to restart ends the ranks of all
WAITING_FILE = "waiting.json"  # in the run directory
_STACK_SECONDS = 2.0  # for that of a rank that goes on; less than PAUSED_SECONDS
_COMPARE_SECONDS = 2.0  # between two comparisons of ranks


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
        seen = liveness.use_of_trees({rank.rank: processes[rank.rank][0] for rank in ranks})
        busy = {
            number: (used - self._seen[number].used) / (now - self._seen[number].at) if number in self._seen else 1.0
            for number, (used, _) in seen.items()
        }
        asked = [one.rank for one in ranks if one.waits and works(one, Signs(busy[one.rank], moved=True))]
        found = stacks.of_ranks(self._run_dir, {number: processes[number] for number in asked}, _SIGN_SECONDS)
        for rank in ranks:
            number, before = rank.rank, self._seen.get(rank.rank)
            used, blocked = seen[number]
            stack = found.get(number, "")
            moved = before is not None and "" not in (stack, before.stack) and stack != before.stack
            self._seen[number] = _Seen(now, used, stack or (before.stack if before else ""))
            if works(rank, Signs(busy[number] if before else 0.0, blocked, moved)):
                self.worked[number] = now


class Tree(Protocol):
    """What the tree of SMPs offers. `position`, `nodes`: of this node in the job, 0 and 0 if it is not in a tree."""

    def place(self) -> tuple[int, int]: ...
    def report_stall(self, stall: Stall | None) -> None: ...
    def announced_stall(self) -> tuple[Stall, str] | None: ...
    def restart_workers(self, token: int, lost: list[str]) -> None: ...


class HangWatch:
    """The watch of one SMP. For one thread."""

    def __init__(self, smp: NodeContext, tree: Tree) -> None:
        self._run_dir, self._segments, self._tree, self._events = smp.run_dir, smp.segments, tree, smp.events
        self._since = self._looked = self._compared = time.monotonic()
        self._owners: dict[int, tuple[int, int]] = {}  # (pid, start time) by rank
        self._declared = -1  # the token whose hang was reported
        self._unwritten: tuple[int, list[str]] | None = None  # what is still to be declared
        self._due = 0.0  # and when (monotonic)
        self._signs = SignsOfWork(smp.run_dir)
        self._waiting: tuple[int, int] | None = None  # the token and iteration in which the job was found waiting
        self._waiting_since = 0.0
        self._hung_in = -1  # the iteration of the last hang
        self._hangs = 0  # that ended in it, in a row
        self.slow: tuple[SlowRank, ...] = ()
        self.verdict = HangVerdict()
        self._usual: float | None = None  # seconds of an iteration
        self._waits_for = ""  # a rank that may be at work, for people

    def status(self) -> dict[str, Any]:
        """For people."""
        return {
            "no_progress_seconds": round(self.verdict.seconds, 1),
            "hang_seconds": round(self.verdict.limit, 1),
            "iteration_seconds": self._usual,
            "waits_for": self._waits_for,
            "slow": [[one.rank, round(one.factor, 2)] for one in self.slow],
        }

    def look(self, token: int, stopped: Mapping[int, float]) -> None:
        """Look at the ranks of incarnation `token`. `stopped`: ranks that are stopped by a signal."""
        now = time.monotonic()
        if now - self._looked > PAUSED_SECONDS:
            self._since = now
        self._looked = now
        ranks, expected = self._read(token)
        alive = any(liveness.started(self._owners[rank.rank][0]) == self._owners[rank.rank][1] for rank in ranks)
        if not ranks or len(ranks) < expected or not alive:  # an incarnation is starting, or training is over
            self.verdict, self.slow, self._waits_for, self._usual = HangVerdict(), (), "", None
            note = read_note(self._run_dir) if ranks and not alive else None
            leaves = note is not None and note.phase is FtRunPhase.LEAVING
            self._tree.report_stall(stall_of_ended(ranks, self._tree.place()[0]) if leaves else None)
            return
        self._usual = usual_seconds(ranks)
        position, nodes = self._tree.place()
        apart = not nodes and ranks[0].ranks > ranks[0].ranks_of_node
        hangs = self._hangs if self._hung_before(min(rank.iteration for rank in ranks)) else 0
        self.verdict = self._judge(ranks, now, position, stopped, apart, hangs)
        self._tree.report_stall(self.verdict.stall)
        self._waits_for = ""
        if self._declared != token:
            self._due = now + (TOGETHER_SECONDS if nodes > 1 else 0.0)
            own = (self.verdict.stall, self._run_dir.name) if self.verdict.stall else None
            found = self._tree.announced_stall() if nodes > 1 else own
            known = (found or own) if own else None
            self._waits_for = known[0].who(known[1]) if known and known[0].patient else ""
            if found is not None and not found[0].patient:
                self._hung(token, *found, ranks)
            elif found is not None and found[0].position == position:
                self._found_waiting(token, *found)
            elif self.verdict.stall is None:
                self._advanced(token, ranks)
        self._declare_unwritten(token)
        if now - self._compared >= _COMPARE_SECONDS:
            self._compared = now
            self._compare(ranks)

    def _judge(
        self, ranks: list[RankProgress], now: float, position: int, stopped: Collection[int], apart: bool, hangs: int
    ) -> HangVerdict:
        """The verdict. Looks for signs of work from half of the limit on, where they count."""

        def verdict() -> HangVerdict:
            return judge(
                ranks, now, position=position, watched_since=self._since, stopped=stopped, apart=apart, hangs=hangs,
                worked=self._signs.worked,
            )  # fmt: skip

        found = verdict()
        if 2 * found.seconds <= found.limit:
            self._signs.forget()
        elif ranks[0].limit_seconds is None:
            self._signs.look(culprits(ranks, stopped) or ranks, self._owners)
            found = verdict()
        return found

    def _read(self, token: int) -> tuple[list[RankProgress], int]:
        """The words of the ranks whose trainers live, and how many such ranks there are."""
        found: list[RankProgress | None] = []
        for rank, segment in sorted(self._segments.items()):
            with suppress(AttributeError):  # closed meanwhile: the rank is on another node now
                owner = segment.header.owner
                if segment.header.attached and owner[1]:
                    self._owners[rank] = owner
                    found.append(read(rank, token, segment.bytes))
        return [one for one in found if one is not None], len(found)

    def _hung(self, token: int, stall: Stall, node: str, ranks: list[RankProgress]) -> None:
        self._declared = token
        self._hangs = self._hangs + 1 if self._hung_before(stall.iteration) else 1
        self._hung_in = stall.iteration
        who, where, failed = stall.who(node), "", ""
        processes = {rank.rank: self._owners[rank.rank] for rank in ranks}
        try:
            where = str(stacks.dump(self._run_dir, token, processes))
        except OSError as error:
            failed = f"; no stacks could be written: {error}"
        seconds = round(self.verdict.seconds, 1)
        idle = f"no iteration was completed for {seconds:g} s" + (f", stacks in {where}" if where else failed)
        self._events.emit(
            catalogue.JOB_HUNG, about=stall.rank, culprit=node, iteration=stall.iteration,
            phase=stall.phase.name.lower(), even=stall.even, ranks=list(self.verdict.ranks), seconds=seconds,
            limit_seconds=round(self.verdict.limit, 1), stacks=where, reason=f"{who}; {idle}",
        )  # fmt: skip
        self._unwritten = token, [f"{HANG}{who} ({idle})"]

    def _found_waiting(self, token: int, stall: Stall, node: str) -> None:
        """Give an alarm, once for an iteration, with the stack of the rank that is waited for."""
        if self._waiting == (token, stall.iteration):
            return
        self._waiting, self._waiting_since = (token, stall.iteration), time.monotonic()
        where, place = "", ""
        with suppress(OSError, KeyError):
            folder = stacks.dump(self._run_dir, token, {stall.rank: self._owners[stall.rank]}, _STACK_SECONDS)
            where, place = str(folder), stacks.place(folder / f"rank{stall.rank}.txt")
        seconds = round(self.verdict.seconds, 1)
        reason = f"no iteration was completed for {seconds:g} s; waiting for {stall.who(node)}"
        reason += f"; its stack stands in {place} ({where})" if place else ""
        self._events.emit(
            catalogue.JOB_WAITING, about=stall.rank, iteration=stall.iteration, phase=stall.phase.name.lower(),
            seconds=seconds, stacks=where, reason=reason,
        )  # fmt: skip
        with suppress(OSError):
            words = catalogue.JOB_WAITING.sentence(f"node {self._run_dir.name}", reason)
            files.write_json(self._run_dir / WAITING_FILE, {"token": token, "words": words})

    def _advanced(self, token: int, ranks: list[RankProgress]) -> None:
        """End the alarm that the job waits; that of an incarnation that has ended once ranks complete iterations."""
        if self._waiting is None or (self._waiting[0] != token and not any(rank.done for rank in ranks)):
            return
        self._events.emit(
            catalogue.JOB_ADVANCED, iteration=max(rank.iteration for rank in ranks),
            seconds=round(time.monotonic() - self._waiting_since, 1),
        )  # fmt: skip
        self._waiting = None

    def _hung_before(self, iteration: int) -> bool:
        """Whether the last hang was there: in the same iteration, or one next to it, between which ranks wait."""
        return self._hung_in >= 0 and abs(iteration - self._hung_in) <= 1

    def _declare_unwritten(self, token: int) -> None:
        """Declare what was found, when it is due; if that fails, at the next look again: the disk may be full."""
        if self._unwritten is not None and self._unwritten[0] == token and time.monotonic() >= self._due:
            with suppress(OSError):
                self._tree.restart_workers(*self._unwritten)
                self._unwritten = None

    def _compare(self, ranks: list[RankProgress]) -> None:
        before = {one.rank: one for one in self.slow}
        self.slow = slow_ranks(ranks, before)
        for one in self.slow:
            if before.pop(one.rank, None) is None:
                self._events.emit(
                    catalogue.RANK_SLOWED, about=one.rank, factor=round(one.factor, 2), seconds=one.seconds,
                    iterations=max(len(rank.computed) for rank in ranks),
                )  # fmt: skip
        for rank in before:
            self._events.emit(catalogue.RANK_RECOVERED, about=rank)
