"""Goodput: which share of a job's wall time trained it, and where every other second went. Pure.

    training    iterations that were not computed before: the effective training time
    recomputed  iterations computed again after a restore
    waits       training stood still for a snapshot, an audit or an average: of the rank that waited longest
    hangs       no iteration was completed, until the hang was found
    waiting     ranks waited for one that may have been at work (`job.waiting`)
    launch      from ft-run's start to the first completed iteration, or to its failure; on a spare, that it waited
    <phases>    of recoveries, as in `recovery_phases`
    down        after a failure that no completed iteration followed, or before a recovery that was not noted
    stopped     no ft-run ran
    unknown     what the events do not say

ETTR, the effective training time ratio, is the first part of all of them (ByteRobust).

Invariant: the parts are whole microseconds, disjoint, and add up to the wall time exactly. Nothing is estimated: if no
event shows the end of recomputing, its time is unknown. Clocks of two nodes are never compared: the parts are those of
one node, the one that trained the longest: a spare waits most of the time. What a slow rank cost is in `training`; who
was slow is named. An iteration that a failure cut short is in `training`, the first one after a restart in the
recovery.

In: the events of one or more nodes. Out: `Goodput`; None without events.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from ..events import Event, catalogue
from .recovery_phases import PHASES, WORDS, recovery_phases

_WORDS = {
    "training": "training",
    "recomputed": "iterations computed again",
    "waits": "waits for snapshots, replicas",
    "hangs": "hangs, until found",
    "waiting": "waiting for one rank",
    "launch": "start of ft-run, wait as spare",
    **{phase: f"restart: {words}" for phase, words in WORDS.items()},
    "down": "down, not recovered",
    "stopped": "no ft-run",
    "unknown": "unknown",
}
PARTS = tuple(_WORDS)
_FAILURES = (
    catalogue.WORKER_FAILED, catalogue.WORKERS_KILLED, catalogue.ROUND_ENDED, catalogue.ROUND_CHANGED,
    catalogue.WORKERS_RESTARTED,
)  # fmt: skip
_STARTS = (catalogue.JOB_STARTED, catalogue.WORKERS_RESTARTED)
_WAITS = tuple(kind for kind in catalogue.EVENTS.values() if "waited_seconds" in kind.fields
               and kind is not catalogue.PROFILE_COMPLETED)  # fmt: skip
_LAST = 3  # the strongest overlay
_Interval = tuple[int, int, str, int]  # begin, end, part, strength


def words_of(part: str) -> str:
    """A part for people."""
    return _WORDS[part]


@dataclass(frozen=True)
class Goodput:
    """`began`: seconds since the epoch. `wall` and `parts`: microseconds. `unseen`: failures of which it is not known
    when they happened, so the time until they were detected is in `training`. `slow`: ranks that were slow."""

    node: str
    began: float
    wall: int
    parts: dict[str, int]
    failures: int
    unseen: int
    slow: tuple[int, ...]
    ended: bool  # ft-run has ended; else the wall time is that until the newest event

    @property
    def ettr(self) -> float | None:
        """Effective training time over wall time; None without any time."""
        return self.parts["training"] / self.wall if self.wall else None

    def block(self) -> dict[str, Any]:
        """For JSON, in seconds."""
        parts = {name: microseconds / 1e6 for name, microseconds in self.parts.items()}
        return {
            "node": self.node, "began": self.began, "wall_seconds": self.wall / 1e6, "ettr": self.ettr,
            "parts": parts, "failures": self.failures, "unseen_detections": self.unseen, "slow": list(self.slow),
            "ended": self.ended,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For people; parts that took no time are left out."""
        ratio = "unknown" if self.ettr is None else f"{100 * self.ettr:.2f} %"
        until = "" if self.ended else ", until the newest event"
        lines = [f"goodput (ETTR) {ratio} of {self.wall / 1e6:.2f} s, seen by node {self.node}{until}"]
        for name, words in _WORDS.items():
            if self.parts[name]:
                share = 100 * self.parts[name] / self.wall
                lines.append(f"  {words:<34}{self.parts[name] / 1e6:>12.2f} s{share:>8.2f} %")
        if self.unseen:
            lines.append(f"  failures that were noticed at an unknown time after they happened: {self.unseen}")
        if self.slow:
            lines.append(f"  slow, which is within training: rank {', '.join(map(str, self.slow))}")
        return lines


