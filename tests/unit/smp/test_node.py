"""Nodes guard each other's slots: what counts can be rebuilt from any nodes that parity makes up for, bit for bit."""

import errno
import itertools
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from ft_plugins.base import files
from ft_plugins.bubbles.bubble_plan import LARGEST_RATE_DUTY
from ft_plugins.bubbles.filling import Grant
from ft_plugins.bubbles.gate.gate import Gate
from ft_plugins.bubbles.gate.gate_pacer import GatePacer
from ft_plugins.errors import FtError, ProtocolError
from ft_plugins.smp.exchange.traffic import RatePacer
from ft_plugins.smp.tree import other_nodes
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.snapshot.segment import segment as segment_module
from ft_plugins.snapshot.segment.paths import parity_path_of
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.slots import SlotState, Version, choose
from ft_plugins.transport import protocol
from ft_plugins.transport.calls import PURPOSE, Peer
from ft_plugins.transport.channel import Party
from harness.job_control import wait_until

from .node_clusters import DETECT, clusters, wait

SECONDS = 600


@pytest.fixture
def cluster(tmp_path, job):
    with clusters(tmp_path, job) as make:
        yield make


STAGES = {"stages": ((0, 2, 4, 6), (1, 3, 5, 7))}  # of four nodes, each a stage: 0 and 2 are no neighbours
BOTH = {  # two stages of two nodes, groups over both: 0 and 2 keep each other's copies, 1 and 3 too
    "stages": ((0, 4), (1, 5), (2, 6), (3, 7)), "groups": ((0, 1, 2, 3), (4, 5, 6, 7)), "both": True,
}  # fmt: skip
COPIES = {"stages": ((0, 2), (1, 3))}  # of two nodes


@pytest.mark.parametrize(
    ("count", "losses", "how", "lost"),
    [
        (2, 1, {}, (0,)), (2, 1, {}, (1,)), (3, 1, {}, (1,)), (4, 1, {}, (3,)),
        (4, 2, {}, (0, 1)), (4, 2, {}, (1, 3)), (5, 2, {}, (4,)),
        (4, 1, STAGES, (0,)), (4, 1, STAGES, (2,)), (4, 1, STAGES, (0, 2)),
        (4, 1, BOTH, (0,)), (4, 1, BOTH, (0, 1)), (4, 1, BOTH, (0, 2)), (4, 1, BOTH, (1, 3)),
        (3, 1, {"encrypt": True}, (1,)),
    ],
)  # fmt: skip
def test_what_counts_is_rebuilt_on_fresh_nodes_and_protected_again(cluster, count, losses, how, lost):
    """From parity, from copies on pipeline neighbours, and from parity beside copies of what is lost with its copy."""
    job = cluster(count, losses, encrypt=how == {"encrypt": True})
    if job.encrypt:
        how = {}
    job.protect(**how)
    job.train(1, 3)
    assert job.rebuilds(Version(1, 3), *lost)
    if how == BOTH:
        sections = job.protection.plan().recovery_sections(2 * lost[0], lost)
        assert sections is not None and (sections[0].index >= job.world) == (lost in ((0, 2), (1, 3)))
    job.protect(2, Version(1, 3))
    job.until_committed(3)
    if not how:
        wait(lambda: all(node.tier.inventory()["parity"] == [(1, 3)] for node in job.nodes))  # fresh ones keep it too
    job.train(4, 5, lineage=2)
    assert job.rebuilds(Version(2, 5), (lost[0] + 1) % count)


def test_the_end_of_an_exchange_does_not_wait_until_large_slots_are_verified(cluster, monkeypatch):
    """The node's reports wait for it: for longer than a node may be silent, it would seem lost."""
    job = cluster(2)
    verifying, suspended, stops = threading.Event(), threading.Event(), list[threading.Event]()
    waited_for = []  # buckets
    freely = itertools.repeat(True, 5)  # of 15 buckets, those that may be waited for
    digest_of = xxhash.xxh3_64_intdigest

    def slow(data):
        if threading.current_thread().name != "smp-send-1":  # the other node's may verify the version before
            return digest_of(data)
        if not stops:
            wait_until(lambda: driver._exchange is not None, SECONDS, lambda: "no sender")  # its threads begin before
            stops.append(driver._exchange._stop)
        verifying.set()
        stops[0].wait(SECONDS)  # a bucket takes until the sender is told to end
        if not waited_for and not next(freely, None) and not suspended.wait(SECONDS):
            waited_for.append(data)
        return digest_of(data)

    job.protect()
    job.until_exchanged(1)
    driver = job.nodes[0].tier._driver
    assert driver is not None
    monkeypatch.setattr(segment_module, "xxhash", SimpleNamespace(xxh3_64_intdigest=slow))
    job.nodes[0].write(1)
    assert verifying.wait(SECONDS)
    job.nodes[0].tier.suspend()
    suspended.set()
    assert not waited_for


