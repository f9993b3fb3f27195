"""Nodes of the tree over real sockets: each with a thread of its own, or stepped by hand."""

import queue
import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import cast

import pytest

from ft_plugins.events import Events
from ft_plugins.smp.tree import tree_state
from ft_plugins.smp.tree.agreement import ExchangeDecision, ExchangeEpoch, NodeReport
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.smp.tree.tree_member import Connected, TreeMember
from ft_plugins.smp.tree.tree_messages import MESSAGE_LIMIT
from ft_plugins.smp.tree.tree_peers import TreePeers
from ft_plugins.smp.tree.tree_state import TreeState
from ft_plugins.snapshot.segment.slots import Version
from ft_plugins.transport.channel import ClientHandshake, Party, ServerHandshake
from ft_plugins.transport.loop import Loop

SECRET = b"a secret of this test"
SECONDS = 90.0


def channels(client, server):
    asking = ClientHandshake(SECRET, Party("smp", "job", f"n{client}"))
    answering = ServerHandshake(SECRET, Party("smp", "job", f"n{server}"))
    answer, channel = asking.answer(answering.challenge(asking.hello()))
    return channel, answering.finish(answer)


def wait(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {SECONDS} s"
        time.sleep(0.005)


class Node:
    """One member with its loop; `job` are all nodes by position."""

    def __init__(self, job, position):
        self.job = job
        self.position = position
        self.changes = 0
        self.errors = []
        self.ended = 0
        self.loop = Loop("smp-tree")
        self.state = TreeState(job.epoch, position, job.detect, time.monotonic())
        self.member = TreeMember(self.loop, self.state, self.connect, self.changed, self.failed)
        self.listening = True

    def changed(self):
        self.changes += 1

    def failed(self, node, reason):
        self.errors.append((node, reason))

    def connect(self, parent, done):
        node = self.job.nodes[parent]
        if not node.listening:
            done("refused")
            return
        ours, theirs = socket.socketpair()
        channel, accepted = channels(self.position, parent)
        node.member.adopt(self.position, Connected(theirs, accepted), node.end)
        done(Connected(ours, channel))

    def end(self):
        self.ended += 1

    def close(self):
        self.listening = False
        self.loop.stop()
        self.member.close()
        self.loop.close()

    @property
    def decision(self):
        return self.member.announcement.decision


class Job:
    def __init__(self, nodes, detect=2.0):
        self.detect = detect
        self.epoch = ExchangeEpoch(1, None, nodes, 1)
        self.nodes = [Node(self, position) for position in range(nodes)]

    def start(self):
        for node in self.nodes:
            node.loop.start()
            node.member.report(NodeReport(0))

    def close(self):
        for node in self.nodes:
            node.close()


@pytest.fixture
def make():
    made = []

    def make_job(nodes, detect=2.0):
        made.append(Job(nodes, detect))
        return made[-1]

    yield make_job
    for job in made:
        job.close()


def test_a_version_is_committed_by_messages_alone_without_waiting_for_a_heartbeat(make, monkeypatch):
    """20 nodes in three levels; heartbeats would come every hour."""
    monkeypatch.setattr(tree_state, "_SLOWEST_SECONDS", 3600.0)
    job = make(20, detect=5 * 3600.0)
    job.start()
    wait(lambda: all(node.decision == ExchangeDecision(Version(1, 1)) for node in job.nodes))
    for iteration in range(1, 11):
        for node in job.nodes:
            node.member.report(NodeReport(iteration, Version(1, iteration), encoded=Version(1, iteration)))
        after = ExchangeDecision(Version(1, iteration + 1), Version(1, iteration))
        wait(lambda after=after: all(node.decision == after for node in job.nodes))
    assert all(node.changes == 11 for node in job.nodes), "each announcement is news once"
    assert [len(node.member.links) for node in job.nodes] == [8, 9, 4, *[1] * 17]
    threads = [thread.name for thread in threading.enumerate()]
    assert threads.count("smp-tree") == 20, "one for each node"


def test_a_node_that_was_stopped_presumes_none_lost_before_it_has_read_what_they_sent(make):
    job = make(3, detect=1.0)
    job.start()
    wait(lambda: all(node.decision.exchange is not None for node in job.nodes))
    root = job.nodes[0]
    stopped, go_on = threading.Event(), threading.Event()

    def stop():
        root.loop.soon(root.member.advance)
        stopped.set()
        go_on.wait(SECONDS)

    root.loop.call(stop)
    assert stopped.wait(SECONDS)
    sent = time.monotonic() + 0.8
    while time.monotonic() < sent + 0.6:  # longer than the detection time; the others and its own driver go on
        for node in job.nodes:
            node.member.report(NodeReport(0))
        time.sleep(0.02)
    lost = []
    root.member._changed = lambda: lost.append(root.member.announcement.lost)
    go_on.set()
    time.sleep(0.3)
    assert not any(lost) and root.member.announcement.lost == ()


def test_a_message_that_no_child_may_send_ends_its_connection_alone(make):
    job = make(3)
    job.start()
    root = job.nodes[0]
    wait(lambda: len(root.member.links) == 2 and len(job.nodes[2].member.links) == 1)  # each end notices by itself
    link = job.nodes[2].member.links[0]
    job.nodes[2].loop.call(lambda: link.send({"do": "announce", "exchange": None, "committed": None, "lost": []}))
    wait(lambda: root.errors == [("n2", "unknown message of a child: 'announce'")])
    wait(lambda: len(root.member.links) == 2)  # it joins again


def test_a_child_that_reads_nothing_stops_none_of_the_others(make):
    job = make(3, detect=60.0)
    root, other = job.nodes[:2]
    job.nodes[2].listening = False
    for node in (root, other):
        node.loop.start()
        node.member.report(NodeReport(0))
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    root.member.adopt(2, Connected(theirs, channels(2, 0)[1]), root.end)
    wait(lambda: len(root.member.links) == 2)
    (link,) = [each for each in root.member.links if each.position == 2]
    filled = threading.Event()

    def fill():
        for _ in range(10_000):
            with suppress(Exception):
                link.send({"do": "announce", "exchange": None, "committed": None, "lost": []})
        filled.set()

    root.loop.call(fill)
    assert filled.wait(SECONDS) and link.waiting and link.waiting < 6 * MESSAGE_LIMIT
    before = other.member.links[0].sent_messages
    other.member.report(NodeReport(7))
    wait(lambda: other.member.links[0].sent_messages > before and root.state._summary.begun == 7)
    ours.close()


def test_an_smp_that_takes_the_place_of_another_one_takes_over_its_connection(make):
    job = make(3)
    job.start()
    wait(lambda: len(job.nodes[0].member.links) == 2)
    dead = job.nodes[2]
    job.nodes[2] = fresh = Node(job, 2)
    fresh.loop.start()
    fresh.member.report(NodeReport(5))
    wait(lambda: job.nodes[0].state._summary.begun == 5)
    assert len(job.nodes[0].member.links) == 2 and job.nodes[0].ended == 1, "the one before is closed"
    dead.close()


def test_a_connection_that_is_made_after_the_end_is_closed(make):
    job = make(2)
    root = job.nodes[0]
    root.loop.start()
    root.close()
    ours, theirs = socket.socketpair()
    root.member.adopt(1, Connected(theirs, channels(1, 0)[1]), root.end)
    ours.settimeout(SECONDS)
    assert ours.recv(1) == b"" and root.ended == 1
    ours.close()


def test_a_connection_that_the_system_refuses_to_watch_ends_and_the_others_go_on(make, monkeypatch):
    job = make(3)
    root = job.nodes[0]
    register, refused = root.loop._selector.register, [0, 0]

    def refuse(connection, *rest):
        if refused:
            refused.pop()
            raise OSError(28, "no space left")
        return register(connection, *rest)

    monkeypatch.setattr(root.loop._selector, "register", refuse)
    job.start()
    wait(lambda: all(node.decision.exchange is not None for node in job.nodes))
    assert not refused and len(root.member.links) == 2 and root.ended == 2
    assert len(root.errors) == 2 and all("no space left" in reason for _, reason in root.errors)


def test_a_parent_that_the_system_refuses_to_watch_is_tried_again(make, monkeypatch):
    job = make(2)
    child = job.nodes[1]
    register, refused = child.loop._selector.register, [0]

    def refuse(connection, *rest):
        if refused:
            refused.pop()
            raise OSError(28, "no space left")
        return register(connection, *rest)

    monkeypatch.setattr(child.loop._selector, "register", refuse)
    job.start()
    wait(lambda: child.decision.exchange is not None)
    assert not refused and child.state.parent == 0


def test_whatever_goes_wrong_while_connecting_the_node_hears_of_it():
    """Otherwise it would never look for a parent again."""

    def connect(position, patience):
        raise IndexError(f"position {position}")

    heard = queue.SimpleQueue()
    peers = TreePeers(cast(Protection, SimpleNamespace(lineage=1, position=3)), ["n0"], connect, Events("n3"))
    peers.connect(0, heard.put)
    assert "IndexError: position 0" in str(heard.get(timeout=SECONDS))
    peers.close()
