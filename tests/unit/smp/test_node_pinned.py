"""What a node tier keeps when SMPs die and incarnations follow each other: always a version that all nodes have whole.

Real tiers, segments and sockets, one rank a node.
"""

from dataclasses import replace
from time import monotonic

import pytest

from ft_plugins.smp.tree import node_step
from ft_plugins.smp.tree.agreement import ExchangeDecision
from ft_plugins.smp.tree.pinned import PinnedVersions
from ft_plugins.snapshot.segment.paths import path_of, remove
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.slots import SHARED, Mark, Version

from .node_clusters import clusters, wait

HELD_BACK = 0.001  # megabits a second: the first frame takes minutes


@pytest.fixture
def make(tmp_path, job):
    """Jobs of which iteration 1 counts on all nodes, unless the test begins them."""
    with clusters(tmp_path, job) as make:

        def small(count, counts=True, **more):
            found = make(count, per_node=1, sizes=lambda rank: 100_000, detect=30.0, **more)
            if counts:
                found.protect()
                found.train(1, 1)
            return found

        yield small


def takes_nothing(node):
    """Whatever is sent to it has to wait."""
    vars(node.tier._requests)["begin"] = lambda store, request: {"wait": True}


def a_dozen_reports():
    """Of each node."""
    until = monotonic() + 1.0
    wait(lambda: monotonic() > until)


def assert_only_1_counts(job):
    assert job.whole() == {Version(1, 1)}, "a lost node could not be rebuilt now"
    assert all(node.status("committed") == [1, 1] for node in job.nodes)


def test_a_version_that_is_held_back_leaves_capture_its_slots(make):
    job = make(2)
    job.protect(2, Version(1, 1), HELD_BACK)
    job.begin(2, 2)
    job.write(3, 12, 2)
    assert job.whole() == {Version(1, 1)} and job.leaves_room()


def test_an_smp_that_is_replaced_while_iterations_pass_goes_on_with_the_version_it_was_sending(make):
    """The same lets go of a version that counts on others already: then none is whole on all nodes."""
    job = make(2, counts=False)
    job.protect(mbps=HELD_BACK)
    job.begin(1)
    job.write(2, 5)
    first, node = job.nodes
    node.replace_smp()
    missed = lambda: node.driver._state.missed  # noqa: E731
    wait(lambda: node.begun(Version(1, 1)) == 2 or missed() is not None or first.status("exchange") != [1, 1])
    assert node.begun(Version(1, 1)) == 2 and missed() is None and first.status("exchange") == [1, 1]


def test_a_restored_version_does_not_count_before_every_node_has_it_and_leaves_its_slot_if_it_never_does(
    make,
):
    """Given a recovery to a version newer than what counted, two nodes that have gathered it and one that has not, when
    an SMP is replaced: what counted is still whole everywhere. Then training dies again."""
    job = make(3)
    job.suspend()
    job.write(2, 4)
    takes_nothing(job.nodes[2])
    job.protect(2, Version(1, 4))
    wait(lambda: all(Version(1, 4) in node.whole() for node in job.nodes[:2]))
    assert Version(1, 4) not in job.nodes[2].whole() and job.whole() == {Version(1, 1)}
    job.nodes[0].replace_smp()
    job.until_exchanged(4)
    a_dozen_reports()
    job.write(5, 9, 2)
    assert_only_1_counts(job)
    job.protect(3, Version(2, 9), HELD_BACK)
    assert job.whole() == {Version(1, 1)} and job.leaves_room()


def test_recoveries_that_follow_each_other_leave_capture_its_slots(make):
    job = make(2)
    for lineage in range(2, 6):  # four times training dies before what it restored is on other nodes again
        base = Version(lineage - 1, 3 * lineage)
        job.suspend()
        job.write(base.iteration, base.iteration, base.lineage)
        job.protect(lineage, base, HELD_BACK)
        assert Version(1, 1) in job.whole() and job.leaves_room(), lineage


def test_what_counts_on_one_node_is_kept_by_the_one_that_had_not_heard_of_it(make):
    """Given a version that all have encoded, and that counts on node 0, when training dies before node 1 has heard."""
    job = make(2)
    job.until_exchanged(2)
    first, deaf = job.nodes
    report = deaf.driver._report

    def not_heard(sent):
        announced = report(sent)
        if announced.decision.committed == Version(1, 2):
            return node_step.Announced(ExchangeDecision(Version(1, 2), Version(1, 1)))  # the one before
        return announced

    deaf.driver._report = not_heard
    job.write(2, 2)
    wait(lambda: first.status("committed") == [1, 2])
    job.write(3, 4)
    job.suspend()
    assert Version(1, 2) in job.whole()
    job.protect(2, Version(1, 4), HELD_BACK)
    deaf.replace_smp()
    job.until_exchanged(4)
    job.write(5, 9, 2)
    assert job.whole() == {Version(1, 2)}, "a lost node could not be rebuilt now"
    assert all(node.status("committed") == [1, 2] for node in job.nodes)


