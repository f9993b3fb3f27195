"""What a node tier keeps when SMPs die and incarnations follow each other: always a version that all nodes have whole.

Real tiers, segments and sockets, one rank a node. The exchange of a version is held back where a test says so. A death
leaves pins as they are, as SIGKILL does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ft_plugins.events import Event, Events
from ft_plugins.smp.serve.context import NodeContext
from ft_plugins.smp.tree import node_step
from ft_plugins.smp.tree.agreement import ExchangeDecision, NodeReport
from ft_plugins.smp.tree.node import NodeTier
from ft_plugins.smp.tree.node_driver import NodeDriver
from ft_plugins.smp.tree.pinned import PinnedVersions
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.snapshot.segment.paths import path_of, remove
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import SHARED, SLOTS, Mark, Pin, SlotState, Version, choose, slots_for

NBYTES = 100_000
SECONDS = 20
Groups = tuple[tuple[int, ...], ...]
HELD_BACK = 0.001  # megabits a second: the first frame takes minutes
SHAPE = Shape(NBYTES, 1000, 1, 77, slots_for(Pin.NODE, Pin.SOURCE))


class Node:
    """One node: its rank's segment, its part of the SMP, its events."""

    def __init__(self, folder: Path, job: str, secret: Path, position: int) -> None:
        self.job, self.name, self.position = job, f"n{position}", position
        self.run_dir = folder / self.name
        self.run_dir.mkdir()
        path = path_of(job, self.name, position)
        create(path, SHAPE, position, {})
        self.segment = Segment(path)
        self.segment.ranges = [(0, NBYTES)]
        self.seen: list[Event] = []
        self.tier = self._start()
        self.endpoint = self.tier.endpoint("127.0.0.1", str(secret))

    def _start(self) -> NodeTier:
        events = Events(self.name)
        events.subscribe(self.seen.append)
        return NodeTier(NodeContext.of(self.run_dir, self.job, self.name, events, {self.position: self.segment}))

    def write(self, iteration: int, lineage: int = 1) -> None:
        """What a capture leaves."""
        version = Version(lineage, iteration)
        index = choose(self.segment.slots())
        self.segment.dirty(index, version, 1)
        self.segment.data(index)[:] = (iteration + self.position) % 256
        self.segment.write_small(index, b"small")
        self.segment.digests(index)[0] = xxhash.xxh3_64_intdigest(self.segment.data(index).data)
        self.segment.seal(index, version, 1, b"small", self.segment.digests(index).copy())

    def whole(self) -> set[Version]:
        """What is complete here: slots and parity."""
        slots = {slot.version for slot in self.segment.slots() if slot.state is SlotState.CLEAN and slot.version}
        return slots & {Version(*version) for version in self.tier.inventory()["parity"]}

    def status(self, name: str) -> Any:
        return self.tier.status()[name]

    def begun(self, iteration: int, lineage: int = 1) -> int:
        """How often an SMP of this node has begun to send a version."""
        fields = {"iteration": iteration, "lineage": lineage}
        return sum(event.name == "exchange.started" and event.fields == fields for event in self.seen)

    def die_and_be_replaced(self) -> None:
        """The SMP ends where it stands, with all its pins; the watcher starts another one."""
        dead = self.tier
        driver = self.driver
        driver._stop.set()
        assert driver._thread is not None
        driver._thread.join(SECONDS)
        driver.leave()
        if driver._exchange is not None:
            driver._exchange.stop()
        dead._endpoint.close()
        self.tier = self._start()

    @property
    def driver(self) -> NodeDriver:
        assert self.tier._driver is not None
        return self.tier._driver

    def encoded(self) -> Version | None:
        """The version of which the node would report now that it is complete on its side."""
        due = node_step.ReportDue(self.driver._observe())
        (sent,) = node_step.step(self.driver._state, due)[1]
        assert isinstance(sent, node_step.SendReport)
        return sent.report.encoded

    def close(self) -> None:
        self.tier.close()
        self.segment.close()
        remove(self.job, self.name)


