"""The states of a slot, what a slot is kept for, and which slot the next capture overwrites. Pure.

Invariant: a CLEAN slot is overwritten only when it is not among the two newest of its rank. Capture waits at the fence,
so a rank that starts capturing v+2 knows that every rank has v clean: with three slots the newest version that all
ranks have is never the one being overwritten. Versions void by a newer lineage are turned DIRTY when that lineage is
opened, so that they go first and are never restored. A slot that a slower tier has pinned is never overwritten; each
purpose of a pin has a slot of its own beyond the three, so that capture always finds one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from ..errors import SegmentError

SLOTS = 3  # that capture needs to itself


class SlotState(IntEnum):
    """EMPTY only at creation; reuse is CLEAN -> DIRTY -> CLEAN."""

    EMPTY = 0
    DIRTY = 1
    CLEAN = 2


class Pin(IntFlag):
    """What a slot is kept for, beyond the capture that goes on in the others."""

    NODE = 1  # the version that counts for the node tier: kept until a newer one counts
    SOURCE = 2  # is being sent to other nodes
    STORAGE = 4  # is being written to storage


def slots_for(*purposes: Pin) -> int:
    """How many slots a segment needs whose versions are pinned for `purposes`."""
    return SLOTS + len(set(purposes))


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
    pins: Pin = Pin(0)


def check_transition(before: SlotState, after: SlotState) -> None:
    """Raises SegmentError for a transition that the table does not have."""
    if after not in TRANSITIONS[before]:
        raise SegmentError(f"a slot cannot go from {before.name} to {after.name}")


def choose(slots: Sequence[Slot]) -> int:
    """The index of the slot to overwrite: one that holds nothing restorable, else the oldest version; none pinned.

    Raises SegmentError when all are pinned.
    """

    def age(slot: Slot) -> tuple[bool, Version, int]:
        restorable = slot.state is SlotState.CLEAN
        return (restorable, slot.version if restorable and slot.version else Version(0, 0), slot.index)

    free = [slot for slot in slots if not slot.pins]
    if not free:
        raise SegmentError(f"all {len(slots)} slots are pinned; expected {SLOTS} for capture alone")
    return min(free, key=age).index


def may_pin(slots: Sequence[Slot], version: Version) -> int | None:
    """The slot of `version` if no capture that has chosen already can be about to overwrite it; None if one may be.

    A capture overwrites neither of the two newest versions of its rank, nor a pinned one. Asked again after the pin is
    set, so that a choice made before it was seen cannot have been this slot.
    """
    clean = sorted((s for s in slots if s.state is SlotState.CLEAN and s.version), key=lambda s: s.version or version)
    for slot in clean:
        if slot.version == version:
            held = slot in clean[-2:] or bool(slot.pins)
            return slot.index if held else None
    return None


def void(slots: Sequence[Slot], base: Version | None) -> tuple[int, ...]:
    """The CLEAN slots that a new lineage growing from `base` makes void: all that is newer (everything if None)."""
    return tuple(
        slot.index
        for slot in slots
        if slot.state is SlotState.CLEAN and slot.version is not None and (base is None or slot.version > base)
    )
