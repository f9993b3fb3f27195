"""Where the time of each restart went, from the failure to the next completed iteration. Pure.

    detect     the failure -> an agent saw it                     known where a test or a benchmark caused the failure
    dump       the kernel writes the core of a rank, which ends when that is written
    end        -> the old processes of the node had ended, and it was decided to restart
    agree      -> a new round was agreed on with the other nodes, the old incarnation fenced
    start      -> the last new process ran
    imports    -> the last one began to make process groups
    groups     it made process groups: until the other ranks were there, too
    build      -> the last one had built its model (all else before `attach`)
    load       -> the last one had loaded its state
    iteration  -> an iteration was completed
    attempts   of the failures and starts before, since the last completed iteration: those that did not get so far

Invariant: the phases of a recovery are disjoint, in this order, and their sum is its total. A step that was not noted
adds its time to the next phase that was, and is None. Clocks of two nodes are never compared: of a job on several
nodes the phases are those of the one node that took longest, as all complete the iteration together.

As lines, a phase is a row and a restart a column; '-' is a phase that is unknown or did not occur.

In: the events of one or more nodes. Out: `RecoveryPhases`, by restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..events import Event, catalogue

_STEPS = {"start": "began", "imports": "joining", "build": "built", "load": "restored", "iteration": "completed"}
_CLOCKS = {"seen", "ended", "clock"}  # of a restart; older events have none
PHASES = ("attempts", "detect", "dump", "end", "agree", "start", "imports", "groups", "build", "load", "iteration")
WORDS = {
    "attempts": "earlier attempts",
    "detect": "detect the failure",
    "dump": "write a core",
    "end": "end old processes",
    "agree": "agree on a round",
    "start": "start processes",
    "imports": "import",
    "groups": "make process groups",
    "build": "build the model",
    "load": "load the state",
    "iteration": "first iteration",
}
_SHOWN = 5  # columns


@dataclass(frozen=True)
class RecoveryPhases:
    """One recovery, in seconds. `phases`: in order; None for one that is unknown or did not occur. `processor`: seconds
    of processors that all ranks of the node used, by the step of `stamps` that ended with them; `ranks` of them are
    described."""

    node: str
    nodes: int  # that noted their steps
    restart: int  # of that node
    lineage: int
    iteration: int  # that was completed
    starts: int  # since the last completed iteration; one if the first attempt succeeded
    phases: Mapping[str, float | None]
    ranks: int = 0
    processor: Mapping[str, float] = field(default_factory=dict)
    ended: float = 0.0  # when the iteration was completed: seconds since the epoch

    @property
    def total(self) -> float:
        """From the failure, if its time is known, else from its detection, to the completed iteration."""
        return sum(seconds for seconds in self.phases.values() if seconds is not None)

    def block(self) -> dict[str, Any]:
        """For JSON."""
        fields = asdict(self)
        phases = fields.pop("phases")
        return {**phases, "iteration_seconds": phases["iteration"], **fields, "total": self.total}


def recovery_phases(events: Iterable[Event]) -> tuple[RecoveryPhases, ...]:
    """The recoveries that ended in a completed iteration, by time. The time of a failure is that of a `signal.sent` of
    the same node."""
    ordered = sorted(events, key=lambda event: event.time)
    found: dict[tuple[int, int, int], list[RecoveryPhases]] = {}
    began: dict[tuple[int, int, int], float] = {}  # when the first node had recovered: seconds since the epoch
    for node in sorted({event.node for event in ordered}):
        before: Counter[tuple[int, int]] = Counter()  # of this node, which recovers once at a time
        for at, one in _of_node([event for event in ordered if event.node == node]):
            same = one.lineage, one.iteration
            key = *same, before[same]
            before[same] += 1
            found.setdefault(key, []).append(one)
            began[key] = min(at, began.get(key, at))
    return tuple(_longest(found[key]) for key in sorted(found, key=began.__getitem__))


def _longest(same: Sequence[RecoveryPhases]) -> RecoveryPhases:
    """Of one recovery on several nodes, the node's that took longest."""
    longest = max(same, key=lambda one: one.total)
    return RecoveryPhases(**{**vars(longest), "nodes": len(same)})


