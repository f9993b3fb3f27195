"""The recovery plan, against brute force over random survivors, and case by case in `plan.txt`."""

import itertools
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.recovery.facts import NodeFacts, RankFacts, trust_of
from ft_plugins.recovery.recovery_plan import Source, Way, newest_committed, plan_recovery
from ft_plugins.recovery.source_choice import choose_source, iteration_bound
from ft_plugins.redundancy.exchange_plan import ExchangePlan, plan_exchange
from ft_plugins.snapshot.segment.slots import SLOTS, Mark, Slot, SlotState, Version, voided_slots
from tests import transcripts
from tests.transcripts import shown

versions = st.builds(Version, st.integers(0, 2), st.integers(1, 5))


@st.composite
def survivors(draw):
    """What the segments of a job's ranks may say: any states, any versions (a version once per rank)."""
    facts = []
    for rank in range(draw(st.integers(1, 5))):
        held = draw(st.lists(versions, min_size=SLOTS, max_size=SLOTS, unique=True))
        states = draw(st.lists(st.sampled_from(SlotState), min_size=SLOTS, max_size=SLOTS))
        slots = tuple(
            Slot(index, state, None if state is SlotState.EMPTY else version)
            for index, (state, version) in enumerate(zip(states, held, strict=True))
        )
        facts.append(RankFacts(rank, slots, draw(st.integers(0, 4)), draw(st.integers(0, 9))))
    return facts


def has(rank, version):
    return any(slot.state is SlotState.CLEAN and slot.version == version for slot in rank.slots)


def belongs(rank, lineage):
    """Whether what a rank has completed is of that lineage: it has opened it, or holds a version of it not newer."""
    newest = max(rank.restorable(), default=Version(0, 0))
    return rank.lineage == lineage or newest.lineage == lineage and (rank.completed or 0) >= newest.iteration


@given(survivors(), st.sets(st.tuples(st.integers(0, 4), versions), max_size=6), st.sets(versions, max_size=2))
def test_the_newest_version_that_every_rank_holds_whole_is_taken(facts, corrupt, banned):
    every = [Version(lineage, iteration) for lineage, iteration in itertools.product(range(3), range(1, 6))]
    common = [
        version
        for version in every
        if version not in banned and all(has(rank, version) and (rank.rank, version) not in corrupt for rank in facts)
    ]

    plan = plan_recovery(facts, corrupt, banned=banned)

    assert plan.version == (common[-1] if common else None)
    # above any version, whatever it is good for: one that was taken over is of a lineage that no rank has opened
    sealed = [version for version in every for rank in facts if has(rank, version)]
    assert plan.lineage == 1 + max([*(rank.lineage for rank in facts), *(version.lineage for version in sealed)])
    # a rank whose segment was made just now has completed nothing, and says nothing about the others
    restored = plan.version.iteration if plan.version else 0
    newest = [rank for rank in facts if belongs(rank, plan.lineage - 1)]
    known = [rank.completed for rank in newest if rank.completed or (rank.lineage and not rank.restorable())]
    assert plan.at_least == (not known) and plan.completed == min(known, default=restored)
    assert plan.lost == max(0, plan.completed - restored)
    assert plan.tier == ("process" if plan.version else "none") and plan.reason
    again = plan_recovery(list(reversed(facts)), frozenset(corrupt), banned=banned)
    assert plan == again, "whoever computes it, it is the same"


@given(survivors())
def test_a_second_recovery_right_after_takes_the_same_version_again(facts):
    """Given a plan carried out on any of the ranks, when the job dies again before it captured anything."""
    plan = plan_recovery(facts)
    for opened in range(len(facts) + 1):
        again = []
        for rank in facts:
            if rank.rank >= opened:
                again.append(rank)
                continue
            voided = voided_slots(rank.slots, plan.version)
            slots = tuple(Slot(s.index, SlotState.DIRTY, None) if s.index in voided else s for s in rank.slots)
            again.append(RankFacts(rank.rank, slots, plan.lineage, plan.version.iteration if plan.version else 0))
        second = plan_recovery(again)
        assert second.version == plan.version
        assert second.lineage == plan.lineage + (1 if opened else 0)


