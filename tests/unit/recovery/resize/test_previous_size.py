"""State of a previous size: which version is restored, which nodes have it, and what is refused."""

from dataclasses import replace

import pytest

from ft_plugins.model.host import resizable
from ft_plugins.recovery.facts import NodeFacts
from ft_plugins.recovery.recovery_plan import Way
from ft_plugins.recovery.resize.previous_size import (
    ResizePlan,
    assign_nodes,
    newest_references,
    plan_current_size,
    plan_previous_size,
    read_previous_sizes,
)
from ft_plugins.smp.serve.job_file import refer
from ft_plugins.snapshot.segment.slots import Mark, Version

from .protections import protection

V3, V4, V5 = Version(1, 3), Version(1, 4), Version(1, 5)
KNOWN = {}  # by the digest of the job file


def referred(told):
    """The reference to a protection, as a report names it."""
    reference, _ = refer(told)
    KNOWN[reference.job] = told
    return reference.block()


def described(reference):
    return replace(KNOWN[reference.job], lineage=reference.lineage, position=reference.position)


def read(*reports):
    return read_previous_sizes(*reports, described=described)


def answer(ranks, size=4, parity=None, position=None):
    """What an SMP says; with a `position` it was protected."""
    told = protection(position) if position is not None else None
    held = [[r, [0, 0], 1, 5, False, [[v.lineage, v.iteration] for v in versions]] for r, versions in ranks.items()]
    return {
        "sizes": [[size, held]] if held else [],
        "fingerprints": [],
        "parity": [[v.lineage, v.iteration] for v in parity or []],
        "committed": [1, 4] if parity else None,
        "position": position,
        "plan": told.digest if told else 0,
        "protection": referred(told) if told else None,
        "released": 0,
    }


def test_the_newest_version_that_all_previous_ranks_have_is_chosen():
    (size,) = read([answer({0: [V3, V4], 1: [V4, V5]}), answer({2: [V4], 3: [V3, V4]})])
    plan = plan_previous_size(size)
    assert plan.version == V4 and {source.way for source in plan.sources} == {Way.OWN}
    assert [size.holder(rank, V4) for rank in range(4)] == [0, 0, 1, 1] and plan.completed == 5
    assert size.holder(1, V3) is None and size.coordinates == dict.fromkeys(range(4), (0, 0))


def test_a_lost_node_is_made_up_for_by_parity():
    told = [answer({rank: [V4, V5]}, parity=[V4], position=rank) for rank in (0, 1, 2)]
    (size,) = read(told)
    plan = plan_previous_size(size)
    assert plan.version == V4 and plan.sources[3].way is Way.DECODE and plan.gone == (3,)
    assert plan.holders == {0: 0, 1: 1, 2: 2}
    assert plan_previous_size(size, banned=[V4]).version is None


def test_too_many_losses_are_reported_as_lost_state():
    (size,) = read([answer({rank: [V4]}, parity=[V4], position=rank) for rank in (0, 1)])
    plan = plan_previous_size(size)
    assert plan.version is None and plan.state_lost and "RAIM5 makes up for 1" in plan.reason


def test_a_corrupt_slot_counts_as_lost():
    (size,) = read([answer({rank: [V4]}, parity=[V4], position=rank) for rank in range(4)])
    plan = plan_previous_size(size, corrupt=[(2, V4)])
    assert plan.version == V4 and plan.sources[2].way is Way.DECODE
    assert plan_previous_size(size, corrupt=[(2, V4), (1, V4)]).version is None


def test_parity_of_another_size_is_of_no_use():
    told = [answer({rank: [V4]}, size=5, parity=[V4], position=rank) for rank in range(4)]
    (size,) = read(told)
    assert size.protection is None and plan_previous_size(size).version is None


@pytest.mark.parametrize("newest", [0, 1, 2])
def test_the_newest_protection_is_used_whichever_node_answers_first(newest):
    """A node that was not there for the newest lineage knows of an older one; the last that answers is a spare."""
    told = [answer({rank: [V4]}, parity=[V4], position=rank) for rank in (0, 1, 2)]
    told[newest]["protection"] = referred(replace(protection(newest), lineage=4, endpoints=(("127.0.0.1", 2),) * 4))
    (size,) = read(told[:2], told[2:])
    assert size.protection is not None
    assert (size.protection.lineage, size.protection.endpoints[0]) == (4, ("127.0.0.1", 2))