def test_what_takes_time_is_done_before_any_node_begins_to_miss_another(cluster):
    job = cluster(2)
    job.protect()
    job.train(1, 2)
    claimed = [replace(job.protection, lineage=2, base=Version(1, 2), position=node.position) for node in job.nodes]
    for node, protection in zip(job.nodes, claimed, strict=True):
        node.tier.claim(protection, 2)
    stores = [parity_path_of(job.job, node.name).stat().st_ino for node in job.nodes]
    time.sleep(2 * DETECT)
    assert not any(node.named("node.lost") for node in job.nodes), "none watches yet"
    assert all(node.tier.inventory()["parity"] for node in job.nodes), "what protects the job is kept"
    job.protect(2, Version(1, 2))
    assert stores == [parity_path_of(job.job, node.name).stat().st_ino for node in job.nodes], "the same memory"
    job.until_committed(2)
    job.train(3, 3, lineage=2)


def test_a_stranger_on_the_port_of_a_dead_smp_costs_the_next_one_only_the_port(cluster):
    job = cluster(2)
    job.protect()
    job.train(1, 2)
    moved, other = job.nodes
    moved.tier.suspend()
    moved.tier._endpoint.close()
    with socket.create_server(moved.endpoint):
        moved.tier = moved._start()
    [event] = moved.named("exchange.interrupted")
    assert f"another process has port {moved.endpoint[1]} of 127.0.0.1" in event["reason"]
    wait((other.run_dir / "lost.json").exists)  # so its workers end, and all are started again

    former, moved.endpoint = moved.endpoint, moved.tier.endpoint("127.0.0.1", str(job.secret))
    assert moved.endpoint[1] != former[1]
    assert json.loads((moved.run_dir / "endpoint.json").read_text())["port"] == moved.endpoint[1]
    assert (1, 2) in moved.tier.inventory()["parity"], "what the SMP before held is kept"
    job.protect(2, Version(1, 2))
    job.train(3, 3, 2)


def test_what_a_full_disk_did_not_take_of_a_loss_is_told_again(cluster, monkeypatch):
    job = cluster(2)
    refused, write = [], files.write_json

    def full(path, value):
        if path.name == "lost.json" and len(refused) < 2:
            refused.append(path)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, value)

    monkeypatch.setattr(files, "write_json", full)
    job.protect(4)
    job.nodes[1].driver._stop.set()
    wait(lambda: bool(job.nodes[0].named("node.lost")))  # which is said after the file is written
    assert len(refused) == 2 and (job.nodes[0].run_dir / "lost.json").exists()
    assert job.nodes[0].named("node.lost") == [{"lost": ["node n1"]}]


def test_corrupt_bytes_are_never_sent_nor_loaded(cluster):
    job = cluster(3)
    job.protect()
    job.train(1, 1)
    victim = job.nodes[1].segments[2]
    job.nodes[0].write(2)
    job.nodes[2].write(2)
    target = choose(victim.slots())
    job.nodes[1].tier._lock.acquire()  # nothing of it is looked at until the byte is flipped
    job.nodes[1].write(2)
    victim.data(target)[12345] ^= 1
    job.nodes[1].tier._lock.release()
    wait(lambda: bool(job.nodes[1].named("slot.corrupted")))
    assert all(node.status("committed") == [1, 1] for node in job.nodes), "the version never counts"
    job.until_exchanged(3)  # nobody waits for it for ever
    (fresh,) = job.substitute(0)
    index = next(s.index for s in victim.slots() if s.version == Version(1, 1))
    victim.data(index)[54321] ^= 1  # and one of the version that counts, on a node that is needed
    with pytest.raises(FtError, match="does not match its digest"):
        job.rebuild(fresh, 0, Version(1, 1), (0,))
    assert not fresh.holds(0, Version(1, 1))
    assert all(slot.state is not SlotState.CLEAN for slot in fresh.segments[0].slots())


