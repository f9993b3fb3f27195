"""Looks that the leader holds until there is news: at the service, at its port, and at the node that looks."""

import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from ft_plugins.base.intake import parsed
from ft_plugins.errors import ProtocolError
from ft_plugins.events import Events
from ft_plugins.launcher.rendezvous import endpoint
from ft_plugins.launcher.rendezvous.local_node import LeaderLink
from ft_plugins.launcher.rendezvous.peers import Credentials, PeerConnection, PeerServer
from ft_plugins.launcher.rounds import held_looks
from ft_plugins.launcher.rounds.held_looks import longest_hold
from ft_plugins.launcher.rounds.node_messages import Admission, Leader
from ft_plugins.launcher.rounds.node_service import NodeIdentity, NodeService
from ft_plugins.launcher.rounds.roster import PAGE, Place, Roster
from ft_plugins.launcher.rounds.round_machine import Phase
from ft_plugins.launcher.rounds.rounds import Rules

WAIT = 60.0
SILENCE = 8.0
US = Credentials(b"sixteen bytes or more", "job", "n")


def application(name, **fields):
    made = {"node": name, "token": f"t-{name}", "endpoint": "127.0.0.1:1", **fields}
    return {"do": "apply", "token": f"t-{name}", "application": made}


def look(name, **fields):
    return {"do": "look", "token": f"t-{name}", **fields}


# ---- at the service ----


class Lead:
    """A service that leads, in made-up time; each node is at a connection of its own."""

    def __init__(self, monkeypatch, nodes=3):
        self.now = 1000.0
        monkeypatch.setattr("ft_plugins.launcher.rounds.node_service.time", SimpleNamespace(monotonic=lambda: self.now))
        self.service = NodeService(NodeIdentity("job", "a", "t-a", "127.0.0.1:1"), Rules(nodes, nodes), SILENCE)
        leader = Leader("a", "t-a", "127.0.0.1:1", 1)
        self.service.answer({"do": "elect", "lead": vars(leader)})
        assert self.service.take_lead(leader, None)

    def come(self, *names):
        for name in names:
            assert self.service.answer(application(name), ord(name))["accepted"]

    def hold(self, name, **fields):
        """A look that is held, because its sender knows what there is."""
        seen = self.service.answer(look(name), ord(name))["changes"]
        assert self.service.answer_or_hold(look(name, wait=2.0, seen=seen, **fields), ord(name)) is None

    def released(self):
        return {chr(connection): reply for connection, reply in self.service.released()}

    def tick(self, seconds=0.1):
        self.now += seconds
        self.service.tick()


@pytest.fixture
def lead(monkeypatch):
    return Lead(monkeypatch)


def test_a_look_without_news_is_held_until_its_time_is_over(lead):
    lead.come("a", "b")
    lead.hold("b")
    lead.tick(1.9)
    assert lead.released() == {}
    lead.tick(0.2)
    assert lead.released()["b"]["waiting"] == 2 and lead.released() == {}


def test_a_look_with_news_or_of_an_unknown_process_or_that_does_not_wait_is_answered_at_once(lead):
    lead.come("a", "b")
    for request in (look("b", wait=2.0), look("b"), look("x", wait=2.0, seen=1), look("b", wait=0.0, seen=1)):
        reply = lead.service.answer_or_hold(request, ord("b"))
        assert reply is not None and reply["changes"] == 1
    lead.service.answer({"do": "leave", "token": "t-b"})
    reply = lead.service.answer_or_hold(look("b", wait=2.0, seen=1), ord("b"))
    assert reply is not None and reply["waits"] is False, "it has to apply again"


def test_all_held_looks_are_released_when_a_round_takes_a_step_and_not_when_a_node_comes(lead):
    lead.come("a", "b")
    lead.hold("a")
    lead.hold("b")
    lead.tick()
    assert lead.released() == {}
    lead.come("c")
    assert lead.released() == {}, "each node would wake all others"
    lead.tick()
    found = lead.released()
    assert {name: (reply["phase"], reply["rank"]) for name, reply in found.items()} == {
        "a": ("proposed", 0),
        "b": ("proposed", 1),
    }


def test_a_held_look_counts_as_a_message_of_a_node_that_was_chosen(lead):
    lead.come("a", "b", "c")
    lead.tick()
    lead.service.answer({"do": "serve", "token": "t-a", "store": "127.0.0.1:2"})
    for name in "abc":
        lead.hold(name)
    lead.tick()
    found = lead.released()
    assert {reply["phase"] for reply in found.values()} == {"complete"} and not found["a"]["begun"]
    for name in "ab":
        lead.hold(name, round=1)
    reply = lead.service.answer_or_hold(look("c", round=1, wait=2.0, seen=found["c"]["changes"]), ord("c"))
    assert reply is not None and reply["begun"], "it is the last one that had to know"
    assert all(reply["begun"] for reply in lead.released().values())


