"""Claim memory for another slot when capture or a recovery needs one.

Invariant: while other slots can be claimed, no version is overwritten that all ranks may still need. If memory is
lacking, the version that needed a slot is left out, and the next ones overwrite what pins leave; by then the SMP, which
pins versions, has read in the segment that this is so.

In: a segment, the version to capture. Out: its slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ...errors import BudgetError, SegmentError
from .paths import check_room, segments_beside
from .segment import Segment
from .slots import Commit, SlotState, Version, choose, free_slot, slot_given_up, slot_to_claim

_RETRY_SECONDS = 60.0  # between two attempts to claim a slot for which memory was lacking


class CaptureOwner:
    """What the owner of a capture does at its events, on the capture thread but for `left_out`. This one: nothing."""

    def sealed(self, commit: Commit) -> None:
        """A version is sealed, and the fence opens next: must be quick."""

    def compared(self, found: Mapping[str, tuple[int, float]] | None, error: str = "") -> bool:
        """The live state was compared with a version: the items that differ, in how many elements, by how much at most
        (nan: they are no numbers); None if an `error` came between. Returns whether each replica is that version."""
        return found == {}

    def updated(self) -> None:
        """After each `run_after_update`; may be slow."""

    def left_out(self, version: Version) -> None:
        """No slot is free for a version."""

    def check_room(self, nbytes: int) -> None:
        """Memory for another slot is about to be claimed. Raises BudgetError if that must not be."""

    def slot_claimed(self, refused: BudgetError | None) -> None:
        """It was claimed; or the first error while it is lacking."""


class SlotClaims:
    """The slots that one rank claims."""

    def __init__(
        self, segment: Segment, owner: CaptureOwner, use: Callable[[int], None] = lambda index: None,
        permitted: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`use` prepares a slot that has memory now for copies. `permitted` raises if another incarnation has taken
        over, which may be while memory is allocated: that takes seconds."""
        self._segment, self._owner, self._use, self._permitted = segment, owner, use, permitted
        self._refused_at = -_RETRY_SECONDS
        self._just_refused = False

    def slot_for(self, version: Version) -> int | None:
        """The slot that the capture of `version`, which begins now, overwrites. None: it is left out."""
        index = self._segment.slot_to_capture(version)
        if index is None and self._claim():
            index = self._segment.slot_to_capture(version)
        refused, self._just_refused = self._just_refused, False
        return None if refused else index

    def make_room(self, version: Version) -> None:
        """Claim now what a capture of `version`, which follows soon, will need."""
        if self._segment.header.short or self._segment.slot_to_capture(version) is None:
            self._claim()

    def _claim(self) -> bool:
        """Claim memory for another slot. False if there is none, or none was left a moment ago."""
        index = slot_to_claim(self._segment.slots())
        if index is None or time.monotonic() - self._refused_at < _RETRY_SECONDS:
            return False
        try:
            self._owner.check_room(self._segment.shape.slot_room)
            self._segment.claim_slot(index, self._permitted)
        except BudgetError as error:
            self._permitted()
            self._refused_at = time.monotonic()
            if not self._segment.header.short:
                self._segment.header.short = self._just_refused = True
                self._owner.slot_claimed(error)
            return False
        self._segment.header.short = False
        self._use(index)
        self._owner.slot_claimed(None)
        return True


def missing(paths: Iterable[Path], slots: int) -> int:
    """How many bytes the segments in `paths` lack until `slots` slots of each have memory, or all of them. Memory that
    is being allocated is not lacking as far as it is there."""
    lacking = 0
    for path in paths:
        with suppress(SegmentError):  # of a rank that is not there
            segment = Segment(path)
            lacking += max(0, segment.shape.bytes_with(min(slots, segment.shape.slots)) - segment.resident_bytes)
            segment.close()
    return lacking


def slot_to_rebuild(segment: Segment) -> int:
    """The slot into which a version is restored that other nodes or storage have, while no capture runs: preferably
    without overwriting another version. If memory is lacking and all slots are pinned, the version has to go that was
    being sent. Raises SegmentError if no slot is left.
    """
    slots = segment.slots()
    index, unclaimed = free_slot(slots), slot_to_claim(slots)
    if unclaimed is None or (index is not None and slots[index].state is not SlotState.CLEAN):
        return choose(slots)
    instead = slot_given_up(slots) if index is None else index
    # the other ranks of the node may be about to do the same; with nothing to overwrite it is worth a try
    together = missing(segments_beside(segment.path), len(segment.claimed) + 1) if instead is not None else 0
    needed = max(segment.shape.slot_room, together)
    try:
        check_room(needed, f"rank {segment.rank}: another slot", segment.path.parent)
        segment.claim_slot(unclaimed)
    except BudgetError:  # an older version has to go
        return choose(slots) if instead is None else instead
    return unclaimed
