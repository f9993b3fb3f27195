"""Keep, report and drop a node's state of previous sizes as the job changes its number of ranks.

Invariant: state of a previous size is removed only when the job is safe without it, or when the ranks have agreed which
version they restore. A checkpoint being written from it is abandoned first.

In: the job's number of ranks, the version that the ranks restore. Out: segments moved out of the SMP's own, moved back,
or removed; `job.resized` and `resize.finished` events.
"""

from __future__ import annotations

from typing import Any

from ...events import catalogue
from ...snapshot.segment.slots import Version, captured_after
from .context import ResizeContext


class ResizeTransition:
    """The resizes of one node that takes part in the job."""

    def __init__(self, smp: ResizeContext) -> None:
        self._smp = smp
        self._world_size = max((segment.world_size for segment in smp.segments.values()), default=0)

    def resize(self, world_size: int) -> bool:
        """The job has `world_size` ranks now: move segments of other sizes out of the way.

        Returns whether this node has state of a previous size."""
        smp = self._smp
        smp.previous_storage.stop()
        with smp.lock:
            self._world_size = world_size
            left = smp.previous.switch(smp.segments, world_size)
            smp.persister.release(left)
        if left:
            smp.events.emit(catalogue.JOB_RESIZED, ranks=world_size, retained=sorted(left))
        return bool(smp.previous)

    def report(self) -> dict[str, Any]:
        """The state of previous sizes on this node (`PreviousSegments.report`), and the parity that belongs to it."""
        with self._smp.lock:
            return {**self._smp.previous.report(), **self._smp.tier.parity()}

    def keep_only(self, size_and_version: tuple[int, Version] | None) -> None:
        """Drop all state of previous sizes but that version of the job of that many ranks; None: drop everything."""
        self._smp.previous_storage.stop()
        with self._smp.lock:
            if size_and_version is None:
                self._smp.previous.drop()
            else:
                self._smp.previous.keep_only(*size_and_version)

    def drop_if_safe(self) -> None:
        """Remove state of previous sizes once the job is safe without it.

        Where nodes protect each other, that is when a version is committed. Otherwise it is when every rank of this
        node holds two versions of this incarnation: all ranks of the job have the older one."""
        smp = self._smp
        if not smp.previous:
            return
        with smp.lock:  # else a request could close a segment while its slots are read
            if not self.safe_lineage:
                return
        smp.previous_storage.stop()  # without the lock: it takes seconds
        with smp.lock:
            if not self.safe_lineage:  # again: another incarnation may have begun meanwhile
                return
            smp.events.emit(catalogue.RESIZE_FINISHED, segments=smp.previous.drop())
            if not self._protected:  # nodes do not protect each other at this size: parity of the previous one is left
                smp.tier.unprotect()

    @property
    def _protected(self) -> bool:
        """Whether the node tier's state is of this incarnation."""
        return self._smp.tier.token == self._smp.token and self._smp.tier.ranks == self._world_size

    @property
    def safe_lineage(self) -> int:
        """The lineage in which the job is safe without what other sizes, and nodes that take no part, hold of older
        ones; 0 if it is not yet. Call with the lock held."""
        version = self._smp.tier.committed if self._protected else self._oldest_where_all_have_two()
        return version.lineage if version else 0

    def _oldest_where_all_have_two(self) -> Version | None:
        """The oldest version of this incarnation, if every rank of this node has a newer one as well."""
        opened = [(segment, segment.header.opened) for segment in list(self._smp.segments.values())]
        own_versions = [
            [version for _, version in captured_after(segment.slots(), own.lineage, -1)]
            for segment, own in opened if own.token == self._smp.token
        ]  # fmt: skip
        if len(own_versions) < max(1, len(self._smp.segments)) or min(map(len, own_versions)) < 2:
            return None
        return min(version for versions in own_versions for version in versions)