def test_sizes_are_told_apart():
    told = [answer({0: [V4], 1: [V4]}, size=2), answer({0: [V5]}, size=1)]
    one, two = read(told)
    assert (one.world_size, plan_previous_size(one).version) == (1, V5)
    assert (two.world_size, plan_previous_size(two).version) == (2, V4)


def test_the_state_of_a_spare_is_fetched_to_a_node_of_the_job_and_its_parity_is_used():
    """Four nodes of one rank were, two are: one is lost, one has no part."""
    members = [answer({rank: [V4]}, parity=[V4], position=rank) for rank in (0, 1)]
    spare = answer({2: [V4]}, parity=[V4], position=2)
    (without,) = read(members)
    assert plan_previous_size(without).version is None and plan_previous_size(without).state_lost
    (size,) = read(members, [spare])
    plan = plan_previous_size(size)
    assert (size.members, plan.version, size.holder(2, V4)) == (2, V4, 2)
    assert [source.way for source in plan.sources] == [Way.OWN, Way.OWN, Way.OWN, Way.DECODE]
    assert plan.holders == {0: 0, 1: 1, 2: 2} and plan.gone == (3,), "decoded with the spare's help"
    where = assign_nodes(size, plan, {})
    assert where == {0: 0, 1: 1, 2: 0, 3: 1} and max(where.values()) < size.members
    assert assign_nodes(size, plan, {(2, V4): 1})[2] == 1, "it was put together there"
    assert plan_previous_size(size, corrupt=[(2, V4)]).version is None, "what cannot be read of it is lost"


def test_a_member_is_preferred_to_a_spare_and_a_newer_version_on_the_spare_alone_is_not_used():
    members = [answer({0: [V4], 1: [V4], 2: [V4]}), answer({3: [V4]})]
    (size,) = read(members, [answer({2: [V4, V5]})])
    plan = plan_previous_size(size)
    assert plan.version == V4 and assign_nodes(size, plan, {}) == {0: 0, 1: 0, 2: 0, 3: 1}


def test_state_that_the_job_continued_without_is_never_restored():
    told = [answer({rank: [V4]}) for rank in range(4)]
    told[2] |= {"released": 2}  # it was a spare while lineage 2 counted
    (size,) = read(told)
    plan = plan_previous_size(size)
    assert plan.version is None and plan.state_lost and "went on in lineage 2" in plan.reason


def test_the_version_of_the_current_size_needs_no_attached_rank():
    facts = [NodeFacts({0: frozenset([V4, V5])}), NodeFacts({1: frozenset([V4])})]
    assert plan_current_size(facts, 2, None, 0).version == V4
    assert plan_current_size(facts, 3, None, 0).version is None


def test_the_previous_ranks_of_a_place_are_found():
    found = ResizePlan(4, V4, V5, {}, {0: (0, 0), 1: (1, 0), 2: (0, 0), 3: (1, 0)}, 4)
    assert found.ranks_of((1, 0)) == (1, 3) and found.ranks_of((0, 1)) == ()


def test_only_what_depends_on_the_size_may_differ():
    now = {"seed": 1, "parallel": {"tp": 2, "dp": 4}, "gradient_buckets": 7, "world_size": 8}
    assert resizable(now) == {"seed": 1, "parallel": {"tp": 2}}
    assert resizable({**now, "parallel": {"tp": 1, "dp": 4}}) != resizable(now)


def test_a_certified_version_of_a_previous_size_is_preferred():
    told = answer({rank: [V3, V4, V5] for rank in range(4)}) | {"marks": [[V4.lineage, V4.iteration, Mark.CERTIFIED]]}
    (size,) = read([told])
    plan = plan_previous_size(size)
    assert (plan.version, plan.mark) == (V4, Mark.CERTIFIED)


def test_the_newest_protection_of_each_size_is_read_once_and_copied_to_the_nodes_that_lack_it():
    told = [answer({rank: [V4]}, parity=[V4], position=rank) for rank in (0, 1)] + [answer({2: [V4]})]
    ((reference, holders),) = newest_references(told)
    assert (reference.ranks, reference.lineage, holders) == (4, 1, {0, 1})
    newer = answer({3: [V4]}, parity=[V4], position=3)
    newer["protection"] = referred(replace(protection(3), lineage=2, endpoints=(("127.0.0.1", 7),) * 4))
    ((reference, holders),) = newest_references(told, [(newer, 2)])
    assert (reference.lineage, holders) == (2, {2}), "the node that asked the spare has its file"
    assert newest_references([answer({0: [V4]})]) == []
