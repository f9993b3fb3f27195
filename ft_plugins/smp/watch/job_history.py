"""What an operator asks of a job on a node: restarts, downtime, and for how long each iteration and version is there.

Downtime is the time from the failure of a training process of this node until all of its ranks have completed an
iteration again; a node that takes no part any more, as a spare, is not down. A restart is a new incarnation after one
whose ranks had attached.

Invariant: facts as this node's SMP saw them, late by one look at most; nothing is decided by them. They are in a file
of the run directory, so an SMP that replaces another continues them, and they can be read where no SMP runs. Times are
seconds since the epoch. Imports nothing that is slow: the command line reads the file.

What ft-run does on this node, or how it ended there, is in a file of its own. Only the ft-run that holds the job's lock
writes it. One that is killed leaves what it did last, so without a live ft-run `ENDED` alone says how it ended.

In: what the SMP sees of its ranks. Out: `History`; plain values for `status`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base import files
from ...base.outside_values import json_value, read_bytes
from ...snapshot.segment.slots import Version
from ..serve.status import any_failed, completed_by_all, newest_complete

if TYPE_CHECKING:
    from ...snapshot.segment.segment import Segment

HISTORY_FILE = "history.json"  # in the run directory
PROCESS, NODE, STORAGE = "process", "node", "storage"  # tiers
_WRITE_SECONDS = 30.0  # between two writes while nothing happens
_LOOK_SECONDS = 1.0  # between two looks at versions
_LIMIT = 1 << 63
NOTE_FILE = "ft-run.json"
ROUND_FILE = "nodes.json"  # of ft-run: the nodes of the last round
ROUND_LIMIT = 4 << 20  # its bytes; enough for thousands of nodes
_REASON = 2000  # characters


@dataclass(frozen=True)
class Sight:
    """What an SMP sees at one time. `completed`: the last iteration that all ranks of the running incarnation have
    completed; None before all of them have opened its lineage. `failed`: one of its trainers has ended on its own.
    `apart`: the job needs none of them, see `takes_no_part`: how far they came is past, and their end no outage."""

    failed: bool = False
    completed: int | None = None
    versions: Mapping[str, Version | None] = field(default_factory=dict)  # the newest, by tier
    apart: bool = False


@dataclass(frozen=True)
class History:
    """`down_seconds` are those of outages that are over, `down_since` is the begin of one that is not. `base`: the
    iteration from which the running incarnation began; None before that is known. `moments`: by tier, the newest
    version and when it was first seen; `iteration` was first seen at `iteration_time`."""

    restarts: int = 0
    down_seconds: float = 0.0
    down_since: float | None = None
    base: int | None = None
    iteration: int = 0
    iteration_time: float = 0.0
    moments: Mapping[str, tuple[int, int, float]] = field(default_factory=dict)
    written: float = 0.0

    def fenced(self, now: float, attached: bool) -> History:
        """A new incarnation begins; `attached`: ranks of the one before had attached."""
        if not attached:
            return replace(self, base=None)
        since = now if self.down_since is None else self.down_since
        return replace(self, restarts=self.restarts + 1, down_since=since, base=None)

    def opened(self, base: int) -> History:
        """The running incarnation continues from iteration `base`."""
        return replace(self, base=base)

    def seen(self, now: float, sight: Sight) -> History:
        """After a look at the ranks."""
        after = replace(self, down_since=None, iteration=0, iteration_time=0.0) if sight.apart else self
        if sight.failed and self.down_since is None:
            idle = 0 < self.written < now - 2 * _WRITE_SECONDS  # the SMP had ended too
            after = replace(after, down_since=self.written if idle else now)
        done = sight.completed
        if done is not None and done > 0 and done != self.iteration:
            completed = self.base is None or done > self.base  # else it was restored
            after = replace(after, iteration=done, iteration_time=now if completed else self.iteration_time)
        again = not sight.failed and done is not None and self.base is not None and done > self.base
        if again and after.down_since is not None:
            lasted = max(0.0, now - after.down_since)
            after = replace(after, down_seconds=after.down_seconds + lasted, down_since=None)
        moments = dict(after.moments)
        for tier, version in sight.versions.items():
            if version is None:
                moments.pop(tier, None)
            elif tier not in moments or moments[tier][:2] != (version.lineage, version.iteration):
                moments[tier] = (version.lineage, version.iteration, now)
        return after if moments == after.moments else replace(after, moments=moments)

    def turned(self, before: History) -> bool:
        """Whether something happened since `before` that must outlive this SMP."""
        return (self.restarts, self.down_since, self.base) != (before.restarts, before.down_since, before.base)

    def report(self, now: float) -> dict[str, Any]:
        """As plain values, with ages in seconds. An outage that is not over counts."""
        current = 0.0 if self.down_since is None else max(0.0, now - self.down_since)
        tiers: dict[str, Any] = dict.fromkeys((PROCESS, NODE, STORAGE))
        for tier, (lineage, iteration, at) in self.moments.items():
            tiers[tier] = {"lineage": lineage, "iteration": iteration, "age_seconds": round(max(0.0, now - at), 1)}
        age = round(max(0.0, now - self.iteration_time), 1) if self.iteration_time else None
        return {
            "restarts": self.restarts, "base": self.base, "downtime_seconds": round(self.down_seconds + current, 1),
            "down_for_seconds": None if self.down_since is None else round(current, 1),
            "iteration": self.iteration or None, "iteration_age_seconds": age, "tiers": tiers,
        }  # fmt: skip


def read_history(run_dir: Path) -> History | None:
    """The history in a run directory; None if there is none, or its file is damaged."""
    try:
        value = json_value(read_bytes(run_dir / HISTORY_FILE))
        moments = {
            tier: (_count(lineage), _count(iteration), _seconds(at))
            for tier, (lineage, iteration, at) in value["moments"].items()
            if tier in (PROCESS, NODE, STORAGE)
        }
        return History(
            _count(value["restarts"]), _seconds(value["down_seconds"]),
            None if value["down_since"] is None else _seconds(value["down_since"]),
            None if value["base"] is None else _count(value["base"]),
            _count(value["iteration"]), _seconds(value["iteration_time"]), moments, _seconds(value["written"]),
        )  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise ValueError("not a count")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError("not a time")
    return float(value)


class JobHistory:
    """The history that an SMP keeps. Call under the SMP's lock."""

    def __init__(self, run_dir: Path, continues: bool) -> None:
        """`continues`: segments of an earlier SMP were adopted, so its history holds on."""
        self._run_dir = run_dir
        self._looked, self._apart = float("-inf"), False  # monotonic; at that look
        self.now = (read_history(run_dir) if continues else None) or History()
        if not continues:
            with suppress(OSError):
                (run_dir / HISTORY_FILE).unlink(missing_ok=True)

    def fenced(self, attached: bool) -> None:
        """See `History.fenced`."""
        self._become(self.now.fenced(time.time(), attached))

    def opened(self, base: int) -> None:
        """See `History.opened`."""
        self._become(self.now.opened(base))

    def look(
        self, segments: Collection[Segment], token: int, tiers: Mapping[str, Version | None], always: bool = False
    ) -> None:
        """Look at the ranks of the incarnation `token`; not more often than each second, unless `always`, for versions:
        those in the segments, and the newest ones of other `tiers`."""
        versions: dict[str, Version | None] = {}
        if always or time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            versions = {PROCESS: newest_complete(segments), **tiers}
            self._apart = takes_no_part(read_note(self._run_dir))
        sight = Sight(any_failed(segments), completed_by_all(segments, token), versions)
        self._become(self.now.seen(time.time(), Sight(versions=versions, apart=True) if self._apart else sight))

    def report(self) -> dict[str, Any]:
        """See `History.report`."""
        return self.now.report(time.time())

    def _become(self, after: History) -> None:
        before, self.now = self.now, after
        if after.turned(before) or after != History() and time.time() - after.written >= _WRITE_SECONDS:
            self._write()

    def _write(self) -> None:
        self.now = replace(self.now, written=time.time())
        with suppress(OSError):  # a full disk
            files.write_json(self._run_dir / HISTORY_FILE, asdict(self.now))

    def close(self) -> None:
        """What is in memory is removed: leave how far the job came, for people. A later SMP begins a new history."""
        if self.now != History():
            moments = {tier: moment for tier, moment in self.now.moments.items() if tier == STORAGE}
            self.now = replace(self.now, moments=moments)
            self._write()


