"""Connections that are idle cost no thread, and those with requests no more than there may be."""

import select
import socket
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from ft_plugins.errors import ProtocolError
from ft_plugins.events import Events
from ft_plugins.smp.tree.tree_member import TreeLink
from ft_plugins.transport.calls import Handover, Peer, Server
from ft_plugins.transport.channel import Party
from ft_plugins.transport.framed import EndedError
from ft_plugins.transport.serving import Served, Serving

SECONDS = 90.0
SECRET = b"a secret of this test"
NAME = "test-serving"


def wait(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {SECONDS} s"
        time.sleep(0.005)


def threads():
    return sum(thread.name == NAME for thread in threading.enumerate())


@dataclass(eq=False)
class One(Served):
    peer: socket.socket
    ended: list[str] = field(default_factory=list)

    def ask(self, what):
        self.peer.sendall(what)

    def answer(self):
        return self.peer.recv(1)


class Echo:
    """Answers each byte; b'w' once `go_on` is set, b'x' never again."""

    def __init__(self, most, idle_seconds=100.0):
        self.go_on = threading.Event()
        self.begun = threading.Event()
        self.serving = Serving[One](self.serve, self.end, NAME, most, 100, idle_seconds)
        self.made = []
        self.most_threads = 0  # that serve at a time
        self._serving = []

    def one(self):
        ours, theirs = socket.socketpair()
        theirs.settimeout(SECONDS)
        self.made.append(One(ours, "local", theirs))
        assert self.serving.take(self.made[-1])
        self.serving.add(self.made[-1])
        return self.made[-1]

    def serve(self, one):
        self._serving.append(one)
        self.most_threads = max(self.most_threads, len(self._serving))
        try:
            return self._serve(one)
        finally:
            self._serving.remove(one)

    def _serve(self, one):
        what = one.connection.recv(1)
        if what == b"w":
            self.begun.set()
            self.go_on.wait(SECONDS)
        if what in (b"", b"x"):
            self.end(one, "asked to")
            return False
        one.connection.send(what)
        return True

    def end(self, one, reason):
        one.ended.append(reason)
        self.serving.leave(one)
        one.connection.close()


@pytest.fixture
def echo():
    made = []

    def make(*args):
        made.append(Echo(*args))
        return made[-1]

    yield make
    for each in made:
        each.go_on.set()
        each.serving.close()
        for one in each.made:
            one.peer.close()


def test_idle_connections_cost_no_thread(echo):
    there = echo(4)
    ones = [there.one() for _ in range(40)]
    for one in ones:
        one.ask(b"a")
    assert [one.answer() for one in ones] == [b"a"] * 40
    assert there.most_threads <= 4
    wait(lambda: threads() == 0)
    ones[7].ask(b"b")
    assert ones[7].answer() == b"b"


def test_requests_beyond_the_threads_wait_and_are_answered_in_turn(echo):
    there = echo(2)
    slow, quick = [there.one() for _ in range(2)], [there.one() for _ in range(6)]
    for one in slow:
        one.ask(b"w")
    wait(lambda: there.serving._active == 2)
    for one in quick:
        one.ask(b"q")
    quick[0].peer.settimeout(0.1)
    with pytest.raises(TimeoutError):
        quick[0].answer()
    there.go_on.set()
    quick[0].peer.settimeout(SECONDS)
    assert [one.answer() for one in slow + quick] == [b"w"] * 2 + [b"q"] * 6


def test_one_that_asks_again_and_again_keeps_no_other_waiting(echo):
    there = echo(1)
    busy, other = there.one(), there.one()
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            busy.ask(b"a")
            assert busy.answer() == b"a"

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(20):
        other.ask(b"o")
        assert other.answer() == b"o"
    stop.set()
    thread.join()


def test_connections_that_are_served_keep_their_threads_while_others_only_wait_for_theirs_to_start(echo, monkeypatch):
    """On a loaded node a thread takes long to start; there are as many as there are connections."""
    started = []
    start = threading.Thread.start

    def slow(thread):
        if thread.name == NAME:
            started.append(thread.name)
            time.sleep(0.05)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow)
    there = echo(8)
    ones = [there.one() for _ in range(8)]

    def ask(one):
        for _ in range(100):
            one.ask(b"a")
            assert one.answer() == b"a"

    asking = [threading.Thread(target=ask, args=(one,)) for one in ones]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(started) == 8, "one for each connection, for all of its requests"


