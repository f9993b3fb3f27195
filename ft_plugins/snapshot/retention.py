"""Which version is written to storage, which one the nodes of a job write together, and what is removed. Pure.

Invariant: nodes that decide alone decide alike. A version's turn follows from its iteration; one that is asked for
while the job trains is named before it exists; when nothing moves any more, the nodes lay open what they hold and take
the newest version that all of them have. What is removed is older than `keep` complete checkpoints of the same job, and
none of those that a person has asked to keep.

In: versions that a node's ranks hold, what other nodes offer, what lies in storage. Out: versions and names.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field

from ..intake import Count, Text
from .slots import Mark, Version, in_order, marks_of

_NAMED_AHEAD_SECONDS = 3.0  # for the other nodes' SMPs, which look once a second, to have seen the name


@dataclass(frozen=True)
class Storage:
    """What a trainer has told its SMP: checkpoints go to `folder` (absolute), every `interval` iterations (0: only
    when asked for and at the end of protection), the newest `keep` stay; the job has `world_size` ranks, which take a
    snapshot every `every` iterations, and compare the replicas of one every `audits` (a multiple of that; 0: never)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    folder: Annotated[Text, Field(pattern="^/")]
    interval: Count
    every: Annotated[Count, Field(ge=1)]
    keep: Annotated[Count, Field(ge=1)]
    world_size: Annotated[Count, Field(ge=1)]
    audits: Count = 0

    @property
    def step(self) -> int:
        """Iterations between two versions that may be written by their turn: snapshots, where compared the compared."""
        return self.audits or self.every


@dataclass(frozen=True)
class NodeOffer:
    """What the ranks of one node all hold, and what is known of the replicas of that."""

    ranks: tuple[int, ...]
    versions: tuple[Version, ...]
    marks: Mapping[Version, Mark] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint's folder in storage. `fingerprint` is the digest of its job's, '' where no file in it has one yet;
    `problem` is why a complete one cannot be used, `certified` is that of its `checkpoint.CheckpointManifest`; `kept`
    marks one that a person wants to stay."""

    version: Version
    name: str
    complete: bool
    fingerprint: str = ""
    problem: str = ""
    certified: bool | None = None
    kept: bool = False


def due(
    held: Collection[Version],
    storage: Storage,
    last: Version | None,
    wanted: Version | None,
    alone: bool,
    good: Collection[Version] | None = None,
) -> Version | None:
    """The version whose turn it is, newer than `last` (the newest one that was dealt with), None for none.

    The first snapshot from each multiple of the interval on, or the one that was named (`wanted`). A node that is
    `alone` makes up for a turn which was overwritten before it was seen, with the newest version; of several nodes, all
    have to write the same one. Where replicas are compared it is the first snapshot whose are, and only if it is one of
    the `good`, of which the verdict is known (None: whatever is held).
    """
    interval = storage.interval
    step, of = (storage.every, 1) if good is None else (storage.step, storage.step)
    fresh = sorted(v for v in held if (last is None or v > last) and (good is None or v in good))
    turns = [
        v for v in fresh if v == wanted or (interval and v.iteration % interval < step and v.iteration % of == 0)
    ]
    if turns:
        return turns[-1]
    if not (alone and interval and fresh):
        return None
    newest = fresh[-1]
    return newest if is_behind(newest.iteration, storage, last) else None


def is_behind(iteration: int, storage: Storage, last: Version | None) -> bool:
    """Whether a turn lies between `last` and `iteration`."""
    interval = storage.interval
    return bool(interval) and iteration // interval > (last.iteration if last else 0) // interval


def next_turn(completed: int, storage: Storage, wanted: Version | None) -> int | None:
    """The next iteration after `completed` whose version will be written; None where none is known of."""
    interval, every = storage.interval, storage.step
    multiples = [completed // interval * interval + step for step in (0, interval)] if interval else []
    turns = [turn for at in multiples if (turn := -(-at // every) * every) > completed]
    if wanted is not None and wanted.iteration > completed:
        turns.append(wanted.iteration)
    return min(turns, default=None)


def name_ahead(lineage: int, completed: int, every: int, iterations_per_second: float) -> Version:
    """A version that will be captured when every node has heard of it: for a checkpoint while the job trains."""
    heard = completed + math.ceil(_NAMED_AHEAD_SECONDS * iterations_per_second)
    return Version(lineage, (heard // every + 2) * every)


def held_by_job(offers: Iterable[NodeOffer], world_size: int) -> Version | None:
    """The newest version in all offers, by what any node knows of the replicas (`in_order`); None while they do not
    cover every rank, or have none in common.

    Of two that speak for one rank the one with the newer versions counts alone: a node that was lost, and for which a
    substitute came, has left its own behind.
    """
    found: list[NodeOffer] = []
    spoken: set[int] = set()
    for offer in sorted(offers, key=lambda each: max(each.versions, default=Version(0, 0)), reverse=True):
        if spoken.isdisjoint(offer.ranks):
            found.append(offer)
            spoken |= set(offer.ranks)
    if spoken != set(range(world_size)):
        return None
    marks = marks_of(told for offer in found for told in offer.marks.items())
    return next(iter(in_order(set.intersection(*(set(offer.versions) for offer in found)), marks)), None)


def surplus(found: Sequence[StoredCheckpoint], keep: int, fingerprint: str) -> tuple[StoredCheckpoint, ...]:
    """What is to be removed once a new checkpoint of the job with `fingerprint` is complete.

    Its complete ones beyond the newest `keep`, but for the newest that is certified and those that are kept, which do
    not count among them; and what was begun before the newest of them and never finished. Checkpoints of other jobs
    stay, and what these have begun: it is not known here whether they are still wanted, or are being written.
    """
    own = sorted((each for each in found if each.complete and each.fingerprint == fingerprint), key=_version)
    if not own:
        return ()
    agreed = [each for each in own if each.certified][-1:]
    older = [each for each in [each for each in own if not each.kept][:-keep] if each not in agreed]
    unfinished = [
        each
        for each in found
        if not each.complete and each.fingerprint in (fingerprint, "") and each.version < own[-1].version
    ]
    return tuple(sorted([*older, *unfinished], key=_version))


def candidates(found: Sequence[StoredCheckpoint], fingerprint: str) -> tuple[StoredCheckpoint, ...]:
    """The complete checkpoints of the job with `fingerprint`, and those that do not say whose, as a recovery tries
    them: newest first, but where any is certified those last of which it was to be found out whether they are."""
    own = [each for each in found if each.complete and each.fingerprint in (fingerprint, "")]
    newest_first = sorted(own, key=_version, reverse=True)
    if not any(each.certified for each in own):
        return tuple(newest_first)
    return tuple(sorted(newest_first, key=lambda each: each.certified is False))


def _version(stored: StoredCheckpoint) -> Version:
    return stored.version