class Job:
    """Nodes that protect each other."""

    def __init__(self, folder: Path, job: str, count: int, groups: Groups | None = None) -> None:
        secret = folder / "secret"
        secret.write_text("a secret of this job alone")
        secret.chmod(0o600)
        self.nodes = [Node(folder, job, secret, position) for position in range(count)]
        self.told = Protection(
            1, None, tuple(node.name for node in self.nodes), groups or (tuple(range(count)),), (SHAPE,) * count, 1, 0,
            tuple(node.endpoint for node in self.nodes), 1, 0.0, 30.0,
        )  # fmt: skip

    def protect(self, lineage: int = 1, base: Version | None = None, mbps: float = 0.0) -> None:
        """A new incarnation."""
        for node in self.nodes:
            node.tier.suspend()
        heard = [node.tier.inventory()["committed"] for node in self.nodes]
        committed = max((Version(*version) for version in heard if version), default=None)
        self.told = replace(self.told, lineage=lineage, base=base, exchange_mbps=mbps, committed=committed)
        for node in self.nodes:
            node.tier.protect(replace(self.told, position=node.position), lineage)

    def write(self, first: int, last: int, lineage: int = 1) -> None:
        for iteration in range(first, last + 1):
            for node in self.nodes:
                node.write(iteration, lineage)

    def counts(self, iteration: int, lineage: int = 1) -> None:
        """Iteration `iteration` is captured and counts on every node."""
        self.waits_for(iteration, lineage)
        self.write(iteration, iteration, lineage)
        wait(lambda: all(node.status("committed") == [lineage, iteration] for node in self.nodes))

    def waits_for(self, iteration: int, lineage: int = 1) -> None:
        wait(lambda: all(node.status("exchange") == [lineage, iteration] for node in self.nodes))

    def begin(self, iteration: int, lineage: int = 1) -> None:
        """Iteration `iteration` is captured, and every node has begun to send it."""
        self.waits_for(iteration, lineage)
        self.write(iteration, iteration, lineage)
        wait(lambda: all(node.begun(iteration, lineage) == 1 for node in self.nodes))

    def whole(self) -> set[Version]:
        """What every node has whole: a lost node can be rebuilt from these."""
        return set.intersection(*(node.whole() for node in self.nodes))


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {SECONDS} s"
        time.sleep(0.005)


@pytest.fixture
def make(tmp_path: Path, job: str) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make_job(count: int, groups: Groups | None = None) -> Job:
        made.append(Job(tmp_path, job, count, groups))
        return made[-1]

    yield make_job
    for each in made:
        for node in each.nodes:
            node.close()


def test_a_version_that_is_held_back_keeps_what_counts_and_itself_for_as_long_as_it_takes(
    make: Callable[..., Job],
) -> None:
    job = make(2)
    job.protect()
    job.counts(1)
    job.protect(2, Version(1, 1), HELD_BACK)
    job.begin(2, 2)
    job.write(3, 12, 2)
    assert job.whole() == {Version(1, 1)}
    assert all(Version(2, 2) in {slot.version for slot in node.segment.slots()} for node in job.nodes)
    for node in job.nodes:
        assert len([slot for slot in node.segment.slots() if not slot.pins]) == SLOTS


def test_an_smp_that_is_replaced_while_iterations_pass_goes_on_with_the_version_it_was_sending(
    make: Callable[..., Job],
) -> None:
    """The same lets go of a version that counts on others already: then none is whole on all nodes."""
    job = make(2)
    job.protect(mbps=HELD_BACK)
    job.begin(1)
    job.write(2, 5)
    node = job.nodes[1]
    node.die_and_be_replaced()
    missed = lambda: node.driver._state.missed  # noqa: E731
    wait(lambda: node.begun(1) == 2 or missed() is not None or job.nodes[0].status("exchange") != [1, 1])
    assert node.begun(1) == 2 and missed() is None and job.nodes[0].status("exchange") == [1, 1]


def test_a_restored_version_does_not_count_before_every_node_has_it(make: Callable[..., Job]) -> None:
    """Given a recovery to a version newer than what counted, two nodes that have gathered it and one that has not, when
    an SMP is replaced: what counted is still whole everywhere."""
    job = make(3)
    job.protect()
    job.counts(1)
    for node in job.nodes:
        node.tier.suspend()
    job.write(2, 4)
    slow = job.nodes[2]
    slow.tier._requests.begin = lambda store, request: {"wait": True}  # type: ignore[method-assign]  # it takes nothing yet
    job.protect(2, Version(1, 4))
    wait(lambda: all(Version(1, 4) in node.whole() for node in job.nodes[:2]))
    assert Version(1, 4) not in slow.whole() and job.whole() == {Version(1, 1)}
    job.nodes[0].die_and_be_replaced()
    wait(lambda: all(node.status("exchange") == [1, 4] for node in job.nodes))
    beats = time.monotonic() + 1.0  # a dozen reports of each node
    wait(lambda: time.monotonic() > beats)
    job.write(5, 9, 2)
    assert job.whole() == {Version(1, 1)}, "a lost node could not be rebuilt now"
    assert all(node.status("committed") == [1, 1] for node in job.nodes)


