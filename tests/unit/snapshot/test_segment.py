"""Segments: claimed whole or not at all, private, and readable as a version only when every byte of it is right."""

import ctypes
import itertools
import os
import shutil
import stat
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ft_plugins.errors import BudgetError, CorruptHeaderError, CorruptSlotError, SegmentError
from ft_plugins.snapshot.schedule import ChosenSchedule, Intervals, newest
from ft_plugins.snapshot.segment import segment as segment_module
from ft_plugins.snapshot.segment.header import Header, OpenedLineage
from ft_plugins.snapshot.segment.paths import path_of, remove, segments_of
from ft_plugins.snapshot.segment.segment import Segment, create, marks_in
from ft_plugins.snapshot.segment.shape import PAGE, Shape
from ft_plugins.snapshot.segment.slot_header import STATES, SlotHeader
from ft_plugins.snapshot.segment.slots import SLOTS, Mark, Pin, SlotState, Version, choose, slots_for

SHAPE = Shape(nbytes=300, small_nbytes=100, buckets=3, layout=0xFEEDFACECAFEBEEF)
BUCKETS = [(0, 128), (128, 128), (256, 44)]
FINGERPRINT = {"layers": 2, "lr": 0.1, "order": ["tp", "dp"], "data": {"path": "/d", "size": 10}}
SMALL = b"small state"


def fill(segment, index, version, seed=1, token=5):
    """Write a version as capture does; its data."""
    data = np.random.default_rng(seed).integers(0, 256, SHAPE.nbytes, dtype=np.uint8)
    digests = [xxhash.xxh3_64_intdigest(data[start : start + size].tobytes()) for start, size in BUCKETS]
    segment.dirty(index, version, token)
    segment.write_small(index, SMALL)
    segment.data(index)[:] = data
    segment.digests(index)[:] = np.array(digests, dtype=np.uint64)
    segment.set_cursor(index, None)
    segment.seal(index, version, token, SMALL, np.array(digests, dtype=np.uint64))
    return data


@pytest.fixture
def segment(segment_path):
    create(segment_path, SHAPE, 0, FINGERPRINT)
    segment = Segment(segment_path)
    segment.ranges = BUCKETS
    return segment


def test_a_new_segment_is_private_resident_and_empty(segment_path):
    create(segment_path, SHAPE, 7, FINGERPRINT)
    found = segment_path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == SHAPE.total == found.st_blocks * 512

    segment = Segment(segment_path, populate=True)
    assert segment.shape == SHAPE and segment.rank == 7 and segment.fingerprint == FINGERPRINT
    assert segment.resident_bytes == SHAPE.total
    header = segment.header
    assert (header.token, header.opened.lineage, header.completed, header.owner) == (0, 0, 0, (0, 0))
    assert [slot.state for slot in segment.slots()] == [SlotState.EMPTY] * SLOTS
    assert not segment_path.with_name(segment_path.name + ".new").exists()


def test_a_core_of_its_process_leaves_a_mapped_segment_out(segment):
    entry = Path("/proc/self/smaps").read_text().split(str(segment.path), 1)[1]
    flags = next(line.split() for line in entry.splitlines() if line.startswith("VmFlags:"))
    assert "dd" in flags, "MADV_DONTDUMP"


def test_the_file_is_private_even_where_someone_left_a_half_made_one_open_to_all(segment_path):
    building = segment_path.with_name(segment_path.name + ".new")
    building.write_bytes(b"theirs")
    building.chmod(0o666)
    held = os.open(building, os.O_RDWR)
    try:
        create(segment_path, SHAPE, 0, FINGERPRINT)
        assert stat.S_IMODE(segment_path.stat().st_mode) == 0o600
        assert os.fstat(held).st_ino != segment_path.stat().st_ino
    finally:
        os.close(held)


def test_a_mount_that_is_too_small_is_an_error_that_names_it_and_the_bytes(segment_path, monkeypatch):
    real = os.statvfs(segment_path.parent)
    sizes = list(real)[:10]
    sizes[4] = 5  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(sizes))
    with pytest.raises(BudgetError) as caught:
        create(segment_path, SHAPE, 3, FINGERPRINT)
    sizes_of = [f"{nbytes / 2**20:.1f} MiB" for nbytes in (SHAPE.total, 5 * real.f_frsize)]
    for part in ("rank 3", "/dev/shm", "--shm-size", *sizes_of):
        assert part in str(caught.value)
    assert not list(segment_path.parent.glob(segment_path.name + "*"))


