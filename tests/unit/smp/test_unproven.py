"""Before its proof a connection costs nearly nothing, however many there are, and real peers get in past all of them.

Strangers come from many addresses of loopback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from ft_plugins.events import Event, Events
from ft_plugins.transport import channel, connections, unproven
from ft_plugins.transport.channel import Party
from ft_plugins.transport.wire import Peer, Server

SECRET = b"a secret of 32 bytes, all random"
HERE, THERE = Party("smp", "a-job", "here"), Party("smp", "a-job", "there")
SECONDS = 20


class Node:
    """An SMP that answers, and its events."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        events = Events("n")
        events.subscribe(self.events.put)
        self.server = Server("127.0.0.1", 0, THERE, SECRET, lambda message, payload: ({"fine": 1}, None), events)
        self.endpoint = self.server.endpoint

    def answers(self, timeout: float = SECONDS) -> bool:
        """Whether a real peer gets in and is answered."""
        peer = Peer(self.endpoint, HERE, SECRET, timeout)
        with contextlib.closing(peer):
            return bool(peer.ask("echo")[0]["fine"])


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.server.close()


@pytest.fixture
def stranger(node: Node) -> Iterator[Callable[..., socket.socket]]:
    """Connections to the node, from any address of loopback."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections.raise_limit()
    with contextlib.ExitStack() as stack:

        def make(address: str = "127.0.0.1", said: bytes = b"") -> socket.socket:
            connection = socket.create_connection(node.endpoint, SECONDS, (address, 0))
            stack.enter_context(connection)
            with contextlib.suppress(ConnectionError):
                connection.sendall(said)
            return connection

        yield make
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_ones(connections: list[socket.socket], most: int) -> int:
    """How many the other side has not closed, once no more than `most` are open."""
    poller = select.poll()
    for connection in connections:
        poller.register(connection, select.POLLRDHUP)
    until = time.monotonic() + SECONDS
    while (found := len(connections) - len(poller.poll(0))) > most and time.monotonic() < until:
        time.sleep(0.01)
    return found


def test_silent_connections_take_no_threads_few_descriptors_and_keep_no_peer_out(
    node: Node, stranger: Callable[..., socket.socket]
) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    silent = [stranger(f"127.0.0.{2 + number % 100}") for number in range(300)]
    assert open_ones(silent, unproven.CONNECTIONS) <= unproven.CONNECTIONS
    assert len(os.listdir("/proc/self/fd")) - files - len(silent) <= unproven.CONNECTIONS
    assert threading.active_count() == threads
    assert node.answers()
    assert node.events.get_nowait().name == "peer.rejected" and node.events.empty(), "one event for all of them"


def test_one_address_takes_a_few_places_and_its_newest_connection_has_one(
    node: Node, stranger: Callable[..., socket.socket]
) -> None:
    elsewhere = [stranger(f"127.0.0.{2 + number}") for number in range(10)]
    silent = [stranger() for _ in range(50)]
    assert open_ones(silent, unproven.ADDRESS_CONNECTIONS) == unproven.ADDRESS_CONNECTIONS
    assert open_ones(silent[-unproven.ADDRESS_CONNECTIONS :], unproven.ADDRESS_CONNECTIONS) == len(silent[-8:])
    assert open_ones(elsewhere, len(elsewhere)) == len(elsewhere), "those of other addresses stay"


def test_a_burst_of_real_peers_of_one_address_gets_in_whole(node: Node, stranger: Callable[..., socket.socket]) -> None:
    """More of them at once than one address may have unproven, among strangers: who had to make room comes again."""
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(node.answers())) for _ in range(40)]
    for thread in threads:
        thread.start()
        stranger()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [True] * len(threads)


def announced(length: int, sent: bytes) -> bytes:
    return struct.pack(">I", length) + sent


BIG = 1 << 20
COSTLY = {
    "unfinished": announced(BIG, b"\x00" * (BIG - 1)),
    "a million maps": announced(BIG, b"\xdd" + struct.pack(">I", BIG - 5) + b"\x80" * (BIG - 5)),
    "a nested list": announced(4000, b"\x81\xa1a" + b"\x91" * 3996 + b"\x01"),
}


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("name", COSTLY)
def test_what_strangers_send_takes_no_memory(node: Node, stranger: Callable[..., socket.socket], name: str) -> None:
    before = most = resident()
    strangers = []
    for number in range(40):
        strangers.append(stranger(f"127.0.0.{2 + number}", COSTLY[name]))
        most = max(most, resident())
    assert open_ones(strangers, 0) == 0, "each was closed as soon as it announced more than a handshake needs"
    assert max(most, resident()) - before < 8 << 20, "40 of them, up to 1 MiB each"
    assert node.answers()


HELLO = channel.ClientHandshake(SECRET, HERE).hello()
HOSTILE: dict[str, Any] = {
    "no map": [1],
    "nested": {"purpose": {"a": {"b": {}}}},
    "a key that is no text": {b"purpose": "smp"},
    "escape codes": {**HELLO, "job": "\x1b[2J"},
    "a large number": {**HELLO, "node": 2**64 - 1},
    "a long name": {**HELLO, "job": "j" * 1000},
    "a truth of another kind": {**HELLO, "encrypt": "yes", "proof": b"x" * 32},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_hello_is_a_short_printable_reason_and_no_traceback(
    node: Node, stranger: Callable[..., socket.socket], capfd: pytest.CaptureFixture[str], name: str
) -> None:
    said = msgpack.packb(HOSTILE[name])
    connection = stranger(said=announced(len(said), said))
    connection.shutdown(socket.SHUT_WR)
    event = node.events.get(timeout=SECONDS)
    assert event.name == "peer.rejected" and len(event.line()) < 600
    assert "\x1b" not in str(event.fields) and node.answers()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("error", [RecursionError("deep"), MemoryError(), OverflowError("large"), UnicodeError("odd")])
def test_whatever_a_handshake_ends_with_the_thread_that_lets_peers_in_goes_on(
    node: Node, stranger: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(channel.ServerHandshake, "challenge", fail)
        said = msgpack.packb(HELLO)
        stranger(said=announced(len(said), said))
        reason = str(*node.events.get(timeout=SECONDS).fields["reasons"])
    assert reason.startswith(type(error).__name__) and "(test_unproven.py:" in reason
    assert node.answers()


def test_without_a_descriptor_to_spare_the_oldest_stranger_makes_room_for_a_peer(
    node: Node, stranger: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [stranger(f"127.0.0.{2 + number}") for number in range(4)]
    assert open_ones(silent, 4) == 4 and node.answers()
    accept, refusals = socket.socket.accept, [errno.EMFILE, errno.ENFILE]

    def without(listener: socket.socket) -> Any:
        if refusals:
            code = refusals.pop()
            raise OSError(code, os.strerror(code))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", without)
    assert node.answers() and open_ones(silent, 2) == 2
    assert open_ones(silent[2:], 2) == 2, "the oldest made room"
    (reason,) = node.events.get_nowait().fields["reasons"]
    assert reason.startswith("a connection could not be accepted: Too many open files")


def test_a_server_that_is_closed_closes_strangers_too_and_frees_its_port(
    node: Node, stranger: Callable[..., socket.socket]
) -> None:
    silent = [stranger() for _ in range(3)]
    assert node.answers()
    node.server.close()
    assert open_ones(silent, 0) == 0
    again = Server(*node.endpoint, THERE, SECRET, lambda message, payload: ({"fine": 2}, None), Events("n"))
    again.close()


@pytest.mark.parametrize(
    ("address", "crowd"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
    ],
)
def test_addresses_that_one_machine_can_have_are_counted_as_one(address: str, crowd: str) -> None:
    assert unproven.crowd_of(address) == crowd
