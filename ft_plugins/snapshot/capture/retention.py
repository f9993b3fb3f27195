"""Decide which version is written to storage, and which checkpoints are removed. Pure.

Invariant: all nodes make the same decision without communicating. Scheduled versions follow from their iteration; a
version requested while the job trains is announced before it exists; after training has stopped, the nodes publish
what they hold and take the newest version that all of them have. A removed checkpoint is older than the newest `keep`
complete ones of the same job, and was not written with --keep.

In: versions that a node's ranks hold, offers of other nodes, checkpoints in storage. Out: versions, checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import ConfigDict, Field

from ...base.intake import Count, Text
from ..schedule import ChosenSchedule, due_from, is_turn, next_due
from ..segment.slots import Mark, Version, marks_of, recovery_order

_ANNOUNCED_AHEAD_SECONDS = 3.0  # until the other nodes' SMPs, which poll once a second, have seen the announcement


@dataclass(frozen=True)
class Storage:
    """A trainer's storage settings for its SMP: checkpoints go to `folder` (absolute) every `interval` iterations (0:
    only on request and at the end of protection), and the newest `keep` stay. The job has `world_size` ranks, which
    take a snapshot every `every` iterations and audit one every `audits` iterations (a multiple of `every`; 0: never).
    `chosen`: where the job chooses its intervals.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    folder: Annotated[Text, Field(pattern="^/")]
    interval: Count
    every: Annotated[Count, Field(ge=1)]
    keep: Annotated[Count, Field(ge=1)]
    world_size: Annotated[Count, Field(ge=1)]
    audits: Count = 0
    chosen: ChosenSchedule | None = None  # None in files and requests: headers have it

    def at(self, iteration: int) -> Storage:
        """The settings for the version of an iteration."""
        if self.chosen is None:
            return self
        now = self.chosen.at(iteration)
        return replace(self, every=self.every * now.captured, interval=now.stored, chosen=None)

    @property
    def step(self) -> int:
        """Iterations between two versions that may be scheduled: audited ones if the job audits, else all."""
        return self.audits or self.every


