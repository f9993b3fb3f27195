"""The world's shared memory: segments and parity stores of plain values, with the product's decisions above them.

`WorldSegment` is the product's `Segment` over words that are attributes; what a slot holds is one value, its content,
in place of bytes. What the words do in real memory (seals, digests, mirrored records) is shown elsewhere.

Invariant: between two words of one thread another thread may run (`Words.pins`, `WorldSegment.slots`), as between two
stores in memory.
"""

from types import SimpleNamespace

from ft_plugins.errors import BudgetError, CorruptSlotError, ResumeError, SegmentError
from ft_plugins.snapshot.segment.claims import slot_to_rebuild
from ft_plugins.snapshot.segment.header import OpenedLineage
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Mark, Pin, Slot, SlotState, check_transition, choose

from . import hub as hubs

VERSIONS = 2  # in a parity store


def _turn():
    """A number below 1 if another thread has its turn now, else None."""
    active = hubs.ACTIVE
    if active is None or not active.preempted or active.current is None:
        return None
    return active.random.random() if active.random.random() < active.preempted else None


def _give_way():
    hubs.ACTIVE.current.sleep(hubs.ACTIVE.random.random() ** 3 * 0.02)


class Header:
    """As `snapshot.segment.header.Header`."""

    damaged = ()

    def __init__(self, lost=False):
        self.token, self.attached, self.owner = 0, False, (0, 0)
        self.opened = OpenedLineage(lost=lost)
        self.completed = self.held = self.held_at = self.ending = self.exchanged_ms = self.stored_ms = 0
        self.proving, self.varies, self.ended = 0, False, 0
        self.chosen = self.agreed = self.doubted = self.awaited = None
        self.short = False

    def await_version(self, version):
        self.awaited = version

    def is_awaited(self, version):
        return self.awaited == version

    def doubt(self, first, last):
        known = self.doubted or (first, last)
        self.doubted = min(first, known[0]), max(last, known[1])


class Words:
    """A slot's header, and its content."""

    seen = None  # as a `Slot`, until something changes

    def __init__(self, segment, state):
        self.__dict__["segment"] = segment
        self.state, self.version, self.token, self.marked = state, None, 0, Mark.NONE
        self.stored_pins, self.content, self.flipped = Pin(0), None, False
        self.cursor, self.small_bytes = None, 0

    def __setattr__(self, name, value):
        self.__dict__["stored_pins" if name == "pins" else name] = value
        self.__dict__["seen"] = self.segment.seen = None

    @property
    def unclaimed(self):
        return self.state is SlotState.UNCLAIMED

    @property
    def pins(self):
        found = self.stored_pins
        if _turn() is not None:
            _give_way()
        return found

    def claim(self):
        self.state = SlotState.EMPTY

    def dirty(self, before, version, token):
        check_transition(before, SlotState.DIRTY)
        self.state, self.version, self.token, self.marked = SlotState.DIRTY, version, token, Mark.NONE
        self.content, self.flipped = None, False

    def seal(self, version, token, small, digests):
        check_transition(self.state, SlotState.CLEAN)
        self.state, self.version, self.token, self.content = SlotState.CLEAN, version, token, small

    def mark(self, mark):
        self.marked = mark


class WorldSegment(Segment):
    """A segment in the memory of a machine, at `path`."""

    damaged = ()
    ranges = ((0, 64),)
    fingerprint = {}
    ledger = SimpleNamespace(condemned=False)  # loops go on as they were
    seen = None  # all slots, until something changes

    def __init__(self, path, shape, rank, world_size=0, lost=False):
        self.path, self.shape, self.rank, self.world_size = path, shape, rank, world_size
        self.header = Header(lost)
        self._slots = [
            Words(self, SlotState.EMPTY if at < shape.first_slots or at >= shape.slots else SlotState.UNCLAIMED)
            for at in range(shape.parity_indices.stop)
        ]
        path.machine.memory[str(path)] = self

    def slot(self, index):
        words = self._slots[index]
        if words.seen is None:
            words.__dict__["seen"] = Slot(
                index, words.state, words.version, words.token, words.stored_pins, words.marked
            )
        return words.seen

    @property
    def words(self):
        """Of its slots, read at once."""
        return self._slots[: self.shape.slots]

    def slots(self):
        between = _turn()  # of other threads, after so large a share of the slots
        if between is not None:
            indices = range(self.shape.slots)
            middle = round(between * len(indices))
            first = tuple(map(self.slot, indices[:middle]))
            _give_way()
            return first + tuple(map(self.slot, indices[middle:]))
        if self.seen is None:
            self.seen = super().slots()
        return self.seen

    def close(self):
        pass

    check = close

    @property
    def linked(self):
        return self.path.machine.memory.get(str(self.path)) is self

    @property
    def resident_bytes(self):
        return self.shape.total

    def digests(self, index):
        return None

    def small(self, index):
        return self._slots[index].content

    def content(self, version):
        """What the slot of `version` holds. Raises CorruptSlotError."""
        for slot in self.slots():
            if slot.version == version and slot.state is SlotState.CLEAN:
                self.verify(slot.index)
                return self._slots[slot.index].content
        raise CorruptSlotError(f"rank {self.rank}: no CLEAN slot holds version {version}")

    def write_small(self, index, encoded):
        pass

    def verify(self, index, stopped=lambda: False):
        if self._slots[index].flipped:
            raise CorruptSlotError(f"rank {self.rank}: a bucket of slot {index} does not match its digest")
        return True

    def claim_slot(self, index, permitted=lambda: None):
        permitted()
        if self.path.machine.short:
            hubs.ACTIVE.world.broken("beyond the budget", f"rank {self.rank} claims slot {index}, and memory is short")
        self._slots[index].claim()

    def _discard_pages(self, index):
        pass


