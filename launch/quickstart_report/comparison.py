"""Compare two runs of one job, one of which was killed and recovered.

Invariant: every figure comes from what the runs wrote (events, losses). Whether they are identical is decided before,
by their transcripts. A figure whose events are missing is None, never a guess. The numbers of a run come from that run
alone.

In: two `RunRecord`s. Out: `RunComparison` and its JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from ft_plugins.errors import FtError
from ft_plugins.events import Event, catalogue
from ft_plugins.rehearse.driven import DETECTION_EVENTS
from ft_plugins.rehearse.driver import Loss
from ft_plugins.report.recovery_phases import RecoveryPhases, recovery_phases

from .bubble_use import CopyTraffic, bubble_use

# training began without a restored version; the second event means that state was lost
SCRATCH_EVENTS = (catalogue.TRAINING_STARTED.name, catalogue.STATE_LOST.name)
MEMORY_TIERS = ("process", "node")  # the third tier is storage


class EvidenceError(FtError):
    """The files of a run are missing or contradict each other, so no report is possible."""


@dataclass(frozen=True)
class RunRecord:
    """What one run wrote. `began`, `ended`: seconds since the epoch."""

    began: float
    ended: float
    events: Sequence[Event]
    losses: Sequence[Loss]


@dataclass(frozen=True)
class RestoredVersion:
    """A restored version and its tier."""

    tier: str
    lineage: int
    iteration: int


@dataclass(frozen=True)
class Downtime:
    """The parts of the downtime, in seconds: until a launcher detected the failure, from then until every new rank had
    attached, and the load time of the slowest rank. `down`: from the kill to the next completed iteration; `proof`: to
    the first one that was computed again, to be compared."""

    detect: float | None
    restart: float | None
    load: float | None
    proof: float | None
    down: float | None


@dataclass(frozen=True)
class RunComparison:
    """The result. Bytes are totals over all ranks; stalls are medians over the iterations of a run."""

    identical: bool
    differing: tuple[str, ...]  # in words
    iterations: int
    iterations_unfailed: int
    iterations_lost: int | None
    restores: int
    scratch_restarts: int  # starts from the beginning after the kill
    restored_from: RestoredVersion | None
    killed: Mapping[str, Any]
    seconds: Downtime
    snapshot_stall_seconds: float | None
    snapshot_stall_seconds_unfailed: float | None
    snapshot_seconds: float | None  # from the version point to the seal, hidden behind compute
    snapshots: int
    host_memory_bytes: int | None  # of the segments, as counted by the kernel
    captured_bytes: int | None  # of one version
    final_loss: float
    final_loss_unfailed: float
    wall_seconds: float
    wall_seconds_unfailed: float
    phases: RecoveryPhases | None = None  # of the first recovery
    bubbles: CopyTraffic | None = None  # with BAFT
    bubbles_unfailed: CopyTraffic | None = None
    unproven: tuple[str, ...] = field(default=())  # the reasons why this is not a proof

    @property
    def victim(self) -> str:
        """The target of the signal: 'rank 3', 'node1'."""
        return str(self.killed["lost"]) if "lost" in self.killed else f"rank {self.killed['rank']}"

    @property
    def proven(self) -> bool:
        """Whether state and losses are identical after exactly one restore from memory."""
        return not self.unproven

    def json(self) -> str:
        """The content of `report.json`."""
        phases = {} if self.phases is None else {"phases": self.phases.block()}
        return json.dumps({**asdict(self), **phases, "proven": self.proven}, indent=2)


def compare_runs(failed: RunRecord, unfailed: RunRecord, differing: Sequence[str] = ()) -> RunComparison:
    """Compare the killed run with the unfailed one. `differing`: in what their transcripts differ. Raises
    EvidenceError."""
    for name, run in (("failed", failed), ("unfailed", unfailed)):
        if not run.losses:
            raise EvidenceError(f"the {name} run left no losses; see its log")
    kills = [event for event in failed.events if event.type is catalogue.SIGNAL_SENT]
    after = [event for event in failed.events if kills and event.time >= kills[0].time]
    restores = restore_count(failed.events)
    scratch = _by_rank(event for event in after if event.name in SCRATCH_EVENTS)
    scratch_restarts = max(scratch.values(), default=0)
    source = restored_from(failed.events)
    return RunComparison(
        identical=not differing,
        differing=tuple(differing),
        iterations=failed.losses[-1].iteration,
        iterations_unfailed=unfailed.losses[-1].iteration,
        iterations_lost=_lost(failed.events, kills, source),
        restores=restores,
        scratch_restarts=scratch_restarts,
        restored_from=source,
        killed={} if not kills else {"rank": kills[0].rank, "time": kills[0].time, **kills[0].fields},
        seconds=downtime(failed, kills[0].time if kills else None),
        snapshot_stall_seconds=stall(failed.events),
        snapshot_stall_seconds_unfailed=stall(unfailed.events),
        snapshot_seconds=_median(_numbers(failed.events, catalogue.SNAPSHOT_SEALED.name, "seconds")),
        snapshots=len(sealed_by_all(failed.events)),
        host_memory_bytes=_total(
            failed.events, {catalogue.RANK_ATTACHED.name: "resident_bytes", catalogue.SLOT_CLAIMED.name: "bytes"}
        ),
        captured_bytes=_total(failed.events, {catalogue.RANK_ATTACHED.name: "share_bytes"}),
        final_loss=failed.losses[-1].loss,
        final_loss_unfailed=unfailed.losses[-1].loss,
        wall_seconds=failed.ended - failed.began,
        wall_seconds_unfailed=unfailed.ended - unfailed.began,
        phases=next(iter(recovery_phases(failed.events)), None),
        bubbles=_traffic(failed),
        bubbles_unfailed=_traffic(unfailed),
        unproven=tuple(_unproven(len(kills), differing, restores, scratch_restarts, source)),
    )


def _unproven(
    kills: int,
    differing: Sequence[str],
    restores: int,
    scratch: int,
    source: RestoredVersion | None,
) -> Iterable[str]:
    if kills != 1:
        yield f"{kills} processes were killed, expected 1"
    if differing:
        yield differing[0]
    if scratch:
        yield f"the job started {scratch} time(s) from scratch after the kill"
    if restores != 1 or source is None:
        yield f"state was restored {restores} time(s), expected 1"
    elif source.tier not in MEMORY_TIERS:
        yield f"state was restored from the {source.tier} tier, expected a memory tier ({', '.join(MEMORY_TIERS)})"


def _lost(events: Sequence[Event], kills: Sequence[Event], source: RestoredVersion | None) -> int | None:
    """The lost iterations that recovery reported, or those logged before the signal, whichever are more."""
    reported = _largest(events, catalogue.STATE_RESTORED.name, "lost", int)
    logged = kills[0].fields["iteration"] - source.iteration if kills and source is not None else 0
    return None if reported is None else max(reported, logged)


def restore_count(events: Iterable[Event]) -> int:
    """The number of restores of the job. Raises EvidenceError if it differs between ranks."""
    events = list(events)
    counts = dict.fromkeys(_ranks(events), 0) | _by_rank(e for e in events if e.type is catalogue.STATE_RESTORED)
    if len(set(counts.values())) > 1:
        raise EvidenceError(f"ranks report different numbers of restores ({counts}), expected the same on all")
    return max(counts.values(), default=0)


def restored_from(events: Iterable[Event]) -> RestoredVersion | None:
    """The version of the last restore. Raises EvidenceError if it differs between ranks."""
    last = {event.rank: event for event in events if event.type is catalogue.STATE_RESTORED}
    versions = {RestoredVersion(e.fields["tier"], e.fields["lineage"], e.fields["iteration"]) for e in last.values()}
    if len(versions) > 1:
        raise EvidenceError(f"ranks restored different versions ({versions}), expected one")
    return next(iter(versions), None)


def downtime(run: RunRecord, killed: float | None) -> Downtime:
    """The parts of the downtime after a kill at time `killed`."""
    if killed is None:
        return Downtime(None, None, None, None, None)
    after = [event for event in run.events if event.time >= killed]
    detected = min((event.time for event in after if event.name in DETECTION_EVENTS), default=None)
    attached = max((event.time for event in after if event.type is catalogue.RANK_ATTACHED), default=None)
    logged = max((entry.iteration for entry in run.losses if entry.time < killed), default=0)
    resumed = [entry for entry in run.losses if attached is not None and entry.time >= attached]
    proof = min((entry.time for entry in resumed if entry.iteration <= logged), default=None)
    new = min((entry.time for entry in resumed if entry.iteration > logged), default=None)
    return Downtime(
        detect=None if detected is None else detected - killed,
        restart=None if detected is None or attached is None else attached - detected,
        load=_largest(after, catalogue.STATE_RESTORED.name, "seconds", float),
        proof=None if proof is None else proof - killed,
        down=None if new is None else new - killed,
    )


def stall(events: Iterable[Event]) -> float | None:
    """Seconds per iteration that training waited for its snapshot: the slowest rank per fence, then the median.
    None without a fence. A restart begins new fences."""
    waits: dict[tuple[int, int], float] = {}
    starts: Counter[int | None] = Counter()
    for event in events:
        if event.type is catalogue.RANK_ATTACHED:
            starts[event.rank] += 1
        elif event.type is catalogue.FENCE_WAITED:
            fence = (starts[event.rank], event.fields["iteration"])
            waits[fence] = max(waits.get(fence, 0.0), event.fields["seconds"])
    return _median(list(waits.values()))


def sealed_by_all(events: Iterable[Event]) -> list[tuple[float, int]]:
    """(time, iteration) of every version that all ranks sealed; the time is that of the last rank."""
    events = list(events)
    ranks = _ranks(events)
    versions: dict[tuple[int, int], dict[int, float]] = {}
    for event in events:
        if event.type is catalogue.SNAPSHOT_SEALED and event.rank is not None:
            version = (event.fields["lineage"], event.fields["iteration"])
            versions.setdefault(version, {})[event.rank] = event.time
    return sorted((max(by.values()), k) for (_, k), by in versions.items() if by.keys() >= ranks)


def _traffic(run: RunRecord) -> CopyTraffic | None:
    use = bubble_use(run.events)
    return None if use is None else use.traffic


def _ranks(events: Iterable[Event]) -> set[int]:
    return {event.rank for event in events if event.type is catalogue.RANK_ATTACHED and event.rank is not None}


def _by_rank(events: Iterable[Event]) -> dict[int, int]:
    return dict(Counter(event.rank for event in events if event.rank is not None))


def _numbers(events: Iterable[Event], name: str, key: str) -> list[float]:
    return [event.fields[key] for event in events if event.name == name]


def _largest(events: Iterable[Event], name: str, key: str, kind: type) -> Any:
    numbers = _numbers(events, name, key)
    return kind(max(numbers)) if numbers else None


def _median(numbers: Sequence[float]) -> float | None:
    return float(median(numbers)) if numbers else None


def _total(events: Iterable[Event], keys: Mapping[str, str]) -> int | None:
    """The sum over ranks of the last reported values: of these events, in these fields."""
    last = {event.rank: int(event.fields[keys[event.name]]) for event in events if event.name in keys}
    return sum(last.values()) if last else None
