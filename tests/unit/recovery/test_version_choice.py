"""Which version a job goes on from, over a life of losses and restarts: plan and agreement, against brute force.

`plan_recovery` and `decide` are the code under test, on real exchange plans. Around them stands a job in miniature:
ranks that capture as the fence lets them, slots and vaults that keep what is pinned, SMPs that report, follow, send and
are replaced, nodes that are lost with their memory, recoveries that die at any point and begin anew. Each capture is
labelled with the incarnation that made it, and parity with the labels that went into it. Schedules are random.

What must hold: the newest version that can be had at all is taken, all of it by one incarnation; what counted, and was
complete on every node, is never given up for an older one while no more nodes are lost than parity makes up for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ResumeError
from ft_plugins.recovery.facts import NodeFacts, RankFacts
from ft_plugins.recovery.recovery_plan import RecoveryPlan, Way, newest_committed, plan_recovery
from ft_plugins.recovery.source_choice import choose_source
from ft_plugins.redundancy.exchange_plan import plan_exchange
from ft_plugins.smp.tree.agreement import ExchangeDecision, ExchangeEpoch, NodeReport, decide, merge, summarize
from ft_plugins.snapshot.segment.slots import (
    Pin,
    Slot,
    SlotState,
    Version,
    choose,
    pinnable_slot,
    slots_for,
    voided_slots,
)

DIGEST = 77
SHAPES = {  # nodes of the ranks, sharding groups, losses
    "3 nodes": ("abc", [(0, 1, 2)], 1),
    "3 nodes, tp 2": ("aabbcc", [(0, 2, 4), (1, 3, 5)], 1),
    "4 nodes in two pairs": ("aabbccdd", [(0, 2), (1, 3), (4, 6), (5, 7)], 1),
    "4 nodes, two losses": ("abcd", [(0, 1, 2, 3)], 2),
}


class Crash(Exception):
    """The processes die."""


class Memory:
    """The slots of a segment or of a vault, and who made what is in them."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(index, SlotState.EMPTY, None) for index in range(count)]
        self.makers: dict[int, int] = {}  # by slot: the incarnation that captured it
        self.lineage, self.completed, self.from_nothing = 0, 0, False

    def write(self, version: Version) -> None:
        """A slot is DIRTY, and will hold `version`."""
        again = [slot.index for slot in self.slots if slot.version == version]
        index = again[0] if again else choose(self.slots)
        self.slots[index] = Slot(index, SlotState.DIRTY, version)

    def seal(self, version: Version, maker: int) -> None:
        for slot in self.slots:
            if slot.version == version:
                self.slots[slot.index] = replace(slot, state=SlotState.CLEAN)
                self.makers[slot.index] = maker

    def maker(self, version: Version) -> int | None:
        """Whose `version` is restorable here; None for nobody's."""
        clean = (slot for slot in self.slots if slot.state is SlotState.CLEAN)
        return next((self.makers[slot.index] for slot in clean if slot.version == version), None)

    def clean(self) -> frozenset[Version]:
        return frozenset(slot.version for slot in self.slots if slot.state is SlotState.CLEAN and slot.version)

    def pinned(self, version: Version, purpose: Pin) -> bool:
        return any(slot.version == version and slot.pins & purpose for slot in self.slots)

    def pin(self, version: Version, purpose: Pin) -> bool:
        index = pinnable_slot(self.slots, version)
        if index is not None:
            self.slots[index] = replace(self.slots[index], pins=self.slots[index].pins | purpose)
        return index is not None

    def unpin(self, purpose: Pin, but: Iterable[Version | None] = ()) -> None:
        kept = set(but)
        self.slots = [slot if slot.version in kept else replace(slot, pins=slot.pins & ~purpose) for slot in self.slots]

    def void_after(self, base: Version | None) -> None:
        for index in voided_slots(self.slots, base):
            self.slots[index] = Slot(index, SlotState.DIRTY, None)