def goodput(events: Iterable[Event]) -> Goodput | None:
    """Where the time went, on the node that trained the longest; of equal ones, whose events cover the longest time."""
    by_node: dict[str, list[Event]] = {}
    for event in sorted(events, key=lambda event: event.time):
        by_node.setdefault(event.node, []).append(event)
    if not by_node:
        return None

    def length(node: str) -> tuple[float, float, str]:
        own = by_node[node]
        return sum(end - begin for begin, end in trained(own)), own[-1].time - own[0].time, node

    longest = max(by_node, key=length)
    slow = {event.fields["about"] for own in by_node.values() for event in own if event.type is catalogue.RANK_SLOWED}
    return _of_node(longest, by_node[longest], tuple(sorted(slow)))


def _of_node(node: str, events: Sequence[Event], slow: tuple[int, ...]) -> Goodput:
    """The parts of one node, from its events by time."""
    began, end = _microseconds(events[0].time), _microseconds(events[-1].time)
    states = list(_states(events))
    recoveries = recovery_phases(events)
    intervals = [*states, *_recomputed(events, states), *_stood_still(events)]
    for one in recoveries:
        at = _microseconds(one.ended - one.total)
        reached = one.ended - one.total
        for phase in PHASES:
            reached += one.phases[phase] or 0.0
            intervals.append((at, _microseconds(reached), phase, _LAST))
            at = _microseconds(reached)
    parts = _swept(began, end, intervals)
    waits = min(parts["training"], _waits(events))
    parts["training"] -= waits
    parts["waits"] += waits
    downs = sum(1 for before, after in zip(states, states[1:], strict=False) if after[2] == "down" != before[2])
    unseen = downs - sum(one.phases["detect"] is not None for one in recoveries)
    over = [event.type for event in events if event.type in (catalogue.JOB_STARTED, catalogue.JOB_ENDED)]
    ended = bool(over) and over[-1] is catalogue.JOB_ENDED
    return Goodput(node, events[0].time, end - began, parts, downs, max(0, unseen), slow, ended)


def trained(events: Sequence[Event]) -> Iterator[tuple[float, float]]:
    """From when to when the ranks of one node trained, in seconds since the epoch. `events`: its own, by time."""
    return ((begin / 1e6, end / 1e6) for begin, end, state, _ in _states(events) if state == "training")


def _last_sign(events: Sequence[Event], at: int) -> float:
    """When anything of the ft-run before the start `events[at]` was seen last. The start's SMP reports before it."""
    own, last = {events[at].pid, events[at - 1].pid}, at - 1
    while last > 0 and events[last].pid in own:
        last -= 1
    started = any(event.type is catalogue.SMP_STARTED for event in events[last + 1 : at])
    return events[last if started else at - 1].time


def _states(events: Sequence[Event]) -> Iterator[_Interval]:
    """What the job did, from one event that shows it to the next."""
    state, since = "unknown", events[0].time
    for at, event in enumerate(events):
        following = state
        if event.type is catalogue.JOB_STARTED:
            if state not in ("stopped", "unknown"):  # ft-run was killed without a word
                before = max(since, _last_sign(events, at))
                yield _microseconds(since), _microseconds(before), "unknown" if state == "launch" else state, 0
                state, since = "unknown", before
            following = "launch"
        elif event.type is catalogue.RANKS_RESUMED:
            following = "training"
        elif event.type in _FAILURES and state in ("training", "launch"):
            following = "down"
        elif event.type is catalogue.SMP_ORPHANED and state != "stopped":  # ft-run is gone, and its SMP goes on
            following = "unknown"
        elif event.type is catalogue.JOB_ENDED:
            if state == "launch":  # not one iteration is known, so neither what this time was
                state = "unknown"
            following = "stopped"
        if following != state:
            yield _microseconds(since), _microseconds(event.time), state, 0
            state, since = following, event.time
    last = "unknown" if state == "launch" else state
    yield _microseconds(since), _microseconds(events[-1].time), last, 0


