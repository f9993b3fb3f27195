"""Ranks find each other through the store, and believe none without the secret. The ranks are threads here."""

import contextlib
import os
import socket
import threading
import time
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from ft_plugins.collective import meeting as module
from ft_plugins.collective.meeting import RankMeeting, meet
from ft_plugins.collective.operations import FrameKind, framed, payloads
from ft_plugins.collective.switch import Switch
from ft_plugins.errors import ConfigError, FtError, ProtocolError
from ft_plugins.events import Events
from ft_plugins.transport import own_address
from ft_plugins.transport.channel import Party
from ft_plugins.transport.frame_codec import UNIT
from ft_plugins.transport.own_address import IDENTITY, UNKNOWN

SECRET = b"sixteen bytes or more"
TREE = bytes(module.NONCE) + (1).to_bytes(4, "big") + UNKNOWN  # what rank 0 writes
SECONDS = 90.0
FOR_EVER = 3600.0  # for what is not waited for: longer than a test may take


def together(count, work):
    """What `work(rank)` returns, or raises, by rank."""
    found = [None] * count

    def run(rank):
        try:
            found[rank] = work(rank)
        except FtError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive()
    return found


def meeting(rank, count, store, secret=SECRET, on_node=1, seconds=SECONDS, encrypt=False):
    return RankMeeting(store, "0", rank, count, on_node, secret, "127.0.0.1", encrypt, seconds, Events())


@contextlib.contextmanager
def switches(count, on_node=1, seconds=SECONDS):
    store = HashStore()
    met = together(count, lambda rank: meet(meeting(rank, count, store, on_node=on_node)))
    made = [Switch(one.place, one.links, seconds) for one in met]
    try:
        yield made
    finally:
        for switch in made:
            switch.close()


@pytest.mark.parametrize("count, on_node", [(2, 1), (5, 2), (12, 1), (17, 8)])
def test_what_ranks_gather_arrives_whatever_its_size(count, on_node):
    bodies = [bytes([rank]) * ((rank * 77_777) % (3 * UNIT)) for rank in range(count)]
    with switches(count, on_node) as made:
        calls = [switch.start(FrameKind.GATHER, framed(body)) for switch, body in zip(made, bodies, strict=True)]
        for switch, call in zip(made, calls, strict=True):
            assert payloads(switch.result(call), count) == bodies


def test_a_word_is_known_to_all_when_the_announcer_goes_on():
    with switches(20, 4) as made:
        assert not any(switch.knows("degraded") for switch in made)
        assert made[13].announce("degraded", SECONDS) == ""
        assert all(switch.knows("degraded") for switch in made)


def kill(switch):
    """End its connections as the kernel does for a process that was killed."""
    still = threading.Event()  # its thread does nothing any more: it would see its own connections end

    def stopped():
        still.set()
        time.sleep(0.01)

    switch._serve = lambda link: None
    switch._turn = stopped
    switch._loop.wake()
    assert still.wait(SECONDS)
    for link in tuple(switch._links.values()):
        link.connection.shutdown(socket.SHUT_RDWR)


def wait_until(done):
    until = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.mark.parametrize("ended", [[0], [1], [4], [0, 4], [4, 0, 1, 2]])
def test_a_rank_that_ends_in_order_is_no_loss_and_no_word_waits_for_it(ended):
    """Ranks 0 and 4 have others below them. Whether a word passes a rank that has ended makes no difference."""
    with switches(8, 4) as made:
        neighbours = [list(made[one]._links) for one in ended]
        for one in ended:
            made[one].close()
        others = [rank for rank in range(8) if rank not in ended]
        for one, near in zip(ended, neighbours, strict=True):
            for rank in near:
                wait_until(lambda one=one, rank=rank: one not in made[rank]._links or rank in ended)
        assert [made[rank].announce("degraded", SECONDS) for rank in others] == [""] * len(others)
        assert [made[rank].lost for rank in others] == [None] * len(others)


@pytest.mark.parametrize("ended", [0, 1, 4])
def test_an_operation_that_a_rank_ended_without_fails_on_all_with_its_name(ended):
    with switches(8, 4) as made:
        others = [rank for rank in range(8) if rank != ended]
        calls = {rank: made[rank].start(FrameKind.GATHER, b"") for rank in others[:-1]}
        made[ended].close()
        calls[others[-1]] = made[others[-1]].start(FrameKind.GATHER, b"")  # called after that
        for rank, call in calls.items():
            with pytest.raises(ProtocolError, match=f"rank {ended} has ended, but did not take part in operation 1 of"):
                made[rank].result(call)
        assert [made[rank].lost for rank in others] == [None] * 7


