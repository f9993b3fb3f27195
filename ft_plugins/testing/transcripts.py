"""Compare the transcripts of two runs of one job: the comparison by which rehearsals, tests and the quickstart judge.

    1. before the first failure both runs are unfailed: what differs there is not reproducible at all
    2. every version that was restored equals what the same rank had captured, in any incarnation of its run
    3. every iteration of the failed run, also one that was computed twice, equals that of the unfailed run

Invariant: there is no tolerance. Floats are compared as hexadecimal text, tensors by digest, name and shape. The data
position is not compared; the batches are. A generator that the script does not seed differs from run to run: it is only
compared where it was restored. If unfailed runs differ in what they compute, but read the same, the
trajectory is left out: what is read, schedules, random numbers and restored bytes are still compared.

In: the folders that `--ftp-transcript-dir` wrote. Out: a `Comparison`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import FtError
from ..systems.transcript import ITERATION, RESTORED
from .golden import tree_differences

_LONGEST = 256 << 20  # bytes of one line
_POSITION = "position"
_READS = "the batch"
_GENERATORS = ("python", "numpy", "torch", "cuda")
_TRAJECTORY = ("loss", "norm")


class TranscriptError(FtError):
    """A transcript is missing, or is not of a run of the same job."""


@dataclass(frozen=True)
class Entry:
    """One line. `seen` is empty for a restored version. `lineage` counts the incarnations of the job. `deferred`: the
    version is captured later, when a synchronisation has changed it."""

    rank: int
    kind: str
    iteration: int
    lineage: int
    seen: Mapping[str, Any]
    phases: tuple[str, ...]
    small: Mapping[str, Any]
    items: Mapping[str, Any]
    deferred: bool = False

    @cached_property
    def compared(self) -> Mapping[str, Any]:
        """The small state without the data position and the generators."""
        return _without(self.small, (_POSITION, "silent", "rng", *_GENERATORS))

    @cached_property
    def generators(self) -> Mapping[str, Any]:
        """The states of the generators, by name."""
        inner = self.small.get("rng", self.small)
        return {name: inner[name] for name in (*_GENERATORS, "tracker") if name in inner}

    @property
    def parts(self) -> int:
        """How many parts are compared."""
        return len(self.items) + len(self.seen) + len(self.compared)


@dataclass(frozen=True)
class FirstDifference:
    """Where two runs differ first: `what` is a batch, an item or a value, `details` both values. `places`: in how many
    places of that iteration and rank."""

    iteration: int
    rank: int
    what: str
    details: str
    places: int = 1

    @property
    def computed(self) -> bool:
        """Whether it is in what was computed, not in what was read or scheduled."""
        return self.what in _TRAJECTORY or self.what.startswith(("state ", "small state "))

    def __str__(self) -> str:
        more = f" (and in {self.places - 1} more places)" if self.places > 1 else ""
        return f"iteration {self.iteration}, rank {self.rank}: {self.what}: {self.details}{more}"


@dataclass(frozen=True)
class Comparison:
    """`irreproducible`: what two unfailed runs differ in. `restored`: the iterations that were restored, in order.
    `unseeded`: generators whose states differ between unfailed runs. `unproven`: why this is no proof."""

    iterations: int
    ranks: int
    parts: int
    restored: tuple[int, ...]
    irreproducible: FirstDifference | None
    difference: FirstDifference | None
    unseeded: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether nothing differs that can be compared."""
        comparable = self.irreproducible is None or self.irreproducible.computed
        return self.difference is None and comparable and not self.unproven

    @property
    def sentence(self) -> str:
        """The verdict for people."""
        at = ", ".join(map(str, self.restored))
        lines = []
        if self.irreproducible is not None:
            lines.append(f"two unfailed runs differ: {self.irreproducible}")
        if self.difference is not None:
            lines.append(f"NOT EXACT: {self.difference}")
        lines += [f"NOT SHOWN: {reason}" for reason in self.unproven]
        if self.irreproducible is not None and not self.irreproducible.computed:
            lines.append("NOT EXACT: what the job reads is not reproducible, with or without a failure: seed it")
        elif self.exact and self.irreproducible is not None:
            lines.append(
                f"exact except for the trajectory, which is not deterministic: over {self.iterations} iterations on "
                f"{self.ranks} ranks every batch, schedule and random number, and every restored byte (iterations {at})"
            )
        elif self.exact:
            lines.append(
                f"exact over {self.iterations} iterations, {self.parts} parts of the state of {self.ranks} ranks; "
                f"restored after iterations {at}"
            )
        if self.unseeded:
            names = ", ".join(self.unseeded)
            lines.append(f"not seeded by the script, so compared at restores only: generators of {names}")
        return "\n".join(lines)


