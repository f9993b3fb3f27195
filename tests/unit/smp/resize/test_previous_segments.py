"""Segments of previous sizes: kept whole, found by a replacement SMP, used again at their size, or dropped."""

import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ft_plugins.events import Events
from ft_plugins.smp.exchange.frames import Data
from ft_plugins.smp.exchange.readers import LocalReader
from ft_plugins.smp.resize.previous_segments import PreviousSegments
from ft_plugins.smp.resize.transition import ResizeTransition
from ft_plugins.smp.serve.owner import SnapshotProcess
from ft_plugins.snapshot.capture import manifest
from ft_plugins.snapshot.capture.manifest import Manifest
from ft_plugins.snapshot.segment.paths import (
    SHM,
    jobs,
    path_of,
    previous_path_of,
    previous_segments_of,
    remove,
    segments_of,
)
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import PAGE, Shape
from ft_plugins.snapshot.segment.slots import SlotState, Version

from ..node_clusters import capture

SHAPE = Shape(nbytes=9000, small_nbytes=1000, buckets=1, layout=3)
NODE = "n0"


def segment(job, rank, world_size, *versions, place=(0, 0)):
    path = path_of(job, NODE, rank)
    create(path, SHAPE, rank, {"job": 1}, world_size)
    found = Segment(path)
    found.ranges = [(0, SHAPE.nbytes)]
    for index, version in enumerate(versions):
        put(found, index, version, place)
    found.header.completed = max((version.iteration for version in versions), default=0)
    return found


def put(found, index, version, place=(0, 0)):
    small = manifest.join(manifest.write(Manifest(found.rank, found.world_size, place, ((0, 9000),), ())), b"state")
    capture(found, index, version, index + 1, small)


def files(job):
    return {"".join(re.split(r"@\d+", path.name.split("@", 1)[1])) for path in SHM.glob(f"ftp-{job}@*")}


def test_segments_of_another_size_leave_and_those_of_this_size_stay(job):
    own = {0: segment(job, 0, 16, Version(1, 4)), 1: segment(job, 1, 12)}
    previous = PreviousSegments(job, NODE)
    assert not previous and previous.switch(own, 12) == [0]
    assert set(own) == {1} and previous and previous.lineage == 1
    assert files(job) == {"n0-r0of16", "n0-r1"}
    assert previous_segments_of(job, NODE) == [previous_path_of(job, NODE, 0, 16)]
    assert segments_of(job, NODE) == [own[1].path]
    found = previous.find(0, Version(1, 4))
    assert found is not None and found.path == previous_path_of(job, NODE, 0, 16) and (found.data(0) == 1).all()
    assert previous.find(0, Version(1, 5)) is None and previous.find(1, Version(1, 4)) is None


def test_a_replacement_smp_finds_them(job):
    own = {0: segment(job, 0, 16, Version(2, 4), place=(1, 0))}
    own[0].open_lineage(2, Version(2, 4), [])
    PreviousSegments(job, NODE).switch(own, 12)
    again = PreviousSegments(job, NODE)
    assert again.report()["sizes"] == [[16, [[0, [1, 0], 2, 4, False, [[2, 4]]]]]] and again.lineage == 2
    assert jobs().count((job, NODE)) == 1
    previous_path_of(job, NODE, 3, 16).write_bytes(b"not a segment")
    assert again.report()["sizes"] == PreviousSegments(job, NODE).report()["sizes"]
    assert remove(job, NODE) == 2 and not files(job)


def test_they_are_used_again_when_the_job_returns_to_their_size(job):
    own = {0: segment(job, 0, 16, Version(1, 4), Version(1, 5))}
    previous = PreviousSegments(job, NODE)
    previous.switch(own, 12)
    own[0] = segment(job, 0, 12, Version(2, 5))
    previous.keep_only(16, Version(1, 5))
    assert previous.switch(own, 16) == [0]
    assert files(job) == {"n0-r0of12", "n0-r0"} and own[0].world_size == 16
    assert [slot.version for slot in own[0].slots() if slot.state is SlotState.CLEAN] == [Version(1, 5)]
    fresh = Segment(own[0].path)
    assert fresh.resident_bytes == SHAPE.total and (fresh.data(1) == 2).all()
    put(own[0], 0, Version(3, 6))
    assert own[0].slot(0).state is SlotState.CLEAN
    assert previous.find(0, Version(2, 5)) is not None


