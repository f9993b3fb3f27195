"""Compare the transcripts of two runs of one job: the comparison by which rehearsals, tests and the quickstart judge.

    1. before the first failure both runs are unfailed: a place that differs there is not reproducible at all
    2. every version that was restored equals what the same rank had captured, in any incarnation of its run
    3. every iteration of the failed run, also one that was computed twice, equals that of the unfailed run

A *place* is one value of an iteration of a rank: its batch, the digest of an item, a counter.

Invariant: there is no tolerance. Floats are compared as hexadecimal text, tensors by digest, name and shape. The data
position is not compared; the batches are. A place that is not reproducible is left out by itself, such as a generator
that the script does not seed. If losses or items are among these places, kernels are not deterministic: then the whole
trajectory is left out, and batches, schedules, random numbers and restored bytes have to have been seen.

In: the folders that `--ftp-transcript-dir` wrote. Out: a `Comparison`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..adapters.value_text import ON_DEVICE
from ..errors import FtError
from ..systems.transcript import ITERATION, RESTORED

TRANSCRIPT = "transcript"  # folder of a run's transcripts
_LONGEST = 256 << 20  # bytes of one line
_POSITION = "position"
_GENERATORS = ("python", "numpy", "torch", "cuda", "tracker")
_SCHEDULE = ("counters", "scheduler", "groups")
_NOT_COMPARED = (_POSITION, "pace", "silent", "observed", "rng", *_GENERATORS)
# the kinds of places, causes first
READS, RATE, DRAWN, SMALL, LOSS, STATE = "the batch", "learning rate", "random numbers", "small state", "loss", "state"
_NORM = "gradient norm"
_TRAJECTORY = (LOSS, _NORM, STATE)
_WITHIN = ("caller", "client", "trainer", "state")
_RESTORED = (DRAWN, SMALL, STATE)  # what a version has as soon as it is restored
_ABSENT = "nothing"
_SKIPPED = ("inf", "nan", "-inf")  # norms of gradients of which no update is made


def leaves(place: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Every value of a tree of plain values, with its place. An empty mapping or list is a value."""
    if isinstance(tree, Mapping) and tree:
        for key in sorted(tree):
            yield from leaves(f"{place}/{key}", tree[key])
    elif isinstance(tree, list) and tree:
        for index, part in enumerate(tree):
            yield from leaves(f"{place}[{index}]", part)
    else:
        yield place, tree


class TranscriptError(FtError):
    """A transcript is missing, or is not of a run of the same job."""


@dataclass(frozen=True)
class TranscriptEntry:
    """One line. `seen` is empty for a restored version. `lineage` counts the incarnations of the job. `deferred`: the
    version is not captured here: later, when a synchronisation has changed it, or it was before, and is proven."""

    rank: int
    kind: str
    iteration: int
    lineage: int
    seen: Mapping[str, Any]
    phases: tuple[str, ...]
    small: Mapping[str, Any]
    items: Mapping[str, Any]
    deferred: bool = False
    world_size: int = 0

    @cached_property
    def places(self) -> Mapping[tuple[str, str], Any]:
        """Every value that is compared, by kind and place, causes first."""
        found: dict[tuple[str, str], Any] = {}
        if self.seen:
            found = {(READS, ""): self.seen.get("batch"), (RATE, ""): self.seen.get("rate")}
        inner = self.small.get("rng", self.small)
        generators = {name: inner[name] for name in _GENERATORS if name in inner}
        found |= {(DRAWN, place): value for place, value in leaves("", generators)}
        found |= {(SMALL, place): value for place, value in leaves("", _without(self.small, _NOT_COMPARED))}
        if self.seen:
            found |= {(LOSS, ""): self.seen.get("loss"), (_NORM, ""): self.seen.get("norm")}
        return found | {(STATE, place): value for place, value in leaves("", self.items)}


@dataclass(frozen=True)
class FirstDifference:
    """Where two runs differ first: `kind` and `place` of a value, `details` both values. `more`: other places of that
    iteration and rank."""

    iteration: int
    rank: int
    kind: str
    place: str
    details: str
    more: int = 0
    restored: bool = False

    def __str__(self) -> str:
        what = f"{'restored ' if self.restored else ''}{self.kind}{f' {self.place}' if self.place else ''}"
        more = f" (and in {self.more} more places)" if self.more else ""
        return f"iteration {self.iteration}, rank {self.rank}: {what}: {self.details}{more}"


