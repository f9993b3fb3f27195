"""The watch of a node's ranks by its SMP: what it reports, what it has restarted, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ft_plugins.events import Event, Events, catalogue
from ft_plugins.model.progress import WorkPhase
from ft_plugins.smp import hang, hang_watch, stacks
from ft_plugins.smp.hang import Stall
from ft_plugins.smp.hang_watch import HangWatch
from ft_plugins.snapshot import progress_words
from ft_plugins.snapshot.progress_words import KEPT, ProgressFacts, ProgressWriter
from ft_plugins.snapshot.segment import Segment, create
from ft_plugins.snapshot.shape import Shape

TOKEN = 3


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)


@dataclass
class OneTree:
    """A tree of SMPs with this node in it."""

    nodes: int = 0
    reported: Stall | None = None
    announced: tuple[Stall, str] | None = None

    def place(self) -> tuple[int, int]:
        return (1 if self.nodes else 0), self.nodes

    def report_stall(self, stall: Stall | None) -> None:
        self.reported = stall

    def announced_stall(self) -> tuple[Stall, str] | None:
        return self.announced


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

    def begin(self, token: int = TOKEN, seconds: float | None = 5.0, ranks: int = 2) -> None:
        self.writers = []
        for rank in range(2):
            path = self.folder / f"segment{rank}"
            if rank not in self.segments:
                create(path, Shape(1 << 12, 1 << 10, 1, 5, 3, 0, 0), rank, {})
                self.segments[rank] = Segment(path)
            self.segments[rank].owner = (1, 1)
            self.segments[rank].attached = True
            self.writers.append(ProgressWriter(path, ProgressFacts(token, seconds, 0, ranks, 2)))

    def watch(self) -> HangWatch:
        events = Events("node7")
        events.subscribe(self.events.append)
        return HangWatch(
            self.folder, self.segments, self.tree, events, lambda token, lost: self.lost.append((token, lost))
        )

    def iterate(self, first: int, last: int, seconds: tuple[float, float] = (0.5, 0.5)) -> None:
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

    def look(self, watch: HangWatch, seconds: float, token: int = TOKEN, **more: Any) -> None:
        """Let time pass, in steps in which the SMP looks."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now = min(until, self.clock.now + 1.0)
            watch.look(token, more.get("stopped", {}))

    def named(self, kind: Any) -> list[dict[str, Any]]:
        return [event.fields for event in self.events if event.name == kind.name]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    clock = Clock()
    monkeypatch.setattr(progress_words, "time", clock)
    monkeypatch.setattr(hang_watch, "time", clock)
    monkeypatch.setattr(stacks, "dump", lambda run_dir, token, processes: run_dir / "hangs" / str(token))
    folder = tmp_path / "node7"
    folder.mkdir()
    node = Node(folder, clock, OneTree())
    yield node
    for segment in node.segments.values():
        segment.close()


Hung = Callable[[], None]


def hang_in(node: Node, step: int) -> None:
    """Rank 1 sleeps in its forward."""
    for writer in node.writers:
        writer.begin(step)
        writer.edge(WorkPhase.FORWARD)
    node.writers[0].edge(WorkPhase.AFTER_FORWARD)


def test_a_hang_is_reported_once_and_the_workers_restart(node: Node) -> None:
    node.begin()
    watch = node.watch()
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