@given(survivors(), st.integers(1, 7))
def test_before_an_iteration_the_plan_is_that_of_a_job_that_never_had_the_versions_from_there_on(facts, before):
    older = [
        replace(rank, slots=tuple(slot for slot in rank.slots if (slot.version or Version(0, 0)).iteration < before))
        for rank in facts
    ]
    plan = plan_recovery(facts, before=before)
    assert plan.version == plan_recovery(older).version
    assert plan.version is None or plan.version.iteration < before
    assert plan.lineage == plan_recovery(facts).lineage, "above all that were ever there"


# ---- with nodes that keep each other's parity ----

DIGEST = 77
SHAPES = {  # nodes of the ranks, sharding groups, losses
    "3 nodes": ("abc", [(0, 1, 2)], 1),
    "3 nodes, tp 2": ("aabbcc", [(0, 2, 4), (1, 3, 5)], 1),
    "2+1+1 ranks": ("aabc", [(0, 1, 2, 3)], 1),
    "4 nodes in two pairs": ("aabbccdd", [(0, 2), (1, 3), (4, 6), (5, 7)], 1),
    "4 nodes, one loss": ("abcd", [(0, 1, 2, 3)], 1),
    "4 nodes, two losses": ("abcd", [(0, 1, 2, 3)], 2),
    "5 nodes, tp 2, two losses": ("aabbccddee", [(0, 2, 4, 6, 8), (1, 3, 5, 7, 9)], 2),
}
few = st.builds(Version, st.integers(1, 2), st.integers(1, 3))


@dataclass(frozen=True)
class Wreck:
    """A job after a failure. The ranks of position i run on node i of now; `facts` are what their own segments say."""

    plan: ExchangePlan
    facts: tuple[RankFacts, ...]
    nodes: tuple[NodeFacts, ...]
    corrupt: frozenset[tuple[int, Version]]
    banned: frozenset[Version]


def facts_of(plan, nodes, lineage=2):
    """What the ranks' own segments say: those that lie on the node where the rank runs now; others are made anew."""
    facts = []
    for rank in range(len(plan.position_of_rank)):
        held = nodes[plan.position_of_rank[rank]].slots
        slots = tuple(Slot(i, SlotState.CLEAN, version) for i, version in enumerate(sorted(held.get(rank, ()))))
        facts.append(RankFacts(rank, slots, lineage if rank in held else 0, 3 if rank in held else 0))
    return tuple(facts)


@st.composite
def wrecks(draw):
    """Nodes that stood at a position each; some are lost, some stand elsewhere now, some hold less than they should."""
    on, groups, losses = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    plan = plan_exchange(list(on), groups, [100] * len(on), losses)
    whole = draw(st.sets(few, min_size=1, max_size=3))  # of these most have everything
    stood = []
    for position, ranks in enumerate(plan.ranks):
        fate = draw(st.sampled_from(["there", "there", "there", "there", "lost", "of another plan", "poor"]))
        if fate == "lost":
            stood.append(NodeFacts({}))
            continue
        slots, parity = {rank: frozenset(whole) for rank in ranks}, frozenset(whole)
        if fate == "poor":
            slots = {rank: frozenset(draw(st.sets(few, max_size=3))) for rank in ranks}
            parity = frozenset(draw(st.sets(few, max_size=2)))
        stood.append(NodeFacts(slots, parity, position, DIGEST + (fate == "of another plan"), lineage=2))
    order = draw(st.just(range(len(stood))) | st.permutations(range(len(stood))))
    nodes = tuple(stood[position] for position in order)
    corrupt = draw(st.sets(st.tuples(st.integers(0, len(on) - 1), few), max_size=3))
    return Wreck(plan, facts_of(plan, nodes), nodes, frozenset(corrupt), frozenset(draw(st.sets(few, max_size=1))))


def sound(wreck, node, rank, version):
    return version in node.slots.get(rank, ()) and (rank, version) not in wreck.corrupt


def stands(wreck, position, version):
    """The nodes that have all that lay at a position."""
    return [
        index
        for index, node in enumerate(wreck.nodes)
        if node.position == position and node.plan_digest == DIGEST and version in node.parity
        and all(sound(wreck, node, rank, version) for rank in wreck.plan.ranks[position])
    ]  # fmt: skip


def ways(wreck, version):
    """By rank, what would do; None where nothing does for one of them."""
    found = []
    for facts in wreck.facts:
        elsewhere = [i for i, node in enumerate(wreck.nodes) if sound(wreck, node, facts.rank, version)]
        (section,) = [s for s in wreck.plan.sections if any(e.rank == facts.rank for t in s.streams for e in t)]
        gone = [position for position in section.positions if not stands(wreck, position, version)]
        if has(facts, version) and (facts.rank, version) not in wreck.corrupt:
            found.append({Source(Way.OWN)})
        elif elsewhere:
            found.append({Source(Way.FETCH, index) for index in elsewhere})
        elif len(gone) <= wreck.plan.losses:
            found.append({Source(Way.DECODE)})
        else:
            return None
    return found