@pytest.fixture
def small_mount(tmp_path):
    """A tmpfs of eight pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(tmp_path), b"tmpfs", 0, f"size={8 * PAGE}".encode()) != 0:
        pytest.skip(f"no tmpfs can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield tmp_path
    assert libc.umount(bytes(tmp_path)) == 0


def test_a_real_mount_that_is_too_small_leaves_nothing_behind(small_mount):
    said = f"{SHAPE.total / 2**20:.1f} MiB of host memory, but {small_mount} has only 0.0 MiB free, of 0.0"
    with pytest.raises(BudgetError, match=said):
        create(small_mount / "ftp-j-n-r0", SHAPE, 0, FINGERPRINT)
    assert list(small_mount.iterdir()) == []


def test_memory_that_goes_to_someone_else_meanwhile_is_the_same_error(small_mount, monkeypatch):
    """Given that the figure of free bytes was right a moment ago; the kernel refuses the pages."""
    free = os.statvfs("/dev/shm")
    monkeypatch.setattr(os, "statvfs", lambda path: free)
    with pytest.raises(BudgetError, match=rf"{small_mount} could not give \d+ bytes: No space left"):
        create(small_mount / "ftp-j-n-r0", SHAPE, 0, FINGERPRINT)
    assert list(small_mount.iterdir()) == []


def test_a_fingerprint_that_does_not_fit_leaves_nothing_behind(segment_path):
    with pytest.raises(SegmentError, match="fingerprint has 5\\d\\d\\d bytes"):
        create(segment_path, SHAPE, 0, {"text": "x" * 5000})
    assert not list(segment_path.parent.glob(segment_path.name + "*"))


def test_what_one_process_writes_another_reads(segment):
    data = fill(segment, 1, Version(2, 9))
    segment.header.token, segment.header.completed, segment.header.owner = 4, 9, (123, 456)
    child = os.fork()
    if child == 0:
        other = Segment(segment.path, populate=True)
        right = (
            (other.header.token, other.header.completed, other.header.owner) == (4, 9, (123, 456))
            and other.slot(1).version == Version(2, 9)
            and other.slot(1).state is SlotState.CLEAN
            and other.small(1) == SMALL
            and bool((other.data(1) == data).all())
        )
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0


class Stores:
    """The words of a slot's header; after every store `observe` looks at shared memory as it stands then."""

    def __init__(self, words, observe):
        self._words, self._observe = words, observe

    def __getitem__(self, key):
        return self._words[key]

    def __setitem__(self, key, value):
        self._words[key] = value
        self._observe()


class StoredByWord:
    """One copy of a record, which is stored word by word; `observe` looks after each."""

    def __init__(self, words, observe):
        self.words, self._observe = words, observe

    def copy(self):
        return self.words.copy()

    def __setitem__(self, key, value):
        places = range(len(self.words))[key]
        for at, word in zip([places] if isinstance(places, int) else places, np.atleast_1d(value), strict=True):
            self.words[at] = word
            self._observe()


def test_after_every_store_a_reader_sees_the_old_version_none_or_the_new_one_whole(segment):
    """A writer may die at any instruction. Given version 1 in the slot, when version 2 overwrites it."""
    old = fill(segment, 0, Version(1, 1), seed=1)
    reader = Segment(segment.path)
    seen = []
    states = []

    def observe():
        states.append(STATES[int(reader._slots[0]._words[0])])
        slot = reader.slot(0)
        if slot.state is not SlotState.CLEAN:
            seen.append(None)
            return
        assert slot.version is not None
        seen.append(slot.version.iteration)
        reader.verify(0)
        expected = old if slot.version == Version(1, 1) else new
        assert (reader.data(0) == expected).all() and reader.small(0) == SMALL

    new = np.random.default_rng(2).integers(0, 256, SHAPE.nbytes, dtype=np.uint8)
    segment._slots[0]._words = Stores(segment._slots[0]._words, observe)
    fill(segment, 0, Version(1, 2), seed=2)
    assert seen[-1] == 2 and set(seen[:-1]) <= {None, 1}
    assert seen.count(2) == 1, "the last store, and only the last, makes the new version readable"
    assert set(states[:-1]) == {SlotState.DIRTY} and states[-1] == SlotState.CLEAN, (
        "the state goes first, and comes last"
    )