def test_a_rank_may_end_when_it_has_done_its_part_of_an_operation():
    with switches(2) as made:
        made[1].start(FrameKind.GATHER, framed(b"1"))  # it does not read the result
        wait_until(lambda: bool(made[0]._operations._joining))
        made[1].close()
        assert payloads(made[0].result(made[0].start(FrameKind.GATHER, framed(b"0"))), 2) == [b"0", b"1"]


@pytest.mark.parametrize("lost, near", [(0, [1, 2, 3, 4]), (1, [0]), (4, [0, 5, 6, 7])])
def test_a_lost_rank_is_named_by_its_neighbours_and_no_later_word_is_waited_for(lost, near):
    with switches(8, 4) as made:
        kill(made[lost])
        others = [rank for rank in range(8) if rank != lost]
        for rank in others:
            wait_until(lambda rank=rank: bool(made[rank]._reason))
        found = {rank: made[rank].lost for rank in others}
        assert {rank: neighbour.rank for rank, neighbour in found.items() if neighbour} == dict.fromkeys(near, lost)
        for rank in others:
            assert "is lost (it has ended)" in made[rank].announce("degraded", FOR_EVER)


def test_a_word_that_a_rank_never_takes_is_reported_after_the_time_for_it(monkeypatch):
    with switches(2) as made:
        monkeypatch.setattr(made[1], "_serve", lambda link: time.sleep(0.01))
        assert made[0].announce("degraded", 0.2) == "rank 0: no answer of some ranks for 0.2 s"


@pytest.mark.parametrize("lost", [0, 1, 4])
def test_a_lost_rank_ends_the_operation_on_all_with_its_name(lost):
    """Ranks 0 and 4 have others below them, 1 has none."""
    with switches(8, 4) as made:
        others = [rank for rank in range(8) if rank != lost]
        calls = {rank: made[rank].start(FrameKind.GATHER, b"") for rank in others}
        kill(made[lost])
        for rank, call in calls.items():
            with pytest.raises(ProtocolError, match=rf"the connection to rank {lost} is lost"):
                made[rank].result(call)
        with pytest.raises(ProtocolError, match="is lost"):
            made[others[0]].result(made[others[0]].start(FrameKind.AGREE, b""))


def test_a_rank_that_does_not_take_part_is_named_after_the_jobs_timeout():
    with switches(3, 1, seconds=0.3) as made:
        call = made[0].start(FrameKind.GATHER, framed(b""))
        made[1].start(FrameKind.GATHER, framed(b""))
        with pytest.raises(ProtocolError, match="rank 0: waited 0.3 s in vain for rank 2, "):
            made[0].result(call)


def test_a_result_is_with_the_ranks_below_before_the_caller_may_end():
    large = bytes(8 * UNIT)
    with switches(2) as made:
        calls = [switch.start(FrameKind.GATHER, framed(large)) for switch in made]
        made[0].result(calls[0])
        made[0].close()
        assert payloads(made[1].result(calls[1]), 2) == [large, large]


@pytest.mark.parametrize("other", [b"", b"another secret, as long"])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_with_different_secrets_say_so_and_their_connection_is_of_no_other_use(other, odd):
    store = HashStore()
    secrets = [other if rank == odd else SECRET for rank in range(3)]
    met = together(3, lambda rank: meet(meeting(rank, 3, store, secrets[rank])))
    pairs = {0: ["0-1", "0-2"], 1: ["0-1"], 2: ["0-2"]}[odd]
    for rank in range(3):
        named = [pair for pair in pairs if str(rank) in pair.split("-")]
        assert bool(met[rank].refusal) == bool(named)
        if named:
            assert "has another secret, or only one of the two has one; give --ftp-secret-file" in met[rank].refusal


def test_ranks_that_differ_in_encryption_say_so():
    store = HashStore()
    met = together(2, lambda rank: meet(meeting(rank, 2, store, encrypt=rank == 1)))
    assert [one.refusal for one in met] == [
        "rank 0: rank 1 differs in --ftp-encrypt; give all nodes the same",
        "rank 1: rank 0 differs in --ftp-encrypt; give all nodes the same",
    ]


