"""Capture: what is sealed is the state at the version point, whatever training or a superseded writer does."""

import contextlib
import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ft_plugins.base import faults
from ft_plugins.errors import CorruptSlotError, FencedError, InventoryError, SegmentError, StateChangedError
from ft_plugins.model.inventory import Inventory, Item, IterationSpan, Role
from ft_plugins.snapshot.capture.capture import Capture
from ft_plugins.snapshot.capture.copiers import CudaCopier, HostCopier, flat_bytes
from ft_plugins.snapshot.capture.layout import plan_layout
from ft_plugins.snapshot.segment.claims import CaptureOwner
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Pin, SlotState, Version
from harness.late_device import LateDevice, LateEvent, LateStream

BUCKET = 256
SECONDS = 90  # bound of every wait
UPDATE = frozenset({IterationSpan.UPDATE})
CPU = torch.device("cpu")


def state(seed=0):
    """Tensors of many kinds: two buckets and more, dense in another order, without dimensions, empty, low precision."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "w": random(10, 20),
        "transposed": random(6, 8).t(),
        "channels_last": random(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "step": random(1).reshape(()),
        "empty": torch.empty(0, 4),
        "half": random(33).bfloat16(),
        "part": random(100)[20:50],
        "amax": random(3),
        "rng": torch.randint(0, 255, (70,), dtype=torch.uint8, generator=generator),
    }


def inventory(tensors):
    early = {"amax": UPDATE | {IterationSpan.FORWARD}, "rng": frozenset({IterationSpan.BETWEEN})}
    return Inventory.of(
        0,
        [
            Item(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.numel() * t.element_size(), Role.BUFFER,
                 (0,), None, early.get(name, UPDATE))
            for name, t in tensors.items()
        ],
    )  # fmt: skip


def contents(tensors):
    return {name: flat_bytes(name, tensor).numpy().tobytes() for name, tensor in tensors.items()}


class Gate(HostCopier):
    """The host's copier, which calls `hook` on the capture thread before or after each background bucket."""

    def __init__(self, before=lambda n: None, after=lambda n: None):
        self._before, self._after, self._done = before, after, 0

    def copy(self, destinations, sources):
        if threading.current_thread() is threading.main_thread():
            return super().copy(destinations, sources)
        self._before(self._done)
        super().copy(destinations, sources)
        self._after(self._done)
        self._done += 1


class Rig(CaptureOwner):
    """A segment with the capture of one rank."""

    def __init__(self, path):
        self.tensors = state()
        self.layout = plan_layout(inventory(self.tensors), (), BUCKET)
        self.begin(path)

    def begin(self, path):
        self.shape = Shape(self.layout.nbytes, 1000, len(self.layout.buckets), 1)
        create(path, self.shape, 0, {})
        self.segment = Segment(path)
        self.segment.ranges = [(bucket.offset, bucket.nbytes) for bucket in self.layout.buckets]
        self.segment.header.token = 1
        self.commits = []
        self.captures = []
        self.stopped = set()

    def capture(self, token=1, gate=None):
        made = Capture(self.segment, self.layout, lambda: self.tensors, token, self)
        if gate is not None:
            made._copiers[CPU] = gate
        self.captures.append(made)
        return made

    def sealed(self, commit):
        self.commits.append((commit, threading.current_thread().name))

    def held(self, index):
        """The items as slot `index` holds them, put together from the pieces."""
        found = {name: bytearray(tensor.numel() * tensor.element_size()) for name, tensor in self.tensors.items()}
        data = self.segment.data(index)
        for bucket in self.layout.buckets:
            for piece in bucket.pieces:
                end = piece.item_offset + piece.nbytes
                found[piece.item][piece.item_offset : end] = data[piece.offset : piece.offset + piece.nbytes].tobytes()
        return {name: bytes(raw) for name, raw in found.items()}

    def restorable(self):
        """The versions that recovery could take, and their slots."""
        found = {}
        for slot in self.segment.slots():
            if slot.state is SlotState.CLEAN and slot.version:
                try:
                    self.segment.verify(slot.index)
                except CorruptSlotError:
                    continue
                found[slot.version] = slot.index
        return found

    def train(self):
        """Change every element of every tensor."""
        for tensor in self.tensors.values():
            tensor.view(torch.uint8).bitwise_not_() if tensor.dtype is torch.uint8 else tensor.neg_().add_(1)