def test_a_node_that_only_has_a_held_look_is_lost_after_the_silence_and_not_before(lead):
    lead.come("a", "b")
    lead.hold("b")
    for _ in range(int(SILENCE / 0.5)):
        lead.tick(0.5)
        lead.service.answer(look("a"), ord("a"))
    assert [place.node for place in lead.service.present] == ["a", "b"]
    lead.tick(0.5)
    assert [place.node for place in lead.service.present] == ["a"]


@pytest.mark.parametrize("end", ["closed", "moved"])
def test_held_looks_are_released_when_there_is_no_round_to_wait_for(lead, end):
    lead.come("a", "b")
    lead.hold("b")
    if end == "closed":
        lead.service.close("it has succeeded", True)
    else:
        lead.service.resign()
    [(name, reply)] = lead.released().items()
    assert name == "b" and bool(reply[end])
    assert lead.service.answer_or_hold(look("b", wait=2.0, seen=1), ord("b")) is not None


def test_a_look_whose_connection_has_ended_is_not_answered(lead):
    lead.come("a", "b")
    lead.hold("b")
    lead.service.gone(ord("b"))
    lead.tick(3.0)
    assert lead.released() == {}


def test_no_look_is_held_for_longer_than_a_quarter_of_the_silence(lead):
    lead.come("a", "b")
    assert lead.service.answer_or_hold(look("b", wait=60.0, seen=1), ord("b")) is None
    lead.tick(SILENCE / 4 + 0.1)
    assert list(lead.released()) == ["b"]
    assert longest_hold(SILENCE) == SILENCE / 4 and longest_hold(1e6) == 10.0 and longest_hold(0.0) == 0.0
    for wait in (-1.0, 1e9, float("nan"), "2", True):
        with pytest.raises(ProtocolError):
            lead.service.answer_or_hold(look("b", wait=wait, seen=1), ord("b"))


# ---- at the port ----


class Shelf:
    """Holds each request that asks for it, until it is told to release them."""

    def __init__(self):
        self.held = {}
        self.open = False
        self.gone = []

    def answer(self, request, connection):
        if request.get("hold"):
            self.held[connection] = request
            return None
        return request

    def released(self):
        return [(each, self.release(each)) for each in list(self.held)] if self.open else []

    def release(self, connection):
        request = self.held.pop(connection)
        return request | {"text": "x" * request.get("size", 0)}


@pytest.fixture
def shelf():
    made = Shelf()
    listener = endpoint.listen_anywhere("127.0.0.1")
    port = PeerServer(listener, US, made.answer, made.gone.append, lambda: 0.05, Events(), made)
    yield made, f"127.0.0.1:{port.port}"
    port.close()
    port.check()


def until(holds):
    deadline = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_held_reply_is_sent_when_it_is_released(shelf):
    held, place = shelf
    peers = [PeerConnection(place, WAIT, US) for _ in range(3)]
    for number, peer in enumerate(peers):
        peer.send({"hold": True, "number": number, "size": 900_000 if number == 1 else 0})
        peer.send({"number": -number}) if number == 2 else None
    until(lambda: len(held.held) == 2)
    assert not peers[0].is_readable(0.2)
    held.open = True
    found = [peer.receive() for peer in peers]
    assert [len(reply["text"]) for reply in found] == [0, 900_000, 0], "more than a socket holds"
    assert [reply["number"] for reply in found] == [0, 1, 2] and peers[2].receive() == {"number": -2}
    for peer in peers:
        assert peer.ask({"hold": True, "number": 7})["number"] == 7
        peer.close()


def test_another_request_on_the_connection_releases_the_reply_before_it(shelf):
    held, place = shelf
    peer = PeerConnection(place, WAIT, US)
    for number in range(5):
        peer.send({"hold": True, "number": number})
    assert [peer.receive()["number"] for _ in range(4)] == [0, 1, 2, 3]
    assert peer.ask({"number": 9}) == {"number": 9} and not held.held, "the reply to the last one was dropped"
    peer.close()


def test_a_connection_that_ends_while_its_reply_is_held_is_gone(shelf):
    held, place = shelf
    peer, other = PeerConnection(place, WAIT, US), PeerConnection(place, WAIT, US)
    peer.send({"hold": True})
    until(lambda: held.held)
    peer.close()
    until(lambda: held.gone)
    held.open = True
    until(lambda: not held.held)
    assert other.ask({"number": 1}) == {"number": 1}
    other.close()