def test_a_version_that_is_overwritten_while_it_is_sent_is_given_up(cluster, monkeypatch):
    job, go_on, take = cluster(2), threading.Event(), RatePacer.take

    def held(pacer, nbytes, stop):
        while not (stop.is_set() or go_on.wait(0.01)):
            pass
        return take(pacer, nbytes, stop)

    job.protect()
    job.train(1, 1)
    monkeypatch.setattr(RatePacer, "take", held)
    job.begin(2)
    wait(lambda: all(node.driver._exchange and node.driver._exchange._verified for node in job.nodes))
    victim = job.nodes[1].segments[2]
    victim.dirty(next(slot.index for slot in victim.slots() if slot.version == Version(1, 2)), None, 1)
    go_on.set()
    wait(lambda: bool(job.nodes[1].named("slot.corrupted")))
    job.train(3, 3)
    assert all(node.tier.status()["committed"][1] == 3 for node in job.nodes)


def test_parity_that_is_damaged_is_an_alarm_when_a_recovery_asks_for_it(cluster):
    job = cluster(2)
    job.protect()
    job.train(1, 1)
    node = job.nodes[1]
    node.tier.suspend()
    store = Segment(parity_path_of(job.job, node.name))
    (index,) = [slot.index for slot in store.slots() if slot.state is SlotState.CLEAN]
    store.digests(index)[0] ^= np.uint64(1)
    assert node.tier.inventory()["parity"] == []
    (event,) = node.named("slot.corrupted")
    assert event["reason"].startswith(f"node n1: the parity in slot {index} is damaged")
    assert event["reason"] in json.loads((node.run_dir / protocol.ALARM).read_text())["parity"]
    store.digests(index)[0] ^= np.uint64(1)
    assert node.tier.inventory()["parity"] == [(1, 1)] and not (node.run_dir / protocol.ALARM).exists()
    store.close()


def test_what_ranks_completed_in_an_older_lineage_is_not_reported(cluster):
    """Given a node on which another rank's segment was left when the ranks moved."""
    node = cluster(2).nodes[0]
    for (rank, segment), lineage in zip(sorted(node.segments.items()), (2, 3), strict=True):
        segment.open_lineage(lineage, None, (), "a" * 32)
        segment.header.completed = 70 + rank
    assert node.tier.inventory()["completed"] == [[max(node.segments), 70 + max(node.segments)]]


def test_another_secret_or_encryption_takes_effect_at_the_same_endpoint(cluster):
    job = cluster(2)
    tier, where = job.nodes[0].tier, job.nodes[0].endpoint
    job.secret.write_text("another secret of this job")
    assert tier.endpoint("127.0.0.1", str(job.secret)) == where
    me = Party(PURPOSE, job.job, "n1")
    with closing(Peer(where, me, b"another secret of this job", 5)) as peer, pytest.raises(ProtocolError, match="beat"):
        peer.ask("beat me")
    assert tier.endpoint("127.0.0.1", str(job.secret), True) == where
    differs = pytest.raises(ProtocolError, match="--ftp-encrypt: expected False as on this node, found True")
    with closing(Peer(where, me, b"another secret of this job", 5)) as peer, differs:
        peer.ask("beat me")


def test_what_belongs_to_another_incarnation_or_to_no_plan_is_refused(cluster):
    job = cluster(2)
    job.protect(5)
    peer = Peer(job.nodes[0].endpoint, Party(PURPOSE, job.job, "n1"), job.secret.read_bytes(), 5)
    with pytest.raises(ProtocolError, match="lineage 4"):
        peer.ask("begin", version=[4, 1], epoch=4, nodes=[], ranks=[])
    frame = np.ones(10, dtype=np.uint8)
    with pytest.raises(ProtocolError, match="do not belong"):
        peer.ask("take", frame, version=[5, 1], epoch=5, key=[0, 9, 0], node=1, at=0, exponent=0)
    with pytest.raises(ProtocolError, match="unknown request"):
        peer.ask("format-the-disk")
    job.nodes[0].tier.suspend()
    with pytest.raises(ProtocolError, match="does not store parity now"):
        peer.ask("begin", version=[5, 1], epoch=5, nodes=[], ranks=[])
    peer.close()
    assert parity_path_of(job.job, "n0").exists(), "and what was kept is still there"