# ---- what ft-run leaves ----


class FtRunPhase(str, Enum):
    """What ft-run does."""

    STARTING = "starting"  # its ranks start, or train
    WAITING = "waiting"  # for other nodes
    SPARE = "spare"  # for a place in the job
    LEAVING = "leaving"  # for ranks of other nodes to end, as its own have
    STOPPING = "stopping"  # for its ranks to end, as it was asked to
    ENDED = "ended"


@dataclass(frozen=True)
class FtRunNote:
    """`time`: since when, in seconds since the epoch. `reason`: what it waits for, or why it ended. `status` and
    `exit_status`: how it ended. `remedy`: what a person should do while it waits; '' for what is usual."""

    phase: FtRunPhase
    reason: str = ""
    status: str = ""
    exit_status: int = 0
    time: float = field(default_factory=time.time)
    remedy: str = ""


def write_note(run_dir: Path, note: FtRunNote) -> None:
    """Replace the note of a run directory. A full disk loses it; nothing is raised."""
    with suppress(OSError):
        files.write_json(run_dir / NOTE_FILE, asdict(note) | {"reason": note.reason[:_REASON]})


def was_drained(run_dir: Path) -> bool:
    """Whether the ft-run of this node has left the job, which goes on without it."""
    return (note := read_note(run_dir)) is not None and note.status == "drained"


def takes_no_part(note: FtRunNote | None) -> bool:
    """Whether the ft-run of this note is a spare, or was drained: the job trains without this node."""
    return note is not None and (note.phase is FtRunPhase.SPARE or note.status == "drained")


def had_others(run_dir: Path) -> bool:
    """Whether the last round that this node took part in had other nodes, too."""
    try:
        return len(json_value(read_bytes(run_dir / ROUND_FILE, ROUND_LIMIT))["roster"]["members"]) > 1
    except (OSError, ValueError, TypeError, KeyError):
        return False


def read_note(run_dir: Path) -> FtRunNote | None:
    """The note of a run directory; None if there is none, or its file is damaged."""
    try:
        value = json_value(read_bytes(run_dir / NOTE_FILE))
        note = FtRunNote(
            FtRunPhase(value["phase"]), value["reason"], value["status"], value["exit_status"], float(value["time"]),
            value.get("remedy", ""),
        )  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError):
        return None
    fits = type(note.reason) is type(note.status) is type(note.remedy) is str and type(note.exit_status) is int
    return note if fits and math.isfinite(note.time) else None