def check_room(nbytes, claim, place):
    """As `snapshot.segment.paths.check_room`."""
    if place.machine.short:
        raise BudgetError(f"{claim}: no memory for another slot")


def create(path, shape, rank, fingerprint, world_size, lost):
    """As `snapshot.segment.segment.create`."""
    hubs.ACTIVE.current.sleep(0.02)
    WorldSegment(path, shape, rank, world_size, lost)


class Store:
    """As `smp.exchange.parity_store.ParityStore`: what the node at `position` keeps of the others' versions."""

    damage = ""

    def __init__(self, path, plan, position, shape):
        self._path, self._position, self._key = path, position, (plan.ranks, shape.layout)
        found = path.machine.memory.get(str(path))
        if not isinstance(found, WorldSegment) or found.shape != shape or found.rank != position:
            found = WorldSegment(path, shape, position)
        self.segment = found
        self.sources = sources_of(plan, position)
        self._version, self._index, self._parts, self._paused = None, -1, {}, False

    nbytes = resident_bytes = 64

    @property
    def linked(self):
        return self.segment.linked

    def write_again(self):
        self._path.machine.memory[str(self._path)] = self.segment

    def begin(self, version):
        if self._version == version or version in self.versions():
            return
        self._version, self._parts = version, {}
        self._index = choose(self.segment.slots())
        kept = [s.version for s in self.segment.slots() if s.state is SlotState.CLEAN and s.index != self._index]
        hubs.ACTIVE.world.stores(self._path.machine.name, version, kept)
        self.segment.dirty(self._index, version, 0)
        self._seal()

    @property
    def receiving(self):
        return self._version

    def take(self, version, source, content):
        """Whether the content of the ranks at position `source` was taken."""
        if version in self.versions():
            return True
        if version != self._version:
            return False
        self._parts[source] = content
        self._seal()
        return True

    def _seal(self):
        if self._parts.keys() == self.sources:
            whole = {rank: one for part in self._parts.values() for rank, one in part.items()}
            self.segment.seal(self._index, self._version, 0, whole, None)
            self._version = None

    def replicas_agree(self, version):
        pass

    def versions(self):
        return tuple(s.version for s in self.segment.slots() if s.state is SlotState.CLEAN and s.version)

    def read(self, version):
        """The contents by rank. Raises SegmentError."""
        if version not in self.versions():
            raise SegmentError(f"parity of version {version} is not here; complete are {self.versions()}")
        return self.segment.content(version)

    def pin(self, version):
        for slot in self.segment.slots():
            if slot.state is SlotState.CLEAN and slot.version == version:
                self.segment.pin(version, Pin.NODE)
            else:
                self.segment.unpin(slot.index, Pin.NODE)

    def void_after(self, base):
        for slot in self.segment.slots():
            if slot.state is SlotState.CLEAN and slot.version and (base is None or slot.version > base):
                self.segment.unpin(slot.index, ~Pin(0))
                self.segment.dirty(slot.index, None, 0)

    def pause(self):
        self._version = None

    close = pause


def shape_of(plan, position, shapes, layout):
    """The shape of a store of this plan."""
    return Shape(1 + plan.parity_bytes(position), 64, 1, layout, VERSIONS)


def sources_of(plan, position):
    """The positions whose ranks' content the node at `position` keeps."""
    sent = {plan.sections[send.area.section].positions[send.node] for send in plan.sends_to(position)}
    return sent | {plan.position_of_rank[rank] for rank in plan.small_state_on(position)}


def targets_of(plan, position):
    """The positions to which the node at `position` sends."""
    sent = {send.area.position for send in plan.sends[position]}
    held = (plan.small_state_holders(rank) for rank in plan.ranks[position])
    return sorted(sent.union(*held))


def fetch(segment, version, token, reader):
    """As `smp.exchange.rebuild.fetch`."""
    return _fill(segment, version, token, lambda: reader.slot(segment.rank, version))


def decode(segment, version, token, plan, lost, readers):
    """As `smp.exchange.rebuild.decode`. What was encoded with other content than is there now is corrupt, as its digest
    shows."""

    def decoded():
        rank = segment.rank
        if plan.recovery_sections(rank, lost) is None:
            raise ResumeError(f"rank {rank}: more is lost than parity replaces")
        own = plan.position_of_rank[rank]
        needed = [at for section in plan.sections_of_rank[rank] for at in section.positions if at not in {own, *lost}]
        stored = {at: readers[at].parity(version) for at in dict.fromkeys(needed)}
        there = {r: readers[at].slot(r, version) for at in stored for r in plan.ranks[at]}
        found = None
        for parts in stored.values():
            if any(there.get(other, content) != content for other, content in parts.items()):
                raise CorruptSlotError(f"rank {rank}: version {version}, rebuilt, does not match its digest")
            found = parts.get(rank, found)
        if found is None:
            raise ResumeError(f"rank {rank}: no node holds version {version} of it")
        return found

    return _fill(segment, version, token, decoded)


def _fill(segment, version, token, content):
    index = slot_to_rebuild(segment)
    segment.dirty(index, version, token)
    hub = hubs.ACTIVE
    hub.world.happened("rebuild")
    hub.current.sleep(hub.random.uniform(0.005, 0.03))
    found = content()
    segment.seal(index, version, token, found, None)
    return 64