@dataclass(frozen=True)
class NodeOffer:
    """The versions that all ranks of one node hold, and the marks of their replicas."""

    ranks: tuple[int, ...]
    versions: tuple[Version, ...]
    marks: Mapping[Version, Mark] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint's folder in storage. `fingerprint` is the digest of its job's fingerprint, '' without a manifest.
    `problem` is why a complete checkpoint cannot be used. `certified` is that of its `checkpoint.CheckpointManifest`.
    `kept`: retention never removes it. `run`: the identity of its run, '' if unknown."""

    version: Version
    name: str
    complete: bool
    fingerprint: str = ""
    problem: str = ""
    certified: bool | None = None
    kept: bool = False
    run: str = ""


def due(
    held: Collection[Version], storage: Storage, last: Version | None, wanted: Version | None, alone: bool,
    good: Collection[Version] | None = None,
) -> Version | None:  # fmt: skip
    """The version to write now, newer than `last` (the newest one already handled; None: none was); None for none.

    It is the first snapshot from each multiple of the interval on, or the announced version (`wanted`, if any). If a
    scheduled version was overwritten before it was seen, a node that is `alone` writes the newest one instead; several
    nodes must all write the same one. In a job that audits, it is the first audited snapshot, if it is in `good`, the
    versions with a good verdict (None: any version).
    """
    fresh = sorted(v for v in held if (last is None or v > last) and (good is None or v in good))
    turns = [v for v in fresh if v == wanted or _is_scheduled(v.iteration, storage, audited=good is not None)]
    if turns:
        return turns[-1]
    if not (alone and fresh):
        return None
    newest = fresh[-1]
    return newest if is_behind(newest.iteration, storage, last) else None


def _is_scheduled(iteration: int, storage: Storage, audited: bool) -> bool:
    now = storage.at(iteration)
    step, of = (now.step, now.step) if audited else (now.every, 1)
    return is_turn(iteration, now.interval, step) and iteration % of == 0


def is_behind(iteration: int, storage: Storage, last: Version | None) -> bool:
    """Whether a scheduled multiple of the interval lies between `last` and `iteration`."""
    interval = storage.at(iteration).interval
    turn = iteration // interval * interval if interval else 0
    if storage.chosen is not None and turn < storage.chosen.since <= iteration:  # another interval held there
        return is_behind(storage.chosen.since - 1, storage, last)
    return turn > (last.iteration if last else 0)


def next_turn(completed: int, storage: Storage, wanted: Version | None) -> int | None:
    """The next iteration after `completed` whose version is scheduled or announced; None for none."""
    now = storage.at(completed + 1)
    interval, every = now.interval, now.step
    multiples = [completed // interval * interval + step for step in (0, interval)] if interval else []
    turns = [turn for at in multiples if (turn := due_from(at, every)) > completed]
    if wanted is not None and wanted.iteration > completed:
        turns.append(wanted.iteration)
    return min(turns, default=None)


def to_announce(lineage: int, completed: int, every: int, iterations_per_second: float) -> Version:
    """The version to announce, for a checkpoint while the job trains: every node hears of it before it is captured."""
    heard = completed + math.ceil(_ANNOUNCED_AHEAD_SECONDS * iterations_per_second)
    return Version(lineage, next_due(heard + every, every))


def newest_held_by_all(offers: Iterable[NodeOffer], world_size: int) -> Version | None:
    """The first version in `recovery_order` that is in all offers; None if they do not cover every rank, or have no
    version in common. A mark that any node reports holds for all.

    If two offers cover the same rank, only the one with the newer versions is used: the other was left by a lost node
    that has a substitute.
    """
    used: list[NodeOffer] = []
    covered: set[int] = set()
    for offer in sorted(offers, key=lambda each: max(each.versions, default=Version(0, 0)), reverse=True):
        if covered.isdisjoint(offer.ranks):
            used.append(offer)
            covered |= set(offer.ranks)
    if covered != set(range(world_size)):
        return None
    marks = marks_of(entry for offer in used for entry in offer.marks.items())
    return next(iter(recovery_order(set.intersection(*(set(offer.versions) for offer in used)), marks)), None)


def surplus(stored: Sequence[StoredCheckpoint], keep: int, fingerprint: str) -> tuple[StoredCheckpoint, ...]:
    """The checkpoints to remove once a new one of the job with `fingerprint` is complete.

    These are its complete ones beyond the newest `keep`, except the newest certified one and those marked `kept`, which
    are not counted; and unfinished ones older than its newest complete one: only the job that holds the folder's lease
    writes there. Complete checkpoints of other jobs stay: they may still be wanted.
    """
    own = sorted((each for each in stored if each.complete and each.fingerprint == fingerprint), key=_version)
    if not own:
        return ()
    agreed = [each for each in own if each.certified][-1:]
    older = [each for each in [each for each in own if not each.kept][:-keep] if each not in agreed]
    unfinished = [each for each in stored if not each.complete and each.version < own[-1].version]
    return tuple(sorted([*older, *unfinished], key=_version))


def candidates(stored: Sequence[StoredCheckpoint], fingerprint: str) -> tuple[StoredCheckpoint, ...]:
    """The complete checkpoints of the job with `fingerprint` or without a known one, in the order in which a recovery
    tries them: newest first, but if any is certified, those whose audit gave no verdict last."""
    own = [each for each in stored if each.complete and each.fingerprint in (fingerprint, "")]
    newest_first = sorted(own, key=_version, reverse=True)
    if not any(each.certified for each in own):
        return tuple(newest_first)
    return tuple(sorted(newest_first, key=lambda each: each.certified is False))


def _version(stored: StoredCheckpoint) -> Version:
    return stored.version