def restorable(segment, index):
    if segment.slot(index).state is not SlotState.CLEAN:
        return False
    try:
        segment.verify(index)
    except CorruptSlotError:
        return False
    return True


def test_a_flip_of_any_byte_of_a_version_makes_it_unrestorable(segment):
    fill(segment, 1, Version(3, 14))
    assert restorable(segment, 1)
    start = SHAPE.slots_start + SHAPE.slot_room
    small = start + PAGE + SHAPE.table_room
    areas = {
        "state, lineage, iteration, token, small size": range(start, start + 5 * 8),
        "seal": range(start + 5 * 8, start + 6 * 8),
        "digests": range(start + PAGE, start + PAGE + 8 * SHAPE.buckets),
        "small state": range(small, small + len(SMALL)),
        "data": range(small + SHAPE.small_room, small + SHAPE.small_room + SHAPE.nbytes),
    }
    for area, places in areas.items():
        for at in places:
            for mask in (0x01, 0x80, 0xFF):
                segment.bytes[at] ^= mask
                assert not restorable(segment, 1), (
                    f"{area}: byte {at - places.start} flipped by {mask:#x} went unnoticed"
                )
                segment.bytes[at] ^= mask
    assert restorable(segment, 1)


def test_a_mismatch_names_rank_bucket_slot_and_version(segment):
    fill(segment, 2, Version(3, 14))
    segment.data(2)[130] ^= 1
    with pytest.raises(CorruptSlotError, match=r"rank 0: bucket 1 of slot 2 \(14 \(lineage 3\)\)"):
        segment.verify(2)


def test_a_flip_in_the_constants_of_the_header_loses_the_segment_and_nothing_else_is_made_of_it(segment):
    """They decide whether the segment is this job's, whose it is and where its parts lie."""
    length = int.from_bytes(segment.bytes[1024:1032].tobytes(), "little")
    for at in [*range(11 * 8), *range(1024, 1032 + length)]:
        for mask in (0x01, 0x10, 0xFF):
            segment.bytes[at] ^= mask
            with pytest.raises(CorruptHeaderError, match=f"{segment.path}: its header does not match its digest"):
                Segment(segment.path)
            with pytest.raises(CorruptHeaderError):
                segment.check()
            assert (segment.shape, segment.rank, segment.fingerprint) == (SHAPE, 0, FINGERPRINT), "as it was mapped"
            segment.bytes[at] ^= mask
    segment.check()
    assert Segment(segment.path).fingerprint == FINGERPRINT


def test_a_flip_of_any_byte_of_a_record_of_the_header_changes_nothing(segment):
    """Each lies there twice. Given both copies damaged, neither is believed, and that is said."""
    segment.header.token, segment.header.owner, segment.header.attached = 7, (123, 456), True
    segment.open_lineage(5, None, ())
    segment.header.completed = 3
    before = segment.bytes.copy()

    def said():
        header = segment.header
        return header.token, header.owner, header.attached, header.opened

    known = said()
    records = range(17 * 8, (17 + 26) * 8)
    for at in records:
        segment.bytes[at] ^= 0x02
        assert said() == known and segment.damaged == ()
        segment.bytes[at] = before[at]
    segment.bytes[records.start : records.stop] ^= 0x02
    assert said() == (0, (0, 0), False, OpenedLineage()) and segment.damaged == ("owner", "lineage")
    segment.header.token = 8
    assert (segment.header.token, segment.damaged) == (8, ("lineage",)), "one that is written again is believed again"
    segment.bytes[:] = before
    for at in range(13 * 8, 14 * 8):
        segment.bytes[at] ^= 0x80
        assert segment.header.completed == 0 and segment.damaged == ("completed iteration",)
        segment.bytes[at] = before[at]
    for at in [*range(14 * 8, 15 * 8), *range(PAGE, PAGE + 16 * SHAPE.buckets)]:
        segment.bytes[at] ^= 0x40
        assert segment.damaged == ("bucket ranges",)
        with pytest.raises(CorruptHeaderError, match="bucket ranges"):
            segment.verify(0)
        segment.bytes[at] = before[at]
    assert segment.damaged == () and segment.ranges == BUCKETS