def test_a_hang_without_room_for_stacks_is_reported_all_the_same(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr(stacks, "dump", full)
    node.begin()
    watch = node.watch()
    node.iterate(1, 2)
    node.look(watch, 10)
    [fields] = node.named(catalogue.JOB_HUNG)
    assert fields["stacks"] == "" and "no space left" in fields["reason"] and fields["even"]
    assert node.lost


def test_a_hang_that_cannot_be_written_down_is_declared_when_it_can(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run directory is full: the SMP goes on, and the workers restart once there is room."""
    declared = node.lost

    class Full(list[tuple[int, list[str]]]):
        def append(self, item: tuple[int, list[str]]) -> None:
            raise OSError("no space left on device")

    node.lost = Full()
    node.begin()
    watch = node.watch()
    node.iterate(1, 2)
    node.look(watch, 20)
    assert len(node.named(catalogue.JOB_HUNG)) == 1
    node.lost = declared
    node.look(watch, 3)
    assert [token for token, _ in declared] == [TOKEN] and len(node.named(catalogue.JOB_HUNG)) == 1


def test_a_job_that_makes_progress_is_left_alone(node: Node) -> None:
    node.begin()
    watch = node.watch()
    for step in range(1, 30):
        node.iterate(step, step)
        node.look(watch, 3)
    assert node.events == [] and node.lost == []


def test_ranks_that_have_not_begun_or_have_ended_are_not_judged(node: Node) -> None:
    node.begin()
    watch = node.watch()
    node.iterate(1, 3)
    node.look(watch, 30, token=TOKEN + 1)  # the next incarnation is starting
    node.writers[0].close()
    node.look(watch, 30)
    node.segments[1].owner = (0, 0)
    node.look(watch, 30)
    assert node.events == [] and watch.status()["hang_seconds"] == 0


def test_time_in_which_the_smp_did_not_run_counts_for_nothing(node: Node) -> None:
    """The machine, or the whole job, was suspended."""
    node.begin()
    watch = node.watch()
    node.iterate(1, 4)
    node.look(watch, 3)
    node.clock.now += 1000
    node.look(watch, 4)
    assert node.events == []
    node.look(watch, 4)
    assert len(node.named(catalogue.JOB_HUNG)) == 1


def test_on_several_nodes_the_root_decides_and_names_the_rank_of_another_node(node: Node) -> None:
    node.tree.nodes = 2
    node.begin(ranks=4)
    watch = node.watch()
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


def test_a_node_that_works_on_withdraws_its_report(node: Node) -> None:
    node.tree.nodes = 2
    node.begin(ranks=4)
    watch = node.watch()
    node.iterate(1, 4)
    node.look(watch, 20)
    node.iterate(5, 5)
    node.look(watch, 1)
    assert node.tree.reported is None


def test_a_node_that_cannot_ask_the_others_waits_longer(node: Node) -> None:
    node.begin(ranks=4, seconds=None)
    watch = node.watch()
    node.iterate(1, 8)
    node.look(watch, hang.APART_SECONDS - 1)
    assert node.events == []
    node.look(watch, 3)
    assert len(node.named(catalogue.JOB_HUNG)) == 1


def seconds_of_hang(node: Node, watch: HangWatch, token: int, last: int) -> float:
    """Of an incarnation that hangs after iteration `last`: the time until it is declared."""
    node.begin(token, seconds=None)
    node.iterate(last - 5, last)
    hang_in(node, last + 1)
    began, before = node.clock.now, len(node.lost)
    while len(node.lost) == before:
        node.look(watch, 1, token)
    return node.clock.now - began


def test_a_hang_in_the_same_iteration_is_given_more_time_and_one_in_a_later_iteration_is_not(node: Node) -> None:
    watch = node.watch()
    limit = hang.LEAST_SECONDS
    assert seconds_of_hang(node, watch, 1, 10) == pytest.approx(limit, abs=2)
    assert seconds_of_hang(node, watch, 2, 10) == pytest.approx(limit * hang.GROWTH, abs=2)
    assert seconds_of_hang(node, watch, 3, 30) == pytest.approx(limit, abs=2)


def test_hangs_at_another_place_are_given_no_more_time(node: Node) -> None:
    """The job continues from an older version, or from nothing, under the same SMP."""
    watch = node.watch()
    for token, grown in ((1, 1), (2, hang.GROWTH), (3, hang.GROWTH**2)):
        assert seconds_of_hang(node, watch, token, 500) == pytest.approx(hang.LEAST_SECONDS * grown, abs=2)
    assert seconds_of_hang(node, watch, 4, 20) == pytest.approx(hang.LEAST_SECONDS, abs=2)


def test_a_rank_at_the_border_is_not_named_again_and_again(node: Node) -> None:
    node.begin()
    watch = node.watch()
    for part in range(20):
        node.iterate(1 + part * KEPT, (part + 1) * KEPT, (0.4, 0.64 if part % 2 else 0.56))
        node.look(watch, 3)
    assert len(node.named(catalogue.RANK_SLOWED)) == 1 and node.named(catalogue.RANK_RECOVERED) == []
    node.iterate(20 * KEPT + 1, 21 * KEPT + 1, (0.4, 0.45))
    node.look(watch, 3)
    assert len(node.named(catalogue.RANK_RECOVERED)) == 1


def test_a_slow_rank_is_named_once_and_again_when_it_is_not_slow_any_more(node: Node) -> None:
    node.begin()
    watch = node.watch()
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