def _of_node(events: Sequence[Event]) -> Iterable[tuple[float, RecoveryPhases]]:
    """The recoveries of one node and when they ended, from its events by time."""
    starts: list[Event] = []  # since the last completed iteration
    failure: float | None = None  # seconds since the epoch, of the last one before these
    for event in events:
        if event.type is catalogue.SIGNAL_SENT and not starts:
            failure = event.time
        elif event.type is catalogue.WORKERS_RESTARTED and event.fields.keys() >= _CLOCKS:
            starts.append(event)
        elif event.type is catalogue.RANKS_RESUMED:
            if starts and starts[-1].fields["token"] == event.fields["token"]:
                yield event.time, _recovery(starts, event, failure)
            starts, failure = [], None


def _recovery(starts: Sequence[Event], resumed: Event, failure: float | None) -> RecoveryPhases:
    first, last, fields = starts[0], starts[-1], resumed.fields
    seen = resumed.time - (fields["completed"] - first.fields["seen"])  # seconds since the epoch
    ends = [("end", last.fields["ended"]), ("agree", last.fields["clock"])]
    ends += [(phase, fields.get(step)) for phase, step in _STEPS.items()]
    phases = _phases(last.fields["seen"], ends)
    dumping = first.fields.get("dumping")
    phases["dump"] = dumped = None if dumping is None else max(0.0, first.fields["seen"] - dumping)
    phases["detect"] = None if failure is None else max(0.0, seen - failure - (dumped or 0.0))
    phases["attempts"] = last.fields["seen"] - first.fields["seen"] if len(starts) > 1 else None
    phases["groups"], build = None, phases["build"]
    if phases["imports"] is not None and build is not None:
        phases["groups"] = groups = min(float(fields.get("grouped") or 0.0), build)
        phases["build"] = build - groups
    return RecoveryPhases(
        node=resumed.node, nodes=1, restart=last.fields["restart"], lineage=int(fields.get("lineage") or 0),
        iteration=fields["iteration"], starts=len(starts), phases={name: phases[name] for name in PHASES},
        ranks=fields.get("count", 0), processor=dict(fields.get("processor") or {}), ended=resumed.time,
    )  # fmt: skip


def _phases(seen: float, ends: Iterable[tuple[str, float | None]]) -> dict[str, float | None]:
    """How long each phase took, from when it ended. One whose end is unknown is None; one that ended before its
    beginning, as that of a process which stood by, took no time."""
    phases: dict[str, float | None] = {}
    reached = seen
    for name, end in ends:
        phases[name] = None if end is None else max(0.0, end - reached)
        reached = reached if end is None else max(reached, end)
    return phases


def phase_lines(recoveries: Sequence[RecoveryPhases]) -> list[str]:
    """The newest recoveries, in seconds; a phase that none of them has is left out."""
    shown = recoveries[-_SHOWN:]
    rows = [("seconds, by restart", [str(number + 1) for number in range(len(recoveries))[-_SHOWN:]])]
    for name, words in WORDS.items():
        values = [one.phases[name] for one in shown]
        if name not in ("attempts", "dump") or any(value is not None for value in values):
            rows.append((words, [_seconds(value) for value in values]))
    unknown = any(one.phases["detect"] is None for one in shown)
    total = "total, from detection" if unknown else "total"
    rows += [
        (total, [_seconds(one.total) for one in shown]),
        ("iteration completed", [str(one.iteration) for one in shown]),
    ]
    if any(one.processor for one in shown):
        rows.append(("processor s to load", [_seconds(sum(one.processor.values()) or None) for one in shown]))
        rows.append(("of ranks", [str(one.ranks) for one in shown]))
    return [f"{words:<24}{''.join(f'{value:>11}' for value in values)}" for words, values in rows]


def proof_lines(events: Iterable[Event]) -> list[str]:
    """What the newest restores have shown, each once, however many nodes have said it."""
    proofs = [event for event in events if event.type in (catalogue.RESUME_PROVEN, catalogue.RESUME_UNPROVEN)]
    said = dict.fromkeys((str(event.fields.get("iteration")), str(event.fields.get("reason"))) for event in proofs)
    return [f"iteration {iteration}: {reason}" for iteration, reason in said][-_SHOWN:]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