@settings(max_examples=600, deadline=None)
@given(wrecks())
def test_the_newest_version_that_every_rank_owns_fetches_or_decodes_is_taken(wreck):
    every = [Version(lineage, iteration) for lineage, iteration in itertools.product(range(1, 3), range(1, 4))]
    can_be_had = [version for version in every if version not in wreck.banned and ways(wreck, version) is not None]

    plan = plan_recovery(wreck.facts, wreck.corrupt, wreck.nodes, wreck.plan, DIGEST, wreck.banned)

    assert plan.version == (can_be_had[-1] if can_be_had else None)
    assert plan.lineage == 1 + max(n.lineage for n in wreck.nodes)
    if plan.version is None:
        assert plan.tier == "none" and plan.sources == ()
        return
    would_do = ways(wreck, plan.version)
    assert would_do is not None and len(plan.sources) == len(would_do)
    assert all(source in sources for source, sources in zip(plan.sources, would_do, strict=True))
    assert plan.tier == ("process" if {source.way for source in plan.sources} == {Way.OWN} else "node")
    decoded = [rank for rank, source in enumerate(plan.sources) if source.way is Way.DECODE]
    for position, index in plan.holders.items():
        assert index in stands(wreck, position, plan.version)
    for rank in decoded:
        for position in wreck.plan.section_of_rank[rank].positions:
            assert (position in plan.holders) != (position in plan.gone), "either it is read from, or not counted on"
            assert position in plan.holders or not stands(wreck, position, plan.version)
        assert wreck.plan.position_of_rank[rank] in plan.gone
    shuffled = list(reversed(wreck.facts))
    assert plan_recovery(shuffled, wreck.corrupt, wreck.nodes, wreck.plan, DIGEST, wreck.banned) == plan


@given(survivors(), st.dictionaries(versions, st.sampled_from(Mark)), st.sets(st.tuples(st.integers(0, 4), versions)))
def test_with_marks_it_is_still_one_version_that_all_have(facts, marks, corrupt):
    clean = [slot.version for slot in facts[0].slots if slot.version and slot.state is SlotState.CLEAN]
    said = {slot.index: marks.get(slot.version, Mark.NONE) for slot in facts[0].slots if slot.version in clean}
    heard = tuple(replace(slot, mark=said.get(slot.index, Mark.NONE)) for slot in facts[0].slots)
    facts = [replace(facts[0], slots=heard), *facts[1:]]
    known = {s.version: s.mark for s in facts[0].slots if s.version and s.state is SlotState.CLEAN}
    common = {
        version
        for version in known
        if known[version] is not Mark.MISMATCHED
        and all(has(one, version) and (one.rank, version) not in corrupt for one in facts)
    }
    plan = plan_recovery(facts, corrupt)
    if not common:
        assert plan.version is None
        return
    good = {version for version in common if known[version] in (Mark.CERTIFIED, Mark.DIVERGED)}
    compared = Mark.CERTIFIED in known.values()
    assert plan.version == max(good if compared and good else common)
    assert plan.mark is known[plan.version]


# ---- case by case ----


MANY = (
    [f"n{rank // 8}" for rank in range(4096)],
    [tuple(range(first + start, start + 512, 8)) for start in range(0, 4096, 512) for first in range(8)],
    1,
)