def test_the_intervals_that_a_job_chose_are_read_as_they_were_written_or_not_at_all(segment):
    header, reader = segment.header, Segment(segment.path).header
    assert (reader.chosen, reader.exchanged_ms, reader.stored_ms) == (None, 0, 0)
    assert newest([reader.chosen]) is None and segment.damaged == ()
    one = ChosenSchedule(2**31, Intervals(7, 0), Intervals(1, 100_000), 2**31, 3)
    for chosen in (one, replace(one, since=9), replace(one, restarts=4, since=1)):
        header.chosen = chosen
        assert reader.chosen == chosen
    other = Header(np.zeros(PAGE // 8, dtype=np.uint64))
    other.chosen = one
    for both in ((reader, other), (other, reader)):
        assert newest(one.chosen for one in both) == reader.chosen, "of the last restart"
    header.exchanged_ms, header.stored_ms = 0, 2**40
    assert (reader.exchanged_ms, reader.stored_ms) == (1, 2**32 - 1), "known, and within a word"
    before = segment.bytes.copy()
    records = range((17 + 26) * 8, (17 + 26 + 12) * 8)
    for at in records:
        segment.bytes[at] ^= 0x02
        assert reader.chosen == replace(one, restarts=4, since=1), "it is there twice"
        segment.bytes[at] = before[at]
    segment.bytes[records.start : records.stop] ^= 0x02
    assert reader.chosen is None and segment.damaged == ()
    header.chosen = None
    assert reader.chosen is None
    segment.bytes[57 * 8] ^= 0x02
    assert reader.exchanged_ms == 0 and reader.stored_ms == 2**32 - 1


def test_after_every_store_of_a_record_a_reader_sees_the_old_values_or_the_new_ones(segment):
    """A writer may die at any instruction, and write again."""
    reader = Segment(segment.path)
    for lineage in (4, 5, 6):
        segment.header.token = 10 * lineage
        old = (reader.header.opened.lineage, reader.header.opened.token)
        seen = []
        record = segment.header._opened

        def observe(seen=seen):
            seen.append((reader.header.opened.lineage, reader.header.opened.token))

        for place, copy in enumerate(record._copies):
            record._copies[place] = StoredByWord(copy, observe)
        segment.open_lineage(lineage, Version(3, 1), ())
        record._copies[:] = [copy.words for copy in record._copies]
        assert len(seen) > 10 and set(seen) == {old, (lineage, 10 * lineage)} and seen[-1] == (lineage, 10 * lineage)
        assert seen == sorted(seen), "once new, it is never old again"


USED = [SlotState.EMPTY, SlotState.DIRTY, SlotState.CLEAN]


def reach(segment, index, state):
    """Bring a slot into `state`."""
    if state is not SlotState.EMPTY:
        fill(segment, index, Version(3, 14))
    if state is SlotState.DIRTY:
        segment.dirty(index, Version(3, 15), 5)


@pytest.mark.parametrize("state", USED)
def test_a_flip_in_the_header_of_a_slot_is_damage_and_what_a_writer_left_is_not(segment, state):
    reach(segment, 0, state)
    assert segment.slot(0).state is state and not segment.slot(0).damaged
    start = SHAPE.slots_start
    for at in range(start, start + 6 * 8):
        for bit in range(8):
            segment.bytes[at] ^= 1 << bit
            slot = segment.slot(0)
            assert slot.state is SlotState.DIRTY and slot.version in (None, segment.slot(0).version)
            if state is not SlotState.DIRTY or at < start + 8:
                assert slot.damaged and slot.version is None
            segment.bytes[at] ^= 1 << bit
    assert segment.slot(0).state is state


@pytest.mark.parametrize("state", USED)
def test_a_slot_whose_header_page_is_all_zeros_is_damaged(segment, state):
    """A page that was lost reads as zeros: that is never taken for a slot that was not used yet."""
    reach(segment, 1, state)
    start = SHAPE.slots_start + SHAPE.slot_room
    segment.bytes[start : start + PAGE] = 0
    slot = segment.slot(1)
    assert (slot.state, slot.version, slot.damaged) == (SlotState.DIRTY, None, True)
    fill(segment, 1, Version(3, 16))
    assert restorable(segment, 1)


def test_a_slot_whose_memory_was_given_back_is_not_damaged(segment, dies_at):
    """Nor at any line of giving it back, nor when it has its memory again."""
    fill(segment, 0, Version(1, 1))
    fill(segment, 1, Version(1, 2))
    assert segment.pin(Version(1, 2), Pin.STORAGE) == 1
    before = segment.bytes.copy()
    deaths = 0
    for at in itertools.count():
        segment.bytes[:] = before
        died = dies_at(at, lambda: segment.release([1, 2]))
        assert not any(slot.damaged for slot in segment.slots()) and restorable(segment, 0)
        assert segment.slot(1).state is not SlotState.CLEAN or restorable(segment, 1)
        if not died:
            break
        deaths += 1
    assert deaths > 10
    allocated = segment.path.stat().st_blocks * 512
    assert allocated == SHAPE.total - 2 * (SHAPE.slot_room - PAGE), "all but the headers"
    again = Segment(segment.path)
    again.claim()
    assert segment.path.stat().st_blocks * 512 == SHAPE.total
    assert not any(slot.damaged or slot.pins for slot in again.slots())
    fill(again, 1, Version(1, 3))
    assert restorable(again, 1)


def test_a_seal_over_other_values_than_those_in_memory_is_no_seal(segment):
    """What a superseded writer puts into the slot while it is being sealed does not become part of the version."""
    digests = np.array([1, 2, 3], dtype=np.uint64)
    for change in ("version", "digests", "small"):
        segment.dirty(0, Version(2, 2), 5)
        segment.write_small(0, SMALL)
        segment.digests(0)[:] = digests
        match change:
            case "version":
                segment.dirty(0, Version(1, 2), 4)
            case "digests":
                segment.digests(0)[1] = 99
            case "small":
                segment.write_small(0, b"other state")
        segment.seal(0, Version(2, 2), 5, SMALL, digests)
        assert segment.slot(0).state is SlotState.DIRTY, change


def test_small_state_that_outgrew_its_room_is_refused_with_both_sizes(segment):
    segment.dirty(0, Version(1, 1), 0)
    segment.write_small(0, b"x" * 100)
    assert segment.small(0) == b"x" * 100
    segment.write_small(0, b"y")
    assert segment.small(0) == b"y"
    with pytest.raises(SegmentError, match="grown to 101 bytes; 100 were claimed"):
        segment.write_small(0, b"x" * 101)
    assert segment.small(0) == b"y"


def test_a_new_lineage_voids_then_says_so(segment):
    for index, iteration in enumerate((4, 5, 6)):
        fill(segment, index, Version(1, iteration), seed=iteration)
    segment.header.completed = 6
    for _ in range(2):  # a second time changes nothing
        segment.open_lineage(2, Version(1, 5), [2])
        assert [slot.state for slot in segment.slots()] == [SlotState.CLEAN, SlotState.CLEAN, SlotState.DIRTY]
        assert (segment.header.opened.lineage, segment.header.completed) == (2, 5)
    segment.open_lineage(3, None, [0, 1])
    assert not any(restorable(segment, index) for index in range(SLOTS))
    assert (segment.header.opened.lineage, segment.header.completed) == (3, 0)


def test_the_cursor_tells_the_bucket_being_written(segment):
    segment.set_cursor(1, 0)
    assert segment.cursor(1) == 0
    segment.set_cursor(1, 2)
    assert segment.cursor(1) == 2
    segment.set_cursor(1, None)
    assert segment.cursor(1) is None


def test_closing_leaves_the_file_and_whatever_view_is_still_held(segment):
    data = fill(segment, 0, Version(1, 1))
    view = segment.data(0)
    segment.close()
    assert (view == data).all()
    assert (Segment(segment.path).data(0) == data).all()


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "magic", "truncated", "longer", "link", "directory"])
def test_what_is_no_segment_is_refused_by_path(segment_path, tmp_path, damage):
    create(segment_path, SHAPE, 0, FINGERPRINT)
    match damage:
        case "missing":
            segment_path.unlink()
        case "empty":
            os.truncate(segment_path, 0)
        case "short":
            os.truncate(segment_path, PAGE - 1)
        case "magic":
            with open(segment_path, "r+b") as file:
                file.write(b"FTPSEG00")
        case "truncated":
            os.truncate(segment_path, SHAPE.total - PAGE)
        case "longer":
            os.truncate(segment_path, SHAPE.total + PAGE)
        case "link":
            shutil.move(segment_path, tmp_path / "elsewhere")
            segment_path.symlink_to(tmp_path / "elsewhere")
        case "directory":
            segment_path.unlink()
            segment_path.mkdir()
    try:
        with pytest.raises(SegmentError, match=str(segment_path)):
            Segment(segment_path)
    finally:
        if damage == "directory":
            segment_path.rmdir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_segment_of_another_user_is_refused(segment_path):
    """Anyone may create files in /dev/shm under names that he can guess."""
    create(segment_path, SHAPE, 0, FINGERPRINT)
    os.chown(segment_path, 65534, 65534)
    with pytest.raises(SegmentError, match=f"{segment_path} belongs to user 65534; expected 0: remove it"):
        Segment(segment_path)