@pytest.fixture
def rig(segment_path):
    made = Rig(segment_path)
    yield made
    faults.arm("")
    for pid in made.stopped:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for capture in made.captures:
        capture.close()


def test_there_are_several_buckets_of_both_kinds(rig):
    """What the other tests rely on."""
    assert len(rig.layout.synchronous) == 1
    assert len(rig.layout.background) >= 6


def test_the_sealed_version_is_the_state_at_its_version_point_and_training_goes_on_right_after_the_fence(rig):
    capture = rig.capture()
    expected = {}
    for iteration in range(1, 8):
        expected[Version(1, iteration)] = contents(rig.tensors)
        capture.start(Version(1, iteration), f"small {iteration}".encode())
        capture.wait()
        rig.train()
    found = rig.restorable()
    assert sorted(found) == [Version(1, 5), Version(1, 6), Version(1, 7)]
    for version, index in found.items():
        assert rig.held(index) == expected[version]
        assert rig.segment.small(index) == f"small {version.iteration}".encode()
        assert rig.segment.slot(index).token == 1


def test_a_slot_is_claimed_once_if_a_second_update_begins_before_the_work_of_the_first_is_done(rig):
    """As with an interval of two, or where versions are taken at synchronisations alone."""
    rig.segment.path.unlink()
    create(rig.segment.path, replace(rig.shape, slots=5, first=2), 0, {})
    rig.segment = Segment(rig.segment.path)
    rig.segment.header.token = 1
    first_ends, claims, updates = threading.Event(), list[str](), list[int]()

    class Owner(CaptureOwner):
        def updated(self):
            updates.append(len(updates))
            if len(updates) == 1:
                assert_set(first_ends)

        def check_room(self, nbytes):
            claims.append(threading.current_thread().name)
            time.sleep(0.3)

    capture = Capture(rig.segment, rig.layout, lambda: rig.tensors, 1, Owner())
    rig.captures.append(capture)
    for iteration in (1, 2):
        capture.start(Version(1, iteration), b"")
        capture.wait()
    capture.run_after_update()
    while not updates:
        time.sleep(0.01)
    capture.run_after_update(Version(1, 3))
    first_ends.set()
    capture.start(Version(1, 3), b"")
    capture.wait()
    assert (claims, len(updates), rig.segment.claimed) == (["ftp-capture"], 2, (0, 1, 2))


def test_what_the_step_may_change_is_copied_before_start_returns(rig):
    released = threading.Event()
    capture = rig.capture(gate=Gate(before=lambda n: assert_set(released)))
    expected = contents(rig.tensors)
    capture.start(Version(1, 1), b"")
    rig.tensors["amax"].fill_(9)
    rig.tensors["rng"].fill_(9)
    released.set()
    capture.wait()
    assert rig.held(rig.restorable()[Version(1, 1)]) == expected


@pytest.mark.parametrize("suspect", [False, True], ids=["digest of the slot", "digest of the source"])
def test_kept_copies_are_captured_in_place_of_tensors_that_changed_since(rig, suspect):
    capture = rig.capture()
    if suspect:  # as after a writer that was stopped within the bucket
        capture._suspect = {(slot.index, 0) for slot in rig.segment.slots()}
    for iteration in (1, 2):  # then from the live tensors again
        expected = contents(rig.tensors)
        kept = {name: rig.tensors[name].clone() for name in ("amax", "rng")} if iteration == 1 else None
        if kept:
            rig.tensors["amax"].fill_(9)
            rig.tensors["rng"].fill_(9)
        capture.start(Version(1, iteration), b"", kept)
        capture.wait()
        assert rig.held(rig.restorable()[Version(1, iteration)]) == expected


def assert_set(event):
    assert event.wait(SECONDS), "nobody released the capture"