def read_transcripts(folder: Path) -> list[Entry]:
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


def _entry(rank: int, line: Mapping[str, Any]) -> Entry:
    return Entry(
        rank, str(line["kind"]), int(line["iteration"]), int(line["lineage"]), dict(line.get("seen", {})),
        tuple(line.get("phases", ())), dict(line["small"]), dict(line["items"]),
        bool(line.get("deferred")),
    )  # fmt: skip


def compare_transcripts(failed: Sequence[Entry], unfailed: Sequence[Entry], restores: int) -> Comparison:
    """Compare a run that was killed with one that was not. `restores`: how many were planned."""
    golden = {(entry.rank, entry.iteration): entry for entry in unfailed if entry.kind == ITERATION}
    ranks = {rank for rank, _ in golden}
    computed = sorted((e for e in failed if e.kind == ITERATION), key=_order)
    first = min(entry.lineage for entry in computed)
    before = [entry for entry in computed if entry.lineage == first]
    unseeded = _unseeded(before, golden)
    irreproducible = _first(_against(before, golden, unseeded, trajectory=True))
    trajectory = irreproducible is None
    restored = sorted((e for e in failed if e.kind == RESTORED), key=lambda e: (e.lineage, e.rank))
    against = _against(computed, golden, unseeded, trajectory)
    difference = _first(_restored_differences(restored, failed)) or _first(against)
    last = max(iteration for _, iteration in golden)
    versions = {entry.lineage: entry.iteration for entry in restored}
    return Comparison(
        last, len(ranks), sum(entry.parts for entry in golden.values() if entry.iteration == last),
        tuple(versions.values()), irreproducible, None if difference == irreproducible else difference,
        unseeded, tuple(_unproven(computed, golden, ranks, last, versions, restores)),
    )  # fmt: skip


def _unproven(
    computed: Sequence[Entry], golden: Mapping[tuple[int, int], Entry], ranks: set[int], last: int,
    versions: Mapping[int, int], restores: int,
) -> Iterator[str]:  # fmt: skip
    done = {(entry.rank, entry.iteration) for entry in computed}
    missing = sorted((iteration, rank) for rank, iteration in golden.keys() - done)
    if missing:
        iteration, rank = missing[0]
        yield f"iteration {iteration} of rank {rank} is in the unfailed run alone"
    beyond = sorted((iteration, rank) for rank, iteration in done - golden.keys())
    if beyond:
        yield f"iteration {beyond[0][0]} of rank {beyond[0][1]} is in the failed run alone; the unfailed one has {last}"
    if len(versions) != restores:
        yield f"state was restored {len(versions)} time(s); expected {restores}"


def _unseeded(before: Iterable[Entry], golden: Mapping[tuple[int, int], Entry]) -> tuple[str, ...]:
    """The generators that differ between two runs without a failure."""
    names: set[str] = set()
    for entry in before:
        other = golden.get((entry.rank, entry.iteration))
        if other is not None:
            names |= {n for n, value in entry.generators.items() if value != other.generators.get(n)}
    return tuple(sorted(names))


def _order(entry: Entry) -> tuple[int, int, int]:
    return entry.iteration, entry.lineage, entry.rank


def _against(
    entries: Iterable[Entry], golden: Mapping[tuple[int, int], Entry], unseeded: Sequence[str], trajectory: bool
) -> Iterator[FirstDifference]:
    for entry in entries:
        other = golden.get((entry.rank, entry.iteration))
        if other is not None:
            yield from _differences(entry, other, unseeded, trajectory)


def _restored_differences(restored: Iterable[Entry], failed: Sequence[Entry]) -> Iterator[FirstDifference]:
    captured: dict[tuple[int, int], list[Entry]] = {}
    for entry in failed:
        if entry.kind == ITERATION and not entry.deferred:
            captured.setdefault((entry.rank, entry.iteration), []).append(entry)
    for entry in restored:
        earlier = [one for one in captured.get((entry.rank, entry.iteration), ()) if one.lineage < entry.lineage]
        if earlier:
            for difference in _differences(entry, earlier[-1], (), True):
                yield FirstDifference(
                    difference.iteration, difference.rank, f"restored {difference.what}", difference.details,
                    difference.places,
                )  # fmt: skip