# ---- at the node that looks ----


@dataclass
class Node:
    """A node at its port."""

    service: NodeService
    port: PeerServer
    link: LeaderLink

    @property
    def token(self):
        return self.service.me.token


@pytest.fixture
def nodes():
    """Of three nodes of a round, the first leads, and the others follow it."""
    made = []
    for name in "abc":
        listener = endpoint.listen_anywhere("127.0.0.1")
        me = NodeIdentity("job", name, f"t-{name}", f"127.0.0.1:{listener.getsockname()[1]}")
        service = NodeService(me, Rules(3, 3, wait=0.0), SILENCE)  # for none of the roster
        port = PeerServer(listener, US, service.answer_or_hold, service.gone, service.tick, Events(), service)
        made.append(Node(service, port, LeaderLink(service, 1.0, SILENCE, US)))
    lead = made[0].service
    leader = Leader("a", "t-a", lead.me.endpoint, 1)
    lead.answer({"do": "elect", "lead": vars(leader)})
    assert lead.take_lead(leader, roster_of(2 * PAGE))
    for node in made:
        node.link.follow(leader)
    yield made
    for node in made:
        node.link.close()
        node.port.close()
        node.port.check()


def roster_of(count):
    return Roster(4, tuple(Place(f"n{number}", "127.0.0.1:1") for number in range(count)))


def apply(node):
    return node.link.ask("apply", application=application(node.service.me.node, knows=4)["application"])


def news(node, seconds=WAIT):
    """What the node sees, once there is news."""
    view = node.link.watch(4, seconds)
    assert view is not None
    return view


@pytest.fixture
def held_for_long(monkeypatch):
    """A look without news is not answered for a long time, and no node is lost meanwhile."""
    monkeypatch.setattr(held_looks, "_LONGEST", 60.0)
    monkeypatch.setitem(globals(), "SILENCE", 240.0)


def test_a_node_learns_of_a_step_at_once_and_of_nothing_else(held_for_long, nodes):
    a, b, c = nodes
    apply(a), apply(b)
    assert news(b).waiting == 2
    assert b.link.watch(4, 0.2) is None
    apply(c)
    view = news(b, 30.0)  # a look without news takes longer
    assert (view.phase, view.rank) == (Phase.PROPOSED, 1)


def test_the_first_look_at_a_leader_is_answered_at_once(held_for_long, nodes):
    a, b, _ = nodes
    apply(a), apply(b)
    seen = news(b).changes
    assert b.link.watch(4, 0.2) is None
    assert a.link.leader is not None
    b.link.follow(a.link.leader)
    apply(b)
    assert news(b, 30.0).changes == seen, "it might be another one that has counted as far"


def test_a_request_while_a_look_is_held_has_its_own_reply(nodes):
    a, b, _ = nodes
    apply(a), apply(b)
    news(b)
    for _ in range(3):
        assert b.link.watch(4, 0.0) is None
        assert b.link.ask("finish", round=1) == {"closed": "", "status": None, "moved": False}
    assert b.link.watch(4, 0.0) is None


def test_a_look_whose_connection_ends_is_sent_again_on_a_new_one(nodes):
    a, b, _ = nodes
    apply(a), apply(b)
    news(b)
    assert b.link.watch(4, 0.0) is None
    connection = b.link._connection
    assert connection is not None
    connection._caller.connect().connection.shutdown(2)  # as a network does that forgets connections
    news(b)  # is answered; whether b is still counted by then depends on how long that took
    assert b.link._connection is not connection


def test_a_leader_that_is_silent_is_only_slow_at_first_and_then_lost(nodes, monkeypatch):
    a, b, _ = nodes
    apply(a), apply(b)
    news(b)
    until_lost = []
    with a.service._lock:  # its thread hangs
        began = time.monotonic()
        while not until_lost:
            try:
                assert b.link.watch(4, 0.1) is None
            except ConnectionError as error:
                if not b.link.is_only_slow(error):
                    until_lost.append(time.monotonic() - began)
    assert until_lost[0] >= SILENCE - 0.2


def test_a_node_that_cannot_use_a_change_reads_the_whole_roster(nodes):
    _, b, _ = nodes
    service = nodes[0].service
    assert service._rounds is not None
    old, new = roster_of(3), Roster(5, roster_of(2 * PAGE).members[1:])
    service._rounds.roster = old
    b.link.ask("roster")
    service._rounds.roster = new
    reply = b.link.ask("apply", application=application("b")["application"], base=old.digest)
    first = parsed(Admission, reply).roster
    assert first is not None and first.base == old.digest
    assert b.link.read_roster(first, roster_of(4)) == new, "it has forgotten what it said it knew"