def test_the_fence_lets_nobody_through_before_the_seal(rig):
    reached, released, passed = threading.Event(), threading.Event(), threading.Event()

    def hold(bucket):
        if bucket == 3:
            reached.set()
            assert_set(released)

    capture = rig.capture(gate=Gate(before=hold))
    capture.start(Version(1, 1), b"")
    assert_set(reached)

    def fence():
        waited.append(capture.wait())
        passed.set()

    waited = []
    other = threading.Thread(target=fence)
    other.start()
    assert not passed.is_set() and rig.restorable() == {}
    released.set()
    assert_set(passed)
    other.join(SECONDS)
    assert list(rig.restorable()) == [Version(1, 1)] and waited[0] >= 0


def test_a_version_that_starts_while_the_last_one_runs_waits_for_it(rig):
    capture = rig.capture()
    capture.start(Version(1, 1), b"a")
    capture.start(Version(1, 2), b"b")
    capture.wait()
    assert sorted(rig.restorable()) == [Version(1, 1), Version(1, 2)]


def test_a_commit_tells_version_slot_and_bytes_on_the_capture_thread(rig):
    capture = rig.capture()
    capture.start(Version(4, 2), b"")
    capture.wait()
    ((commit, thread),) = rig.commits
    assert (commit.version, commit.slot, commit.nbytes) == (Version(4, 2), 0, rig.layout.nbytes)
    assert thread == "ftp-capture" and commit.seconds > 0


def test_a_tensor_that_was_moved_is_named_and_the_version_before_stays(rig):
    capture = rig.capture()
    capture.start(Version(1, 1), b"")
    capture.wait()
    rig.tensors["half"] = rig.tensors["half"].clone()  # as a framework does that replaces a tensor by another
    with pytest.raises(InventoryError, match="rank 0: item 'half' has moved"):
        capture.start(Version(1, 2), b"")
    assert list(rig.restorable()) == [Version(1, 1)]


def test_small_state_that_has_outgrown_its_room_fails_the_start_and_the_version_before_stays(rig):
    capture = rig.capture()
    capture.start(Version(1, 1), b"")
    capture.wait()
    with pytest.raises(SegmentError, match="grown to 1001 bytes"):
        capture.start(Version(1, 2), b"x" * 1001)
    capture.start(Version(1, 3), b"x" * 1000)
    capture.wait()
    assert sorted(rig.restorable()) == [Version(1, 1), Version(1, 3)]


def test_a_failure_behind_the_step_surfaces_at_the_fence_once_and_the_version_before_stays(rig):
    capture = rig.capture()
    capture.start(Version(1, 1), b"")
    capture.wait()
    number = len(rig.layout.buckets) - 1
    faults.arm(f"capture.bucket.begin@iteration=2,bucket={number}:raise")
    capture.start(Version(1, 2), b"")
    with pytest.raises(RuntimeError, match="capture.bucket.begin"):
        capture.wait()
    assert list(rig.restorable()) == [Version(1, 1)]
    capture.wait()
    capture.start(Version(1, 3), b"")
    capture.wait()
    assert sorted(rig.restorable()) == [Version(1, 1), Version(1, 3)]


def test_a_failure_that_no_fence_has_met_surfaces_at_the_next_start(rig):
    capture = rig.capture()
    faults.arm("capture.seal.before:raise")
    capture.start(Version(1, 1), b"")
    with pytest.raises(RuntimeError, match="capture.seal.before"):
        capture.start(Version(1, 2), b"")
    assert rig.restorable() == {}


def test_a_superseded_incarnation_cannot_start(rig):
    capture = rig.capture()
    rig.segment.header.token = 2
    before = rig.segment.bytes.tobytes()
    with pytest.raises(FencedError, match=r"rank 0: .*token 1.*superseded.*token 2"):
        capture.start(Version(1, 1), b"")
    assert rig.segment.bytes.tobytes() == before