def test_segments_are_found_by_job_and_node_and_ordered_by_rank(job):
    names = ["n", "n-r1", "n2"]
    for name in names:
        for rank in (10, 9, 0):
            create(path_of(job, name, rank), SHAPE, rank, {})
    path_of(job, "n", 3).with_name(f"{path_of(job, 'n', 3).name}.new").touch()
    try:
        for name in names:
            assert segments_of(job, name) == [path_of(job, name, rank) for rank in (0, 9, 10)]
        assert remove(job, "n") == 4
        assert segments_of(job, "n") == []
        assert len(segments_of(job, "n-r1")) == len(segments_of(job, "n2")) == 3, "another node's segments stay"
    finally:
        for name in names:
            remove(job, name)
    assert remove(job, "n") == 0


def test_a_shape_of_nothing_is_a_segment_all_the_same(segment_path):
    """A rank may have an empty share."""
    create(segment_path, Shape(0, 10, 0, 0), 0, {})
    segment = Segment(segment_path)
    segment.dirty(0, Version(1, 1), 1)
    segment.write_small(0, b"s")
    segment.seal(0, Version(1, 1), 1, b"s", np.zeros(0, dtype=np.uint64))
    assert segment.slot(0).state is SlotState.CLEAN
    segment.verify(0)


def test_room_is_counted_in_whole_pages():
    shape = Shape(nbytes=PAGE + 1, small_nbytes=1, buckets=513, layout=0)
    assert (shape.table_room, shape.small_room, shape.slot_room) == (2 * PAGE, PAGE, PAGE + 2 * PAGE + PAGE + 2 * PAGE)
    assert shape.ranges_room == 3 * PAGE
    assert shape.total == shape.slots_start + SLOTS * shape.slot_room