def test_recoveries_that_follow_each_other_leave_capture_its_slots(make: Callable[..., Job]) -> None:
    job = make(2)
    job.protect()
    job.counts(1)
    for lineage in range(2, 6):  # four times training dies before what it restored is on other nodes again
        base = Version(lineage - 1, 3 * lineage)
        for node in job.nodes:
            node.tier.suspend()
        job.write(base.iteration, base.iteration, base.lineage)
        job.protect(lineage, base, HELD_BACK)
        assert Version(1, 1) in job.whole()
        for node in job.nodes:
            free = [slot for slot in node.segment.slots() if not slot.pins]
            assert len(free) >= SLOTS, f"{len(free)} slots are left for capture after {lineage - 1} recoveries"


def test_what_counts_on_one_node_is_kept_by_the_one_that_had_not_heard_of_it(make: Callable[..., Job]) -> None:
    """Given a version that all have encoded, and that counts on node 0, when training dies before node 1 has heard."""
    job = make(2)
    job.protect()
    job.counts(1)
    job.waits_for(2)
    first, deaf = job.nodes
    report = deaf.driver._report

    def not_heard(sent: NodeReport) -> node_step.Announced:
        announced = report(sent)
        if announced.decision.committed == Version(1, 2):
            return node_step.Announced(ExchangeDecision(Version(1, 2), Version(1, 1)))  # the one before
        return announced

    deaf.driver._report = not_heard  # type: ignore[method-assign]
    job.write(2, 2)
    wait(lambda: first.status("committed") == [1, 2])
    job.write(3, 4)
    for node in job.nodes:
        node.tier.suspend()
    assert Version(1, 2) in job.whole()
    job.protect(2, Version(1, 4), HELD_BACK)
    deaf.die_and_be_replaced()
    wait(lambda: all(node.status("exchange") == [1, 4] for node in job.nodes))
    job.write(5, 9, 2)
    assert job.whole() == {Version(1, 2)}, "a lost node could not be rebuilt now"
    assert all(node.status("committed") == [1, 2] for node in job.nodes)


def test_what_is_complete_on_two_nodes_of_three_does_not_count_however_often_an_smp_is_replaced(
    make: Callable[..., Job],
) -> None:
    """Given version 2 on its way, which one node has not taken: version 1 stays whole everywhere."""
    job = make(3)
    job.protect()
    job.counts(1)
    slow = job.nodes[2]
    slow.tier._requests.begin = lambda store, request: {"wait": True}  # type: ignore[method-assign]
    job.begin(2)
    wait(lambda: all(Version(1, 2) in node.whole() for node in job.nodes[:2]))
    for _ in range(2):
        job.nodes[0].die_and_be_replaced()
        wait(lambda: job.nodes[0].status("exchange") is not None)
    beats = time.monotonic() + 1.0  # a dozen reports of each node
    wait(lambda: time.monotonic() > beats)
    job.write(3, 8)
    assert Version(1, 2) not in slow.whole()
    assert job.whole() == {Version(1, 1)}, "a lost node could not be rebuilt now"
    assert all(node.status("committed") == [1, 1] for node in job.nodes)


def test_versions_that_one_group_misses_again_and_again_leave_the_other_group_its_slots(
    make: Callable[..., Job],
) -> None:
    """Two pairs of nodes: what the first has complete counts for nothing, as long as the second misses each version."""
    job = make(4, groups=((0, 1), (2, 3)))
    job.protect()
    job.counts(1)
    behind = job.nodes[2]
    job.waits_for(2)
    for _ in range(4):
        iteration = job.nodes[0].status("exchange")[1]  # further ahead each time
        named = Version(1, iteration)
        job.waits_for(iteration)
        for node in job.nodes:
            if node is not behind:
                node.write(iteration)
        wait(lambda version=named: all(version in node.whole() for node in job.nodes[:2]))
        iteration += 1
        for node in job.nodes:
            node.write(iteration)  # the one that is behind has left one out
        wait(lambda version=named: job.nodes[0].status("exchange") != [1, version.iteration])
        assert Version(1, 1) in job.whole()
        for node in job.nodes:
            free = [slot for slot in node.segment.slots() if not slot.pins]
            assert len(free) >= SLOTS, f"{len(free)} slots are left for capture at iteration {iteration}"


