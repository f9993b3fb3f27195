"""Random histories of ranks that live by the fence, are compared and killed, over the slots that the rules choose."""

import random
from dataclasses import dataclass, field, replace

from ft_plugins.snapshot.segment.slots import (
    SLOTS,
    Mark,
    Pin,
    Slot,
    SlotState,
    Version,
    check_transition,
    choose,
    marks_of,
    pinnable_slot,
    recovery_order,
    voided_slots,
)

CLEAN, DIRTY, EMPTY = SlotState.CLEAN, SlotState.DIRTY, SlotState.EMPTY
OTHERS = (Pin.NODE, Pin.SOURCE, Pin.STORAGE)


@dataclass
class Rank:
    """A rank's slots and where it stands: captures of `step` begin at its end, and are sealed and marked at the next
    fence."""

    slots: list[Slot]
    interval: int = 1  # iterations between two captures
    lineage: int = 0
    step: int = 0  # the last iteration whose version point was reached
    fenced: int = 0  # the last iteration whose fence was passed
    writing: int | None = None

    def versions(self):
        return {slot.version for slot in self.slots if slot.state is CLEAN and slot.version}

    def change(self, index, **values):
        before = self.slots[index]
        self.slots[index] = replace(before, **values)
        if "state" in values:
            check_transition(before.state, self.slots[index].state)

    def begin(self):
        """The version point: a capture starts."""
        self.step += 1
        if self.step % self.interval:
            return
        version, before = Version(self.lineage, self.step), sorted(self.versions())
        self.writing = choose(self.slots, version)
        chosen = self.slots[self.writing]
        assert len(self.slots) < SLOTS or chosen.version not in before[-2:], "one of the two newest is overwritten"
        assert not chosen.pins
        self.change(self.writing, state=DIRTY, version=version, mark=Mark.NONE)

    def seal(self):
        if self.writing is not None:
            self.change(self.writing, state=CLEAN)
            self.writing = None

    def fence(self, mark):
        """Before the update of iteration `step` + 1: what was captured last is sealed, and its verdict is here."""
        self.seal()
        self.mark(Version(self.lineage, self.step), mark)
        self.fenced = self.step + 1

    def mark(self, version, mark):
        for slot in list(self.slots):
            if slot.version == version and slot.state is CLEAN:
                self.change(slot.index, mark=mark)

    def pin(self, purpose, draw):
        """The SMP keeps another version for `purpose`, if it may, as `Segment.pin` does."""
        held = sorted(self.versions())
        found = pinnable_slot(self.slots, draw.choice(held)) if held else None
        if found is not None:
            for slot in list(self.slots):
                self.change(slot.index, pins=slot.pins | purpose if slot.index == found else slot.pins & ~purpose)


@dataclass
class Job:
    """Ranks of which any may take the next step that the others allow: an update needs everybody's gradients. `audit`
    is the interval between two verdicts, 0: none are given."""

    draw: random.Random
    ranks: list[Rank]
    audit: int = 0
    pinned: bool = False
    verdicts: dict[Version, Mark] = field(default_factory=dict)
    restored: list[tuple[Version | None, Mark]] = field(default_factory=list)

    def verdict(self, version):
        """The same for all ranks."""
        if version not in self.verdicts:
            audited = version.iteration % self.audit == 0
            agreed = Mark.CERTIFIED if self.draw.random() < 0.8 else Mark.MISMATCHED
            self.verdicts[version] = agreed if audited else Mark.UNAUDITED
        return self.verdicts[version]

    def common(self):
        return set.intersection(*(rank.versions() for rank in self.ranks))

    def marks(self):
        return marks_of((slot.version, slot.mark) for rank in self.ranks for slot in rank.slots)

    def newest(self, mark=None):
        marks = self.marks()
        return max((v for v in self.common() if mark is None or marks.get(v) is mark), default=None)

    def step(self):
        rank = self.draw.choice(self.ranks)
        if self.pinned and self.draw.random() < 0.2:
            rank.pin(self.draw.choice(OTHERS), self.draw)
        if rank.writing is not None and self.draw.random() < 0.3:
            rank.seal()  # the capture is done before the fence asks for it
        elif rank.fenced == rank.step:
            if not self.audit:
                rank.fence(Mark.NONE)
            elif all(other.step >= rank.step for other in self.ranks):  # a verdict takes the digests of all
                rank.fence(self.verdict(Version(rank.lineage, rank.step)) if rank.step else Mark.NONE)
        elif all(other.fenced >= rank.step for other in self.ranks):
            rank.begin()

    def recover(self):
        """All are killed wherever they stand; each opens a lineage in turn. With a chance they are killed again before
        all have, and the same version is restored."""
        for rank in self.ranks:
            rank.writing = None
            for slot in list(rank.slots):
                rank.change(slot.index, pins=Pin(0))
        marks = self.marks()
        base = next(iter(recovery_order(self.common(), marks)), None)
        mark = marks.get(base, Mark.NONE) if base else Mark.NONE
        self.restored.append((base, mark))
        opened = 0
        while opened < len(self.ranks):
            lineage, opened = max(rank.lineage for rank in self.ranks) + 1, len(self.ranks)
            if self.draw.random() < 0.3:
                opened = self.draw.randrange(opened)
            for rank in self.draw.sample(self.ranks, opened):
                if base is not None:
                    rank.mark(base, mark)
                for index in voided_slots(rank.slots, base):
                    rank.change(index, state=DIRTY, version=None, mark=Mark.NONE)
                rank.lineage = lineage
            again = next(iter(recovery_order(self.common(), self.marks())), None)
            assert again == base, "opening a lineage lost or gained a version"
        for rank in self.ranks:
            rank.step = rank.fenced = base.iteration if base else 0
            assert not [version for version in rank.versions() if base is None or version > base]


def life(seed, world, audit=0, pinned=False, slots=SLOTS, interval=1):
    """A job's history, and the versions that all ranks held and some lost before all had a newer one: the certified
    ones where replicas are compared, any of them elsewhere."""
    draw = random.Random(seed)
    ranks = [Rank([Slot(i, EMPTY, None) for i in range(slots)], interval) for _ in range(world)]
    job, kind = Job(draw, ranks, audit, pinned), Mark.CERTIFIED if audit else None
    best = None
    lost = []
    for _ in range(200):
        if draw.random() < (0.02 if audit else 0.04):
            job.recover()
            best = best if audit else None  # a restored version may be older than one that was being captured
        else:
            job.step()
        found = job.newest(kind)
        if best is not None and (found is None or found < best):
            lost.append(best)
        best = found
    return job, lost
