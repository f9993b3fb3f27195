"""The port of a node: real sockets on loopback, peers that behave and peers that do not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ft_plugins.launcher import post
from ft_plugins.launcher.post import Endpoint, Line, Post

WAIT = 60.0


def free_port() -> int:
    """A port that is free on all loopback addresses."""
    with socket.create_server(("", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture
def echo() -> Iterator[Post]:
    listener = post.listen_anywhere("127.0.0.1")
    found = Post(listener, lambda request, connection: {"ok": True, **request}, lambda connection: None, lambda: 0.1)
    yield found
    found.close()
    found.close()


def test_requests_are_answered_also_in_pieces_and_several_at_once(echo: Post) -> None:
    text = "x" * 300_000  # more than a socket holds
    line = Line(f"127.0.0.1:{echo.port}", WAIT)
    for number in range(3):
        assert line.ask({"number": number, "text": text}) == {"ok": True, "number": number, "text": text}
    line.close()
    places = [f"127.0.0.1:{echo.port}", "127.0.0.1:1"]
    found = post.ask_all(places, {"do": "it"}, WAIT)
    assert found[places[0]] == {"ok": True, "do": "it"} and "refused" in str(found[places[1]])


@pytest.mark.parametrize(
    "frame", [b"\xff\xff\xff\xff", b"\0\0\0\x01\xc1", b"\0\0\0\x01\x01", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_a_malformed_frame_is_answered_by_a_close_and_others_go_on(echo: Post, frame: bytes) -> None:
    with socket.create_connection(("127.0.0.1", echo.port), WAIT) as stranger:
        stranger.sendall(frame)
        assert stranger.recv(1) == b""
    assert post.ask(f"127.0.0.1:{echo.port}", {}, WAIT) == {"ok": True}


def test_one_who_does_not_answer_costs_the_bound_and_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(ConnectionError, match="no answer within 0.2 s"):
        post.ask(f"127.0.0.1:{mute.getsockname()[1]}", {}, 0.2)


def test_where_answering_fails_all_connections_end_and_it_is_said_here() -> None:
    def fail(request: dict[str, Any], connection: int) -> dict[str, Any]:
        raise KeyError("an error of ours")

    def gone(connection: int) -> None:
        raise KeyError("as well, for every connection that ends")

    broken = Post(post.listen_anywhere("127.0.0.1"), fail, gone, lambda: 0.1)
    broken.check()
    others = [socket.create_connection(("127.0.0.1", broken.port), WAIT) for _ in range(3)]
    with pytest.raises(ConnectionError, match="closed the connection|reset"):
        post.ask(f"127.0.0.1:{broken.port}", {}, WAIT)
    for other in others:
        with other:
            assert other.recv(1) == b""
    broken.close()  # waits for the thread
    with pytest.raises(RuntimeError, match="not answered any more") as found:
        broken.check()
    assert isinstance(found.value.__cause__, KeyError) and not broken.answers
    with pytest.raises(ConnectionError, match="refused"):
        post.ask(f"127.0.0.1:{broken.port}", {}, WAIT)


def test_an_endpoint_is_this_machines_if_it_can_be_listened_on() -> None:
    port = free_port()
    found = post.listen_as(Endpoint("127.0.0.9", port))
    assert found is not None and found.getsockname() == ("127.0.0.9", port)
    assert post.listen_as(Endpoint("127.0.0.9", port), patience=0) is None  # taken
    assert post.listen_as(Endpoint("192.0.2.1", port)) is None  # of nobody
    assert post.listen_as(Endpoint("no-such-host.invalid", port)) is None
    found.close()


def test_a_port_of_a_process_that_is_ending_is_waited_for_and_that_of_a_living_node_is_not(echo: Post) -> None:
    place = Endpoint("127.0.0.9", free_port())
    ending = socket.create_server(("127.0.0.9", place.port))
    threading.Timer(0.3, ending.close).start()
    found = post.listen_as(place, patience=WAIT)
    assert found is not None
    found.close()
    began = time.monotonic()
    assert post.listen_as(Endpoint("127.0.0.1", echo.port), patience=WAIT) is None
    assert time.monotonic() - began < WAIT / 2  # it answers, so nothing is waited for


def test_loopback_addresses_that_differ_are_two_emulated_nodes() -> None:
    assert post.emulated_apart("127.0.0.2", "127.0.0.1")
    assert not any(
        post.emulated_apart(*pair) for pair in [("127.0.0.1", "127.0.0.1"), ("10.0.0.1", "127.0.0.1"), ("h", None)]
    )
