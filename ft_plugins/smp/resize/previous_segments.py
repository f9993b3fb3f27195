"""Segments of the job at another size, kept until the state in them is safe at the new one.

Invariant: a segment whose job has another number of ranks than the one that runs now is set aside under a name of its
own, whole; only the version that is taken over stays in it once all ranks have agreed which one that is. It is removed
when a version of the new size counts. An SMP that takes over finds all of it in the files' names.

    <job, node and user>-r<rank>  ->  <job, node and user>-r<rank>of<ranks of that job>

In: the SMP's own segments, the size of the job. Out: facts for a recovery, segments to be read or rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...errors import SegmentError
from ...snapshot import manifest, paths
from ...snapshot import segment as segments
from ...snapshot.paths import path_of, set_aside
from ...snapshot.segment import Segment
from ...snapshot.shape import Shape
from ...snapshot.slots import SlotState, Version


class Former:
    """What is set aside on this node, by size of the job and rank."""

    def __init__(self, job: str, node: str) -> None:
        """Find what an SMP before this one has set aside."""
        self._job = job
        self._node = node
        self._held: dict[int, dict[int, Segment]] = {}
        for path in paths.former_segments_of(job, node):
            with suppress(SegmentError):  # half-made or damaged: nothing that could be taken over
                found = Segment(path)
                if path == set_aside(job, node, found.rank, found.world_size):
                    self._held.setdefault(found.world_size, {})[found.rank] = found

    def __bool__(self) -> bool:
        return any(self._held.values())

    @property
    def lineage(self) -> int:
        """The newest lineage that was opened in any of them, or that a version is of; 0 for none."""
        return max((one.newest_lineage for held in self._held.values() for one in held.values()), default=0)

    def sizes(self) -> Mapping[int, Mapping[int, Segment]]:
        """The segments by size of the job, then by rank."""
        return self._held

    def exchange(self, own: MutableMapping[int, Segment], world_size: int) -> list[int]:
        """Set aside what in `own` is of another size; bring back what is of this one. Returns the ranks that left."""
        left = [rank for rank, found in own.items() if found.world_size not in (0, world_size)]
        for rank in left:
            found = own.pop(rank)
            aside = self._held.setdefault(found.world_size, {})
            aside.pop(rank, None)  # an older one of the same name: what it held was left behind when it came back
            found.path = found.path.replace(set_aside(self._job, self._node, rank, found.world_size))
            aside[rank] = found
        for rank, found in list(self._held.get(world_size, {}).items()):
            if rank in own or found.shape.slots == 1:
                continue
            found.claim()  # before it has its name again: under that it is whole
            found.path = found.path.replace(path_of(self._job, self._node, rank))
            own[rank] = self._held[world_size].pop(rank)
        return left

    def find(self, rank: int, version: Version) -> Segment | None:
        """The segment that holds `version` of a rank, at whatever size."""
        for held in self._held.values():
            found = held.get(rank)
            if found is not None and any(s.version == version and s.state is SlotState.CLEAN for s in found.slots()):
                return found
        return None

    def make(self, world_size: int, rank: int, shape: Shape, fingerprint: Mapping[str, Any]) -> Segment:
        """A segment with one slot for a rank of the former job that is lost. Raises BudgetError."""
        path = set_aside(self._job, self._node, rank, world_size)
        path.unlink(missing_ok=True)
        segments.create(path, replace(shape, slots=1), rank, fingerprint, world_size)
        found = Segment(path)
        self._held.setdefault(world_size, {})[rank] = found
        return found

    def keep(self, world_size: int, version: Version) -> None:
        """Of everything that is set aside only `version` of the job of that size stays; the memory is given back."""
        for size in list(self._held):
            if size != world_size:
                self._remove(size)
        for found in self._held.get(world_size, {}).values():
            found.release(slot.index for slot in found.slots() if slot.version != version)

    def drop(self) -> int:
        """Remove everything. Returns how many segments."""
        return sum(self._remove(size) for size in list(self._held))

    def _remove(self, size: int) -> int:
        held = self._held.pop(size)
        for found in held.values():
            found.path.unlink(missing_ok=True)
        return len(held)

    def facts(self, beside: Iterable[Segment] = ()) -> list[list[Any]]:
        """For a recovery: [size, [[rank, place, lineage, completed, from nothing, versions], ...]] of each size.

        `place` is that of the manifest, None where there is none; `beside` are segments that are not set aside.
        """
        sizes = {size: dict(held) for size, held in self._held.items() if held}
        for found in beside:
            sizes.setdefault(found.world_size, {})[found.rank] = found
        return [
            [size, [self._fact(rank, found) for rank, found in sorted(held.items())]]
            for size, held in sorted(sizes.items())
        ]

    def fingerprints(self, beside: Iterable[Segment] = ()) -> list[list[Any]]:
        """For a recovery: [size, fingerprint] of the job at each size, likewise. Raises SegmentError where one is
        damaged."""
        held = [*(one for found in self._held.values() for one in found.values()), *beside]
        return [[size, one.fingerprint] for size, one in sorted({one.world_size: one for one in held}.items())]

    def marks(self, beside: Iterable[Segment] = ()) -> list[list[int]]:
        """For a recovery, likewise: what is known of the replicas of their versions."""
        return segments.marks_in([*(one for held in self._held.values() for one in held.values()), *beside])

    def damaged(self, beside: Iterable[Segment] = ()) -> list[list[int]]:
        """For a recovery, likewise: [size, rank] of those of which a slot cannot be read."""
        held = [*(one for held in self._held.values() for one in held.values()), *beside]
        return [[one.world_size, one.rank] for one in held if any(slot.damaged for slot in one.slots())]

    @staticmethod
    def _fact(rank: int, found: Segment) -> list[Any]:
        clean = [slot for slot in found.slots() if slot.state is SlotState.CLEAN and slot.version is not None]
        place = None
        for slot in clean[:1]:
            with suppress(SegmentError):
                place = list(manifest.read(manifest.split(found.small(slot.index))[0]).place)
        versions = sorted([slot.version.lineage, slot.version.iteration] for slot in clean if slot.version)
        return [rank, place, found.lineage, found.completed, found.from_nothing, versions]