def test_a_pin_keeps_a_slot_until_it_is_taken_back_and_ends_with_its_lineage(segment_path):
    shape = replace(SHAPE, slots=slots_for(Pin.NODE))
    create(segment_path, shape, 3, {})
    segment = Segment(segment_path)
    assert segment.shape == shape and len(segment.slots()) == 4
    for iteration in (1, 2, 3):
        index = choose(segment.slots())
        segment.dirty(index, Version(1, iteration), 1)
        segment.seal(index, Version(1, iteration), 1, b"", segment.digests(index))
    assert segment.pin(Version(1, 1), Pin.NODE) is None, "the oldest of three may be overwritten at any moment"
    index = segment.pin(Version(1, 2), Pin.NODE)
    assert index is not None and segment.slot(index).pins == Pin.NODE
    assert segment.slot(index).state is SlotState.CLEAN, "the seal does not cover pins"
    segment.unpin(index, Pin.NODE)
    assert not segment.slot(index).pins
    index = segment.pin(Version(1, 3), Pin.NODE)
    assert index is not None
    segment.open_lineage(2, Version(1, 2), (index,))
    assert segment.slot(index).state is SlotState.DIRTY and not segment.slot(index).pins


@pytest.mark.parametrize(
    ("before", "ours", "theirs", "after"),
    [
        (Pin(0), ("pin", Pin.STORAGE), ("pin", Pin.NODE), Pin.STORAGE | Pin.NODE),
        (Pin.STORAGE, ("unpin", Pin.STORAGE), ("pin", Pin.SOURCE), Pin.SOURCE),
        (Pin.SOURCE, ("pin", Pin.STORAGE), ("unpin", Pin.SOURCE), Pin.STORAGE),
    ],
)
def test_what_one_thread_stores_of_pins_is_not_undone_by_another(
    segment_path, monkeypatch, before, ours, theirs, after
):
    """Each has a mapping of its own; the other one comes when the first one has read the pins, and is about to store
    them."""
    create(segment_path, replace(SHAPE, slots=slots_for(Pin.NODE, Pin.SOURCE, Pin.STORAGE)), 0, {})
    first, second = Segment(segment_path), Segment(segment_path)
    first.ranges = BUCKETS
    fill(first, 0, Version(1, 1))
    first._slots[0].pins = before
    come = threading.Event()  # the other one has done it, or waits until the first one has

    def change(segment, name, purpose):
        getattr(segment, name)(Version(1, 1) if name == "pin" else 0, purpose)

    def other():
        change(second, *theirs)
        come.set()

    thread, pins, lock = threading.Thread(target=other), SlotHeader.pins, threading.RLock()

    class Lock:
        def __enter__(self):
            if threading.current_thread() is thread:
                come.set()
            lock.acquire()

        def __exit__(self, *error):
            lock.release()

    def store(header, value):
        if threading.current_thread() is not thread and not come.is_set():
            thread.start()
            assert come.wait(60.0)
        pins.__set__(header, value)

    monkeypatch.setattr(segment_module, "_PINNING", Lock(), raising=False)
    monkeypatch.setattr(SlotHeader, "pins", property(pins.fget, store))
    change(first, *ours)
    thread.join()
    assert first.pins(0) == after