def test_a_stranger_that_has_read_the_nonce_in_the_store_takes_no_ranks_place():
    store = HashStore()
    strangers = []

    def work(rank):
        if rank == 1:
            nonce = bytes(store.get("ft_plugins/ranks/0/tree"))[: module.NONCE]
            where = "127.0.0.1", int.from_bytes(store.get("ft_plugins/ranks/0/0")[:2], "big")
            me, proving = (module.RankDoor("127.0.0.1", nonce, "0", 1, Events()).me, Party("ranks", "0", "1"))
            until = time.monotonic() + SECONDS
            greet = lambda one: module._prove(one, until, b"no key of this job", proving)  # noqa: E731
            strangers.append(module.dial(where, nonce, me, 0, until, greet))
            assert "has another secret" in strangers[0][-1]
        return meet(meeting(rank, 2, store))

    met = together(2, work)
    assert [sorted(one.links) for one in met] == [[1], [0]] and not any(one.refusal for one in met)
    strangers[0][0].close()


@pytest.mark.parametrize("error", [ConnectionResetError(), ProtocolError("it sent something else")])
def test_a_rank_that_is_cut_off_between_its_two_proofs_tries_again(error, monkeypatch):
    check, cut = module._check, [0, 0]

    def once(*words):
        if not cut[0]:
            cut[0] = 1
            raise error
        cut[1] += 1
        return check(*words)

    monkeypatch.setattr(module, "_check", once)
    store = HashStore()
    met = together(3, lambda rank: meet(meeting(rank, 3, store)))
    assert [sorted(one.links) for one in met] == [[1, 2], [0], [0]] and not any(one.refusal for one in met)
    assert cut == [1, 2]


def test_a_rank_that_is_always_cut_off_names_the_other_one_and_the_remedy(monkeypatch):
    def never(*words):
        raise ConnectionResetError

    monkeypatch.setattr(module, "_check", never)
    store = HashStore()
    met = together(2, lambda rank: meet(meeting(rank, 2, store, seconds=0.3 if rank else 0.6)))
    assert "rank 1: rank 0 cannot be reached at 127.0.0.1" in str(met[1]) and "--ftp-interface" in str(met[1])


@pytest.mark.parametrize("on_node, local", [(1, [0]), (1, [1]), (2, [0, 1])])
def test_a_node_that_resolves_its_name_to_loopback_is_reached_at_its_address_towards_another_node(
    on_node, local, monkeypatch
):
    """Ranks of the node whose name all have; others see its address, here another one of this machine."""
    monkeypatch.setattr(own_address, "only_local", lambda address: address == "127.0.1.1")
    monkeypatch.setattr(module, "only_local", own_address.only_local)
    monkeypatch.setattr(own_address, "_on_the_way", lambda host: {"127.0.0.9": "127.0.0.8"}[host])
    store, count = HashStore(), 3 * on_node

    def work(rank):
        address = "127.0.1.1" if rank in local else "127.0.0.9"
        return meet(replace(meeting(rank, count, store, on_node=on_node), address=address, by_name=True))

    met = together(count, work)
    assert [one.address for one in met] == ["127.0.0.8" if rank in local else "127.0.0.9" for rank in range(count)]
    if 0 in local:
        assert bytes(store.get("ft_plugins/ranks/0/0"))[2 + IDENTITY :] == b"127.0.0.8"
    assert not any(one.refusal for one in met)


THIS, OTHER = b"this".ljust(IDENTITY), b"other".ljust(IDENTITY)  # hosts


def on_host(rank, store, host, address, by_name=False, seconds=1.0):
    return replace(meeting(rank, 2, store, seconds=seconds), host=host, address=address, by_name=by_name)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_a_loopback_address_of_the_rank_above_is_refused_on_another_host_before_it_is_tried(address):
    store = HashStore()
    store.set("ft_plugins/ranks/0/tree", TREE)
    store.set("ft_plugins/ranks/0/0", (1).to_bytes(2, "big") + THIS + address.encode())
    with pytest.raises(ConfigError) as caught:
        meet(on_host(1, store, OTHER, "10.0.0.2"))
    assert str(caught.value).startswith(
        f"rank 1: rank 0 has the address {address}, which only its own host reaches, and rank 1 runs on another host"
    )
    assert "--ftp-interface" in str(caught.value) and "MASTER_ADDR" in str(caught.value)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_loopback_address_of_a_rank_itself_is_refused_on_another_host_than_rank_0s(by_name):
    """It may have no rank below it, but its node's SMP would publish the address too. All nodes that resolve the name
    of the job's host to loopback, as copies of one image do, are no emulated ones."""
    store = HashStore()
    store.set("ft_plugins/ranks/0/tree", TREE[:-IDENTITY] + THIS)
    store.set("ft_plugins/ranks/0/from0", b"127.0.1.1")
    store.set("ft_plugins/ranks/0/0", (1).to_bytes(2, "big") + UNKNOWN + b"127.0.0.9")
    with pytest.raises(ConfigError, match="rank 1: rank 1 has the address 127.0.1.1, .* and rank 0 runs on another"):
        meet(on_host(1, store, OTHER, "127.0.1.1", by_name))