def test_a_restored_version_that_never_came_to_count_leaves_its_slot_though_it_was_complete_here(
    make: Callable[..., Job],
) -> None:
    job = make(3)
    job.protect()
    job.counts(1)
    for node in job.nodes:
        node.tier.suspend()
    job.write(2, 4)
    job.nodes[2].tier._requests.begin = lambda store, request: {"wait": True}  # type: ignore[method-assign]
    job.protect(2, Version(1, 4))
    wait(lambda: all(Version(1, 4) in node.whole() for node in job.nodes[:2]))
    for node in job.nodes:
        node.tier.suspend()
    job.write(5, 9, 2)
    job.protect(3, Version(2, 9), HELD_BACK)
    assert job.whole() == {Version(1, 1)}
    for node in job.nodes:
        free = [slot for slot in node.segment.slots() if not slot.pins]
        assert len(free) >= SLOTS, f"{len(free)} slots are left for capture on {node.name}"


def test_a_restored_version_that_one_node_cannot_send_is_left_for_a_newer_one_and_leaves_its_slot(
    make: Callable[..., Job],
) -> None:
    """Given a slot of it that went bad after it had been verified: what counted stays until something newer does."""
    job = make(3)
    job.protect()
    job.counts(1)
    for node in job.nodes:
        node.tier.suspend()
    job.write(2, 4)
    struck = job.nodes[1].segment
    (index,) = [slot.index for slot in struck.slots() if slot.version == Version(1, 4)]
    struck.data(index)[77] ^= 1
    job.protect(2, Version(1, 4), HELD_BACK)
    job.begin(5, 2)
    job.write(6, 9, 2)
    assert job.whole() == {Version(1, 1)}
    for node in job.nodes:
        free = [slot for slot in node.segment.slots() if not slot.pins]
        assert len(free) >= SLOTS, f"{len(free)} slots are left for capture on {node.name}"
        assert Version(2, 5) in {slot.version for slot in node.segment.slots()}


def test_where_replicas_are_compared_a_version_counts_when_they_were_found_to_agree(make: Callable[..., Job]) -> None:
    """Else a node that is lost would have the job go back to what nobody has compared, and the rest would be void."""
    job = make(2)
    job.told = replace(job.told, audited=True)
    job.protect()
    job.begin(1)
    wait(lambda: all(node.driver._exchange is not None and node.driver._exchange.done for node in job.nodes))
    assert all(node.encoded() is None for node in job.nodes)
    assert job.nodes[0].segment.mark(Version(1, 1), Mark.CERTIFIED)
    assert job.nodes[0].encoded() == Version(1, 1)
    assert not any(node.status("committed") for node in job.nodes), "the ranks of one node have not heard of it"
    job.nodes[1].segment.mark(Version(1, 1), Mark.CERTIFIED)
    wait(lambda: all(node.status("committed") == [1, 1] for node in job.nodes))
    job.begin(2)
    for node in job.nodes:
        node.segment.mark(Version(1, 2), Mark.MISMATCHED)
    job.waits_for(3)
    assert all(node.status("committed") == [1, 1] for node in job.nodes)


def test_a_version_found_to_hold_a_wrong_replica_is_given_up_however_long_it_would_take_to_send(
    make: Callable[..., Job],
) -> None:
    """It can never be committed: until it had been sent, no other version would be."""
    job = make(2)
    job.told = replace(job.told, audited=True)
    job.protect(mbps=HELD_BACK)
    job.begin(1)
    wait(lambda: all(node.driver._exchange is not None for node in job.nodes))
    assert not any(node.driver._observe().complete for node in job.nodes)
    assert job.nodes[1].segment.mark(Version(1, 1), Mark.MISMATCHED)  # on the other node it was not pinned, so is gone
    job.waits_for(2)
    assert not any(node.segment.slots()[0].pins for node in job.nodes)


def test_what_was_restored_counts_whatever_is_known_of_it(make: Callable[..., Job]) -> None:
    job = make(2)
    job.write(1, 1)
    job.told = replace(job.told, audited=True)
    job.protect(2, Version(1, 1))
    wait(lambda: all(node.status("committed") == [1, 1] for node in job.nodes))


@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_what_ranks_with_few_slots_have_left_out_counts_as_begun(tmp_path: Path, job: str, free: int) -> None:
    """All of their slots are pinned: else the version that is announced next would long be past."""
    path = path_of(job, "n0", 0)
    create(path, replace(SHAPE, slots=2 + free, free=free), 0, {})
    segment = Segment(path)
    segment.open_lineage(1, None, ())
    segment.header.completed = 7
    pinned = PinnedVersions(tmp_path, {0: segment})
    pinned._ranks = (0,)
    assert pinned.begun(1) == (7 if free < SHARED else 0) and pinned.begun(2) == 0
    segment.close()
    remove(job, "n0")
