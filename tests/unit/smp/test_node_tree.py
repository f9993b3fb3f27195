"""Node tiers that agree over a tree of several levels: real segments, sockets and threads, as in `test_node`."""

import json
import threading
import time
from collections import Counter

import pytest

from ft_plugins.errors import ProtocolError
from ft_plugins.smp.tree import tree
from ft_plugins.smp.tree.agreement import Summary
from ft_plugins.smp.tree.tree_messages import packed_summary
from ft_plugins.snapshot.segment.slots import Version
from ft_plugins.transport.calls import PURPOSE, Peer
from ft_plugins.transport.channel import Party

from .node_clusters import DETECT, clusters, wait

GROUP = 8  # nodes


@pytest.fixture
def cluster(tmp_path, job):
    """Nodes in redundancy groups of at most eight."""
    with clusters(tmp_path, job) as make:

        def grouped(count):
            halves = [range(at, min(at + GROUP, count)) for at in range(0, count, GROUP)]
            return make(count, groups=tuple(tuple(2 * node + at for node in half) for half in halves for at in (0, 1)))

        yield grouped


@pytest.fixture
def deep(cluster, monkeypatch):
    """Seven nodes in three levels, which protect each other."""
    monkeypatch.setattr(tree, "ARITY", 2)
    job = cluster(7)
    job.protect()
    wait(lambda: parents(job) == [None, 0, 0, 1, 1, 2, 2])
    return job


def parents(job):
    return [node.driver._member._state.parent for node in job.nodes]


def die(node):
    """The SMP ends, and none replaces it."""
    node.driver._stop.set()
    node.driver.leave()
    node.tier._endpoint.close()


def declared(node):
    path = node.run_dir / "lost.json"
    return list(json.loads(path.read_text())["lost"]) if path.exists() else []


def test_versions_are_committed_over_several_levels_and_a_replaced_inner_smp_loses_nothing(deep):
    deep.train(1, 3)
    for position in (1, 0):
        deep.nodes[position].replace_smp()
        wait(lambda: parents(deep) == [None, 0, 0, 1, 1, 2, 2])
        newest = deep.nodes[2].tier.status()["committed"][1]
        deep.train(newest + 1, newest + 2)
    time.sleep(DETECT)
    assert not any(declared(node) for node in deep.nodes)


@pytest.mark.parametrize("lost", [0, 1, 6])
def test_a_lost_node_is_declared_by_all_others_wherever_it_was(deep, lost):
    deep.train(1, 1)
    die(deep.nodes[lost])
    others = [node for node in deep.nodes if node.position != lost]
    wait(lambda: all(declared(node) == [f"node n{lost}"] for node in others))
    silent = [fields["reason"] for node in others for fields in node.named("coordinator.lost")]
    assert len(silent) == (lost == 0), "found out by the node that acts as root in its place"
    assert all(reason.startswith("position 0: ") for reason in silent)


def test_none_but_the_node_of_a_position_reports_for_it(deep):
    where, secret = deep.nodes[1].endpoint, deep.secret.read_bytes()
    peer = Peer(where, Party(PURPOSE, deep.job, "n5"), secret, 5)
    for position in (1, 0, 7):
        with pytest.raises(ProtocolError, match=f"position {position} cannot report to position 1 of 7 nodes"):
            peer.ask("join", epoch=1, position=position)
    with pytest.raises(ProtocolError, match="lineage 9"):
        peer.ask("join", epoch=9, position=3)
    peer.ask("join", epoch=1, position=3)
    peer.is_readable(5)
    wait(lambda: bool(deep.nodes[1].named("peer.disconnected")))
    (fields,) = deep.nodes[1].named("peer.disconnected")
    assert fields["peer"] == "n5" and "node n3 is at position 3" in fields["reason"]
    peer.close()
    deep.train(1, 1)


def test_one_wrong_summary_stops_no_commit_and_its_sender_is_named(deep):
    deep.train(1, 1)
    root, sender = deep.nodes[0], deep.nodes[1].driver
    wrong = Version(1, 10**6)
    summary = packed_summary(Summary(1 << 1, 10**6, wrong, wrong, wrong, wrong, wrong, wrong))

    def told():
        sender._loop.call(lambda: sender._member._send(0, summary))  # again: a right one may come at the same time
        return bool(root.named("report.rejected"))

    wait(told)
    fields = root.named("report.rejected")[0]
    assert fields["peer"] == "n1" and "iteration 1000000 of lineage" in fields["reason"]
    deep.train(2, 3)


def test_a_version_is_committed_without_waiting_for_the_next_look_at_memory(cluster, monkeypatch):
    """What is looked for again and again is only what ranks write: that they have sealed."""
    monkeypatch.setattr("ft_plugins.smp.tree.node_driver.OBSERVE_SECONDS", 3600.0)
    job = cluster(3)
    job.protect(detect_seconds=60.0)
    job.train(1, 1)
    wait(lambda: all(node.driver._state.awaited == Version(1, 2) for node in job.nodes))
    job.train(2, 5)


def test_threads_of_a_node_are_those_of_its_group_and_do_not_grow_with_the_job(cluster):
    job = cluster(16)
    most = Counter()
    stop = threading.Event()

    def count():
        while not stop.wait(0.002):
            names = Counter(thread.name.partition("-send")[0] for thread in threading.enumerate())
            most.update({name: number - most[name] for name, number in names.items() if number > most[name]})

    counting = threading.Thread(target=count, name="counting")
    counting.start()
    job.protect()
    job.train(1, 2)
    stop.set()
    counting.join()
    assert most["smp-tree"] == most["smp-node-tier"] == most["smp-peers"] == most["smp-peer-idle"] == 16
    assert most["smp"] == 16 * (GROUP - 1), "a lane to each other node of the group"
    assert most["smp-peer"] <= 16 * 8, "no more than there may be"
    wait(lambda: not any(thread.name == "smp-peer" for thread in threading.enumerate()))
