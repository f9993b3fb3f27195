"""Nodes of the tree, with a clock and a network that are made up: all that are lost are found, and no other."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.smp.tree import tree
from ft_plugins.smp.tree.agreement import Announcement, ExchangeDecision, ExchangeEpoch, NodeReport, merge, summarize
from ft_plugins.smp.tree.tree_state import TreeState
from ft_plugins.snapshot.segment.slots import Version
from tests import transcripts
from tests.unit.smp.tree_network import DETECT, LATENCY, Network

PERIOD = TreeState(ExchangeEpoch(1, None, 2, 1), 1, DETECT, 0.0).heartbeat_seconds  # 1 s
SETTLING = 5.0  # seconds until all have joined
MARGIN = 0.3  # seconds for messages of all levels


class Node:
    """One node of the tree: what it hears, and what it does at a time."""

    def node(self, position, nodes, lineage=1):
        self.state = TreeState(ExchangeEpoch(lineage, None, nodes, 1), position, DETECT, 0.0)

    def reports(self, at, begun, **more):
        self.state.report(NodeReport(begun, **more), at)

    def joined(self, at, parent):
        self.state.joined(parent, at)

    def child(self, at, position, begun=0, also=(), lost=(), wrong=(), **more):
        """Its summary; `also`: of these positions, too. What is `wrong` in it is an iteration that cannot be."""
        found = merge([summarize(one, NodeReport(begun, **more)) for one in (position, *also)])
        far = {name: 10**6 if name == "begun" else Version(self.state._epoch.lineage, 10**6) for name in wrong}
        self.state.hear_child(position, replace(found, lost=lost, **far), at)

    def child_joined(self, position):
        self.state.child_joined(position)

    def child_left(self, position):
        self.state.child_left(position)

    def parent(self, at, position, exchange=None, committed=None, lost=()):
        self.state.hear_parent(position, Announcement(ExchangeDecision(exchange, committed), lost), at)

    def at(self, now):
        """What it does then, and what it knows."""
        outbox = self.state.advance(now)
        sent = [] if outbox.up is None else [f"sends {transcripts.shown(outbox.up)}"]
        sent += [f"answers {transcripts.shown(outbox.down)}"] if outbox.down else []
        sent += [f"connects to {outbox.connect}"] if outbox.connect is not None else []
        sent += [f"rejects {transcripts.shown(one)}" for one in outbox.rejected]
        return "\n".join([*sent, f"looks again at {outbox.wake:g}"])

    def beats(self, last, child):
        """From second to second its driver, its parent and a child are heard of. Whom it reports as lost, and when."""
        said, before = [], ()
        for now in range(last):
            self.reports(now, 1)
            self.parent(now, self.state.parent)
            self.child(now, child)
            lost = self.state.advance(now).up.lost
            said += [f"{now} s: {transcripts.shown(lost)}"] if lost != before else []
            before = lost
        return "\n".join(said)

    def knows(self):
        return self.state.announcement


test_tree_state = transcripts.of(__file__, Node)


@pytest.fixture
def narrow(monkeypatch):
    """A deep tree of few nodes."""
    monkeypatch.setattr(tree, "ARITY", 3)


def settled(nodes, seed=0):
    network = Network(nodes, seed)
    network.run(SETTLING)
    assert network.parents() == [tree.parent_of(position) for position in range(nodes)]
    return network


@pytest.mark.parametrize("nodes", [1, 2, 9])
def test_a_small_job_is_a_star(nodes):
    network = settled(nodes)
    assert network.parents() == [None] + [0] * (nodes - 1)
    assert len(network.commits) > 3


@pytest.mark.usefixtures("narrow")
def test_versions_are_committed_within_milliseconds_after_the_last_node_has_encoded_them():
    """40 nodes in 4 levels; a version takes up to 0.3 s."""
    network = settled(40)
    count, began = len(network.commits), network.now
    network.run(30.0)
    per_version = (network.now - began) / (len(network.commits) - count)
    assert per_version < 0.3 + 4 * 2 * (LATENCY + 0.005) + 0.02
    assert network.lost() == {()}


@pytest.mark.usefixtures("narrow")
def test_a_node_without_news_costs_its_neighbours_a_message_each_way_at_each_heartbeat():
    network = settled(40)
    network.encoding = 1e9
    network.run(1.0)
    network.up, network.down = dict.fromkeys(network.up, 0), dict.fromkeys(network.down, 0)
    network.run(100 * PERIOD)
    assert all(98 <= count <= 102 for at, count in network.up.items() if at) and network.up[0] == 0
    assert all(network.down[at] <= 102 * len(tree.children_of(at, 40)) for at in range(40))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("powered", [True, False])
@pytest.mark.parametrize("position", [0, 1, 2, 5, 39])
def test_one_that_is_lost_is_known_everywhere_after_the_detection_time(position, powered):
    """The root, inner nodes of two levels, a leaf; the process alone, or the machine without a word."""
    network = settled(40, seed=position)
    killed = network.now
    network.kill(position, powered)
    assert network.run(2 * DETECT, lambda: network.lost() != {()})
    assert network.now - killed >= DETECT - PERIOD - MARGIN, "not earlier"
    assert network.run(MARGIN, lambda: network.lost() == {(position,)}), network.lost()
    assert network.now - killed <= DETECT + MARGIN


@pytest.mark.usefixtures("narrow")
@settings(max_examples=60, deadline=None)
@given(st.integers(2, 45), st.sets(st.integers(0, 44), min_size=1, max_size=6), st.integers(0, 99), st.booleans())
def test_of_any_that_are_lost_together_some_are_known_everywhere_and_never_one_that_lives(nodes, lost, seed, powered):
    lost = {position % nodes for position in lost} - {Random(seed).randrange(nodes)}
    network = settled(nodes, seed)
    for position in lost:
        network.kill(position, powered)
    tries = len(lost) * (0.1 if powered else DETECT / 4)  # one after another, of those that do not answer
    assert not lost or network.run(2 * DETECT + tries + 1, lambda: () not in network.lost()), network.lost()
    for _ in range(60):
        network.run(DETECT / 20)
        assert all(set(one) <= lost for one in network.lost()), "a live node is announced as lost"
    found = set(network.lost())
    assert found == {tuple(sorted(lost))}, "in the end all of them, on all nodes"
    parents, root = network.parents(), min(machine.state.position for machine in network.live())
    for position in {machine.state.position for machine in network.live()} - {root}:
        while position != root:
            above = parents[position]
            assert above is not None and above not in lost and above < position, "all are connected again"
            position = above


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("position", [0, 1, 5, 39])
def test_a_replaced_smp_loses_nothing_and_versions_go_on(position):
    network = settled(40, seed=position)
    for _ in range(3):
        network.replace_smp(position)
        count = len(network.commits)
        network.run(DETECT)
        assert network.lost() == {()}
        assert len(network.commits) > count + 5
    assert network.parents() == [tree.parent_of(at) for at in range(40)]


@pytest.mark.usefixtures("narrow")
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 29), st.floats(0, 3)), max_size=8), st.integers(0, 99))
def test_however_smps_are_replaced_no_version_is_committed_too_early_and_one_is_in_the_end(nodes, replaced, seed):
    """`Network` checks that no node is made to commit what it has not encoded, or to go back."""
    network = settled(nodes, seed)
    for position, pause in replaced:
        if network.machines[position % nodes].alive:
            network.replace_smp(position % nodes, 0.5)
        network.run(pause)
    network.run(DETECT)
    count = len(network.commits)
    network.run(5.0)
    assert network.lost() == {()} and len(network.commits) > count


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("child", "other"), [(5, 3), (16, 6), (2, 1)])
def test_a_link_that_carries_nothing_any_more_costs_no_node(child, other):
    """Both ends live: the child reports elsewhere before its parent has missed it for too long, and comes back once
    the link works again."""
    network = settled(40)
    above = network.machines[child].state.parent
    assert above is not None
    network.cut.add((child, above))
    for _ in range(60):
        network.run(DETECT / 20)
        assert network.lost() == {()}
    assert network.machines[child].state.parent == other
    count = len(network.commits)
    network.cut.clear()
    network.run(3 * DETECT)
    assert network.machines[child].state.parent == above and network.lost() == {()}
    assert len(network.commits) > count + 10


@pytest.mark.usefixtures("narrow")
def test_a_child_that_comes_back_to_a_parent_that_reports_it_as_lost_is_not_lost():
    """The other parent hears at once that it has been left, and the root hears late of the new one."""
    network = settled(40)
    network.slow[1, 0] = 20 * LATENCY
    network.cut.add((5, 1))
    network.run(1.2 * DETECT)
    network.cut.clear()
    assert not network.run(DETECT / 2, lambda: network.lost() != {()}), network.lost()
    assert network.machines[5].state.parent == 1


@pytest.mark.usefixtures("narrow")
def test_a_job_that_is_suspended_and_resumed_has_lost_none():
    network = settled(40)
    for seconds in (0.1, 0.3, 1.0):
        network.suspend(10 * DETECT)
        network.run(seconds)
        assert network.lost() == {()}
    count = len(network.commits)
    network.run(DETECT / 2)
    assert network.lost() == {()} and len(network.commits) > count + 2


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("position", [0, 5])
def test_one_that_is_lost_while_the_job_is_suspended_is_found(position):
    network = settled(40)
    network.suspend(10 * DETECT)
    network.kill(position, powered=False)
    network.run(DETECT + MARGIN + PERIOD)
    assert network.lost() == {(position,)}


@pytest.mark.parametrize("first", [0, 8])
def test_every_node_knows_of_a_lost_rack_after_the_detection_time(first):
    """Eight machines without power, which have most of the children; and the root."""
    network = settled(100)
    for position in range(first, first + 8):
        network.kill(position, powered=False)
    network.run(DETECT + MARGIN)
    assert () not in network.lost()


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("position", [0, 2, 39])
def test_a_node_whose_driver_hangs_is_lost_though_its_connections_work(position):
    network = settled(40)
    network.machines[position].hung = True
    network.run(DETECT + MARGIN)
    assert network.lost() == {(position,)}


@pytest.mark.usefixtures("narrow")
def test_a_node_that_never_joins_is_lost_after_the_detection_time():
    network = Network(20)
    network.machines[7].alive = False
    network.run(DETECT - 0.5)
    assert network.lost() == {()} and not network.commits
    network.run(0.5 + DETECT / 20 + MARGIN)
    assert network.lost() == {(7,)}


def test_2048_nodes_join_commit_and_find_a_lost_inner_node():
    network = Network(2048, encoding=1.0)
    network.run(2.0)
    assert network.parents() == [tree.parent_of(position) for position in range(2048)]
    assert network.run(5.0, lambda: len(network.commits) >= 2)
    network.encoding = 1e9
    killed = network.now
    network.kill(40)
    assert network.run(2 * DETECT, lambda: bool(network.machines[0].state.announcement.lost))
    network.run(MARGIN)
    assert network.lost() == {(40,)} and network.now - killed <= DETECT + MARGIN
