"""A node keeps its run's lease on the folder of checkpoints, writes nothing without it, and says so once."""

import os
from dataclasses import replace

import pytest

from ft_plugins.errors import StorageError
from ft_plugins.events import Events
from ft_plugins.smp.serve.node_context import NodeContext
from ft_plugins.smp.storage import folder_lease
from ft_plugins.smp.storage.folder_lease import FolderLease
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.checkpoint import lease
from ft_plugins.snapshot.checkpoint.lease import Lease
from ft_plugins.snapshot.segment import segment as segments
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import Shape

A, B = "a" * 32, "b" * 32
ME = os.getpid(), liveness.started(os.getpid())
SHAPE = Shape(nbytes=1 << 12, small_nbytes=100, buckets=1, layout=5, slots=2)


class Node:
    """One node of a run, with one rank."""

    def __init__(self, folder, name, rank, world_size, run=A, lineage=5):
        self.base, self.world_size = folder / "ck" / "job", world_size
        self.lives = self.trains = True  # ft-run; and its trainers as well
        run_dir = folder / name
        run_dir.mkdir()
        self.seen = []
        events = Events(name)
        events.subscribe(self.seen.append)
        path = run_dir / "segment"
        segments.create(path, SHAPE, rank, {})
        self.segment, self.rank = Segment(path), rank
        self.open(lineage, run)
        context = NodeContext.of(run_dir, "job", name, events, {})
        self.lease = FolderLease(context, lambda: ME if self.lives else (0, 0))

    def open(self, lineage, run=A):
        self.segment.open_lineage(lineage, None, (), run)

    def require(self):
        self.look(writes=True)

    def look(self, writes=False):
        self.segment.header.owner = ME if self.lives and self.trains else (0, 0)
        self.lease.keep(self.base, {self.rank: self.segment}, self.world_size, writes)

    def found(self):
        assert (found := lease.newest(self.base)) is not None
        return found


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(folder_lease.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(folder_lease.time, "time", lambda: now[0])
    return now


def test_the_node_of_rank_0_renews_and_another_one_only_when_that_one_is_gone(tmp_path, clock):
    first, second = Node(tmp_path, "x", 0, 2), Node(tmp_path, "y", 1, 2)
    first.require()
    assert (first.found().lineage, first.found().run, first.found().nodes) == (5, A, ("x",))
    for _ in range(12):  # a minute
        clock[0] += 5.0
        first.look()
        second.look()
        assert first.found().renewed == clock[0]
    gone_at = clock[0]
    while second.found().renewed == gone_at:
        clock[0] += 5.0
        second.look()
    assert clock[0] - gone_at < lease.HOLD_SECONDS, "a start that watches for as long sees it change"
    assert not first.lease.lost and not second.lease.lost


def test_nothing_renews_it_when_ft_run_and_trainers_are_gone_and_a_job_on_one_node_releases_it(tmp_path, clock):
    one, other, alone = Node(tmp_path, "x", 0, 2), Node(tmp_path, "y", 1, 2), Node(tmp_path, "z", 0, 1)
    one.require()
    one.lives = other.lives = False
    before = one.found()
    for _ in range(12):
        clock[0] += 5.0
        one.look()
        other.look()
    assert one.found() == before
    alone.base = tmp_path / "other" / "job"
    alone.require()
    alone.lives = False
    clock[0] += 5.0
    alone.look()
    assert alone.found().released
    alone.lives = True
    clock[0] += 5.0
    alone.look()
    assert not alone.found().released, "another ft-run goes on with its memory"
    alone.lease.release(alone.base, [alone.segment])
    assert alone.found().released


def test_a_run_that_was_replaced_writes_no_more_and_says_so_once(tmp_path, clock):
    old = Node(tmp_path, "x", 0, 1)
    old.require()
    lease.take(old.base, Lease(6, A, ("elsewhere",), True, ("there",), 1.0, 2.0), None)
    for _ in range(3):
        clock[0] += 5.0
        old.look()
        with pytest.raises(StorageError, match=r"now used by run aaaaaaaa on elsewhere.*writes no more checkpoints"):
            old.require()
    (event,) = [each for each in old.seen if each.name == "lease.lost"]
    assert "elsewhere" in event.fields["reason"]
    old.lease.release(old.base, [old.segment])
    assert not old.found().released, "it is not this run's"
    lease.take(old.base, Lease(7, A), None)  # as its next start does, once the other one is gone
    old.open(7)
    old.require()
    assert not old.lease.lost


def test_a_start_of_the_same_job_under_way_is_no_loss(tmp_path, clock):
    node = Node(tmp_path, "x", 0, 1)
    node.require()
    node.segment.header.token += 1  # fenced
    lease.take(node.base, Lease(6, A), None)
    with pytest.raises(StorageError, match="not known yet whether another start uses it"):
        node.require()
    assert not node.lease.lost and not node.seen
    node.open(6)
    node.require()


def test_a_folder_that_could_not_be_reached_at_the_start_is_taken_later_unless_another_run_has_it(tmp_path, clock):
    node = Node(tmp_path, "x", 0, 1, lineage=8)
    node.base.mkdir(parents=True)
    lease.take(node.base, Lease(5, B), None)
    with pytest.raises(StorageError, match="run bbbbbbbb"):
        node.require()
    lease.renew(node.base, Lease(5, B, released=True))
    node.require()
    assert (node.found().lineage, node.found().run) == (8, A)
    lease.renew(node.base, replace(node.found(), run=B))
    with pytest.raises(StorageError, match="run bbbbbbbb"):
        node.require()


def test_a_node_that_has_left_the_round_does_not_take_the_next_lineage_of_its_run_for_a_loss(tmp_path, clock):
    """Given a drained node, whose ft-run waits as a spare with the memory of the round before."""
    spare = Node(tmp_path, "x", 0, 2)
    spare.require()
    lease.take(spare.base, Lease(6, A, ("y", "z")), None)
    spare.trains = False
    for _ in range(12):
        clock[0] += 5.0
        spare.look()
    with pytest.raises(StorageError, match="not known yet"):
        spare.require()
    assert not spare.lease.lost and not spare.seen
    assert spare.found() == Lease(6, A, ("y", "z")), "nothing of it is renewed there"
    spare.trains = True  # cut off, it was not told to stop
    clock[0] += 5.0
    spare.look()
    assert [each.name for each in spare.seen] == ["lease.lost"]


def test_a_lease_of_a_run_that_died_is_taken_while_training_once_it_held_for_its_time_and_a_living_one_says_so_once(
    tmp_path, clock
):
    """Given a folder that could not be reached at the start, where another run had been."""
    late = Node(tmp_path, "x", 0, 1, lineage=8)
    late.base.mkdir(parents=True)
    lease.take(late.base, Lease(5, B), None)
    first = clock[0]
    while late.found().run == B:
        late.look()
        assert not late.lease.lost and clock[0] - first < 2 * lease.HOLD_SECONDS
        clock[0] += 5.0
    assert clock[0] - first > lease.HOLD_SECONDS and not late.seen
    assert (late.found().lineage, late.found().run) == (8, A)
    other = Node(tmp_path, "y", 0, 1, lineage=8)
    other.base = tmp_path / "other" / "job"
    other.base.mkdir(parents=True)
    lease.take(other.base, Lease(5, B), None)
    for turn in range(30):
        if turn % 3 == 1:
            lease.renew(other.base, Lease(5, B, renewed=clock[0]))
        clock[0] += 5.0
        other.look()
        assert bool(other.lease.lost) is (turn > 0) and other.found().run == B
    assert [each.name for each in other.seen] == ["lease.lost"]


def test_a_folder_that_stalls_does_not_count_as_one_that_does_not_change(tmp_path, clock):
    late = Node(tmp_path, "x", 0, 1, lineage=8)
    late.base.mkdir(parents=True)
    lease.take(late.base, Lease(5, B), None)
    late.look()
    clock[0] += 10 * lease.HOLD_SECONDS
    late.look()
    assert late.found().run == B


def test_a_node_that_has_the_job_alone_names_ft_run_and_trainers_besides_its_smp(tmp_path):
    node = Node(tmp_path, "x", 0, 1)
    node.require()
    assert node.found().alone and node.found().processes == (liveness.identified(os.getpid()),) * 3