def test_what_is_complete_on_two_nodes_of_three_does_not_count_however_often_an_smp_is_replaced(make):
    """Given version 2 on its way, which one node has not taken: version 1 stays whole everywhere."""
    job = make(3)
    takes_nothing(job.nodes[2])
    job.begin(2)
    wait(lambda: all(Version(1, 2) in node.whole() for node in job.nodes[:2]))
    for _ in range(2):
        job.nodes[0].replace_smp()
        wait(lambda: job.nodes[0].status("exchange") is not None)
    a_dozen_reports()
    job.write(3, 8)
    assert Version(1, 2) not in job.nodes[2].whole()
    assert_only_1_counts(job)


def test_versions_that_one_group_misses_again_and_again_leave_the_other_group_its_slots(make):
    """Two pairs of nodes: what the first has complete counts for nothing, as long as the second misses each version."""
    job = make(4, groups=((0, 1), (2, 3)))
    behind = job.nodes[2]
    job.until_exchanged(2)
    for _ in range(4):
        iteration = job.nodes[0].status("exchange")[1]  # further ahead each time
        named = Version(1, iteration)
        job.until_exchanged(iteration)
        for node in job.nodes:
            if node is not behind:
                node.write(iteration)
        wait(lambda version=named: all(version in node.whole() for node in job.nodes[:2]))
        job.write(iteration + 1, iteration + 1)  # the one that is behind has left one out
        wait(lambda version=named: job.nodes[0].status("exchange") != [1, version.iteration])
        assert Version(1, 1) in job.whole() and job.leaves_room(), iteration


def test_a_restored_version_that_one_node_cannot_send_is_left_for_a_newer_one_and_leaves_its_slot(make):
    """Given a slot of it that went bad after it had been verified: what counted stays until something newer does."""
    job = make(3)
    job.suspend()
    job.write(2, 4)
    struck = job.nodes[1].segment
    (index,) = [slot.index for slot in struck.slots() if slot.version == Version(1, 4)]
    struck.data(index)[77] ^= 1
    job.protect(2, Version(1, 4), HELD_BACK)
    job.begin(5, 2)
    job.write(6, 9, 2)
    assert job.whole() == {Version(1, 1)} and job.leaves_room()
    assert all(Version(2, 5) in {slot.version for slot in node.segment.slots()} for node in job.nodes)


def test_where_replicas_are_compared_a_version_counts_when_they_were_found_to_agree(make):
    """Else a node that is lost would have the job go back to what nobody has compared, and the rest would be void."""
    job = make(2, counts=False)
    job.protect(audited=True)
    job.begin(1)
    wait(lambda: all(node.driver._exchange is not None and node.driver._exchange.done for node in job.nodes))
    assert all(node.encoded() is None for node in job.nodes)
    assert job.nodes[0].segment.mark(Version(1, 1), Mark.CERTIFIED)
    assert job.nodes[0].encoded() == Version(1, 1)
    assert not any(node.status("committed") for node in job.nodes), "the ranks of one node have not heard of it"
    job.nodes[1].segment.mark(Version(1, 1), Mark.CERTIFIED)
    job.until_committed(1)
    job.begin(2)
    for node in job.nodes:
        node.segment.mark(Version(1, 2), Mark.MISMATCHED)
    job.until_exchanged(3)
    assert all(node.status("committed") == [1, 1] for node in job.nodes)


def test_a_version_found_to_hold_a_wrong_replica_is_given_up_however_long_it_would_take_to_send(make):
    """It can never be committed: until it had been sent, no other version would be."""
    job = make(2, counts=False)
    job.protect(mbps=HELD_BACK, audited=True)
    job.begin(1)
    wait(lambda: all(node.driver._exchange is not None for node in job.nodes))
    assert not any(node.driver._observe().complete for node in job.nodes)
    assert job.nodes[1].segment.mark(Version(1, 1), Mark.MISMATCHED)  # on the other node it was not pinned, so is gone
    job.until_exchanged(2)
    assert not any(node.segment.slots()[0].pins for node in job.nodes)


@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_what_ranks_with_few_slots_have_left_out_counts_as_begun(make, tmp_path, job, free):
    """All of their slots are pinned: else the version that is announced next would long be past."""
    path = path_of(job, "few", 0)
    shape = make(1, counts=False).shapes[0]
    create(path, replace(shape, slots=2 + free, free=free), 0, {})
    segment = Segment(path)
    segment.open_lineage(1, None, ())
    segment.header.completed = 7
    pinned = PinnedVersions(tmp_path, {0: segment})
    pinned._ranks = (0,)
    assert pinned.begun(1) == (7 if free < SHARED else 0) and pinned.begun(2) == 0
    segment.close()
    remove(job, "few")
