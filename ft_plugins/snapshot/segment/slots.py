"""The states of a slot, what slots are pinned for, and which slot the next capture overwrites. Pure.

Invariant: a capture never overwrites the two newest CLEAN slots of its rank. Capture waits at the fence, so a rank that
starts capturing v+2 knows that every rank has v CLEAN: with three slots, the newest version that all ranks have is
never overwritten. If versions are two iterations or more apart, every rank has the last one when the next one begins:
two slots are enough, and the newest CLEAN one stays. Opening a lineage makes the versions that it voids DIRTY, so they
are overwritten first and never restored. A pinned slot is never overwritten; each purpose of a pin adds one slot to
those, so capture always finds one.

Not all of these slots need memory. The committed version is one that all ranks have, so older ones are needed no
longer. Where nodes protect each other two slots have memory from the start, and another one is claimed when capture
would otherwise have to overwrite what it must not. Two are enough if each version is committed before the next one is
captured, four if that takes up to three iterations (`slot_to_reuse`).

With fewer slots (`--reft-slots`, or if memory for another one is lacking) capture has what the pins of the node tier
leave: two, one or none. Then the newest version that all ranks are sure to have is the committed one or the one being
sent. Both are pinned; with one slot or none the trainer pins the latter itself, before it seals it. A capture that
finds no slot is left out: no rank waits.

The newest certified version also stays, until every rank has a newer one. It is not pinned: it is protected by its
`Mark`, which the trainer sets at the fence, and by the iteration being captured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from ...errors import ConfigError, SegmentError

SLOTS = 3  # needed by capture alone, of every iteration
SHARED = 2  # by the node tier: the committed version, and the one being sent
FIRST = 2  # slots with memory from the start, where nodes protect each other: the others are claimed when needed


class SlotState(IntEnum):
    """UNCLAIMED: the slot has no memory but its header. EMPTY: it has, and was never used; then it is reused as
    CLEAN -> DIRTY -> CLEAN."""

    EMPTY = 0
    DIRTY = 1
    CLEAN = 2
    UNCLAIMED = 3


class Pin(IntFlag):
    """What a slot is pinned for, while capture continues in the others."""

    NODE = 1  # the committed version of the node tier, until a newer one is committed
    SOURCE = 2  # being sent to other nodes
    STORAGE = 4  # being written to storage
    CERTIFIED = 8  # its replicas agreed: adds a slot, but is never set (see `certified_slot`)


def slots_for(*purposes: Pin, free: int = SLOTS) -> int:
    """The number of slots of a segment in which versions are pinned for `purposes`; `free` of them are never pinned."""
    return free + len(set(purposes))


def needed_free(interval: int, aligned: bool = True) -> int:
    """How many slots have to be free of pins so that the newest version that all ranks have is never overwritten.

    `interval`: iterations between two versions. `aligned`: all replicas take part in a collective in every iteration,
    and no verdict on a version comes later.
    """
    return SLOTS - 1 if interval > 1 and aligned else SLOTS


def free_of(slots: int, needed: int, nodes: bool, others: Collection[Pin]) -> int:
    """How many of `slots` (`--reft-slots`: those of the process tier and the node tier) are free of pins, of which
    `needed` would be. `nodes`: whether nodes protect each other; `others`: what else versions are pinned for.

    Raises ConfigError if fewer than `needed` are not possible.
    """
    free = slots - SHARED
    if not nodes:
        raise ConfigError(
            f"--reft-slots {slots} has no effect: nodes do not protect each other here, and the {needed} slots of a "
            "rank are all that the job can resume from; drop it"
        )
    if free < needed and others:
        raise ConfigError(
            f"--reft-slots {slots}: expected at least {SHARED + needed} where checkpoints are written or replicas are "
            "compared: with fewer a version may be overwritten before it is written, or before its verdict is known"
        )
    return free


class Mark(IntEnum):
    """What is known of the replicas of a version after comparing or averaging them."""

    NONE = 0  # not compared yet, or never compared
    UNAUDITED = 1  # not compared, expected to be identical
    DIVERGED = 2  # apart between two averagings, as intended; each replica is captured whole
    CERTIFIED = 3  # compared, and all agreed
    MISMATCHED = 4  # compared, not identical, but captured in parts as one state: a mixture, never restored

    @property
    def preferred(self) -> bool:
        """Whether a recovery tries the version before newer ones that are not preferred, once any is certified.

        A diverged version holds each replica whole. If it were not preferred, a job under steady noise, whose replicas
        never agree, would go back to before the noise began.
        """
        return self in (Mark.CERTIFIED, Mark.DIVERGED)

    @property
    def word(self) -> str:
        """The name for messages; '' for NONE."""
        return "" if self is Mark.NONE else self.name.lower()


TRANSITIONS = {
    SlotState.EMPTY: {SlotState.DIRTY},
    SlotState.DIRTY: {SlotState.DIRTY, SlotState.CLEAN},  # DIRTY -> DIRTY: an interrupted capture is overwritten
    SlotState.CLEAN: {SlotState.DIRTY},
    SlotState.UNCLAIMED: {SlotState.EMPTY},
}


@dataclass(frozen=True, order=True)
class Version:
    """(lineage, iteration), ordered. A recovery opens a new lineage."""

    lineage: int
    iteration: int

    def __str__(self) -> str:
        return f"{self.iteration} (lineage {self.lineage})"


@dataclass(frozen=True)
class Commit:
    """A version that became CLEAN. Seconds from the version point to the seal."""

    version: Version
    slot: int
    nbytes: int
    seconds: float


def marks_of(reported: Iterable[tuple[Version | None, Mark]]) -> dict[Version, Mark]:
    """Combine the marks of each version. A mark holds for the whole job, so one rank that reports it suffices; the
    highest one wins."""
    marks: dict[Version, Mark] = {}
    for version, mark in reported:
        if version is not None and mark:
            marks[version] = max(mark, marks.get(version, mark))
    return marks


def recovery_order(versions: Iterable[Version], marks: Mapping[Version, Mark]) -> list[Version]:
    """`versions` in the order in which a recovery tries them: newest first, or preferred ones first if any version is
    certified. Versions whose replicas are mismatched are left out."""
    newest_first = sorted((v for v in versions if marks.get(v) is not Mark.MISMATCHED), reverse=True)
    if Mark.CERTIFIED not in marks.values():
        return newest_first
    return sorted(newest_first, key=lambda version: not marks.get(version, Mark.NONE).preferred)


@dataclass(frozen=True)
class Slot:
    """A slot as its header describes it. `version` is None if it never held one or the version is unknown.

    `damaged`: it is DIRTY because its header does not match its digest, not because of an unfinished write.
    """

    index: int
    state: SlotState
    version: Version | None
    token: int = 0  # of the incarnation that wrote it
    pins: Pin = Pin(0)
    mark: Mark = Mark.NONE
    damaged: bool = False


def check_transition(before: SlotState, after: SlotState) -> None:
    """Raises SegmentError for a transition that is not in TRANSITIONS."""
    if after not in TRANSITIONS[before]:
        raise SegmentError(f"a slot cannot go from {before.name} to {after.name}")


def certified_slot(slots: Sequence[Slot], writing: Version | None = None) -> int | None:
    """The slot that must stay because its version is certified, while `writing` is captured (None: by a recovery).

    It holds the newest certified version that every rank is known to have marked. Ranks mark a version at the fence of
    the next iteration, so a rank that has finished the iteration after that knows that all have marked it. Until then
    the version is safe as one of the two newest, and the certified one before it, which another rank may still need,
    stays.
    """

    def settled(version: Version) -> bool:
        return writing is None or version.lineage < writing.lineage or version.iteration + 2 <= writing.iteration

    marked = [(slot.version, slot.index) for slot in slots if slot.mark is Mark.CERTIFIED and slot.version]
    return max(((version, index) for version, index in marked if settled(version)), default=(None, None))[1]


def choose(slots: Sequence[Slot], writing: Version | None = None) -> int:
    """Choose the slot to overwrite: one without a restorable version, else the oldest; never a pinned slot or the
    certified one. `writing` is the version being captured, None for a recovery. Returns its index.

    Raises SegmentError if no slot is free.
    """
    index = free_slot(slots, writing)
    if index is None:
        raise SegmentError(f"all {len(slots)} slots are pinned; expected {SLOTS} free for capture")
    return index


def free_slot(slots: Sequence[Slot], writing: Version | None = None) -> int | None:
    """`choose`, but None if no slot is free."""
    free = _unpinned(slots, writing)
    return min(free, key=_age).index if free else None


def _unpinned(slots: Sequence[Slot], writing: Version | None) -> list[Slot]:
    """The slots with memory that are not pinned, without the certified one."""
    staying = certified_slot(slots, writing)
    return [s for s in slots if s.state is not SlotState.UNCLAIMED and not s.pins and s.index != staying]


def _age(slot: Slot) -> tuple[bool, Version, int]:
    """Sorts first what is not restorable, then the oldest version."""
    restorable = slot.state is SlotState.CLEAN
    return (restorable, slot.version if restorable and slot.version else Version(0, 0), slot.index)


def committed_in(slots: Iterable[Slot]) -> Version | None:
    """The newest version here that is pinned as a committed one. All ranks have it."""
    return max((slot.version for slot in slots if slot.pins & Pin.NODE and slot.version), default=None)


def slot_to_reuse(slots: Sequence[Slot], writing: Version, spared: int, until_committed: bool) -> int | None:
    """Choose the slot that capture of `writing` overwrites while other slots can still be claimed: one without a
    restorable version, else one older than the newest version that all ranks are known to have. None if there is none:
    another slot is to be claimed.

    All ranks have the version of which this rank has `spared` - 1 newer ones. `until_committed`: versions older than
    the committed one are needed for nothing else either.
    """
    clean = sorted((s.version for s in slots if s.state is SlotState.CLEAN and s.version), reverse=True)
    known = clean[spared - 1 : spared]
    committed = committed_in(slots)
    if until_committed and committed is not None:
        known.append(committed)
    newest = max(known, default=Version(0, 0))
    free = [
        slot
        for slot in _unpinned(slots, writing)
        if slot.state is not SlotState.CLEAN or (slot.version is not None and slot.version < newest)
    ]
    return min(free, key=_age).index if free else None


def slot_to_claim(slots: Sequence[Slot]) -> int | None:
    """The first slot without memory; None if all have it."""
    return next((slot.index for slot in slots if slot.state is SlotState.UNCLAIMED), None)


def slot_given_up(slots: Sequence[Slot]) -> int | None:
    """The slot that a recovery overwrites although it is pinned, where it can get no other one: its version was being
    sent, and is not the one that the job resumes from. None if there is none."""
    return next((slot.index for slot in slots if slot.pins == Pin.SOURCE), None)


def choose_parity(slots: Sequence[Slot], version: Version) -> int | None:
    """Choose the parity slot for `version`, which is exchanged next: the one that holds it already, if what that holds
    is damaged, else one that does not hold the committed version's parity. None if there is none."""
    same = [slot.index for slot in slots if slot.version == version]
    if same:
        return same[0]
    return free_slot(slots)


