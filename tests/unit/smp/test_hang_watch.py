"""The watch of a node's ranks by its SMP: what it reports, what it has restarted, and when."""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ft_plugins.events import Event, Events, catalogue
from ft_plugins.model.progress import WorkPhase
from ft_plugins.smp.serve.node_context import NodeContext
from ft_plugins.smp.watch import hang, hang_watch, liveness, stacks
from ft_plugins.smp.watch.hang import Stall
from ft_plugins.smp.watch.hang_watch import HangWatch
from ft_plugins.smp.watch.job_history import FtRunNote, FtRunPhase, write_note
from ft_plugins.snapshot.segment import progress_words
from ft_plugins.snapshot.segment.progress_words import KEPT, ProgressFacts, ProgressWriter
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape

TOKEN = 3


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def monotonic_ns(self):
        return round(self.now * 1e9)


@dataclass
class OneTree:
    """A tree of SMPs with this node in it."""

    nodes: int = 0
    reported: Stall | None = None
    announced: tuple[Stall, str] | None = None

    def place(self):
        return (1 if self.nodes else 0), self.nodes

    def report_stall(self, stall):
        self.reported = stall

    def announced_stall(self):
        return self.announced


class Signs:
    """The signs of work of a node's ranks: of those that the test calls busy."""

    def __init__(self, node):
        self.node, self.worked, self.asked = node, dict[int, float](), list[int]()

    def forget(self):
        self.worked.clear()

    def look(self, ranks, processes):
        self.asked = [rank.rank for rank in ranks]
        self.worked.update({rank: self.node.clock.now for rank in self.asked if rank in self.node.busy})


