"""A relay without the secret stands between two SMPs: it changes, repeats, drops, reorders and asks, all in vain."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from ft_plugins.errors import ProtocolError
from ft_plugins.events import Event, Events
from ft_plugins.transport.channel import TAG, Party
from ft_plugins.transport.wire import Bytes, Peer, Server

SECRET = b"a secret of 32 bytes, all random"
HERE, THERE = Party("smp", "a-job", "here"), Party("smp", "a-job", "there")
SECONDS = 20
HANDSHAKE = {"up": 2, "down": 2}  # frames of each direction before the first request; the last one down is sealed
Parts = list[bytes]  # a frame, or one payload unit, each with its tag


def passed_on(way: str, number: int, unit: bytes) -> Parts:
    return [unit]


class Relay:
    """Takes frames apart as they come, and sends what `meddle(direction, number, frame)` makes of each, in order."""

    def __init__(self, onwards: tuple[str, int], meddle: Callable[[str, int, bytes], Parts]) -> None:
        self._onwards = onwards
        self._meddle = meddle
        self.seen: dict[str, Parts] = {"up": [], "down": []}
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            near, _ = self._listener.accept()
            far = socket.create_connection(self._onwards, SECONDS)
            self._sockets += [near, far]
            for direction, source, target in (("up", near, far), ("down", far, near)):
                self._threads.append(threading.Thread(target=self._pass_on, args=(direction, source, target)))
                self._threads[-1].start()

    def _pass_on(self, direction: str, source: socket.socket, target: socket.socket) -> None:
        try:
            for number, unit in enumerate(self._units(direction, source)):
                self.seen[direction].append(unit)
                for part in self._meddle(direction, number, unit):
                    target.sendall(part)
        except OSError:
            pass
        finally:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)

    def _units(self, direction: str, source: socket.socket) -> Iterator[bytes]:
        """Messages with their length; what is no message (a payload) as it comes."""
        plain = HANDSHAKE[direction] if direction == "up" else HANDSHAKE[direction] - 1
        number = 0
        while head := source.recv(4, socket.MSG_WAITALL):
            length = int.from_bytes(head, "big") + (TAG if number >= plain else 0)
            body = source.recv(length, socket.MSG_WAITALL)
            yield head + body
            if number >= plain and (nbytes := self._announced(body)):
                yield source.recv(nbytes + TAG, socket.MSG_WAITALL)
            number += 1

    @staticmethod
    def _announced(body: bytes) -> int:
        """The bytes of the payload that follows; what is encrypted says nothing, its tests know."""
        with contextlib.suppress(Exception):
            return int(msgpack.unpackb(body[:-TAG]).get("bytes", 0))
        return 0

    def send(self, direction: str, raw: bytes) -> None:
        """What comes from the relay itself."""
        self._sockets[1 if direction == "up" else 0].sendall(raw)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(SECONDS)
        for each in self._sockets:
            each.close()


class Between:
    """Two real ends, and what the server was asked."""

    def __init__(self, meddle: Callable[[str, int, bytes], Parts], encrypt: bool) -> None:
        self.asked: list[tuple[dict[str, Any], bytes]] = []
        self.events: queue.Queue[Event] = queue.Queue()
        events = Events("there")
        events.subscribe(self.events.put)
        self.server = Server("127.0.0.1", 0, replace(THERE, encrypt=encrypt), SECRET, self._answer, events)
        self.relay = Relay(self.server.endpoint, meddle)
        self.peer = Peer(self.relay.endpoint, replace(HERE, encrypt=encrypt), SECRET, 1.0)

    def _answer(self, message: dict[str, Any], payload: Bytes) -> tuple[dict[str, Any], Bytes | None]:
        self.asked.append((message, payload.tobytes()))
        return {"echo": message.get("value")}, payload

    def close(self) -> None:
        self.peer.close()
        self.peer._drop()
        self.relay.close()
        self.server.close()


@pytest.fixture
def between() -> Iterator[Callable[..., Between]]:
    made: list[Between] = []

    def make(meddle: Callable[[str, int, bytes], Parts] = passed_on, encrypt: bool = False) -> Between:
        made.append(Between(meddle, encrypt))
        return made[-1]

    yield make
    for each in made:
        each.close()


PAYLOAD = np.frombuffer(b"the state of rank 3, precious " * 100, dtype=np.uint8)
FIRST = HANDSHAKE["up"]  # number of the first request's message; its payload is the next


def changed(unit: bytes, at: int) -> bytes:
    whole = bytearray(unit)
    whole[at] ^= 1
    return bytes(whole)


def test_what_is_passed_on_as_it_was_arrives(between: Callable[..., Between]) -> None:
    there = between()
    for value in range(3):
        reply, back = there.peer.ask("echo", PAYLOAD, value=value)
        assert reply["echo"] == value and (back == PAYLOAD).all()
    assert [message["value"] for message, _ in there.asked] == [0, 1, 2]


# what becomes of the first message, or of the payload after it
MEDDLING: dict[str, Callable[[int, bytes], bytes]] = {
    "a message is changed": lambda number, unit: changed(unit, 8) if number == FIRST else unit,
    "a payload is changed": lambda number, unit: changed(unit, 0) if number == FIRST + 1 else unit,
    "a tag is changed": lambda number, unit: changed(unit, -1) if number == FIRST else unit,
    "a length is changed": lambda number, unit: changed(unit, 3) if number == FIRST else unit,
    "a message is made up": lambda number, unit: unit[:4] + os.urandom(len(unit) - 4) if number == FIRST else unit,
}


@pytest.mark.parametrize("name", MEDDLING)
@pytest.mark.parametrize("way", ["up", "down"])
def test_nothing_that_was_changed_on_the_way_is_believed(between: Callable[..., Between], name: str, way: str) -> None:
    there = between(lambda to, number, unit: [MEDDLING[name](number, unit) if to == way else unit])
    with pytest.raises(ProtocolError, match="did not answer 'echo'"):
        there.peer.ask("echo", PAYLOAD, value=1)
    assert (len(there.asked), way) in ((0, "up"), (1, "down"))
    if way == "up":
        there.peer.close()
        assert there.events.get(timeout=SECONDS).name == "peer.disconnected"


def test_a_request_that_is_repeated_is_carried_out_once(between: Callable[..., Between]) -> None:
    there = between(lambda way, number, unit: [unit, unit] if way == "up" and number == FIRST else [unit])
    assert there.peer.ask("echo", value=1)[0]["echo"] == 1
    assert "changed on the way" in there.events.get(timeout=SECONDS).fields["reason"]
    with pytest.raises(ProtocolError):
        there.peer.ask("echo", value=2)
    assert [message["value"] for message, _ in there.asked] == [1]


def test_a_request_that_is_left_out_ends_the_connection_at_the_next(between: Callable[..., Between]) -> None:
    """The relay answers in its place with the reply before: what was asked is refused on both sides."""

    def meddle(way: str, number: int, unit: bytes) -> Parts:
        if way == "up" and number == FIRST + 1:
            there.relay.send("down", there.relay.seen["down"][-1])
            return []
        return [unit]

    there = between(meddle)
    there.peer.ask("echo", value=1)
    with pytest.raises(ProtocolError, match="changed on the way"):
        there.peer.ask("echo", value=2)
    assert [message["value"] for message, _ in there.asked] == [1]


def test_units_of_a_request_and_its_payload_cannot_be_exchanged_or_reordered(between: Callable[..., Between]) -> None:
    held: list[bytes] = []

    def meddle(way: str, number: int, unit: bytes) -> Parts:
        if way == "up" and number == FIRST + 1:
            held.append(unit)
            return []
        return [unit, *held] if way == "up" and number == FIRST + 3 else [unit]

    there = between(meddle)
    with pytest.raises(ProtocolError):
        there.peer.ask("echo", PAYLOAD, value=1)
    assert not there.asked


def test_a_relay_that_let_both_sides_prove_themselves_cannot_ask_for_itself(between: Callable[..., Between]) -> None:
    there = between()
    there.peer.ask("echo", value=1)
    read = msgpack.packb({"do": "read", "what": "data"})
    there.relay.send("up", len(read).to_bytes(4, "big") + read + os.urandom(TAG))
    assert there.events.get(timeout=SECONDS).name == "peer.disconnected"
    assert len(there.asked) == 1


def test_of_an_encrypted_connection_a_relay_sees_lengths_and_no_content(between: Callable[..., Between]) -> None:
    there = between(encrypt=True)
    small = PAYLOAD[:600]
    reply, back = there.peer.ask("echo", value="precious value")
    assert reply["echo"] == "precious value"
    plain = between()
    plain.peer.ask("echo", small, value="precious value")
    for word in (b"precious", b"echo", b"value"):
        assert any(word in unit for unit in plain.relay.seen["up"][FIRST:]), "as it is without"
        assert not any(word in unit for way in there.relay.seen.values() for unit in way)


def test_an_encrypted_payload_arrives_byte_by_byte_and_is_writable() -> None:
    encrypted = {who: replace(who, encrypt=True) for who in (HERE, THERE)}

    def answer(message: dict[str, Any], payload: Bytes) -> tuple[dict[str, Any], Bytes | None]:
        payload ^= 1
        return {}, payload

    with contextlib.closing(Server("127.0.0.1", 0, encrypted[THERE], SECRET, answer, Events("there"))) as server:
        peer = Peer(server.endpoint, encrypted[HERE], SECRET, SECONDS)
        with contextlib.closing(peer):
            for size in (1, 4096, 1 << 20):
                payload = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
                assert (peer.ask("echo", payload)[1] == payload ^ 1).all()
        peer._drop()