def test_a_token_raised_in_mid_capture_stops_it_after_the_bucket_it_is_in(rig):
    """Given a slot full of a pattern, when the token is raised while background bucket 2 is being copied."""
    rig.segment.data(0)[:] = 0x5A
    capture = rig.capture(gate=Gate(before=lambda n: setattr(rig.segment.header, "token", 2) if n == 2 else None))
    capture.start(Version(1, 1), b"")
    with pytest.raises(FencedError, match="may not write"):
        capture.wait()
    written = rig.layout.background[2].offset + rig.layout.background[2].nbytes
    assert (rig.segment.data(0)[written:] == 0x5A).all()
    assert rig.segment.slot(0).state is SlotState.DIRTY
    assert rig.segment.cursor(0) in (len(rig.layout.synchronous) + 2, len(rig.layout.synchronous) + 3)


def test_a_token_raised_during_the_last_bucket_prevents_the_seal(rig):
    last = len(rig.layout.background) - 1
    capture = rig.capture(gate=Gate(after=lambda n: setattr(rig.segment.header, "token", 2) if n == last else None))
    capture.start(Version(1, 1), b"")
    with pytest.raises(FencedError):
        capture.wait()
    assert rig.restorable() == {}


LEFT = {
    "capture.begin": {2, 3, 4},  # not marked yet
    "capture.bucket.begin": {3, 4},
    "capture.bucket.end": {3, 4},
    "capture.seal.before": {3, 4},
    "capture.seal.after": {3, 4, 5},
}


@pytest.mark.parametrize("point", LEFT)
def test_a_writer_killed_at_any_point_leaves_whole_versions_only(rig, point):
    """Given versions 1 to 4, when the writer is killed during version 5, in each bucket where there are several."""
    conditions = [f",bucket={n}" for n in range(len(rig.layout.buckets))] if "bucket" in point else [""]
    for lineage, condition in enumerate(conditions, start=1):
        pid = os.fork()
        if pid == 0:
            try:
                faults.arm(f"{point}@iteration=5{condition}:kill")
                capture = rig.capture()
                for iteration in range(1, 6):
                    rig.tensors["w"].fill_(iteration)
                    capture.start(Version(lineage, iteration), str(iteration).encode())
                    capture.wait()
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        found = rig.restorable()
        assert set(found) == {Version(lineage, iteration) for iteration in LEFT[point]}, condition
        for version, index in found.items():
            raw = np.frombuffer(rig.held(index)["w"], dtype=np.float32)
            assert (raw == version.iteration).all() and rig.segment.small(index) == str(version.iteration).encode()


# ---- superseded writers that wake up ----


