"""Keep a node's segments of previous sizes of the job until its state is safe at the current size.

Invariant: a segment of a job with another number of ranks is renamed and kept whole. Once all ranks have agreed which
version they restore, only that version keeps its memory. The segments are removed when a version of the current size is
committed. A replacement SMP recognises them by file name:

    <job, node and user>-r<rank>  ->  <job, node and user>-r<rank>of<ranks of that job>

In: the SMP's own segments, the number of ranks of the job. Out: reports for a recovery; segments to read or rebuild.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...errors import SegmentError
from ...snapshot.capture import manifest
from ...snapshot.segment import paths
from ...snapshot.segment import segment as segments
from ...snapshot.segment.paths import path_of, previous_path_of
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.shape import Shape
from ...snapshot.segment.slots import SlotState, Version


class PreviousSegments:
    """The segments of previous sizes on one node, by number of ranks and rank."""

    def __init__(self, job: str, node: str) -> None:
        """Adopt the segments that an earlier SMP of this node kept."""
        self._job = job
        self._node = node
        self._by_size: dict[int, dict[int, Segment]] = {}
        for path in paths.previous_segments_of(job, node):
            with suppress(SegmentError):  # incomplete or damaged: there is nothing to restore from it
                segment = Segment(path)
                if path == previous_path_of(job, node, segment.rank, segment.world_size):
                    self._by_size.setdefault(segment.world_size, {})[segment.rank] = segment

    def __bool__(self) -> bool:
        return any(self._by_size.values())

    @property
    def lineage(self) -> int:
        """The newest lineage that any of them opened or holds a version of; 0 if there are none."""
        return max((segment.newest_lineage for segment in self.all()), default=0)

    def by_size(self) -> Mapping[int, Mapping[int, Segment]]:
        """The segments by number of ranks of the job, then by rank."""
        return self._by_size

    def all(self) -> list[Segment]:
        """The segments of all previous sizes."""
        return [segment for ranks in self._by_size.values() for segment in ranks.values()]

    def switch(self, own: MutableMapping[int, Segment], world_size: int) -> list[int]:
        """Move segments of other sizes out of `own`, and those of `world_size` back into it.

        Returns the ranks whose segments left `own`."""
        left = [rank for rank, segment in own.items() if segment.world_size not in (0, world_size)]
        for rank in left:
            segment = own.pop(rank)
            ranks = self._by_size.setdefault(segment.world_size, {})
            ranks.pop(rank, None)  # an older one of that name: the job has since run at that size with another
            segment.path = segment.path.replace(previous_path_of(self._job, self._node, rank, segment.world_size))
            ranks[rank] = segment
        for rank, segment in list(self._by_size.get(world_size, {}).items()):
            if rank in own or segment.shape.slots == 1:
                continue
            segment.claim()  # before it gets its own name back: a segment of that name has all its memory
            segment.path = segment.path.replace(path_of(self._job, self._node, rank))
            own[rank] = self._by_size[world_size].pop(rank)
        return left

    def find(self, rank: int, version: Version) -> Segment | None:
        """The segment of any previous size that holds `version` of a rank."""
        for ranks in self._by_size.values():
            segment = ranks.get(rank)
            if segment and any(s.version == version and s.state is SlotState.CLEAN for s in segment.slots()):
                return segment
        return None

    def create(self, world_size: int, rank: int, shape: Shape, fingerprint: Mapping[str, Any]) -> Segment:
        """Create a segment with one slot, to rebuild a lost rank of the previous job in. Raises BudgetError."""
        path = previous_path_of(self._job, self._node, rank, world_size)
        path.unlink(missing_ok=True)
        segments.create(path, replace(shape, slots=1), rank, fingerprint, world_size)
        segment = Segment(path)
        self._by_size.setdefault(world_size, {})[rank] = segment
        return segment

    def keep_only(self, world_size: int, version: Version) -> None:
        """Free the memory of everything but `version` of the job of `world_size` ranks."""
        for size in list(self._by_size):
            if size != world_size:
                self._remove(size)
        for segment in self._by_size.get(world_size, {}).values():
            slots = (*segment.slots(), *segment.parity_slots())
            segment.release(slot.index for slot in slots if slot.version != version)

    def drop(self) -> int:
        """Remove all segments. Returns their number."""
        return sum(self._remove(size) for size in list(self._by_size))

    def _remove(self, size: int) -> int:
        ranks = self._by_size.pop(size)
        for segment in ranks.values():
            segment.path.unlink(missing_ok=True)
        return len(ranks)

    def report(self, own: Iterable[Segment] = ()) -> dict[str, Any]:
        """What a recovery needs to know of these segments, and of segments in `own`, as plain values.

            sizes         [size, [[rank, coordinates, lineage, completed, from nothing, versions], ...]] for each size;
                          `coordinates` are the manifest's, None without one
            fingerprints  [size, fingerprint of the job at that size]
            marks         results of comparing the replicas of these versions
            damaged       [size, rank] of segments with an unreadable slot
            run           the newest lineage whose run is known, and that run

        Raises SegmentError where a fingerprint is damaged.
        """
        reported = [*self.all(), *own]
        sizes: dict[int, dict[int, Segment]] = {}
        for segment in reported:
            sizes.setdefault(segment.world_size, {})[segment.rank] = segment
        return {
            "sizes": [
                [size, [self._summary(segment) for _, segment in sorted(ranks.items())]]
                for size, ranks in sorted(sizes.items())
            ],
            "fingerprints": [
                [size, one.fingerprint] for size, one in sorted({one.world_size: one for one in reported}.items())
            ],
            "marks": segments.marks_in(reported),
            "run": segments.newest_run(reported),
            "damaged": [[one.world_size, one.rank] for one in reported if any(slot.damaged for slot in one.slots())],
        }

    @staticmethod
    def _summary(segment: Segment) -> list[Any]:
        clean = [slot for slot in segment.slots() if slot.state is SlotState.CLEAN and slot.version is not None]
        coordinates = None
        for slot in clean[:1]:
            with suppress(SegmentError):
                coordinates = list(manifest.read(manifest.split(segment.small(slot.index))[0]).coordinates)
        versions = sorted([slot.version.lineage, slot.version.iteration] for slot in clean if slot.version)
        opened = segment.header.opened
        return [segment.rank, coordinates, opened.lineage, segment.header.completed, opened.from_nothing, versions]