def _recomputed(events: Sequence[Event], states: Sequence[_Interval]) -> Iterator[_Interval]:
    """From the first iteration after a restore to the one that had been completed before, if events show its end."""
    times = [_microseconds(event.time) for event in events]
    starts = [event.time for event in events if event.type in _STARTS]
    restores = [event for event in events if event.type is catalogue.STATE_RESTORED]
    restored_at = [event.time for event in restores]
    for begin, end, state, _ in states:
        if state != "training":
            continue
        within = events[bisect_left(times, begin) : bisect_right(times, end)]
        first = next((event.fields for event in within if event.type is catalogue.RANKS_RESUMED), None)
        start = bisect_right(starts, begin, key=_microseconds)
        restore = bisect_right(restored_at, begin / 1e6 + 1e-6)
        if first is None or not restore or start and restored_at[restore - 1] < starts[start - 1]:
            continue
        restored = restores[restore - 1].fields
        target = restored.get("completed")
        if target is None or not restored.get("lost") or first["iteration"] >= target:
            continue
        shown = [(e.fields["iteration"], _microseconds(e.time - (e.fields.get("seconds") or 0.0))) for e in within
                 if e.type is catalogue.SNAPSHOT_SEALED]  # fmt: skip
        exact = [at for iteration, at in shown if iteration == target]
        later = [at for iteration, at in shown if iteration > target]
        if exact:
            yield begin, max(begin, min(exact)), "recomputed", 1
        else:
            yield begin, max(begin, min(later, default=end)), "unknown", 1


def _stood_still(events: Sequence[Event]) -> Iterator[_Interval]:
    """Hangs, from the last completed iteration until they were found, and waits for a rank that may have worked."""
    waiting: float | None = None
    for event in events:
        if event.type in (catalogue.JOB_HUNG, catalogue.JOB_WAITING):
            since = event.time - (event.fields.get("seconds") or 0.0)
            if event.type is catalogue.JOB_HUNG:
                yield _microseconds(since), _microseconds(event.time), "hangs", 2
            else:
                waiting = since if waiting is None else waiting
        elif waiting is not None and event.type in (catalogue.JOB_ADVANCED, *_FAILURES):
            yield _microseconds(waiting), _microseconds(event.time), "waiting", 2
            waiting = None
    if waiting is not None:
        yield _microseconds(waiting), _microseconds(events[-1].time), "waiting", 2


def _waits(events: Sequence[Event]) -> int:
    """For how long the rank that waited longest stood still at fences and for replicas."""
    waited: Counter[int | None] = Counter()
    summed: dict[tuple[str, int], int] = {}  # by process, the last iteration of which a sum has the fence
    fences = [e for e in events if e.type is catalogue.ROUTINE_SUMMED and e.fields["of"] == catalogue.FENCE_WAITED.name]
    for event in fences:
        waited[event.rank] += _microseconds(event.fields.get("seconds") or 0.0)
        process = event.node, event.pid
        summed[process] = max(event.fields.get("last") or 0, summed.get(process, 0))
    for event in events:
        seconds = event.fields.get("waited_seconds") or 0.0 if event.type in _WAITS else 0.0
        if event.type is catalogue.FENCE_WAITED:
            new = event.fields["iteration"] > summed.get((event.node, event.pid), 0)
            seconds = event.fields["seconds"] if new else 0.0
        waited[event.rank] += _microseconds(seconds)
    return max(0, *waited.values())


def _swept(began: int, end: int, intervals: Sequence[_Interval]) -> dict[str, int]:
    """How long each part lasted: at any moment the strongest interval holds, of equal ones the later one."""
    parts = dict.fromkeys(PARTS, 0)
    edges = sorted({began, end, *(edge for each in intervals for edge in each[:2] if began < edge < end)})
    ahead = deque(sorted(intervals, key=lambda each: each[0]))
    over: list[tuple[int, int, int, _Interval]] = []  # a heap, the strongest first; some are past already
    for left, right in zip(edges, edges[1:], strict=False):
        while ahead and ahead[0][0] <= left:
            each = ahead.popleft()
            heappush(over, (-each[3], -each[0], -len(ahead), each))
        while over and over[0][3][1] <= left:
            heappop(over)
        parts[over[0][3][2] if over else "unknown"] += right - left
    return parts


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