def stopped_writer(rig, place):
    """A process of incarnation 1 that was stopped at `place` while it captured version 3; its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            faults.arm(f"{place}:stop")
            capture = rig.capture()
            for iteration in (1, 2, 3):
                for tensor in rig.tensors.values():
                    tensor.fill_(iteration)
                capture.start(Version(1, iteration), f"stale {iteration}".encode())
                capture.wait()
        except FencedError:
            os._exit(7)
        finally:
            os._exit(1)
    rig.stopped.add(pid)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    return pid


def wake(rig, pid):
    """Let the stopped writer go on until it notices."""
    os.kill(pid, signal.SIGCONT)
    rig.stopped.remove(pid)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7, "it was fenced"


def check_new(rig, expected):
    """Every restorable version is one of incarnation 2, whole, or an untouched one of incarnation 1."""
    for version, index in rig.restorable().items():
        small = rig.segment.small(index)
        if version.lineage == 2:
            assert rig.held(index) == expected[version], f"{version} is torn"
            assert small == f"new {version.iteration}".encode()
        else:
            raw = np.frombuffer(rig.held(index)["w"], dtype=np.float32)
            assert (raw == version.iteration).all(), f"{version} is torn"
            assert small == f"stale {version.iteration}".encode()


@pytest.mark.parametrize("moment", ["before its digest", "after its digest", "after the seal"])
def test_a_late_write_into_the_bucket_it_was_in_is_never_restored(rig, moment):
    """Given a writer of incarnation 1 stopped in mid-bucket of slot 2, which nobody could kill; incarnation 2 captures
    into the same slot. When the old one wakes up in the middle of that, its bytes are in no version that can be
    restored."""
    number = len(rig.layout.synchronous) + 1
    pid = stopped_writer(rig, f"capture.bucket.begin@iteration=3,bucket={number}")
    assert rig.segment.slot(2).state is SlotState.DIRTY and rig.segment.cursor(2) == number
    rig.segment.header.token = 2
    for tensor in rig.tensors.values():
        tensor.fill_(30)
    expected = {Version(2, 3): contents(rig.tensors)}

    def after(bucket):
        if moment == "before its digest" and bucket == 1 or moment == "after its digest" and bucket == 2:
            wake(rig, pid)

    capture = rig.capture(token=2, gate=Gate(after=after))
    capture.start(Version(2, 3), b"new 3")
    capture.wait()
    if moment == "after the seal":
        assert Version(2, 3) in rig.restorable()
        wake(rig, pid)
    assert rig.held(2) != expected[Version(2, 3)], "the late write happened"
    check_new(rig, expected)
    assert Version(2, 3) not in rig.restorable()
    assert {Version(1, 1), Version(1, 2)} <= set(rig.restorable())


@pytest.mark.parametrize("moment", ["during the capture", "after the seal"])
def test_a_late_start_of_a_capture_never_relabels_what_the_new_incarnation_wrote(rig, moment):
    """Given a writer stopped between choosing slot 2 and marking it; incarnation 2 writes that slot meanwhile."""
    pid = stopped_writer(rig, "capture.begin@iteration=3")
    rig.segment.header.token = 2
    for tensor in rig.tensors.values():
        tensor.fill_(30)
    expected = {Version(2, 3): contents(rig.tensors)}
    capture = rig.capture(
        token=2, gate=Gate(after=lambda n: wake(rig, pid) if n == 2 and moment == "during the capture" else None)
    )
    capture.start(Version(2, 3), b"new 3")
    capture.wait()
    if moment == "after the seal":
        wake(rig, pid)
    check_new(rig, expected)
    assert {Version(1, 1), Version(1, 2)} <= set(rig.restorable())


def test_a_writer_stopped_at_a_bucket_edge_is_suspected_of_the_next_bucket(rig):
    """The cursor is moved before the token is looked at: whoever passed that check is in the cursor's bucket."""
    seen = []

    class Watched(Capture):
        def _check_token(self):
            seen.append(self._segment.cursor(0))
            super()._check_token()

    capture = Watched(rig.segment, rig.layout, lambda: rig.tensors, 1)
    rig.captures.append(capture)
    capture.start(Version(1, 1), b"")
    capture.wait()
    assert seen[1:-1] == list(range(len(rig.layout.buckets)))  # between the one at start and the one before the seal


def test_missing_tensors_are_refused(rig):
    with pytest.raises(KeyError):
        Capture(rig.segment, rig.layout, dict, 1)


def test_a_tensor_that_no_update_has_made_is_captured_as_zeros_until_it_is_there(rig):
    live, name = dict(rig.tensors), "w"
    made = live[name]
    live[name] = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device="meta")
    capture = Capture(rig.segment, rig.layout, lambda: live, 1, rig)
    capture.start(Version(1, 1), b"")
    capture.wait()
    held = rig.held(rig.restorable()[Version(1, 1)])
    assert held == contents({**rig.tensors, name: torch.zeros_like(made)})
    live[name] = made
    capture.start(Version(1, 2), b"")
    capture.wait()
    assert rig.held(rig.restorable()[Version(1, 2)]) == contents(rig.tensors)
    live[name] = made.clone()
    with pytest.raises(InventoryError, match="'w' has moved"):
        capture.start(Version(1, 3), b"")
    capture.close()


def test_closing_finishes_the_running_capture(rig):
    capture = rig.capture()
    expected = contents(rig.tensors)
    capture.start(Version(1, 1), b"")
    capture.close()
    assert rig.held(rig.restorable()[Version(1, 1)]) == expected
    assert "ftp-capture" not in {thread.name for thread in threading.enumerate()}