@dataclass
class Node:
    """A machine: segments of the ranks that run or ran on it, a vault, an SMP that may be replaced."""

    ranks: dict[int, Memory] = field(default_factory=dict)
    vault: Memory = field(default_factory=lambda: Memory(2))
    position: int | None = None  # at which it was told to protect
    file: Version | None = None  # what counts, in the run directory
    base: Version | None = None
    counted_before: Version | None = None
    counted: Version | None = None
    directive: ExchangeDecision = field(default_factory=ExchangeDecision)
    missed: Version | None = None
    running: Version | None = None
    done: set[int] = field(default_factory=set)
    gathering: Version | None = None
    taken: dict[int, int] = field(default_factory=dict)

    def facts(self) -> NodeFacts:
        return NodeFacts(
            {rank: memory.clean() for rank, memory in self.ranks.items()}, self.vault.clean(), self.position,
            DIGEST if self.position is not None else 0, {r: m.completed for r, m in self.ranks.items()},
            max([memory.lineage for memory in self.ranks.values()], default=0), self.counted,
        )  # fmt: skip

    def suspend(self) -> None:
        self.running, self.gathering = None, None

    def start_smp(self) -> None:
        """An SMP that knows what stands in headers and in the run directory."""
        self.suspend()
        self.directive, self.missed = ExchangeDecision(), None
        kept = self.file is not None and self.file in self.vault.clean()
        kept = kept and all(self.file and memory.pinned(self.file, Pin.NODE) for memory in self.ranks.values())
        self.counted = self.file if kept else None

    def protect(self, position: int, ranks: Iterable[int], base: Version | None, counts: Version | None) -> None:
        self.ranks = {rank: self.ranks[rank] for rank in ranks}
        if self.position != position:
            self.vault = Memory(2)
        self.position, self.base, self.counted_before = position, base, counts
        kept = {version for version in (base, counts) if version is not None}
        self.vault.void_after(base)
        for memory in self.ranks.values():
            for version in kept:
                memory.pin(version, Pin.NODE)
            memory.unpin(Pin.SOURCE)
            memory.unpin(Pin.NODE, but=kept)
        if counts is not None and counts in self.vault.clean():
            self.vault.pin(counts, Pin.NODE)
            self.vault.unpin(Pin.NODE, but=[counts])
            self.file = counts
        self.start_smp()

    def report(self, lineage: int) -> NodeReport:
        begun = [s.version.iteration for memory in self.ranks.values() for s in memory.slots
                 if s.version and s.version.lineage == lineage]  # fmt: skip
        ready = self.running is not None and not self.done and self.running in self.vault.clean()
        exchange = self.running or self.directive.exchange
        return NodeReport(max(begun, default=0), exchange, self.missed, self.running if ready else None, self.counted)

    def follow(self, directive: ExchangeDecision) -> None:
        if directive.committed is not None and directive.committed != self.counted:
            self._count(directive.committed)
        version = directive.exchange
        if version != self.directive.exchange:
            self.running, self.missed = None, None
            left = version is not None and self.base is not None and version > self.base
            left = left and self.base not in (directive.committed, self.counted, self.counted_before)
            for memory in self.ranks.values():
                memory.unpin(Pin.SOURCE, but=[version])
                if left:
                    memory.unpin(Pin.NODE, but={slot.version for slot in memory.slots} - {self.base})
            if version is not None and version not in self.vault.clean() and self.gathering != version:
                self.gathering, self.taken = version, {}
                self.vault.write(version)
        self.directive = directive

    def _count(self, version: Version) -> None:
        if version not in self.vault.clean() or not all(m.pin(version, Pin.NODE) for m in self.ranks.values()):
            return
        for memory in self.ranks.values():
            memory.unpin(Pin.NODE, but=[version])
        self.vault.pin(version, Pin.NODE)
        self.vault.unpin(Pin.NODE, but=[version])
        self.counted = self.file = version

    def poll(self, peers: set[int]) -> None:
        version = self.directive.exchange
        if version is None or self.running is not None or self.missed == version:
            return
        for memory in self.ranks.values():
            if memory.pin(version, Pin.SOURCE):
                continue
            newest = max((slot.version for slot in memory.slots if slot.version), default=version)
            coming = any(slot.version == version and slot.state is SlotState.DIRTY for slot in memory.slots)
            if newest > version and not coming:
                self.missed = version
            return
        self.running, self.done = version, set(peers)

    def take(self, version: Version, source: int, maker: int, peers: set[int]) -> bool:
        """Whether all of `source` is here then."""
        if self.gathering == version:
            self.taken[source] = maker
            if self.taken.keys() == peers:
                (one,) = set(self.taken.values())  # parity over two incarnations' bytes is no parity
                self.vault.seal(version, one)
                self.gathering = None
            return True
        return version in self.vault.clean()