class Job:
    """What ranks and nodes report, and the plan that follows: its text, then what the text leaves out."""

    def __init__(self):
        self.facts, self.nodes, self.corrupted = {}, [], []
        self.exchange, self.digest = None, DIGEST

    # ---- what the ranks' segments say ----

    def rank(self, *numbers, holds=(), lineage=1, completed=0, damaged=(), unreadable=(), **more):
        """Clean slots with these iterations of the lineage, of which some are unreadable."""
        held = [Slot(at, SlotState.CLEAN, Version(lineage, one)) for at, one in enumerate(_all(holds))]
        for at in _all(unreadable):
            held[at] = Slot(at, SlotState.DIRTY, None, damaged=True)
        for number in numbers:
            self.facts[number] = RankFacts(number, tuple(held), lineage, completed, damaged=_all(damaged), **more)

    def ranks(self, first, last, **more):
        self.rank(*range(first, last + 1), **more)

    def empty(self, *numbers, **more):
        """Segments that were made just now."""
        self.facts |= {number: RankFacts(number, (), 0, 0, **more) for number in numbers}

    def first_capture(self, number, **more):
        """The first version is being written."""
        slots = (Slot(0, SlotState.DIRTY, Version(1, 1), **more),)
        self.facts[number] = RankFacts(number, slots, 1, 0, from_nothing=True)

    def record(self, number, **more):
        self.facts[number] = replace(self.facts[number], **more)

    def mark(self, number, iteration, word):
        facts = self.facts[number]
        marked = [replace(one, mark=Mark[word.upper()]) if one.version and one.version.iteration == iteration else one
                  for one in facts.slots]  # fmt: skip
        self.facts[number] = replace(facts, slots=tuple(marked))

    def corrupt(self, number, version):
        self.corrupted.append((number, version))

    # ---- what the SMPs of nodes say ----

    def node(self, rank=None, holds=(), parity=(), completed=None, marks=None, **more):
        slots = {} if rank is None else {rank: frozenset(_all(holds))}
        done = {} if completed is None else {rank: completed}
        known = {} if marks is None else {holds: Mark[marks.upper()]}
        self.nodes.append(NodeFacts(slots, frozenset(_all(parity)), completed=done, marks=known, **more))

    def job(self, shape, kept=(), counted=4):
        """Version `counted` is complete; the nodes' ranks hold the iterations `kept` beside it."""
        on, groups, losses = SHAPES.get(shape) or MANY
        self.exchange = plan_exchange(list(on), groups, [100] * len(on), losses)
        held = frozenset(Version(1, iteration) for iteration in (counted, *_all(kept)))
        whole = Version(1, counted)
        for position, ranks in enumerate(self.exchange.ranks):
            slots = dict.fromkeys(ranks, held)
            self.nodes.append(NodeFacts(slots, frozenset([whole]), position, DIGEST, lineage=1, committed=whole))

    def lose(self, *positions):
        for position in positions:
            self.nodes[position] = NodeFacts({})

    def without_slots(self, position):
        self.nodes[position] = replace(self.nodes[position], slots={})

    def fetched(self, rank, source, target):
        """A slot lies on two nodes."""
        slots = {**self.nodes[target].slots, rank: self.nodes[source].slots[rank]}
        self.nodes[target] = replace(self.nodes[target], slots=slots)

    def places(self, *order):
        """Nodes have changed places."""
        self.nodes = [self.nodes[one] for one in order]

    def knows(self, position, completed=None, parity=None, **more):
        if completed is not None:
            more["completed"] = {self.nodes[position].position: completed}
        if parity is not None:
            more["parity"] = frozenset(_all(parity))
        self.nodes[position] = replace(self.nodes[position], **more)

    # ---- what follows ----

    def plan(self):
        plan = self._plan(None)
        said = [plan.table()]
        if plan.tier == "node":
            runs = [(source, len(list(same))) for source, same in itertools.groupby(plan.sources)]
            said.append("sources: " + ", ".join(f"{count} {_text(source)}" for source, count in runs))
            holders = [node for position, node in plan.holders.items() if node != position]
            said.append(f"holders elsewhere: {shown(holders)}; gone: {shown(plan.gone)}")
        return "\n".join(said + ["state is lost"] * plan.state_lost + ["nothing is lost"] * plan.fresh)

    def reason(self):
        return self._plan(None).reason

    def proves(self, at):
        """What is said where the state of an iteration before is loaded."""
        return self._plan(None).table(at)

    def choose(self, mode, loaded=0):
        plan = choose_source(self._plan(iteration_bound(mode)), mode, loaded)
        return f"{plan.table()}\nrefused: {plan.refused}" if plan.refused else plan.table()

    def trust(self):
        return trust_of(list(self.facts.values()))

    def committed(self, base=None):
        return shown(newest_committed(self.nodes, base, self.exchange, self.digest))

    def _plan(self, before):
        facts = list(self.facts.values()) or facts_of(self.exchange, self.nodes)
        return plan_recovery(facts, self.corrupted, self.nodes, self.exchange, self.digest, before=before)


def _all(given):
    return given if isinstance(given, tuple) else (given,)


def _text(source):
    return shown(source.way) if source.node is None else f"{shown(source.way)} {source.node}"


test_plan = transcripts.of(__file__, Job)
