"""Why a job failed last: from its events to a few lines for people. Pure.

An *outage* is everything that failed in one incarnation, whether it completed an iteration or not. The newest one is
described: the rank that failed first, or for which the others waited, or the node that was lost, or the cause that the
nodes gave; its last words; what the kernel, NCCL and the stacks say; whether the same happened before; what to do. A
node that was drained ends an incarnation, too, and is shown as that. A later start that was refused, perhaps of another
job of that name, hides no outage of the one that trained: it is shown in addition.

Invariant: nothing is concluded that no event says. A kill by SIGKILL is not called one for lack of memory: the kernel's
count of such kills is shown, and where there is none, it is unknown. Clocks of nodes may differ: failures on several
nodes are of one outage if they ended the same incarnation, and the first one is chosen as ft-run chooses the cause
(`root_cause`).

In: the events of one or more nodes. Out: `Account`; None if nothing failed.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import EXIT_REFUSED, printable
from ...events import Event, catalogue
from .restarts import WorkerFailure, root_cause

_WORDS = 300  # characters of an error
_REFUSED = "Do what its error says; no restart helps before that."  # to do
_LABEL = 13  # columns, with the indentation
_CAUSES = (
    catalogue.WORKER_FAILED, catalogue.WORKERS_KILLED, catalogue.JOB_HUNG, catalogue.FAILURE_RECURRED,
    catalogue.NODE_LOST, catalogue.NODE_REPLACED, catalogue.NODE_DRAINED, catalogue.RESUME_DIFFERED,
    catalogue.STATE_LOST,
)  # fmt: skip
_NODE, _STOPPED = re.compile("node (.+)", re.DOTALL), re.compile("rank ([0-9]{1,9})")  # in words of what is lost
_FOLLOWS = (catalogue.RESUME_DIFFERED, catalogue.STATE_LOST)  # what a resume shows after a failure
_Incarnation = tuple[Any, Any, int, int]
_LEFT = (catalogue.JOB_STARTED, catalogue.JOB_ENDED, catalogue.NODE_DRAINED)  # without ranks, or not yet with any
_BEGINS = (catalogue.RANKS_RESUMED, catalogue.WORKERS_RESTARTED, catalogue.JOB_STARTED)


@dataclass(frozen=True)
class Account:
    """`rank` (None if it was no rank) of `node` failed first, or hung, at `time` (seconds since the epoch); `cause`
    says how. `same`: outages in a row, this one included, with the same cause. Texts are '' where nothing is known."""

    time: float
    node: str
    rank: int | None
    cause: str
    words: str  # the last error that it reported
    memory: str
    stacks: str
    record: str
    others: str  # that were not killed for it
    same: int
    recovered: bool  # ranks have completed iterations since
    advice: str
    drained: bool = False  # the node left as it was asked: no failure
    refused: str = ""  # which later start, and why
    proof: str = ""  # what the restore after it has shown

    def lines(self, width: int = 0) -> list[str]:
        """For people, in lines of at most `width` columns; 0: of any length."""
        who = f"rank {self.rank} on node {self.node}" if self.rank is not None else f"node {self.node}"
        when = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self.time))
        rows = [
            ("drained" if self.drained else "failed", f"{who}, {when}: {self.cause}"),
            ("its error", self.words),
            ("memory", self.memory),
            ("stacks", self.stacks),
            ("NCCL", self.record),
            ("others", self.others),
            ("again", f"the same cause ended the last {self.same} incarnations" if self.same > 1 else ""),
            ("since then", f"iterations were completed again; {self.proof}".rstrip("; ") if self.recovered else ""),
            ("to do", self.advice),
            ("refused", self.refused),
        ]
        shown = []
        for label, text in rows:
            if text:
                shown += textwrap.wrap(
                    printable(text).replace("\n", " "), max(width, 60) if width else 1 << 20,
                    initial_indent=f"  {label:<{_LABEL - 2}}", subsequent_indent=" " * _LABEL,
                    break_long_words=False, break_on_hyphens=False,
                )  # fmt: skip
        return shown


def why(events: Iterable[Event]) -> Account | None:
    """The account of the newest outage."""
    events = sorted(events, key=lambda event: event.time)
    outages, resumed, refused = _outages(events)
    own = sorted(outages.keys() - refused or outages, key=lambda key: outages[key][0].time)
    if not own:
        return None
    account = _account([outages[key] for key in own], own[-1] in resumed)
    later = (_account([outages[key]], False) for key in refused - {*own})
    said = {one.time: f"{one.lines()[0][_LABEL:]}: {one.words}" for one in later if one.time > account.time}
    proofs = (e for e in events if e.type in (catalogue.RESUME_PROVEN, catalogue.RESUME_UNPROVEN))
    proof = [str(event.fields.get("reason", "")) for event in proofs if event.time > account.time][-1:]
    later_start = f"a later start under this name: {said[max(said)]}" if said else ""
    return replace(account, refused=later_start, proof="".join(proof))


def _outages(events: Iterable[Event]) -> tuple[dict[_Incarnation, list[Event]], set[_Incarnation], set[_Incarnation]]:
    """The outages of a job by the incarnation that they ended, those after which ranks completed iterations, and those
    that are a start that was refused. The events are by time; the order of those of different nodes has no effect on
    what belongs together."""
    outages: dict[_Incarnation, list[Event]] = {}
    resumed: set[_Incarnation] = set()
    begun: set[_Incarnation] = set()  # of an ft-run, and no rank has completed an iteration under it
    walks: dict[str, _NodeWalk] = {}
    for event in events:
        walk = walks.setdefault(event.node, _NodeWalk())
        if event.type is catalogue.NODE_LOST and not walk.takes_part:
            continue  # a spare, or one that has left, no longer reaches the others: no rank ends for it
        if event.type in _BEGINS or event.type in (catalogue.INCARNATION_FENCED, *_LEFT):
            walk.takes_part = event.type not in _LEFT
        if event.type in _BEGINS:
            if event.type is catalogue.RANKS_RESUMED and walk.failed is not None:
                resumed.add(walk.failed)
            walk.begin(event)
            if event.type is catalogue.JOB_STARTED:
                begun.add(walk.incarnation)
        elif event.type in _FOLLOWS and walk.failed not in (None, walk.incarnation):
            continue  # not why the job failed, but what that cost
        elif event.type in _CAUSES:
            walk.failed = walk.incarnation
            outages.setdefault(walk.incarnation, []).append(event)
            resumed.discard(walk.incarnation)
    first: _Incarnation = _NodeWalk().incarnation
    fresh = [key for key, outage in outages.items() if key[:3] == first[:3] and all(e.type in _FOLLOWS for e in outage)]
    if len(fresh) < len(outages):  # a substitute says what the failure of another node cost
        outages = {key: outage for key, outage in outages.items() if key not in fresh}
    return outages, resumed, {
        key
        for key in begun & outages.keys()
        if any(event.fields.get("exitcode") == EXIT_REFUSED for event in outages[key])
    }  # fmt: skip


class _NodeWalk:
    """In which incarnation of the job a node is, from its own events in their order. All nodes name it the same: by the
    iteration that was completed first after the last recovery, and the starts since."""

    def __init__(self) -> None:
        self._times: Counter[tuple[Any, Any]] = Counter()
        self.incarnation: _Incarnation = (None, None, 0, 0)
        self.failed: _Incarnation | None = None  # the last one that failed, until ranks resume
        self.takes_part = True  # as far as known: it has ranks, or starts them

    def begin(self, event: Event) -> None:
        """Ranks were started, or have resumed."""
        if event.type is catalogue.RANKS_RESUMED:
            same = event.fields.get("lineage"), event.fields.get("iteration")
            self._times[same] += 1
            self.incarnation, self.failed = (*same, self._times[same], 0), None
        else:
            *since, starts = self.incarnation
            self.incarnation = (*since, starts + 1)


def _account(outages: Sequence[Sequence[Event]], recovered: bool) -> Account:
    outage, causes = outages[-1], [_signature(each) for each in outages]
    same = next((n for n, cause in enumerate(reversed(causes)) if cause != causes[-1]), len(causes))
    first, chosen = _first(outage), _failures(outage)
    hung = next((event for event in outage if event.type is catalogue.JOB_HUNG), None)
    recurred = next((event for event in outage if event.type is catalogue.FAILURE_RECURRED), None)
    fields = first.fields
    failure = chosen.get(id(first))
    others = [one.name for key, one in chosen.items() if key != id(first)]
    stopped = _lost(first, _STOPPED)
    kills, memory = fields.get("oom_kills"), ""
    if failure and failure.signal == "SIGKILL":
        memory = "whether it was for lack of memory is unknown: the kernel's log has it"
        if kills is not None:
            memory = f"the kernel killed {kills} processes of this node's control group for lack of memory"
            memory = memory if kills else "the kernel killed no process of this node's control group for lack of memory"
    kind = first.type
    advice = _REFUSED if failure and failure.refused else kind.action if kind else ""
    if recurred:
        advice = str(recurred.fields.get("reason", advice))
    elif hung:
        advice = catalogue.JOB_HUNG.action
    elif _drained_nodes(first):
        advice = catalogue.NODE_DRAINED.action
    elif failure and failure.secondary:
        advice = (
            "A node that was lost is named here once that is known, within --ftp-detect-seconds; if none is, look at "
            "the events and logs of the other nodes."
        )
    elif stopped:
        advice = "Find out what stops it: a debugger, kill -STOP, a batch system that suspends jobs."
    elif kills:
        advice = "Give the job more memory, or let it use less; `ft-plugins plan memory` shows what protection claims."
    return Account(
        time=first.time, node=_whose(first),
        rank=failure.rank if failure else int(stopped[0]) if stopped else fields.get("about"),
        cause=_said(first) if failure is None else
        failure.how + ": a peer's connection closed, or it gave no answer" * (failure.secondary and not failure.signal),
        words=failure.message.strip()[:_WORDS] if failure else "", memory=memory,
        stacks=str(hung.fields.get("stacks", "")) if hung else "",
        record=str(fields.get("flight_record", "")), same=same, recovered=recovered,
        others=", ".join([*(f"rank {rank}" for rank in stopped[1:]), *others]), advice=advice,
        drained=bool(_drained_nodes(first)),
    )  # fmt: skip


def _failures(outage: Sequence[Event]) -> dict[int, WorkerFailure]:
    """The failures of ranks, by the identity of their events."""
    return {
        id(event): WorkerFailure(
            event.rank if event.rank is not None else -1,
            event.fields.get("local_rank", -1),
            0,
            event.fields.get("exitcode", 1),
            event.fields.get("message", ""),
            event.time,
        )  # fmt: skip
        for event in outage
        if event.type is catalogue.WORKER_FAILED
    }


def _first(outage: Sequence[Event]) -> Event:
    """What ended the ranks: a hang that was found, the failure that caused the others, or else the first event. Where
    ranks only say that they lost a peer, it is the loss of a node, or that one was drained."""
    for event in outage:
        if event.type is catalogue.JOB_HUNG:
            return event
    failures = _failures(outage)
    cause = root_cause(list(failures.values())) if failures else None
    if cause is None or cause.secondary:
        drained = {name for event in outage for name in _drained_nodes(event)}
        lost = [event for event in outage if not drained.issuperset(_lost_nodes(event))]
        for event in sorted(lost, key=lambda event: event.type is not catalogue.NODE_REPLACED):  # that one is sure
            return event
        for event in sorted(outage, key=lambda event: event.type is not catalogue.NODE_DRAINED):
            if _drained_nodes(event):
                return event
    return next((event for event in outage if cause and failures.get(id(event)) is cause), outage[0])


def _lost_nodes(event: Event) -> list[str]:
    """Names of nodes that are no longer there and were not asked to leave, as the event's node saw it."""
    if event.type is catalogue.NODE_REPLACED:
        return [str(name) for name in event.fields["gone"] if name not in event.fields["asked"]]
    return _lost(event, _NODE)