def test_a_version_for_which_no_slot_is_free_is_left_out_and_said_and_nothing_waits_or_changes(rig):
    left_out = []
    rig.left_out = left_out.append
    capture = rig.capture()
    for iteration in (1, 2, 3):
        capture.start(Version(1, iteration), b"")
        capture.wait()
        rig.segment.pin(Version(1, iteration), Pin.NODE)
    before = rig.segment.bytes.copy()
    capture.start(Version(1, 4), b"")
    capture.wait()
    assert left_out == [Version(1, 4)]
    assert (rig.segment.bytes == before).all()
    rig.segment.unpin(0, Pin.NODE)
    capture.start(Version(1, 5), b"")
    capture.wait()
    assert rig.segment.slot(0).version == Version(1, 5) and len(left_out) == 1


@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_what_is_exchanged_next_is_pinned_before_it_is_sealed_if_the_next_capture_might_take_its_slot(tmp_path, free):
    tensors = state()
    layout = plan_layout(inventory(tensors), (), BUCKET)
    create(tmp_path / "segment", Shape(layout.nbytes, 1000, len(layout.buckets), 1, 2 + free, free=free), 0, {})
    segment = Segment(tmp_path / "segment")
    segment.ranges = layout.ranges
    capture = Capture(segment, layout, lambda: tensors, 0)
    try:
        segment.header.await_version(Version(1, 2))
        for iteration in (1, 2):
            capture.start(Version(1, iteration), b"")
            capture.wait()
        pinned = {slot.version for slot in segment.slots() if slot.pins == Pin.SOURCE}
        assert pinned == ({Version(1, 2)} if free < 2 else set())
        assert segment.pin(Version(1, 2), Pin.NODE) is not None
    finally:
        capture.close()
        segment.close()


# ---- changes that no version counter sees ----


@pytest.mark.parametrize("undone", [False, True], ids=["left", "undone before the fence"])
@pytest.mark.parametrize("suspect", [False, True], ids=["slot", "slot of a superseded writer"])
def test_weights_swapped_through_data_while_they_are_copied_are_named_and_never_sealed(rig, undone, suspect):
    """As averaged weights are for an evaluation between two updates: some tensors are copied before, some after."""
    swapped, copied = threading.Event(), threading.Event()

    def hold(bucket):
        if bucket == 2:
            copied.set()
            assert_set(swapped)

    capture = rig.capture()
    capture.start(Version(1, 1), b"")
    capture.wait()
    before = contents(rig.tensors)
    if suspect:
        numbers = range(len(rig.layout.buckets))
        capture._suspect = {(slot.index, number) for slot in rig.segment.slots() for number in numbers}
    capture._copiers[CPU] = Gate(before=hold)
    capture.start(Version(1, 2), b"")
    assert_set(copied)
    own = {name: tensor.clone() for name, tensor in rig.tensors.items()}
    for tensor in rig.tensors.values():
        tensor.data.copy_(torch.ones_like(tensor))
    swapped.set()
    capture._idle.wait(SECONDS)
    if undone:
        for name, tensor in rig.tensors.items():
            tensor.data.copy_(own[name])
    with pytest.raises(StateChangedError, match=r"rank 0: '\w+' was changed after the end of iteration 2 "):
        capture.wait()
    found = rig.restorable()
    assert list(found) == [Version(1, 1)] and rig.held(found[Version(1, 1)]) == before


def test_a_tensor_that_gets_other_memory_while_it_is_copied_is_captured_as_it_was(rig):
    copied, swapped = threading.Event(), threading.Event()

    def hold(bucket):
        copied.set()
        assert_set(swapped)

    capture, before = rig.capture(gate=Gate(before=hold)), contents(rig.tensors)
    capture.start(Version(1, 1), b"")
    assert_set(copied)
    own = rig.tensors["w"].data
    rig.tensors["w"].data = torch.zeros_like(own)
    swapped.set()
    capture.wait()
    rig.tensors["w"].data = own
    assert rig.held(rig.restorable()[Version(1, 1)]) == before


# ---- frozen items, which the script changes all the same ----


class FrozenRig(Rig):
    """A frozen base and a momentum encoder, next to what the update changes."""

    def __init__(self, path, size=300):
        self.tensors = {name: torch.randn(size) for name in ("base", "encoder", "trained")}
        spans = {"base": frozenset[IterationSpan](), "encoder": frozenset[IterationSpan](), "trained": UPDATE}
        items = [
            Item(name, "float32", (size,), 4 * size, Role.PARAMETER, (0,), None, spans[name]) for name in self.tensors
        ]
        self.layout = plan_layout(Inventory.of(0, items), (), BUCKET)
        self.begin(path)

    def start(self, capture, iteration):
        capture.start(Version(1, iteration), b"")
        return contents(self.tensors)