def pinnable_slot(slots: Sequence[Slot], version: Version, free: int = SLOTS) -> int | None:
    """The slot of `version` if no capture that has already chosen its slot can overwrite it, else None. `free`: how
    many slots are never pinned.

    A capture spares the newest versions of its rank, one fewer than there are free slots, pinned ones and the newest
    certified one. The caller checks again after it sets the pin: as long as no newer version is marked certified, no
    capture that chose before the pin was visible can have chosen this slot. An older certified version is not safe: the
    next capture may overwrite it.
    """
    clean = sorted((s for s in slots if s.state is SlotState.CLEAN and s.version), key=lambda s: s.version or version)
    agreed = [slot for slot in clean if slot.mark is Mark.CERTIFIED]
    for slot in clean:
        if slot.version == version:
            newest = clean[max(0, len(clean) - max(0, free - 1)) :]
            spared = slot in [*newest, *agreed[-1:]] or bool(slot.pins)
            return slot.index if spared else None
    return None


def captured_after(slots: Iterable[Slot], lineage: int, since: int) -> list[tuple[Slot, Version]]:
    """The restorable versions of `lineage` that were captured after iteration `since`, with their slots."""
    clean = [(slot, slot.version) for slot in slots if slot.state is SlotState.CLEAN and slot.version is not None]
    return [(slot, version) for slot, version in clean if version.lineage == lineage and version.iteration > since]


def voided_slots(slots: Sequence[Slot], base: Version | None) -> tuple[int, ...]:
    """The slots that a new lineage from `base` voids: those of newer versions (of all versions if None), and damaged
    ones, which were reported before."""
    return tuple(
        slot.index
        for slot in slots
        if slot.damaged
        or slot.state is SlotState.CLEAN
        and slot.version is not None
        and (base is None or slot.version > base)
    )