def test_capture_finds_a_slot_however_long_a_copy_takes(cluster):
    job = cluster(2)
    job.protect(**COPIES)
    job.train(1, 1)
    gates = [Gate(segment.gate) for node in job.nodes for segment in node.segments.values()]
    for gate in gates:
        gate.hold(SECONDS, time.monotonic_ns())
    job.begin(2)
    job.write(3, 29)  # `choose` refuses where all slots are pinned
    assert all(node.status("committed") == [1, 1] for node in job.nodes)
    for gate in gates:
        gate.open([Grant(0, -1, 0.0, SECONDS, 1 << 30)], 0, time.monotonic_ns())
    job.until_committed(2)
    assert all(node.holds(rank, Version(1, 2)) for node in job.nodes for rank in node.segments)


def test_what_the_links_carry_is_measured_where_it_is_wanted(cluster):
    job = cluster(2)
    job.protection = replace(job.protection, **COPIES)
    first, second = job.nodes
    assert first.tier.protect(replace(job.protection, position=0), 1)["links"] == []
    wanted = replace(job.protection, measure=True)
    assert Protection.read(wanted.block()) == wanted
    ((target, rate),) = first.tier.protect(replace(wanted, position=0), 1)["links"]
    assert target == 1 and 1e6 < rate < 1e12, "a loopback"
    assert second.status("committed") is None and not second.tier.inventory()["parity"], "nothing of it is kept"
    second.tier._endpoint.close()
    gone = replace(wanted, position=0, endpoints=(first.endpoint, ("127.0.0.1", 1)))
    assert first.tier.protect(gone, 1)["links"] == []
    (event,) = first.named("probe.failed")
    assert "127.0.0.1" in event["reason"]


def test_whatever_fails_while_a_copy_is_sent_is_said_and_tried_again(cluster, monkeypatch):
    """A lane that ended of it would be missed by nobody, and no version would count any more."""
    take, failures = GatePacer.take, iter([ZeroDivisionError("by no time")])

    def fails_once(pacer, nbytes, stop):
        for failure in failures:
            raise failure
        return take(pacer, nbytes, stop)

    monkeypatch.setattr(GatePacer, "take", fails_once)
    job = cluster(2)
    job.protect(**COPIES)
    job.train(1, 1)  # until it counts
    (said,) = [fields for node in job.nodes for fields in node.named("exchange.retried")]
    assert said["reason"] == "ZeroDivisionError: by no time"


def test_that_checkpoints_get_rarer_is_left_for_the_trainers_to_print_on_one_node(cluster):
    job = cluster(2)
    job.protect(**COPIES)
    job.train(1, 1)
    for node in job.nodes:
        for segment in node.segments.values():
            Gate(segment.gate).plan(1, 1.0, 0.0)
            Gate(segment.gate).hold(SECONDS, time.monotonic_ns())
    job.write(2, 39)  # captured, but nothing may go
    first, second = (node.run_dir / protocol.ALARM for node in job.nodes)
    wait(first.exists)
    (alarm,) = (one for one in json.loads(first.read_text()).values() if one.startswith("exchange.slowed"))
    assert re.match(r"exchange\.slowed: node n0: none in (2[6-9]|3\d) iterations, planned 1: ", alarm), alarm
    assert not second.exists() and job.nodes[0].status("rarer")


