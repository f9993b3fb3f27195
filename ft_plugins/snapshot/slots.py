"""The states of a slot, and which slot the next capture overwrites. Pure.

Invariant: a CLEAN slot is overwritten only when it is not among the two newest of its rank. Capture waits at the fence,
so a rank that starts capturing v+2 knows that every rank has v clean: with three slots the newest version that all
ranks have is never the one being overwritten. Versions void by a newer lineage are turned DIRTY when that lineage is
opened, so that they go first and are never restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ..errors import SegmentError

SLOTS = 3


class SlotState(IntEnum):
    """EMPTY only at creation; reuse is CLEAN -> DIRTY -> CLEAN."""

    EMPTY = 0
    DIRTY = 1
    CLEAN = 2


TRANSITIONS = {
    SlotState.EMPTY: {SlotState.DIRTY},
    SlotState.DIRTY: {SlotState.DIRTY, SlotState.CLEAN},  # DIRTY -> DIRTY: a capture that was cut short is overwritten
    SlotState.CLEAN: {SlotState.DIRTY},
}


@dataclass(frozen=True, order=True)
class Version:
    """(lineage, iteration), ordered. A recovery opens a new lineage."""

    lineage: int
    iteration: int

    def __str__(self) -> str:
        return f"{self.iteration} (lineage {self.lineage})"


@dataclass(frozen=True)
class Slot:
    """What a slot's header says. `version` is None when it never held one."""

    index: int
    state: SlotState
    version: Version | None
    token: int = 0  # of the incarnation that wrote it


def check_transition(before: SlotState, after: SlotState) -> None:
    """Raises SegmentError for a transition that the table does not have."""
    if after not in TRANSITIONS[before]:
        raise SegmentError(f"a slot cannot go from {before.name} to {after.name}")


def choose(slots: Sequence[Slot]) -> int:
    """The index of the slot to overwrite: one that holds nothing restorable, else the oldest version."""

    def age(slot: Slot) -> tuple[bool, Version, int]:
        restorable = slot.state is SlotState.CLEAN
        return (restorable, slot.version if restorable and slot.version else Version(0, 0), slot.index)

    return min(slots, key=age).index


def void(slots: Sequence[Slot], base: Version | None) -> tuple[int, ...]:
    """The CLEAN slots that a new lineage growing from `base` makes void: all that is newer (everything if None)."""
    return tuple(
        slot.index
        for slot in slots
        if slot.state is SlotState.CLEAN and slot.version is not None and (base is None or slot.version > base)
    )
