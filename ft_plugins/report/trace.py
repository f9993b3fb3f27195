"""A trace of a job for Perfetto and chrome://tracing, from its events alone. Pure.

A process of the trace is a node; below it are lanes: recoveries with their phases, transfers, checkpoints, and of each
rank its captures and waits. What BAFT measured of one iteration has processes of its own: spans, bubbles and planned
windows of all ranks, from the time at which the first of them was recorded, not from when the iteration ran.

Invariant: a slice lasts as long as an event says, and ends when that was written; nothing is drawn that no event holds.
Slices of a lane are ordered, and nested or disjoint: one that overlaps another gets a lane of its own. Clocks of nodes
are as they are. Times are microseconds since the first slice; `otherData.began` is that in seconds since the epoch.

In: the events of one or more nodes. Out: an object for JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..events import Event, Severity, catalogue
from .recovery_phases import WORDS, recovery_phases

_LASTED = {  # lane and words of events that say how long something took
    catalogue.SNAPSHOT_SEALED.name: ("captures", "capture"),
    catalogue.FENCE_WAITED.name: ("waits", "wait for the snapshot"),
    catalogue.STATE_RESTORED.name: ("restores", "restore"),
    catalogue.EXCHANGE_SENT.name: ("transfers", "send"),
    catalogue.VERSION_COMMITTED.name: ("commits", "commit"),
    catalogue.SLOT_REBUILT.name: ("rebuilds", "rebuild"),
    catalogue.CHECKPOINT_COMPLETED.name: ("checkpoints", "checkpoint"),
    catalogue.JOB_HUNG.name: ("hangs", "hang"),
}
_WAITED = {
    catalogue.REPLICAS_AVERAGED.name, catalogue.REPLICAS_SYNCHRONISED.name, catalogue.LAYERS_AVERAGED.name,
    catalogue.AUDIT_FAILED.name,
}  # fmt: skip


@dataclass(frozen=True)
class _Slice:
    """Times are seconds since the epoch; `inner` ones lie within, in order."""

    process: str
    lane: str
    name: str
    begin: float
    end: float
    facts: dict[str, Any] = field(default_factory=dict)
    inner: tuple[_Slice, ...] = ()


def trace(events: Iterable[Event]) -> dict[str, Any]:
    """The trace, in Chrome's format."""
    ordered = sorted(events, key=lambda event: event.time)
    slices = [*_lasted(ordered), *_recoveries(ordered), *_measured(ordered)]
    marks = [event for event in ordered if event.type is not None and event.type.severity >= Severity.WARNING]
    began = min([*(each.begin for each in slices), *(event.time for event in marks)], default=0.0)
    lanes: dict[tuple[str, str], list[float]] = {}  # the ends of the lanes of one name
    pids: dict[str, int] = {}
    tids: dict[tuple[str, str, int], int] = {}
    drawn: list[dict[str, Any]] = []

    def place(process: str, lane: str, number: int) -> dict[str, int]:
        pid = pids.setdefault(process, len(pids) + 1)
        return {"pid": pid, "tid": tids.setdefault((process, lane, number), len(tids) + 1)}

    def microseconds(time: float) -> int:
        return round((time - began) * 1e6)

    for each in sorted(slices, key=lambda each: (each.begin, -each.end)):
        ends = lanes.setdefault((each.process, each.lane), [])
        begin, end = microseconds(each.begin), microseconds(each.end)
        number = next((at for at, last in enumerate(ends) if last <= begin), len(ends))
        ends[number : number + 1] = [end]
        for one in (each, *each.inner):
            at = microseconds(one.begin)
            where = place(each.process, each.lane, number)
            drawn.append({"ph": "X", "name": one.name, "cat": each.lane, "ts": at, "dur": microseconds(one.end) - at,
                          **where, "args": one.facts})  # fmt: skip
    for event in marks:
        at, where = microseconds(event.time), place(_node(event), "failures", 0)
        facts = {"rank": event.rank, **event.fields}
        drawn.append({"ph": "i", "s": "p", "name": event.name, "cat": "failures", "ts": at, **where, "args": facts})
    drawn.sort(key=lambda each: (each["pid"], each["tid"], each["ts"], -each.get("dur", 0)))
    named = [
        {"ph": "M", "name": "process_name", "ts": 0, "pid": pid, "tid": 0, "args": {"name": name}}
        for name, pid in pids.items()
    ]
    for (process, lane, number), tid in tids.items():
        name = f"{lane} ({number + 1})" if number else lane
        where = {"pid": pids[process], "tid": tid}
        named.append({"ph": "M", "name": "thread_name", "ts": 0, **where, "args": {"name": name}})
    return {"traceEvents": [*named, *drawn], "displayTimeUnit": "ms", "otherData": {"began": began}}


def _node(event: Event) -> str:
    return f"node {event.node}"


def _lasted(events: Sequence[Event]) -> Iterator[_Slice]:
    for event in events:
        lane, name = _LASTED.get(event.name, ("waits", "wait for replicas" if event.name in _WAITED else ""))
        seconds = event.fields.get("waited_seconds" if event.name in _WAITED else "seconds") if name else None
        if seconds is None:
            continue
        if event.rank is not None:
            lane = f"rank {event.rank}: {lane}"
        iteration = event.fields.get("iteration")
        words = name if iteration is None else f"{name} {iteration}"
        yield _Slice(_node(event), lane, words, event.time - max(0.0, seconds), event.time, event.fields)


def _recoveries(events: Sequence[Event]) -> Iterator[_Slice]:
    for node in sorted({event.node for event in events}):
        for one in recovery_phases(event for event in events if event.node == node):
            begin = reached = one.ended - one.total
            phases = []
            for phase, seconds in one.phases.items():
                if seconds:
                    end = min(reached + seconds, one.ended)
                    phases.append(_Slice("", "", WORDS[phase], reached, end))
                    reached = end
            whole = _Slice(f"node {node}", "recoveries", f"restart {one.restart}", begin, one.ended)
            yield replace(whole, facts={"iteration": one.iteration, "starts": one.starts}, inner=tuple(phases))


def _measured(events: Sequence[Event]) -> Iterator[_Slice]:
    """Spans, bubbles and windows of measured iterations."""
    recorded = [event for event in events if event.type is catalogue.TIMELINE_RECORDED]
    bases = {event.fields.get("iteration"): event.time for event in reversed(recorded)}  # of the first one
    for event in recorded:
        iteration = event.fields.get("iteration")
        base = bases[iteration]
        process = f"one iteration as measured before {iteration}"
        for kind, begin, end in event.fields.get("spans", ()):
            yield _Slice(process, f"rank {event.rank}: {kind}", str(kind), base + begin, base + end)
        for index, begin, end in event.fields.get("bubbles", ()):
            yield _Slice(process, f"rank {event.rank}: bubbles", f"bubble {index}", base + begin, base + end)
        for bubble, begin, end, nbytes in event.fields.get("windows", ()):
            facts = {"bubble": bubble, "bytes": nbytes}
            yield _Slice(process, f"rank {event.rank}: windows", f"window {bubble}", base + begin, base + end, facts)