def test_copies_go_out_while_their_rank_s_gate_is_open_and_not_otherwise(cluster):
    job = cluster(2)
    job.protect(**COPIES)
    job.train(1, 1)  # without a plan yet, by the rate, which is divided among ranks by what they send
    assert all(node.status("in_bubbles") == node.status("late") == 0 for node in job.nodes)
    for node in job.nodes:
        sizes = {rank: job.shapes[rank].nbytes for rank in node.segments}
        duties = {rank: pacer._state.rate_duty for rank, pacer in node.driver.pace.pacers.items()}
        assert duties == {rank: LARGEST_RATE_DUTY * size / sum(sizes.values()) for rank, size in sizes.items()}

    def bubbles(ranks, nbytes):
        """The trainers of `ranks` wait for a long time, in which so much may go."""
        for node in job.nodes:
            for rank in set(node.segments) & set(ranks):
                grant = Grant(0, -1, 0.0, SECONDS, nbytes)
                Gate(node.segments[rank].gate).open([grant], 0, time.monotonic_ns())

    bubbles((0, 1, 2, 3), 0)  # from now on there is a plan, by which nothing may go now
    for node in job.nodes:
        for segment in node.segments.values():
            Gate(segment.gate).plan(2, SECONDS, 0.0)  # so that no copy is overdue, however slow the machine is
    job.begin(2)
    bubbles((2,), 300_000)  # less than the copy; the last frame has to be through before it is opened anew
    wait(lambda: job.nodes[1].status("in_bubbles") == 300_000)
    bubbles((0, 1, 2), 1 << 30)
    lanes = {0: (0, 1), 1: (2, 3)}
    sent = {at: sum(job.shapes[rank].nbytes for rank in ranks if rank != 3) for at, ranks in lanes.items()}
    wait(lambda: all(job.nodes[at].status("in_bubbles") > nbytes for at, nbytes in sent.items()))
    assert all(node.status("committed") == [1, 1] for node in job.nodes), "rank 3 has not been allowed anything"
    assert job.nodes[1].status("in_bubbles") < sent[1] + job.shapes[3].nbytes
    bubbles((3,), 1 << 30)
    job.until_committed(2)
    assert all(node.status("late") == 0 for node in job.nodes)
    for node, ranks in zip(job.nodes, lanes.values(), strict=True):
        told = node.named("version.committed")[-1]
        assert [(rank, bubble) for rank, bubble, _ in told["filled"]] == [(rank, 0) for rank in ranks]
        assert sum(nbytes for _, _, nbytes in told["filled"]) == told["in_bubbles"]
    for node in job.nodes:
        by_rate, sent_now = node.named("exchange.sent")
        assert by_rate["in_bubbles"] == by_rate["late"] == 0 < by_rate["bytes"]
        assert sent_now["in_bubbles"] == sent_now["bytes"] and sent_now["late"] == 0
        counts = node.named("version.committed")
        assert [(one["iterations"], one["planned"]) for one in counts] == [(None, None), (1, 2)]
        status = node.tier.status()
        assert (status["iterations"], status["planned"], status["rarer"]) == (1, 2, False)
        assert [one["rank"] for one in status["copies"]] == sorted(node.segments)
        assert sum(one["in_bubbles"] for one in status["copies"]) == status["in_bubbles"] == sent_now["in_bubbles"]
    (fresh,) = job.substitute(1)
    job.rebuild(fresh, 3, Version(1, 2), (1,))
    assert fresh.holds(3, Version(1, 2)), "put together from frames of any length"


def test_other_nodes_are_asked_for_people_page_by_page_and_each_by_its_own_name(cluster, monkeypatch):
    job = cluster(3)
    first, second, third = (node.tier for node in job.nodes)
    assert first.other_nodes(0, SECONDS, SECONDS) == ([], None), "nothing is protected yet"
    job.protect()
    told = {"state": "TRAINING", "headline": "", "remedy": "", "ranks": 2, "iteration": None, "restarts": 0}
    more = {"iteration_age_seconds": 0.5, "downtime_seconds": 0.0, "newest": {"process": None}, "alarm": None}
    more["details"] = {"safe_lineage": 0}
    second.serve_status(lambda: other_nodes.reported({**told, **more}))
    monkeypatch.setattr(other_nodes, "PAGE", 1)
    pages = [first.other_nodes(at, SECONDS, SECONDS) for at in (0, 1, 99)]
    assert [[each["node"] for each in page] for page, _ in pages] == [["n1"], ["n2"], []]
    assert [following for _, following in pages] == [1, None, None]
    (answered,), (starting,) = pages[0][0], pages[1][0]
    assert (answered["state"], answered["error"]) == ("TRAINING", "")
    assert (starting["state"], starting["error"]) == (None, "node n2 is still starting")


def test_however_many_people_ask_at_once_the_other_nodes_are_asked_for_one_of_them_at_a_time(cluster, monkeypatch):
    job = cluster(2)
    job.protect()
    go_on, came, asked = threading.Event(), list[float](), list[float]()

    def now():
        came.append(time.monotonic())
        return came[-1]

    def ask(peers, seconds):
        asked.append(seconds)
        assert go_on.wait(SECONDS)
        return [{"node": "n1"}]

    monkeypatch.setattr("ft_plugins.smp.tree.node.time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(other_nodes, "ask", ask)
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(job.nodes[0].tier.other_nodes, 0, SECONDS, SECONDS) for _ in range(20)]
        wait(lambda: len(came) == 20)
        go_on.set()
        assert [each.result(SECONDS) for each in answers] == [([{"node": "n1"}], None)] * 20
    assert len(asked) == 1, "those who waited share the answer"
    job.nodes[0].tier.other_nodes(0, SECONDS, SECONDS)
    assert len(asked) == 2, "and nobody gets an old one"