def test_only_the_restored_version_keeps_its_memory(job):
    own = {0: segment(job, 0, 16, Version(1, 4), Version(1, 5)), 1: segment(job, 1, 8, Version(1, 2))}
    previous = PreviousSegments(job, NODE)
    previous.switch(own, 12)
    before = previous_path_of(job, NODE, 0, 16).stat().st_blocks * 512
    previous.keep_only(16, Version(1, 4))
    left = previous_path_of(job, NODE, 0, 16).stat().st_blocks * 512
    assert before == SHAPE.total and left == before - 2 * (SHAPE.slot_room - PAGE), "all but the headers"
    assert files(job) == {"n0-r0of16"}
    found = previous.find(0, Version(1, 4))
    assert found is not None and (found.data(0) == 1).all() and previous.find(0, Version(1, 5)) is None
    assert previous.drop() == 1 and not files(job) and not previous


def test_a_lost_rank_of_the_previous_job_has_room_for_one_version(job):
    previous = PreviousSegments(job, NODE)
    made = previous.create(16, 7, SHAPE, {"job": 1})
    assert (made.rank, made.world_size, made.shape.slots, made.fingerprint) == (7, 16, 1, {"job": 1})
    put(made, 0, Version(1, 4), place=(0, 1))
    assert previous.report()["sizes"] == [[16, [[7, [0, 1], 0, 0, False, [[1, 4]]]]]]
    own = {}
    previous.switch(own, 16)
    assert not own, "it has no slots for capture"
    again = previous.create(16, 7, SHAPE, {})
    assert again.slot(0).state is SlotState.EMPTY and files(job) == {"n0-r7of16"}


def test_a_slot_that_does_not_say_what_it_holds_has_no_place(job):
    own = {0: segment(job, 0, 16)}
    capture(own[0], 0, Version(1, 1), small=b"old")
    previous = PreviousSegments(job, NODE)
    previous.switch(own, 12)
    assert previous.report()["sizes"] == [[16, [[0, None, 0, 0, False, [[1, 1]]]]]]


@pytest.fixture(autouse=True)
def gone(job):
    yield
    remove(job, NODE)
    assert not path_of(job, NODE, 0).exists()


def test_the_segment_read_last_is_unmapped_when_it_is_dropped(job):
    own = {3: segment(job, 3, 16, Version(1, 1))}
    previous = PreviousSegments(job, NODE)
    previous.switch(own, 12)
    memory = LocalReader({}, previous, lambda: None)
    assert memory.read(Data(3, Version(1, 1), 0, 8)).tolist() == [1] * 8
    mapped = f"ftp-{job}@"
    assert mapped in Path("/proc/self/maps").read_text()
    previous.drop()
    assert mapped not in Path("/proc/self/maps").read_text()


def test_a_version_that_another_incarnation_committed_does_not_remove_them(job, tmp_path):
    """The node tier still reports an earlier incarnation at the current size."""
    segment(job, 0, 1, Version(3, 9))
    process = SnapshotProcess(tmp_path, job, NODE, Events(NODE))
    process.token = 5
    process.answer({"do": "resize", "rank": 0, "token": 5, "world_size": 2})
    tier = process._tier
    tier._protection, tier.token = SimpleNamespace(nodes=("a", "b")), 4
    tier._pinned.committed = Version(2, 7)
    process.check_trainers()
    assert files(job) == {"n0-r0of1"}
    tier.token, stop = 5, process._previous_storage.stop

    def begun_over_it():
        process._previous_storage.stop = stop
        assert process.answer({"do": "fence"})["ok"]

    process._previous_storage.stop = begun_over_it
    process.check_trainers()
    assert process.token == 6 and files(job) == {"n0-r0of1"}, "the next one has not committed anything yet"
    tier.token = 6
    process.check_trainers()
    assert not files(job), "a version that this one committed replaces them"


def test_a_rank_that_leaves_while_it_is_looked_whether_the_job_is_safe_is_no_error(job, tmp_path):
    segment(job, 0, 1, Version(3, 9))
    process = SnapshotProcess(tmp_path, job, NODE, Events(NODE))
    process.answer({"do": "resize", "rank": 0, "token": 0, "world_size": 2})
    process._segments[1] = segment(job, 1, 2, Version(3, 10))
    process._segments[1].close()

    @contextmanager
    def once_the_request_is_over():
        """A request that closes a segment holds the lock until it is in no list."""
        process._segments.pop(1, None)
        yield

    smp = replace(process._transition._smp, lock=once_the_request_is_over())
    ResizeTransition(smp).drop_if_safe()
    assert files(job) == {"n0-r0of1", "n0-r1"}
    remove(job, NODE)