@dataclass
class Node:
    """Two ranks, their words, and the watch."""

    folder: Path
    clock: Clock
    tree: OneTree
    events: list[Event] = field(default_factory=list)
    lost: list[tuple[int, list[str]]] = field(default_factory=list)
    segments: dict[int, Segment] = field(default_factory=dict)
    writers: list[ProgressWriter] = field(default_factory=list)
    owner: tuple[int, int] = (os.getpid(), liveness.started(os.getpid()))  # of each rank's segment
    busy: set[int] = field(default_factory=set)  # ranks that are seen at work

    def begin(self, token=TOKEN, seconds=5.0, ranks=2):
        """An incarnation of the job, as this node sees it; returns a new watch."""
        self.writers = []
        for rank in range(2):
            path = self.folder / f"segment{rank}"
            if rank not in self.segments:
                create(path, Shape(1 << 12, 1 << 10, 1, 5, 3, 0, 0), rank, {})
                self.segments[rank] = Segment(path)
            self.segments[rank].header.owner = self.owner
            self.segments[rank].header.attached = True
            self.writers.append(ProgressWriter(path, ProgressFacts(token, seconds, 0, ranks, 2)))
        return self.watch()

    def watch(self):
        events = Events("node7")
        events.subscribe(self.events.append)
        self.tree.restart_workers = lambda token, lost: self.lost.append((token, lost))
        watch = HangWatch(NodeContext.of(self.folder, "j", "node7", events, self.segments), self.tree)
        watch._signs = Signs(self)
        return watch

    def iterate(self, first, last, seconds=(0.5, 0.5)):
        for step in range(first, last + 1):
            began = self.clock.now
            for writer, own in zip(self.writers, seconds, strict=True):
                self.clock.now = began
                writer.begin(step)
                self.clock.now += own
                writer.edge(WorkPhase.AFTER_FORWARD)
            self.clock.now = began + 1
            for writer in self.writers:
                writer.end(step)

    def look(self, watch, seconds, token=TOKEN, **more):
        """Let time pass, in steps in which the SMP looks."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now = min(until, self.clock.now + 1.0)
            watch.look(token, more.get("stopped", {}))

    def named(self, kind):
        return [event.fields for event in self.events if event.name == kind.name]


@pytest.fixture
def node(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress_words, "time", clock)
    monkeypatch.setattr(hang_watch, "time", clock)
    monkeypatch.setattr(stacks, "dump", lambda run_dir, token, processes, seconds=0: run_dir / "hangs" / str(token))
    monkeypatch.setattr(stacks, "place", lambda path: f"upload (train.py:{path.stem.removeprefix('rank')})")
    folder = tmp_path / "node7"
    folder.mkdir()
    node = Node(folder, clock, OneTree())
    yield node
    for segment in node.segments.values():
        segment.close()


def hang_in(node, step):
    """Rank 1 sleeps in its forward."""
    for writer in node.writers:
        writer.begin(step)
        writer.edge(WorkPhase.FORWARD)
    node.writers[0].edge(WorkPhase.AFTER_FORWARD)


def test_a_hang_is_reported_once_and_the_workers_restart(node):
    watch = node.begin()
    node.iterate(1, 4)
    hang_in(node, 5)
    node.look(watch, 4.5)
    assert node.events == [] and watch.status()["no_progress_seconds"] == 4.5
    node.look(watch, 20)
    [fields] = node.named(catalogue.JOB_HUNG)
    assert (fields["about"], fields["culprit"], fields["iteration"], fields["phase"]) == (1, "node7", 5, "forward")
    assert fields["ranks"] == [1] and fields["stacks"] == str(node.folder / "hangs" / "3")
    [(token, [words])] = node.lost
    assert token == TOKEN and words.startswith("hang of rank 1 of node node7, in the forward of iteration 5 (no ")
    assert f"stacks in {fields['stacks']}" in words


def test_a_hang_without_room_for_stacks_is_reported_all_the_same(node, monkeypatch):
    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(stacks, "dump", full)
    watch = node.begin()
    node.iterate(1, 2)
    node.look(watch, 10)
    [fields] = node.named(catalogue.JOB_HUNG)
    assert fields["stacks"] == "" and "no space left" in fields["reason"] and fields["even"]
    assert node.lost


def test_a_hang_that_cannot_be_written_down_is_declared_when_it_can(node, monkeypatch):
    """The run directory is full: the SMP goes on, and the workers restart once there is room."""
    declared = node.lost

    class Full(list[tuple[int, list[str]]]):
        def append(self, item):
            raise OSError("no space left on device")

    node.lost = Full()
    watch = node.begin()
    node.iterate(1, 2)
    node.look(watch, 20)
    assert len(node.named(catalogue.JOB_HUNG)) == 1
    node.lost = declared
    node.look(watch, 3)
    assert [token for token, _ in declared] == [TOKEN] and len(node.named(catalogue.JOB_HUNG)) == 1


def test_ranks_that_have_not_begun_or_have_ended_are_not_judged(node):
    watch = node.begin()
    node.iterate(1, 3)
    node.look(watch, 30, token=TOKEN + 1)  # the next incarnation is starting
    node.writers[0].close()
    node.look(watch, 30)
    node.segments[1].header.owner = (0, 0)
    node.look(watch, 30)
    assert node.events == [] and watch.status()["hang_seconds"] == 0


def test_time_in_which_the_smp_did_not_run_counts_for_nothing(node):
    """The machine, or the whole job, was suspended."""
    watch = node.begin()
    node.iterate(1, 4)
    node.look(watch, 3)
    node.clock.now += 1000
    node.look(watch, 4)
    assert node.events == []
    node.look(watch, 4)
    assert len(node.named(catalogue.JOB_HUNG)) == 1


def test_on_several_nodes_the_root_decides_and_names_the_rank_of_another_node(node):
    node.tree.nodes = 2
    watch = node.begin(ranks=4)
    node.iterate(1, 4)
    node.look(watch, 20)
    assert node.events == [], "the other node may be saving a checkpoint"
    own = node.tree.reported
    assert own is not None and (own.position, own.even, own.iteration) == (1, True, 4)
    node.tree.announced = Stall(4, False, 1, 3, WorkPhase.DATA, 0, False), "node2"
    node.look(watch, 1)
    [fields] = node.named(catalogue.JOB_HUNG)
    assert (fields["about"], fields["culprit"], fields["phase"], fields["ranks"]) == (3, "node2", "data", [])
    assert node.lost == [], "the other node, which would restart too, may still write its stacks"
    node.look(watch, 2)
    assert "rank 3 of node node2" in node.lost[0][1][0]


def test_a_node_that_works_on_withdraws_its_report(node):
    node.tree.nodes = 2
    watch = node.begin(ranks=4)
    node.iterate(1, 4)
    node.look(watch, 20)
    node.iterate(5, 5)
    node.look(watch, 1)
    assert node.tree.reported is None


def test_a_node_that_cannot_ask_the_others_waits_longer(node):
    watch = node.begin(ranks=4, seconds=None)
    node.iterate(1, 8)
    hang_in(node, 9)
    node.look(watch, hang.APART_SECONDS - 1)
    assert node.events == []
    node.look(watch, 3)
    assert len(node.named(catalogue.JOB_HUNG)) == 1


# ---- ranks that may be at work ----


def upload_after(node, step):
    """Rank 0 is past the update of `step`, in what the loop does there; rank 1 waits for it in the next iteration."""
    node.iterate(step - 5, step - 1)
    for writer in node.writers:
        writer.begin(step)
        writer.edge(WorkPhase.AFTER_UPDATE)
    node.writers[1].end(step)
    node.writers[1].begin(step + 1)
    node.writers[1].edge(WorkPhase.AFTER_FORWARD)


def test_a_rank_that_is_past_its_update_has_half_an_hour_and_after_a_minute_there_is_an_alarm(node):
    watch = node.begin(seconds=None)
    upload_after(node, 20)
    node.look(watch, hang.LEAST_SECONDS)
    assert node.events == []
    node.look(watch, 5)
    assert watch.status()["waits_for"] == "rank 0 of node node7, after the update of iteration 20"
    [waiting] = node.named(catalogue.JOB_WAITING)
    assert (waiting["about"], waiting["iteration"], waiting["phase"]) == (0, 20, "after_update")
    where = "rank 0 of node node7, after the update of iteration 20; its stack stands in upload (train.py:0)"
    assert f"for 61 s; waiting for {where}" in waiting["reason"]
    written = json.loads((node.folder / hang_watch.WAITING_FILE).read_text())
    assert written["token"] == TOKEN and where in written["words"] and written["words"].startswith("job.waiting: node ")
    node.look(watch, 150)
    assert node.lost == [] and len(node.events) == 1
    node.writers[0].end(20)
    node.look(watch, 2)
    [advanced] = node.named(catalogue.JOB_ADVANCED)
    assert 150 <= advanced["seconds"] < 160 and node.named(catalogue.JOB_HUNG) == []
    assert watch.status()["waits_for"] == ""


def test_the_alarm_of_an_incarnation_that_was_ended_ends_with_the_iterations_of_the_next_one(node):
    watch = node.begin(seconds=None)
    upload_after(node, 20)
    node.look(watch, hang.LEAST_SECONDS + 5)
    assert len(node.named(catalogue.JOB_WAITING)) == 1
    node.begin(TOKEN + 1, seconds=None)
    for writer in node.writers:
        writer.begin(19)
    node.look(watch, 2, TOKEN + 1)
    assert node.named(catalogue.JOB_ADVANCED) == [], "none is completed"
    node.iterate(19, 20)
    node.look(watch, 2, TOKEN + 1)
    assert [each["iteration"] for each in node.named(catalogue.JOB_ADVANCED)] == [20]


def test_a_rank_that_is_seen_at_work_in_an_iteration_is_waited_for_until_it_is_not_any_more(node):
    watch = node.begin(seconds=None)
    node.iterate(1, 8)
    hang_in(node, 9)
    node.busy = {1}
    node.look(watch, 300)
    assert watch._signs.asked == [1], "only the rank that is waited for is looked at"
    assert node.lost == [] and [fields["about"] for fields in node.named(catalogue.JOB_WAITING)] == [1]
    node.busy = set()
    node.look(watch, hang.LEAST_SECONDS - 2)
    assert node.lost == []
    node.look(watch, 5)
    assert "rank 1 of node node7, in the forward of iteration 9" in node.lost[0][1][0]


def test_a_rank_that_waits_does_not_give_time_to_the_one_it_waits_for(node):
    """Waits of a device poll: it uses a processor."""
    watch = node.begin(seconds=None)
    node.iterate(1, 8)
    hang_in(node, 9)
    node.busy = {0}
    node.look(watch, hang.LEAST_SECONDS + 3)
    assert len(node.lost) == 1 and node.named(catalogue.JOB_WAITING) == []


def test_a_stopped_rank_is_not_at_work(node):
    watch = node.begin(seconds=None)
    upload_after(node, 20)
    node.look(watch, hang.LEAST_SECONDS + 3, stopped={0: 0.0})
    assert len(node.lost) == 1


def test_on_several_nodes_only_that_of_the_awaited_rank_gives_the_alarm(node):
    node.tree.nodes = 2
    watch = node.begin(ranks=4, seconds=None)
    upload_after(node, 20)
    node.look(watch, hang.LEAST_SECONDS + 3)
    assert node.tree.reported is not None and node.tree.reported.patient and node.events == []
    node.tree.announced = replace(node.tree.reported, position=0), "node2"
    node.look(watch, 3)
    assert node.events == []
    node.tree.announced = node.tree.reported, "node7"
    node.look(watch, 3)
    assert len(node.named(catalogue.JOB_WAITING)) == 1 and node.lost == []


def test_where_no_rank_lives_any_more_nothing_hangs(node):
    """After an orderly end of a script that does not say so, a refusal, or the end of ft-run."""
    watch = node.begin()
    node.iterate(1, 4)
    hang_in(node, 5)
    for segment in node.segments.values():
        segment.header.owner = (os.getpid(), 1)  # another process has that number now
    node.look(watch, 100)
    assert node.events == [] and node.lost == [] and watch.status()["hang_seconds"] == 0
    assert node.tree.reported is None, "a failure, perhaps: ft-run starts them again"
    write_note(node.folder, FtRunNote(FtRunPhase.LEAVING))
    node.look(watch, 1)
    assert node.tree.reported == Stall(5, False, 0, 0, WorkPhase.ENDED, 0, True), "those of other nodes may hang"


def seconds_of_hang(node, watch, token, last):
    """Of an incarnation that hangs after iteration `last`: the time until it is declared."""
    node.begin(token, seconds=None)
    node.iterate(last - 5, last)
    hang_in(node, last + 1)
    began, before = node.clock.now, len(node.lost)
    while len(node.lost) == before:
        node.look(watch, 1, token)
    return node.clock.now - began


def test_a_hang_in_the_same_iteration_is_given_more_time_and_one_at_another_place_is_not(node):
    """In the end the job continues from an older version under the same SMP."""
    watch = node.watch()
    for token, last, grown in ((1, 10, 1), (2, 10, hang.GROWTH), (3, 10, hang.GROWTH**2), (4, 30, 1), (5, 10, 1)):
        seconds = seconds_of_hang(node, watch, token, last)
        assert seconds == pytest.approx(hang.LEAST_SECONDS * grown, abs=2), token


def test_a_rank_at_the_border_is_not_named_again_and_again(node):
    watch = node.begin()
    for part in range(20):
        node.iterate(1 + part * KEPT, (part + 1) * KEPT, (0.4, 0.64 if part % 2 else 0.56))
        node.look(watch, 3)
    assert len(node.named(catalogue.RANK_SLOWED)) == 1 and node.named(catalogue.RANK_RECOVERED) == []
    node.iterate(20 * KEPT + 1, 21 * KEPT + 1, (0.4, 0.45))
    node.look(watch, 3)
    assert len(node.named(catalogue.RANK_RECOVERED)) == 1


def test_a_slow_rank_is_named_once_and_again_when_it_is_not_slow_any_more(node):
    watch = node.begin()
    node.iterate(1, KEPT, (0.1, 0.8))
    node.look(watch, 3)
    assert node.events == []
    node.iterate(KEPT + 1, KEPT + 9, (0.1, 0.8))
    for _ in range(2):
        node.look(watch, 3)
    [fields] = node.named(catalogue.RANK_SLOWED)
    assert (fields["about"], fields["factor"]) == (1, 8.0) and fields["seconds"] == pytest.approx(0.7, abs=0.01)
    assert watch.status()["slow"] == [[1, 8.0]]
    node.iterate(KEPT + 10, 3 * KEPT, (0.1, 0.1))
    node.look(watch, 3)
    assert [fields["about"] for fields in node.named(catalogue.RANK_RECOVERED)] == [1]
    assert node.lost == [] and watch.status()["slow"] == []