@dataclass(frozen=True)
class Comparison:
    """`irreproducible`: the first place in which two unfailed runs differ, `left_out` all of them, without iterations.
    `restored`: the iterations that were restored, in order. `unproven`: why this is no proof. `uncaptured`: values that
    are not captured, and differ. `unprotected`: where a run without protection differs from the unfailed one first."""

    iterations: int
    ranks: int
    parts: int
    restored: tuple[int, ...]
    irreproducible: FirstDifference | None
    difference: FirstDifference | None
    left_out: tuple[str, ...] = ()
    trajectory: bool = True
    unproven: tuple[str, ...] = ()
    uncaptured: tuple[str, ...] = ()
    unprotected: FirstDifference | None = None

    @property
    def exact(self) -> bool:
        """Whether nothing differs that can be compared."""
        same = self.difference is None and self.unprotected is None
        return same and READS not in self.left_out and not self.unproven

    @property
    def sentence(self) -> str:
        """The verdict for people."""
        at = ", ".join(map(str, self.restored))
        lines = []
        if self.irreproducible is not None and (READS in self.left_out or not self.trajectory):
            lines.append(f"two unfailed runs differ: {self.irreproducible}")
        if self.difference is not None:
            lines.append(f"NOT EXACT: {self.difference}")
        if self.unprotected is not None:
            lines.append(f"NOT EXACT: protection changes training, without any failure: {self.unprotected}")
        lines += [f"NOT SHOWN: {reason}" for reason in self.unproven]
        if READS in self.left_out:
            lines.append("NOT EXACT: what the job reads is not reproducible, with or without a failure: seed it")
        elif self.exact and not self.trajectory:
            lines.append(
                f"exact except for the trajectory, which is not deterministic: over {self.iterations} iterations on "
                f"{self.ranks} ranks every batch, schedule and random number, and every restored byte (iterations {at})"
            )
        elif self.exact:
            but = f", but for what is not captured ({len(self.uncaptured)} listed)," if self.uncaptured else ""
            lines.append(
                f"exact{but} over {self.iterations} iterations, {self.parts} parts of the state of {self.ranks} ranks; "
                f"restored after iterations {at}"
            )
        others = [name for name in self.left_out if not name.startswith(_TRAJECTORY) and name != READS]
        if others:
            lines.append(f"not reproducible, so compared at restores only: {', '.join(others)}")
        return "\n".join(lines)