class Job:
    """All nodes, in the order of their positions now, and the job's own memory of nothing."""

    def __init__(self, random: Random, name: str, interval: int) -> None:
        on, groups, losses = SHAPES[name]
        self.random, self.interval = random, interval
        self.plan = plan_exchange(list(on), groups, [100] * len(on), losses)
        self.peers = [set[int]() for _ in self.plan.nodes]
        for section in self.plan.sections:
            for position in section.positions:
                self.peers[position] |= set(section.positions) - {position}
        self.nodes = [Node() for _ in self.plan.nodes]
        self.incarnation, self.lineage = 0, 0
        self.base: Version | None = None
        self.safe: Version | None = None  # counts, and was complete on every node
        self.floor: Version | None = None  # nothing older will do, with the nodes that are lost
        self.before, self.heard = ExchangeDecision(), dict[int, NodeReport]()
        self.restored: list[Version | None] = []
        self.begun_anew = False  # a recovery from nothing died after a rank's segment had changed
        self.recover()

    def memories(self) -> list[tuple[int, Memory]]:
        """Each rank's own segment."""
        return [(r, self.nodes[at].ranks[r]) for at, ranks in enumerate(self.plan.ranks) for r in ranks]

    # ---- training, and the agreement ----

    def train(self, rank: int) -> None:
        """It begins to capture, or seals. The fence: not before all have sealed what is two older."""
        own = dict(self.memories())
        sealed = {r: max([v.iteration for v in m.clean() if v.lineage == self.lineage], default=self._first())
                  for r, m in own.items()}  # fmt: skip
        version = Version(self.lineage, sealed[rank] + 1)
        if any(slot.version == version for slot in own[rank].slots):
            own[rank].seal(version, self.incarnation)
        elif min(sealed.values()) >= sealed[rank] - 1:
            own[rank].completed = version.iteration
            own[rank].write(version)

    def _first(self) -> int:
        return self.base.iteration if self.base else 0

    def beat(self, node: Node, deaf: bool) -> None:
        position = self.nodes.index(node)
        self.heard[position] = node.report(self.lineage)
        epoch = ExchangeEpoch(self.lineage, self.base, len(self.nodes), self.interval)
        self.before = decide(epoch, self.before, merge(summarize(*each) for each in self.heard.items()))
        if not deaf:
            node.follow(self.before)

    def send(self, source: int, target: int) -> None:
        node = self.nodes[source]
        if node.running is not None and target in self.peers[source]:
            (maker,) = {memory.maker(node.running) for memory in node.ranks.values()}
            assert maker is not None, "what is being sent is overwritten"
            if self.nodes[target].take(node.running, source, maker, self.peers[target]):
                node.done.discard(target)

    def replace_smp(self, node: Node) -> None:
        node.start_smp()
        if node is self.nodes[0]:
            self.before, self.heard = ExchangeDecision(), {}

    def complete(self, version: Version) -> bool:
        """Slots and parity of it, on every node."""
        return all(version in m.clean() for _, m in self.memories()) and all(
            version in node.vault.clean() for node in self.nodes
        )

    def check(self) -> None:
        if self.safe is not None:
            whole = [v for v in self.nodes[0].vault.clean() if v >= self.safe and self.complete(v)]
            assert whole, f"{self.safe} had counted, and is not complete any more"
        for version in {node.counted for node in self.nodes if node.counted}:  # the first that hears of it makes it so
            if self.complete(version):
                self.safe = max(version, self.safe or version)

    def step(self) -> None:
        node = self.random.choice(self.nodes)
        match self.random.choices(["train", "beat", "poll", "send", "replace"], [6, 4, 3, 8, 0.1])[0]:
            case "train":
                self.train(self.random.choice(self.memories())[0])
            case "beat":
                self.beat(node, deaf=self.random.random() < 0.2)
            case "poll":
                node.poll(self.peers[self.nodes.index(node)])
            case "send":
                for source, target in itertools.permutations(range(len(self.nodes)), 2):
                    if self.random.random() < 0.5:
                        self.send(source, target)
            case "replace":
                self.replace_smp(node)
        self.check()

    # ---- losses and recoveries ----

    def fail(self) -> None:
        """The processes die; with some of the nodes, perhaps, or with all in other places afterwards."""
        for node in self.nodes:
            node.suspend()
        lost = self.random.sample(range(len(self.nodes)), self.random.choice([0, 0, 1, 1, 1, 2, 3]))
        # a node that is lost before its parity is back counts beside the ones before it
        within = all(len(set(lost) & set(s.positions)) <= self.plan.losses for s in self.plan.sections)
        self.floor = self.safe if within else None
        for position in lost:
            self.nodes[position] = Node()
        if self.random.random() < 0.15:
            self.random.shuffle(self.nodes)
        kept = [node.position == position for position, node in enumerate(self.nodes)]
        self.safe = self.safe if all(kept) else None
        self.recover()

    def recover(self) -> None:
        """Until one recovery is through."""
        for _ in range(50):
            self.before, self.heard = ExchangeDecision(), {}
            for position, node in enumerate(self.nodes):
                node.suspend()
                for rank in self.plan.ranks[position]:
                    node.ranks.setdefault(rank, Memory(slots_for(Pin.NODE, Pin.SOURCE)))
            try:
                self._recover_once()
                return
            except Crash:
                if self.random.random() < 0.2:
                    self.nodes[self.random.randrange(len(self.nodes))] = Node()
                    self.floor = self.safe = None
                    self.begun_anew = False
        raise AssertionError("no recovery in 50 came through")

    def _perhaps_crash(self) -> None:
        if self.restored and self.random.random() < 0.04:
            raise Crash

    def _planned(self) -> RecoveryPlan:
        facts = []
        for rank, m in self.memories():
            lineage = max([m.lineage, *(slot.version.lineage for slot in m.slots if slot.version)])
            facts.append(RankFacts(rank, tuple(m.slots), lineage, m.completed, m.from_nothing))
        self.random.shuffle(facts)
        return plan_recovery(facts, (), [node.facts() for node in self.nodes], self.plan, DIGEST)

    def _recover_once(self) -> None:
        versions, whose = self.can_be_had()
        plan = self._planned()
        assert plan.version == max(versions, default=None), f"{plan.table()}, but {sorted(versions)} can be had"
        taken = plan.version or Version(0, 0)
        assert self.floor is None or taken >= self.floor, f"{self.floor} counts: {plan.table()}"
        everywhere = [memory for node in self.nodes for memory in node.ranks.values()]
        seen = {version.lineage for memory in everywhere for version in memory.clean()}
        assert plan.lineage > max([*seen, *(memory.lineage for memory in everywhere)]), "a lineage is opened again"
        if plan.version is None:
            known = any(node.counted for node in self.nodes) and not self._void_below()
            try:
                choose_source(plan, "auto", 0)
                assert not known, "something had counted, and training starts from the beginning without a word"
            except ResumeError:
                assert not self.begun_anew, "it was asked for, and had begun"
                plan = choose_source(plan, "fresh", 0)  # as the user says then
        elif self.random.random() < 0.05:
            plan, self.safe, self.floor = choose_source(plan, "fresh", 0), None, None
        else:
            (maker,) = whose[plan.version]
            self._rebuild(plan, maker)
        self._open(plan)
        heard = newest_committed([node.facts() for node in self.nodes], plan.version, self.plan, DIGEST)
        for position in self.random.sample(range(len(self.nodes)), len(self.nodes)):
            self._perhaps_crash()
            self.nodes[position].protect(position, self.plan.ranks[position], plan.version, heard)
        self.begun_anew = False
        self.lineage, self.base = plan.lineage, plan.version
        self.incarnation += 1
        self.restored.append(plan.version)
        if plan.version is None or self.safe is not None and self.safe > plan.version:
            self.safe = None

    def _rebuild(self, plan: RecoveryPlan, maker: int) -> None:
        own = self.memories()
        assert plan.version is not None
        for rank, memory in self.random.sample(own, len(own)):
            if plan.sources[rank].way is not Way.OWN:
                memory.write(plan.version)
                self._perhaps_crash()
                memory.seal(plan.version, maker)
        again = self._planned()
        assert again.version == plan.version and {source.way for source in again.sources} == {Way.OWN}
        assert {memory.maker(plan.version) for _, memory in own} == {maker}, "two incarnations in one version"

    def _open(self, plan: RecoveryPlan) -> None:
        own = self.memories()
        for _, memory in self.random.sample(own, len(own)):
            self._perhaps_crash()
            self.begun_anew = plan.version is None
            if plan.version is None:  # recorded first
                memory.lineage, memory.from_nothing = plan.lineage, True
                self._perhaps_crash()
            memory.void_after(plan.version)
            self._perhaps_crash()
            memory.lineage, memory.completed = plan.lineage, plan.version.iteration if plan.version else 0
            memory.from_nothing = plan.version is None

    # ---- brute force ----

    def _void_below(self) -> int:
        """The lineage before which everything is void, as a rank was told; 0 for none."""
        told = [memory for node in self.nodes for memory in node.ranks.values()]
        newest = max(memory.lineage for memory in told)
        return newest if any(m.from_nothing and m.lineage == newest for m in told) else 0

    def can_be_had(self) -> tuple[set[Version], dict[Version, set[int]]]:
        """Every version that each rank can have in some way, and whose captures the parts of it are."""
        everywhere = [(rank, memory) for node in self.nodes for rank, memory in node.ranks.items()]
        candidates = set().union(*(memory.clean() for _, memory in everywhere))
        found: dict[Version, set[int]] = {}
        for version in candidates:
            if version.lineage < self._void_below():
                continue
            makers: set[int] = set()
            for rank, _ in self.memories():
                held = {m.maker(version) for r, m in everywhere if r == rank} - {None}
                section = self.plan.section_of_rank[rank]
                standing = {
                    node.position: node for node in self.nodes
                    if node.position in section.positions and node.vault.maker(version) is not None
                    and all(r in node.ranks and version in node.ranks[r].clean()
                            for r in self.plan.ranks[node.position])
                }  # fmt: skip
                if not held and len(section.positions) - len(standing) <= section.placement.losses:
                    held = {node.vault.maker(version) for node in standing.values()}
                if not held:
                    break
                makers |= {maker for maker in held if maker is not None}
            else:
                found[version] = makers
                assert len(makers) == 1, f"{version} is there by incarnations {makers}"
        return set(found), found


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(SHAPES)), st.sampled_from([1, 1, 2, 3]))
def test_over_a_life_of_losses_the_newest_version_that_can_be_had_is_taken_and_what_counts_is_not_lost(
    seed: int, shape: str, interval: int
) -> None:
    random = Random(seed)
    job = Job(random, shape, interval)
    for _ in range(8):
        for _ in range(random.choice([5, 60, 300])):
            job.step()
        job.fail()


def test_such_lives_do_count_versions_and_restore_them_from_parity_or_are_refused() -> None:
    """The test above would be worth nothing if its jobs never came so far."""
    safe, losses, anew = 0, 0, 0
    for seed in range(25):
        random = Random(seed)
        job = Job(random, random.choice(sorted(SHAPES)), 1)
        for _ in range(4):
            for _ in range(200):
                job.step()
            safe += job.safe is not None
            fresh = list(job.nodes)
            job.fail()
            losses += job.base is not None and any(node not in fresh for node in job.nodes)
            anew += job.base is None
    assert safe > 30 and losses > 20 and anew > 10, (safe, losses, anew)