def _counted(tensor):
    tensor.mul_(0.5)


def _through_data(tensor):
    tensor.data.mul_(0.5)


@pytest.fixture
def frozen(segment_path):
    made = FrozenRig(segment_path)
    yield made
    for capture in made.captures:
        capture.close()


@pytest.mark.parametrize("change", [_counted, _through_data])
@pytest.mark.parametrize("first", [1, 3], ids=["from the first iteration on", "later"])
def test_a_frozen_item_that_changes_while_it_is_copied_is_captured_as_it_was(frozen, first, change):
    """As a momentum encoder in the forward, some buckets of which are copied before, some after."""
    copied, changed = threading.Event(), threading.Event()

    def hold(bucket):
        copied.set()
        assert_set(changed)

    capture = frozen.capture(gate=Gate(before=hold))
    expected = {}
    for iteration in range(1, 7):
        copied.clear(), changed.clear()
        expected[Version(1, iteration)] = frozen.start(capture, iteration)
        assert_set(copied)
        if iteration >= first:
            change(frozen.tensors["encoder"])
        changed.set()
        capture.wait()
        frozen.tensors["trained"].add_(1)
    found = frozen.restorable()
    assert sorted(found) == [Version(1, iteration) for iteration in (4, 5, 6)]
    assert all(frozen.held(index) == expected[version] for version, index in found.items())


def test_what_stays_frozen_is_copied_at_once_in_the_first_version_only(frozen, monkeypatch):
    capture, at_once = frozen.capture(), list[int]()
    early = capture._copied_early
    monkeypatch.setattr(capture, "_copied_early", lambda *slots: (made := early(*slots), at_once.append(len(made)))[0])
    for iteration in range(1, 6):
        frozen.start(capture, iteration)
        capture.wait()
        frozen.tensors["trained"].add_(1)
        if iteration == 3:
            frozen.tensors["encoder"].add_(1)
    assert at_once[0] > at_once[3] > 0 and at_once[1:3] == at_once[4:] * 2 == [0, 0]


def test_a_version_that_is_damaged_gives_its_frozen_items_to_no_other(frozen):
    capture = frozen.capture()
    frozen.start(capture, 1)
    capture.wait()
    frozen.segment.data(frozen.restorable()[Version(1, 1)])[:] = 7
    expected = frozen.start(capture, 2)
    capture.wait()
    assert frozen.held(frozen.restorable()[Version(1, 2)]) == expected


def test_without_the_version_before_a_frozen_item_is_copied_at_once(frozen):
    """As where a recovery, or a replica that was found wrong, has made it void."""
    capture = frozen.capture()
    frozen.start(capture, 1)
    capture.wait()
    frozen.segment.dirty(frozen.restorable()[Version(1, 1)], None, 1)
    expected = frozen.start(capture, 2)
    frozen.tensors["encoder"].add_(1)
    capture.wait()
    assert frozen.held(frozen.restorable()[Version(1, 2)]) == expected


def test_a_change_that_no_sample_shows_is_in_a_version_after_as_many_as_there_are_buckets(segment_path, request):
    frozen = FrozenRig(segment_path, size=2000)
    capture = frozen.capture()
    request.addfinalizer(capture.close)
    for iteration in range(1, len(frozen.layout.background) + 4):
        if iteration == 3:
            frozen.tensors["encoder"].data[2::8].add_(1)  # of four words of 8 bytes the first one is sampled
        expected = frozen.start(capture, iteration)
        capture.wait()
        frozen.tensors["trained"].add_(1)
        if iteration == 3:
            assert frozen.held(frozen.restorable()[Version(1, 3)]) != expected, "it was seen at once: nothing is shown"
    assert frozen.held(frozen.restorable()[Version(1, iteration)]) == expected