def _lost(event: Event, kind: re.Pattern[str]) -> list[str]:
    said = event.fields.get("lost")  # names of nodes or ranks, or how many iterations
    names = map(str, said) if isinstance(said, list | tuple) else ()
    return [found[1] for found in map(kind.fullmatch, names) if found]


def _drained_nodes(event: Event) -> list[str]:
    """Names of the nodes that left as they were asked, if the event says nothing else."""
    if event.type is catalogue.NODE_DRAINED:
        return [event.node]
    asked = event.type is catalogue.NODE_REPLACED and not _lost_nodes(event)
    return [str(name) for name in event.fields["gone"]] if asked else []


def _whose(event: Event) -> str:
    """The node, or nodes, at which it lay."""
    return str(event.fields.get("culprit") or ", ".join(_lost_nodes(event) or _drained_nodes(event)) or event.node)


def _said(event: Event) -> str:
    reason, new = event.fields.get("reason"), event.fields.get("new")
    if event.type is catalogue.NODE_DRAINED:
        return f"it left as was asked, after iteration {event.fields.get('iteration')}; no iteration was lost"
    if event.type is catalogue.NODE_REPLACED:
        how = "lost" if _lost_nodes(event) else "it was asked to leave"
        return f"{how}; " + (f"{', '.join(map(str, new))} takes its place" if new else "the job goes on without it")
    if _lost(event, _STOPPED):
        return "was stopped by a signal for longer than --ftp-detect-seconds while the others waited"
    if _lost_nodes(event):
        return f"lost, as was seen from node {event.node}" + (f": {reason}" if reason else "")
    return str(reason or (event.type.what if event.type else event.name))


def _signature(outage: Sequence[Event]) -> tuple[object, ...]:
    """What is equal in two outages with the same cause."""
    first = _first(outage)
    failure = _failures(outage).get(id(first))
    lost = first.name, _whose(first), *_lost(first, _STOPPED)
    return (first.name, failure.rank, failure.exitcode, failure.error) if failure else lost
