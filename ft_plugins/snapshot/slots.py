"""The states of a slot, what a slot is kept for, and which slot the next capture overwrites. Pure.

Invariant: a CLEAN slot is overwritten only when it is not among the two newest of its rank. Capture waits at the fence,
so a rank that starts capturing v+2 knows that every rank has v clean: with three slots the newest version that all
ranks have is never the one being overwritten. Versions void by a newer lineage are turned DIRTY when that lineage is
opened, so that they go first and are never restored. A slot that a slower tier has pinned is never overwritten; each
purpose of a pin has a slot of its own beyond the three, so that capture always finds one.

The newest version whose replicas were compared and agreed is kept likewise, until every rank has a newer such one. No
pin says so: what keeps it is its `Mark`, which the trainer sets at the fence, and the iteration that is captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    CERTIFIED = 8  # its replicas agreed: a purpose that has its slot, but is never set (see `certified`)


def slots_for(*purposes: Pin) -> int:
    """How many slots a segment needs whose versions are pinned for `purposes`."""
    return SLOTS + len(set(purposes))


class Mark(IntEnum):
    """What is known of the replicas of a version, in the words of whoever compares or averages them."""

    NONE = 0  # nobody has said: the verdict is still to come, or nobody compares
    UNAUDITED = 1  # not compared, expected to be identical
    DRIFTING = 2  # let differ between two averagings, and each captured whole
    CERTIFIED = 3  # compared: all of them agreed
    DIFFERING = 4  # compared, captured in parts as if they were one, and not alike: a mixture, never restored

    @property
    def preferred(self) -> bool:
        """Whether a recovery takes it before any newer version that is not, once something is certified.

        One that drifts is all that it should be, each replica in full: were it not taken, a job under steady noise, of
        which no version ever agrees, would go back to before the noise began.
        """
        return self in (Mark.CERTIFIED, Mark.DRIFTING)

    @property
    def word(self) -> str:
        """For people."""
        return "" if self is Mark.NONE else self.name.lower()


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


def marks_of(said: Iterable[tuple[Version | None, Mark]]) -> dict[Version, Mark]:
    """What is known of each version's replicas. A verdict is one of the whole job: any rank that heard it speaks for
    all, and what is worse goes before what is better."""
    found: dict[Version, Mark] = {}
    for version, mark in said:
        if version is not None and mark:
            found[version] = max(mark, found.get(version, mark))
    return found


def in_order(versions: Iterable[Version], marks: Mapping[Version, Mark]) -> list[Version]:
    """`versions` as a recovery tries them: newest first, but for those whose replicas differed; where any is certified,
    first those that are preferred."""
    newest_first = sorted((v for v in versions if marks.get(v) is not Mark.DIFFERING), reverse=True)
    if Mark.CERTIFIED not in marks.values():
        return newest_first
    return sorted(newest_first, key=lambda version: not marks.get(version, Mark.NONE).preferred)


@dataclass(frozen=True)
class Slot:
    """What a slot's header says. `version` is None when it never held one, or is not known.

    `damaged`: it is DIRTY because its header says something that does not match its digest, and not because a writer
    was at it.
    """

    index: int
    state: SlotState
    version: Version | None
    token: int = 0  # of the incarnation that wrote it
    pins: Pin = Pin(0)
    mark: Mark = Mark.NONE
    damaged: bool = False


def check_transition(before: SlotState, after: SlotState) -> None:
    """Raises SegmentError for a transition that the table does not have."""
    if after not in TRANSITIONS[before]:
        raise SegmentError(f"a slot cannot go from {before.name} to {after.name}")


def certified(slots: Sequence[Slot], writing: Version | None = None) -> int | None:
    """The slot that is kept because its version is certified, while `writing` is captured (None: by a recovery).

    That is the newest which every rank is known to have, and to know that it is certified. Ranks say so at the fence of
    the iteration after it, so one that is through the iteration after that knows that all have. Until then it is one of
    the two newest and safe without, while the one before it, which another rank may still need, is kept here.
    """

    def settled(version: Version) -> bool:
        return writing is None or version.lineage < writing.lineage or version.iteration + 2 <= writing.iteration

    held = [(slot.version, slot.index) for slot in slots if slot.mark is Mark.CERTIFIED and slot.version]
    return max(((version, index) for version, index in held if settled(version)), default=(None, None))[1]


def choose(slots: Sequence[Slot], writing: Version | None = None) -> int:
    """The index of the slot to overwrite: one that holds nothing restorable, else the oldest version; none pinned, nor
    the one that is certified. `writing` is what a capture writes, None for a recovery.

    Raises SegmentError when all are kept.
    """

    def age(slot: Slot) -> tuple[bool, Version, int]:
        restorable = slot.state is SlotState.CLEAN
        return (restorable, slot.version if restorable and slot.version else Version(0, 0), slot.index)

    kept = certified(slots, writing)
    free = [slot for slot in slots if not slot.pins and slot.index != kept]
    if not free:
        raise SegmentError(f"all {len(slots)} slots are pinned; expected {SLOTS} for capture alone")
    return min(free, key=age).index


def may_pin(slots: Sequence[Slot], version: Version) -> int | None:
    """The slot of `version` if no capture that has chosen already can be about to overwrite it; None if one may be.

    A capture overwrites neither of the two newest versions of its rank, nor a pinned one, nor the newest that is
    certified. Asked again after the pin is set, so that a choice made before it was seen cannot have been this slot: as
    long as no newer one is marked certified, no capture has chosen that need not have kept this one. An older certified
    one does not count: the capture that is about to choose may be the first that need not keep it.
    """
    clean = sorted((s for s in slots if s.state is SlotState.CLEAN and s.version), key=lambda s: s.version or version)
    agreed = [slot for slot in clean if slot.mark is Mark.CERTIFIED]
    for slot in clean:
        if slot.version == version:
            held = slot in [*clean[-2:], *agreed[-1:]] or bool(slot.pins)
            return slot.index if held else None
    return None


def captured_after(slots: Iterable[Slot], lineage: int, since: int) -> list[tuple[Slot, Version]]:
    """The restorable versions of `lineage` that were captured after iteration `since`, with their slots."""
    clean = [(slot, slot.version) for slot in slots if slot.state is SlotState.CLEAN and slot.version is not None]
    return [(slot, version) for slot, version in clean if version.lineage == lineage and version.iteration > since]


def void(slots: Sequence[Slot], base: Version | None) -> tuple[int, ...]:
    """The slots that a new lineage growing from `base` makes void: all that is newer (everything if None), and what is
    damaged, which has been reported by then."""
    return tuple(
        slot.index
        for slot in slots
        if slot.damaged
        or slot.state is SlotState.CLEAN
        and slot.version is not None
        and (base is None or slot.version > base)
    )