@pytest.mark.parametrize("mark", list(Mark))
def test_what_is_said_of_a_version_stays_with_it_and_is_said_of_no_other(segment, mark):
    fill(segment, 1, Version(1, 3))
    assert segment.slot(1).mark is Mark.NONE
    assert segment.mark(Version(1, 3), mark) and not segment.mark(Version(1, 4), mark)
    assert segment.slot(1).mark is mark and segment.slot(1).state is SlotState.CLEAN
    assert marks_in([segment]) == ([[1, 3, int(mark)]] if mark else [])
    again = Segment(segment.path)
    assert again.slot(1).mark is mark, "whoever adopts the segment knows it"
    again.close()
    segment.dirty(1, Version(1, 4), 5)
    assert segment.slot(1).mark is Mark.NONE
    fill(segment, 1, Version(1, 4))
    assert segment.slot(1).mark is Mark.NONE and not segment.mark(Version(1, 3), mark)


def test_a_flipped_bit_of_a_mark_says_nothing(segment):
    fill(segment, 0, Version(1, 3))
    before = segment.bytes.copy()
    segment.mark(Version(1, 3), Mark.UNAUDITED)
    changed = np.flatnonzero(segment.bytes != before)
    assert changed.max() - changed.min() < 8, "one word: it is said or not"
    for bit in range(8 * 8):
        byte = changed.min() // 8 * 8 + bit // 8
        segment.bytes[byte] ^= 1 << bit % 8
        assert segment.slot(0).mark is Mark.NONE
        segment.bytes[byte] ^= 1 << bit % 8
    assert segment.slot(0).mark is Mark.UNAUDITED