def test_one_that_is_idle_for_too_long_is_ended_without_a_reason(echo):
    there = echo(4, 3.0)
    idle, used = there.one(), there.one()
    while not idle.ended:
        used.ask(b"a")
        assert used.answer() == b"a"
    assert idle.ended == [""]
    assert idle.answer() == b"" and used.ended == []


def test_closing_ends_idle_ones_and_the_others_after_their_request(echo):
    there = echo(4)
    idle, busy = there.one(), there.one()
    busy.ask(b"w")
    assert there.begun.wait(SECONDS)
    there.serving.close()
    assert idle.ended == [""] and busy.ended == []
    there.go_on.set()
    assert busy.answer() == b"w" and busy.answer() == b""
    late = there.one()
    assert late.ended == [""]


# ---- a connection that is handed over ----


class Joined:
    """A server that hands over the connections of those who ask to join."""

    def __init__(self):
        self.taken = []
        self.ended = []
        self.seen = []
        events = Events("n")
        events.subscribe(self.seen.append)
        self.server = Server("127.0.0.1", 0, Party("smp", "job", "there"), SECRET, self.handle, events)

    def handle(self, message, payload):
        if message["do"] == "join":
            return Handover(self.take)
        return {"echo": message["do"]}, None

    def take(self, connection, channel, ended):
        self.taken.append((connection, channel))
        self.ended.append(ended)

    @property
    def places(self):
        return len(self.server._serving._open)


@pytest.fixture
def there():
    made = Joined()
    yield made
    made.server.close()
    for connection, _ in made.taken:
        connection.close()


def test_a_connection_is_handed_over_by_both_sides_with_its_keys_and_keeps_its_place(there):
    peer = Peer(there.server.endpoint, Party("smp", "job", "here"), SECRET, SECONDS)
    assert peer.ask("hello", np.ones(1000, dtype=np.uint8))[0]["echo"] == "hello"
    peer.ask("join")
    ours = TreeLink(0, *peer.surrender())
    wait(lambda: bool(there.taken))
    theirs = TreeLink(1, *there.taken[0])
    ours.send({"do": "leave", "number": 1})
    theirs.send({"do": "announce", "number": 2})
    heard = []
    wait(lambda: bool(heard.extend([message for message, _ in theirs.read()]) or heard))
    wait(lambda: bool(heard.extend([message for message, _ in ours.read()]) or len(heard) > 1))
    assert [message["number"] for message in heard] == [1, 2]
    assert there.places == 1 and (ours.node, theirs.node) == ("there", "here")
    wait(lambda: not any(thread.name == "smp-peer" for thread in threading.enumerate()))
    ours.close()
    assert select.select([theirs.connection], [], [], SECONDS)[0]
    with pytest.raises(EndedError):
        next(theirs.read())
    there.ended[0]()
    assert there.places == 0 and not there.seen
    with pytest.raises(ProtocolError, match="hung up"):
        peer.surrender()
    assert peer.ask("hello")[0]["echo"] == "hello", "on a new connection"
    peer.close()


def test_waiting_until_a_connection_is_closed_ends_with_either_side(there):
    peer = Peer(there.server.endpoint, Party("smp", "job", "here"), SECRET, SECONDS)
    peer.is_readable(SECONDS)  # there is none
    peer.ask("hello")
    began = time.monotonic()
    peer.is_readable(0.1)
    assert time.monotonic() - began > 0.09
    threading.Timer(0.1, there.server.close).start()
    peer.is_readable(3600)  # longer than a test may take
    peer.close()
