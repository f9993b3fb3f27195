"""The port of a node: real sockets on loopback, peers that behave and peers that do not."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from ft_plugins.errors import ConfigError
from ft_plugins.events import Event, Events
from ft_plugins.launcher.rendezvous import endpoint, peer_client
from ft_plugins.launcher.rendezvous.endpoint import Endpoint
from ft_plugins.launcher.rendezvous.peer_client import Credentials, ForeignError, PeerConnection
from ft_plugins.launcher.rendezvous.peer_server import (
    _OF_ONE_ADDRESS,
    _PROOF_SECONDS,
    _SHORT_SECONDS,
    _UNREAD_SECONDS,
    PeerServer,
)
from ft_plugins.rehearse.ports import free_port
from ft_plugins.transport.channel import Channel

WAIT = 60.0
US = Credentials(b"sixteen bytes or more", "job", "n")


def reply(request: dict[str, Any], connection: int) -> dict[str, Any]:
    if "fail" in request:
        raise RecursionError("an error of ours")
    return {"ok": True, **request, "text": "x" * request.get("size", 0)}


class Running:
    """A port on loopback that repeats what it is asked, and what it has reported."""

    def __init__(self, tick: Callable[[], float] = lambda: 0.1) -> None:
        self.reports: list[Event] = []
        events = Events()
        events.subscribe(self.reports.append)
        self.gone: list[int] = []
        listener = endpoint.listen_anywhere("127.0.0.1")
        self.post = PeerServer(listener, US, reply, self.gone.append, tick, events)
        self.place = f"127.0.0.1:{self.post.port}"

    def call(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.post.port), WAIT)

    def until(self, holds: Callable[[], Any]) -> None:
        deadline = time.monotonic() + WAIT
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def echo() -> Iterator[Running]:
    found = Running()
    yield found
    found.post.close()
    found.post.close()


def test_requests_are_answered_also_long_and_several_at_once(echo: Running) -> None:
    size = 900_000  # more than a socket holds
    one = PeerConnection(echo.place, WAIT, US)
    for number in range(3):
        assert one.ask({"number": number, "size": size})["text"] == "x" * size
    one.close()
    found = peer_client.ask_all([echo.place, "127.0.0.1:1"], {"do": "it"}, WAIT, US)
    assert found[echo.place] == {"ok": True, "do": "it", "text": ""} and "refused" in str(found["127.0.0.1:1"])


@pytest.mark.parametrize(
    ("them", "why"),
    [
        (Credentials(US.secret, "another", "n"), "it belongs to another job"),
        (Credentials(b"another secret, as long", "job", "n"), "does not know the secret of this job"),
    ],
)
def test_who_is_of_another_job_or_has_another_secret_hears_that_and_no_more(
    echo: Running, them: Credentials, why: str
) -> None:
    with pytest.raises(ForeignError, match=why):
        peer_client.ask(echo.place, {}, WAIT, them)
    peer_client.ask(echo.place, {}, WAIT, US)


def test_who_is_dropped_for_others_after_its_proof_comes_again_until_it_is_let_in(
    echo: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, dropped = echo.post._handle, []

    def crowded(connection: socket.socket, peer: Any, frame: bytes) -> None:
        if peer.greeted and not peer.channel and len(dropped) < 5:
            dropped.append(peer.number)
            raise ConnectionResetError("dropped for a newer one")
        handle(connection, peer, frame)

    monkeypatch.setattr(echo.post, "_handle", crowded)
    assert peer_client.ask(echo.place, {"do": "it"}, WAIT, US)["do"] == "it" and len(dropped) == 5


def prove(echo: Running) -> tuple[socket.socket, Channel]:
    """A connection of one who knows the secret, to do with as he likes."""
    found = PeerConnection(echo.place, WAIT, US)
    return found._socket, found._channel


def sealed(channel: Channel, payload: bytes) -> bytes:
    body, tag = channel.sealer.seal(payload)
    return peer_client.length_prefix(payload) + bytes(body) + tag


def nested(depth: int) -> Any:
    return {"lead": nested(depth - 1)} if depth else 1


@pytest.mark.parametrize(
    "payload",
    [msgpack.packb({"fail": 1}), msgpack.packb(nested(500)), msgpack.packb([1]), b"\xc1", b"", b"\xdd\xff\xff\xff\xff"],
    ids=["fails", "nested", "list", "no msgpack", "empty", "huge list"],
)
def test_a_request_that_cannot_be_answered_ends_its_connection_alone(echo: Running, payload: bytes) -> None:
    other = PeerConnection(echo.place, WAIT, US)
    peer, channel = prove(echo)
    with peer:
        peer.sendall(sealed(channel, payload))
        assert peer.recv(1) == b""
    echo.until(lambda: echo.reports and echo.gone)
    [reason] = echo.reports[0].fields["reasons"]
    assert ("RecursionError" in reason) is (b"fail" in payload) and "\n" not in reason
    assert other.ask({"do": "it"})["do"] == "it" and echo.post.is_serving
    other.close()


def test_what_a_peer_does_not_read_is_not_held_for_it(echo: Running) -> None:
    peer, channel = prove(echo)
    with peer:
        peer.settimeout(0.5)
        with pytest.raises(TimeoutError):
            while True:  # until neither side takes any more
                peer.sendall(sealed(channel, msgpack.packb({"size": 1 << 19})))
        held = [key.data for key in echo.post._selector.get_map().values() if key.data is not None]
        [found] = held
        assert len(found.sending) < 1 << 20 and len(found.received) < 1 << 14
        found.used -= 2 * _UNREAD_SECONDS
        echo.until(lambda: echo.gone == [found.number])
    assert peer_client.ask(echo.place, {"do": "it"}, WAIT, US)["do"] == "it"


def test_before_the_proof_a_connection_is_one_of_a_few_for_a_few_seconds(echo: Running) -> None:
    silent = [echo.call() for _ in range(100)]
    for _ in range(20):  # one who knows the secret gets in all the same
        assert peer_client.ask(echo.place, {"do": "it"}, WAIT, US)["do"] == "it"
    assert 0 < len(echo.post._unproven) <= _OF_ONE_ADDRESS
    for peer in list(echo.post._unproven.values()):
        peer.used -= 2 * _PROOF_SECONDS
    echo.until(lambda: not echo.post._unproven)
    for each in silent:
        with each:
            assert each.recv(1) == b""
    assert len(echo.reports) == 1, "one report a minute"
    assert list(echo.reports[0].fields["addresses"]) == ["127.0.0.1"]


def test_a_connection_that_is_reset_before_its_proof_is_counted(echo: Running) -> None:
    stranger = echo.call()
    echo.until(lambda: echo.post._unproven)
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()
    echo.until(lambda: echo.reports)
    assert list(echo.reports[0].fields["addresses"]) == ["127.0.0.1"]


def test_one_more_than_there_may_be_closes_the_oldest_of_the_address_with_the_most(
    echo: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_plugins.launcher.rendezvous.peer_server._UNPROVEN", 4)
    with contextlib.ExitStack() as stack:

        def call(host: str) -> socket.socket:
            count = echo.post._accepted
            found = socket.create_connection(("127.0.0.1", echo.post.port), WAIT, (host, 0))
            echo.until(lambda: echo.post._accepted > count)
            return stack.enter_context(found)

        alone = call("127.0.0.2")
        crowd = [call("127.0.0.3") for _ in range(3)]
        call("127.0.0.4")
        assert crowd[0].recv(1) == b""
        alone.settimeout(0.2)
        with pytest.raises(TimeoutError):
            alone.recv(1)


def test_before_the_proof_no_more_is_read_than_a_handshake_has(echo: Running) -> None:
    with echo.call() as stranger:
        stranger.sendall(peer_client.length_prefix(bytes(5000)))
        assert stranger.recv(1) == b""
    with echo.call() as stranger:
        stranger.sendall(peer_client.length_prefix(bytes(4000)) + bytes(3000))
        echo.until(lambda: any(len(peer.received) == 3004 for peer in echo.post._unproven.values()))


def test_without_descriptors_those_who_are_here_are_still_answered(
    echo: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = PeerConnection(echo.place, WAIT, US)
    tried: list[int] = []

    class Short:
        """A listener for which there is no descriptor, ten times."""

        def __init__(self, listener: socket.socket) -> None:
            self.listener = listener

        def fileno(self) -> int:
            return self.listener.fileno()

        def close(self) -> None:
            self.listener.close()

        def accept(self) -> Any:
            tried.append(1)
            if len(tried) < 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return self.listener.accept()

    assert echo.post._listening
    echo.post._selector.modify(echo.post._listener, 1, None)
    short = Short(echo.post._listener)
    echo.post._selector.unregister(echo.post._listener)
    monkeypatch.setattr(echo.post, "_listener", short)
    echo.post._selector.register(short, 1)
    began = time.monotonic()
    assert peer_client.ask(echo.place, {"do": "it"}, WAIT, US)["do"] == "it"
    assert time.monotonic() - began >= 2 * _SHORT_SECONDS * 0.9 and len(tried) == 3, "it does not spin"
    assert here.ask({"do": "it"})["do"] == "it"
    here.close()


@pytest.mark.parametrize(
    "frame", [b"\xff\xff\xff\xff", b"\0\0\0\x01\xc1", b"\0\0\0\x01\x01", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_a_malformed_frame_is_answered_by_a_close_and_others_go_on(echo: Running, frame: bytes) -> None:
    with echo.call() as stranger:
        stranger.sendall(frame)
        assert stranger.recv(1) == b""
    assert peer_client.ask(echo.place, {}, WAIT, US)["ok"] is True


def test_one_who_does_not_answer_costs_the_bound_and_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(ConnectionError, match="no answer within 0.2 s"):
        peer_client.ask(f"127.0.0.1:{mute.getsockname()[1]}", {}, 0.2, US)


def test_where_this_nodes_own_part_fails_all_connections_end_and_it_is_said_here() -> None:
    ready = threading.Event()

    def tick() -> float:
        if ready.is_set():
            raise KeyError("an error of ours")
        return 0.1

    broken = Running(tick)
    broken.post.check()
    others = [broken.call() for _ in range(3)]
    assert peer_client.ask(broken.place, {}, WAIT, US)
    ready.set()
    for other in others:
        with other:
            assert other.recv(1) == b""
    broken.post.close()  # waits for the thread
    with pytest.raises(RuntimeError, match="no longer answers") as found:
        broken.post.check()
    assert isinstance(found.value.__cause__, KeyError) and not broken.post.is_serving
    with pytest.raises(ConnectionError, match="refused"):
        peer_client.ask(broken.place, {}, WAIT, US)


@pytest.mark.parametrize("text", ["h:\u00b2", "h:99999", "h:" + "9" * 5000, "", "[::1]:x"])
def test_what_is_no_endpoint_is_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError, match="--rdzv-endpoint"):
        Endpoint.read(text)


def test_an_endpoint_is_this_machines_if_it_can_be_listened_on() -> None:
    port = free_port()
    found = endpoint.listen_as(Endpoint("127.0.0.9", port), peer_client.node_answers)
    assert found is not None and found.getsockname() == ("127.0.0.9", port)
    assert endpoint.listen_as(Endpoint("127.0.0.9", port), peer_client.node_answers, patience=0) is None  # taken
    assert endpoint.listen_as(Endpoint("192.0.2.1", port), peer_client.node_answers) is None  # of nobody
    assert endpoint.listen_as(Endpoint("no-such-host.invalid", port), peer_client.node_answers) is None
    found.close()


def test_a_port_of_a_process_that_is_ending_is_waited_for_and_that_of_a_living_node_is_not(echo: Running) -> None:
    place = Endpoint("127.0.0.9", free_port())
    ending = socket.create_server(("127.0.0.9", place.port))
    threading.Timer(0.3, ending.close).start()
    found = endpoint.listen_as(place, peer_client.node_answers, patience=WAIT)
    assert found is not None
    found.close()
    began = time.monotonic()
    assert endpoint.listen_as(Endpoint.read(echo.place), peer_client.node_answers, patience=WAIT) is None
    assert time.monotonic() - began < WAIT / 2  # it answers, so nothing is waited for


def test_loopback_addresses_that_differ_are_two_emulated_nodes() -> None:
    assert endpoint.emulated_apart("127.0.0.2", "127.0.0.1")
    assert not any(
        endpoint.emulated_apart(*pair) for pair in [("127.0.0.1", "127.0.0.1"), ("10.0.0.1", "127.0.0.1"), ("h", None)]
    )