@pytest.mark.parametrize("hosts", [(THIS, THIS), (UNKNOWN, THIS), (THIS, UNKNOWN)])
def test_loopback_addresses_of_one_host_or_of_one_that_is_unknown_are_tried(hosts):
    store = HashStore()
    met = together(2, lambda rank: meet(on_host(rank, store, hosts[rank], f"127.0.0.{rank + 3}", seconds=20)))
    assert [sorted(one.links) for one in met] == [[1], [0]] and not any(one.refusal for one in met)


def test_nodes_that_are_all_on_loopback_keep_their_addresses():
    store = HashStore()
    met = together(2, lambda rank: meet(replace(meeting(rank, 2, store), address=f"127.0.0.{rank + 3}", by_name=True)))
    assert [one.address for one in met] == ["127.0.0.3", "127.0.0.4"]


@pytest.mark.parametrize(
    "entry, words", [(None, "rank 0: rank 1 did not come in time"), (b"eth0", "the entry of rank 1 in the job's store")]
)
def test_without_an_address_of_another_node_the_reason_is_named(entry, words):
    store = HashStore()
    if entry is not None:
        store.set("ft_plugins/ranks/0/from1", entry)
    with pytest.raises(ProtocolError, match=words):
        meet(replace(meeting(0, 2, store, seconds=0.2), by_name=True))


@pytest.mark.parametrize(
    "key, entry",
    [
        ("tree", b""),
        ("tree", bytes(len(TREE))),
        ("tree", TREE[:-1]),
        ("tree", TREE + b"1"),
        ("tree", bytes(32) + b"\xff" * 4 + UNKNOWN),
        ("0", b""),
        ("0", bytes(2) + UNKNOWN),
        ("0", bytes(2) + UNKNOWN + b"not an address"),
        ("0", bytes(2) + UNKNOWN + b"1" * 65),
    ],
)
def test_what_a_stranger_writes_to_the_store_is_refused(key, entry):
    store = HashStore()
    store.set("ft_plugins/ranks/0/tree", TREE)
    store.set(f"ft_plugins/ranks/0/{key}", entry)
    with pytest.raises(ProtocolError, match="rank 1: the entry of rank 0 in the job's store makes no sense"):
        meet(meeting(1, 2, store))


def test_nodes_with_different_numbers_of_ranks_form_one_tree():
    """The last node has one rank; each knows its own number only."""
    store = HashStore()
    met = together(5, lambda rank: meet(meeting(rank, 5, store, on_node=1 if rank == 4 else 2)))
    assert [one.place.parent for one in met] == [None, 0, 0, 2, 0]


def test_where_no_rank_listens_the_rank_and_the_remedy_are_named():
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    store.set("ft_plugins/ranks/0/tree", TREE)
    store.set("ft_plugins/ranks/0/0", port.to_bytes(2, "big") + UNKNOWN + b"127.0.0.1")
    with pytest.raises(ProtocolError, match=f"rank 1: rank 0 cannot be reached at 127.0.0.1:{port} .*--ftp-interface"):
        meet(meeting(1, 2, store, seconds=0.2))


def test_ranks_that_never_come_are_named():
    with pytest.raises(ProtocolError, match="rank 0: rank 1, 2 did not connect to 127.0.0.1:"):
        meet(meeting(0, 3, HashStore(), seconds=0.3))


def test_a_forked_child_keeps_no_connection_of_its_parent():
    with switches(2) as made:
        descriptors = [link.connection.fileno() for switch in made for link in switch._links.values()]
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            left = [number for number in descriptors if os.path.exists(f"/proc/self/fd/{number}")]
            os.write(write, str(left).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 1000) == b"[]"
        os.close(read)
        os.close(write)
        calls = [switch.start(FrameKind.GATHER, framed(b"1")) for switch in made]
        assert payloads(made[1].result(calls[1]), 2) == [b"1", b"1"], "the parent keeps its own"