def read_transcripts(folder: Path) -> list[TranscriptEntry]:
    """All complete lines of all ranks. Raises TranscriptError."""
    entries = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        try:
            with open(path) as file:
                while (line := file.readline(_LONGEST)).endswith("\n"):
                    entries.append(_entry(rank, json.loads(line)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TranscriptError(f"{path} is no transcript ({error!r}): run the rehearsal again") from error
    if not any(entry.kind == ITERATION for entry in entries):
        raise TranscriptError(f"{folder}: no iteration was completed")
    return entries


def _entry(rank: int, line: Mapping[str, Any]) -> TranscriptEntry:
    return TranscriptEntry(
        rank, str(line["kind"]), int(line["iteration"]), int(line["lineage"]), dict(line.get("seen", {})),
        tuple(line.get("phases", ())), dict(line["small"]), dict(line["items"]),
        bool(line.get("deferred")), int(line["world_size"]),
    )  # fmt: skip


Golden = Mapping[tuple[int, int], TranscriptEntry]  # by rank and iteration
Place = tuple[str, str]


def compare_transcripts(
    failed: Sequence[TranscriptEntry],
    unfailed: Sequence[TranscriptEntry],
    restores: int,
    unprotected: Sequence[TranscriptEntry] = (),
) -> Comparison:
    """Compare a run that was killed with one that was not. `restores`: how many were planned. `unprotected`: of a run
    without protection, of fewer iterations."""
    golden = {(entry.rank, entry.iteration): entry for entry in unfailed if entry.kind == ITERATION}
    computed = sorted((e for e in failed if e.kind == ITERATION), key=_order)
    first = min(entry.lineage for entry in computed)
    before = list(_against((entry for entry in computed if entry.lineage == first), golden, frozenset()))
    varies = frozenset(place for _, places in before for place in places)
    seeded = [(entry, {at: both for at, both in places.items() if at[0] != DRAWN}) for entry, places in before]
    telling = [(entry, places) for entry, places in seeded if places]  # more than a generator that nothing draws from
    trajectory = not any(kind in _TRAJECTORY for kind, _ in varies)
    restored = sorted((e for e in failed if e.kind == RESTORED), key=lambda e: (e.lineage, e.rank))
    found = [*_restored_differences(restored, failed), *_against(computed, golden, varies, trajectory)]
    apart = sorted(unprotected, key=_order)  # which has no fence, where rates are read; they are in the state, too
    last = max(iteration for _, iteration in golden)
    versions = {entry.lineage: entry.iteration for entry in restored}
    return Comparison(
        last, max(entry.world_size for entry in unfailed),
        sum(len(entry.places) for entry in golden.values() if entry.iteration == last), tuple(versions.values()),
        _first(telling) or _first(before), _first(found), tuple(sorted({_name(*place) for place in varies})),
        trajectory, tuple(_unproven(failed, unfailed, golden, restored, restores, trajectory)),
        _uncaptured(computed, golden, first), _first(list(_against(apart, golden, varies | {(RATE, "")}, trajectory))),
    )  # fmt: skip


def _uncaptured(computed: Iterable[TranscriptEntry], golden: Golden, first: int) -> tuple[str, ...]:
    """The values that are not captured and differ after the lineage `first`, but in no iteration of it."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for entry in computed:
        other = golden.get((entry.rank, entry.iteration))
        ours, theirs = ({} if one is None else one.small.get("observed", {}).get("last", {}) for one in (entry, other))
        both = ((path, {ours[path], theirs[path]}) for path in ours.keys() & theirs.keys())
        found[entry.lineage == first] |= {path for path, texts in both if len(texts) > 1 and ON_DEVICE not in texts}
    return tuple(sorted(found[False] - found[True]))


def _name(kind: str, place: str) -> str:
    """A place for people; of a generator, its name alone."""
    place = place.split("/")[1].partition("[")[0] if kind == DRAWN else place
    return f"{kind} {place}".strip()


def _unproven(
    failed: Sequence[TranscriptEntry], unfailed: Sequence[TranscriptEntry], golden: Golden,
    restored: Sequence[TranscriptEntry], restores: int, trajectory: bool,
) -> Iterator[str]:  # fmt: skip
    done = {(entry.rank, entry.iteration) for entry in failed if entry.kind == ITERATION}
    last = max(iteration for _, iteration in golden)
    everyone = set(range(max(entry.world_size for entry in unfailed)))
    if {entry.rank for entry in unfailed} != everyone:
        yield f"only ranks {sorted({entry.rank for entry in unfailed})} of {len(everyone)} have written a transcript"
    if any(entry.kind == RESTORED for entry in unfailed) or len({entry.lineage for entry in unfailed}) > 1:
        yield "the unfailed run was itself restarted: see its log"
    for iteration, rank in sorted((iteration, rank) for rank, iteration in golden.keys() - done)[:1]:
        yield f"iteration {iteration} of rank {rank} is in the unfailed run alone"
    for iteration, rank in sorted((iteration, rank) for rank, iteration in done - golden.keys())[:1]:
        yield f"iteration {iteration} of rank {rank} is in the failed run alone; the unfailed one has {last}"
    lineages = {entry.lineage for entry in restored}
    if len(lineages) != restores:
        yield f"state was restored {len(lineages)} time(s); expected {restores}"
    for lineage in sorted(lineages):
        if (missing := everyone - {entry.rank for entry in restored if entry.lineage == lineage}) and restores:
            yield f"ranks {sorted(missing)} did not write down what they restored"
    if trajectory:
        return  # equal states show equal batches and restored bytes
    read = {entry.iteration for entry in golden.values() if entry.seen.get("batch") is not None}
    if unread := sorted({iteration for _, iteration in golden} - read):
        yield (
            f"the batches of {len(unread)} iterations were not seen (the model's forward is not called, or reads what "
            "is on a device already), and kernels are not deterministic: rehearse on a CPU, or with deterministic ones"
        )
    captured = {(e.rank, e.iteration) for e in failed if e.kind == ITERATION and not e.deferred}
    for entry in restored:
        if (entry.rank, entry.iteration) not in captured:
            yield f"what rank {entry.rank} restored of iteration {entry.iteration} could not be compared"
            return


def _order(entry: TranscriptEntry) -> tuple[int, int, int]:
    return entry.iteration, entry.lineage, entry.rank


Differing = tuple[TranscriptEntry, dict[Place, str]]  # an entry, and what differs in it with both values


def _against(
    entries: Iterable[TranscriptEntry], golden: Golden, left_out: frozenset[Place], trajectory: bool = True
) -> Iterator[Differing]:
    for entry in entries:
        other = golden.get((entry.rank, entry.iteration))
        if other is not None and (places := _differences(entry, other, left_out, trajectory)):
            yield entry, places


def _restored_differences(
    restored: Iterable[TranscriptEntry], failed: Sequence[TranscriptEntry]
) -> Iterator[Differing]:
    captured: dict[tuple[int, int], list[TranscriptEntry]] = {}
    for entry in failed:
        if entry.kind == ITERATION and not entry.deferred:
            captured.setdefault((entry.rank, entry.iteration), []).append(entry)
    for entry in restored:
        earlier = [one for one in captured.get((entry.rank, entry.iteration), ()) if one.lineage < entry.lineage]
        if earlier and (places := _differences(entry, earlier[-1])):
            yield entry, places


def _differences(
    entry: TranscriptEntry, other: TranscriptEntry, left_out: frozenset[Place] = frozenset(), trajectory: bool = True
) -> dict[Place, str]:
    """What differs in one iteration of one rank, causes first. A restored version has neither batch nor loss."""
    ours, theirs = entry.places, other.places
    both = bool(entry.seen) and bool(other.seen)
    places = [*ours, *(place for place in theirs if place not in ours)]
    return {
        place: f"{ours.get(place, _ABSENT)} != {theirs.get(place, _ABSENT)}"
        for place in places
        if ours.get(place, _ABSENT) != theirs.get(place, _ABSENT)
        and place not in left_out
        and (both or place[0] in _RESTORED)
        and (trajectory or _is_scheduled(place))
    }


def _is_scheduled(place: Place) -> bool:
    """Whether a value does not depend on what kernels compute."""
    kind, path = place
    if kind == SMALL:
        return path.removeprefix("/caller").startswith(tuple(f"/{name}" for name in _SCHEDULE))
    return kind not in _TRAJECTORY


def _first(found: Sequence[Differing]) -> FirstDifference | None:
    """The first difference of the first iteration that has one: batches on any rank before values on another."""
    if not found:
        return None
    entry, places = found[0]
    for other, others in found:
        if (other.iteration, other.kind) == (entry.iteration, entry.kind) and (READS, "") in others:
            entry, places = other, others
            break
    (kind, place), details = next(iter(places.items()))
    return FirstDifference(entry.iteration, entry.rank, kind, place, details, len(places) - 1, entry.kind == RESTORED)


def _without(small: Mapping[str, Any], left_out: Sequence[str]) -> dict[str, Any]:
    """A small state, and those within it of a loop of plain torch and of a Trainer, without these entries."""
    kept = {key: value for key, value in small.items() if key not in left_out}
    inner = {key: _without(part, left_out) for key in _WITHIN if isinstance(part := kept.get(key), Mapping)}
    return {**kept, **inner}


# ---- what was exercised ----


def epoch_ends(entries: Iterable[TranscriptEntry]) -> tuple[int, ...]:
    """The iterations in which a pass over the data began or ended, as far as data positions show."""
    ends: set[int] = set()
    last: dict[tuple[int, str], float] = {}
    newest = {(e.rank, e.iteration): e for e in sorted(entries, key=_order) if e.kind == ITERATION}
    for entry in sorted(newest.values(), key=_order):  # an iteration that was computed twice is no new pass
        for place, value in _numbers("", entry.small, False):
            before = last.get((entry.rank, place))
            name = place.rpartition("/")[2]
            if before is not None and ((name == "read" and value <= before) or (name == "epoch" and value > before)):
                ends.add(entry.iteration)
            last[entry.rank, place] = value
    return tuple(sorted(ends))


def _numbers(place: str, value: Any, inside: bool) -> Iterator[tuple[str, int]]:
    """The counts of the data position, by place."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(f"{place}/{key}", part, inside or key == _POSITION)
    elif inside and type(value) is int:
        yield place, value


def not_exercised(entries: Sequence[TranscriptEntry]) -> list[str]:
    """What no iteration after a restore has shown, and how to reach it."""
    computed = [entry for entry in entries if entry.kind == ITERATION]
    first = min((entry.lineage for entry in computed), default=0)
    after = [entry for entry in computed if entry.lineage > first]
    begun = min((entry.iteration for entry in after), default=0)
    phases = {phase for entry in after for phase in entry.phases}
    made = [entry for entry in after if str(entry.seen.get("norm")) not in _SKIPPED]
    by_iteration = {e.iteration: e.seen["rate"] for e in made if e.rank == 0 and e.seen.get("rate")}
    rates = [float.fromhex(rate) for _, rate in sorted(by_iteration.items())]
    phases_of_rate = {(b > a) - (b < a) for a, b in zip(rates, rates[1:], strict=False)}  # rises, stays, falls
    missing, ends = [], epoch_ends(entries)
    if not any(end < begun for end in ends):
        missing.append(
            "a resume in a later epoch than the first, where what the script counts itself is no longer zero: more "
            "--iterations, or a smaller data set"
        )
    if not any(end > begun for end in ends):
        missing.append("an epoch's end after a resume: more --iterations, or a smaller data set")
    if "evaluation" not in phases:
        missing.append("an evaluation: more --iterations, or a shorter interval between evaluations")
    if "saving" not in phases:
        missing.append("the script's own checkpoint: more --iterations, or a shorter interval between checkpoints")
    if len(made) == len(after):
        missing.append("a skipped update: a loss scale that overflows")
    if len(phases_of_rate) < 2:
        missing.append("another phase of the learning rate's schedule: a shorter warm-up")
    return missing