def _first(differences: Iterator[FirstDifference]) -> FirstDifference | None:
    """The first difference of the first iteration that has one: batches on any rank before values on another."""
    first = next(differences, None)
    if first is None or first.what == _READS:
        return first
    for other in differences:
        if other.iteration != first.iteration:
            break
        if other.what == _READS:
            return other
    return first


def _differences(
    entry: Entry, other: Entry, unseeded: Sequence[str], trajectory: bool
) -> Iterator[FirstDifference]:
    """What differs in one iteration of one rank, causes first."""

    def found(what: str, places: Iterable[str]) -> Iterator[FirstDifference]:
        listed = list(places)
        if listed:
            place, _, details = listed[0].partition(": ")
            yield FirstDifference(entry.iteration, entry.rank, f"{what}{place}", details, len(listed))

    seen, theirs = entry.seen, other.seen
    if seen and theirs:
        if seen.get("batch") != theirs.get("batch"):
            yield FirstDifference(entry.iteration, entry.rank, _READS, f"{seen.get('batch')} != {theirs.get('batch')}")
        if seen.get("rate") != theirs.get("rate"):
            details = f"{seen.get('rate')} != {theirs.get('rate')}"
            yield FirstDifference(entry.iteration, entry.rank, "learning rate", details)
    ours, others = ({n: one.generators[n] for n in one.generators if n not in unseeded} for one in (entry, other))
    yield from found("random numbers ", tree_differences("", ours, others))
    small, wanted = entry.compared, other.compared
    if not trajectory:
        small, wanted = _schedule(small), _schedule(wanted)
    yield from found("small state ", tree_differences("", small, wanted))
    if trajectory:
        for name in _TRAJECTORY:
            if seen and theirs and seen.get(name) != theirs.get(name):
                yield FirstDifference(entry.iteration, entry.rank, name, f"{seen.get(name)} != {theirs.get(name)}")
        yield from found("state ", tree_differences("", entry.items, other.items))


def _without(small: Mapping[str, Any], left_out: Sequence[str]) -> dict[str, Any]:
    """A small state, and that within it of a loop of plain torch, without these entries."""
    kept = {key: value for key, value in small.items() if key not in left_out}
    if isinstance(caller := kept.get("caller"), Mapping):
        kept["caller"] = _without(caller, left_out)
    return kept


def _schedule(small: Mapping[str, Any]) -> dict[str, Any]:
    """Counters and schedules: what does not depend on what was computed."""
    kept = ("counters", "scheduler", "groups")
    inner = {"caller": _schedule(small["caller"])} if isinstance(small.get("caller"), Mapping) else {}
    return {key: value for key, value in small.items() if key in kept} | inner


# ---- what was exercised ----


def epoch_ends(entries: Iterable[Entry]) -> tuple[int, ...]:
    """The iterations in which a pass over the data began or ended, as far as data positions show."""
    ends: set[int] = set()
    last: dict[tuple[int, str], float] = {}
    for entry in sorted((e for e in entries if e.kind == ITERATION), key=_order):
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


def not_exercised(entries: Sequence[Entry]) -> list[str]:
    """What no iteration after a restore has shown, and how to reach it."""
    computed = [entry for entry in entries if entry.kind == ITERATION]
    first = min((entry.lineage for entry in computed), default=0)
    after = [entry for entry in computed if entry.lineage > first]
    begun = min((entry.iteration for entry in after), default=0)
    phases = {phase for entry in after for phase in entry.phases}
    rates = [float.fromhex(e.seen["rate"]) for e in sorted(after, key=_order) if e.rank == 0 and e.seen.get("rate")]
    turns = {later > earlier for earlier, later in zip(rates, rates[1:], strict=False) if later != earlier}
    norms = [str(entry.seen.get("norm")) for entry in after]
    missing = []
    if not any(end > begun for end in epoch_ends(entries)):
        missing.append("an epoch's end after a resume: more --iterations, or a smaller data set")
    if "evaluation" not in phases:
        missing.append("an evaluation: more --iterations, or a shorter interval between evaluations")
    if "saving" not in phases:
        missing.append("the script's own checkpoint: more --iterations, or a shorter interval between checkpoints")
    if not any(norm in ("inf", "nan", "-inf") for norm in norms):
        missing.append("a skipped update: a loss scale that overflows")
    if len(turns) < 2:
        missing.append("another phase of the learning rate's schedule: a shorter warm-up")
    return missing