@pytest.mark.parametrize("change", [_counted, _through_data])
def test_a_version_that_is_captured_later_names_a_frozen_item_that_changed_before_and_after_its_version_point(
    frozen, change
):
    capture = frozen.capture()
    for iteration in (1, 2):
        change(frozen.tensors["encoder"])
        capture.hold()
        if iteration == 2:
            change(frozen.tensors["encoder"])
        with pytest.raises(StateChangedError, match="'encoder'") if iteration == 2 else contextlib.nullcontext():
            capture.start(Version(1, iteration), b"", {})
            capture.wait()
    assert sorted(frozen.restorable()) == [Version(1, 1)]


@pytest.mark.parametrize("changes", [False, True])
def test_a_version_that_is_captured_later_has_its_frozen_items_or_names_one_that_has_changed(frozen, changes):
    capture = frozen.capture()
    for iteration in (1, 2, 3):
        frozen.tensors["encoder"].add_(1)
        capture.hold()
        if iteration == 3:
            expected = contents(frozen.tensors)
            frozen.tensors["base" if changes else "trained"].add_(1)
        changed = changes and iteration == 3
        with pytest.raises(StateChangedError, match="'base'") if changed else contextlib.nullcontext():
            capture.start(Version(1, iteration), b"", {})
            capture.wait()
    held = frozen.held(frozen.restorable()[Version(1, 2 if changes else 3)])
    assert changes or {**expected, "trained": held["trained"]} == held


# ---- from a device ----

LATE_ITERATIONS = 4


class NoSamples:
    """Nothing is sampled in the memory of a device."""

    def take(self): ...

    def require_unchanged(self, *_): ...

    def close(self): ...


def captured_on(device, path):
    """Train on `device`, a version per iteration. Returns what is sealed, and the state at the version points."""
    rig = Rig(path)
    capture = rig.capture()
    capture._copiers[CPU] = CudaCopier(CPU, device)
    capture._samples = NoSamples()
    for index in (*rig.segment.claimed, *rig.segment.shape.parity_indices):
        capture._use(index)
    assert sum(device.registered.values()) >= 2 * rig.layout.nbytes
    expected = {}
    try:
        for iteration in range(1, LATE_ITERATIONS + 1):
            version = Version(1, iteration)
            device.training.give(rig.train)
            device.training.give(lambda version=version: expected.__setitem__(version, contents(rig.tensors)))
            capture.start(version, b"")
            capture.wait()
        device.training.synchronize()
        return {version: rig.held(index) for version, index in rig.restorable().items()}, expected
    finally:
        capture.close()
        assert device.registered == {}, "memory stays registered"


PACES = st.lists(st.integers(0, 4), min_size=1, max_size=40)


@given(PACES)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_delays_what_is_sealed_is_the_state_at_its_version_point(tmp_path, pace):
    path = tmp_path / f"segment-{len(list(tmp_path.iterdir()))}"
    found, expected = captured_on(LateDevice(pace), path)
    path.unlink()
    assert sorted(found)[-1] == Version(1, LATE_ITERATIONS)
    for version, held in found.items():
        assert held == expected[version], version


@pytest.mark.parametrize("missing", ["wait_event", "synchronize", "record"])
def test_a_wait_that_is_missing_is_found(tmp_path, monkeypatch, missing):
    """On a device that does nothing until it must."""
    monkeypatch.setattr(LateEvent if missing == "record" else LateStream, missing, lambda *_: None)
    monkeypatch.setattr(LateDevice, "tick", lambda self: self.streams[-1].run(9))  # the side stream is never late
    device = LateDevice([0])
    if missing == "synchronize":
        monkeypatch.setattr(LateDevice, "tick", lambda self: None)
        device.training.synchronize = lambda: None
    found, expected = captured_on(device, tmp_path / "segment")
    assert any(held != expected.get(version) for version, held in found.items())


def test_memory_that_cannot_be_registered_is_an_error_with_its_number():
    device = LateDevice([0])
    device.status = 712
    with pytest.raises(InventoryError, match=r"cannot be registered as pinned memory \(CUDA error 712\)"):
        CudaCopier(CPU, device).use(4096, 4096)
