"""Frames: bounded, whole, maps of msgpack; anything else ends in a ProtocolError, never in memory or patience spent."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins import errors
from ft_plugins.errors import BudgetError, FencedError, ProtocolError
from ft_plugins.smp import protocol

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(10)
    yield ours, theirs
    ours.close()
    theirs.close()


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def received(raw: bytes) -> Any:
    """What `receive` makes of bytes after which the peer closes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(10)
        writer = threading.Thread(target=lambda: (ours.sendall(raw), ours.shutdown(socket.SHUT_WR)))
        writer.start()
        try:
            return protocol.receive(theirs)
        finally:
            writer.join(10)


messages = st.dictionaries(
    st.text(max_size=10),
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text()
    | st.binary()
    | st.lists(st.integers(0, 9)),
)


@settings(deadline=None)
@given(st.lists(messages, min_size=1, max_size=4))
def test_messages_arrive_as_they_were_sent_one_by_one(sent: list[dict[str, Any]]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(10)
        for message in sent:
            protocol.send(ours, message)
        ours.shutdown(socket.SHUT_WR)
        assert [protocol.receive(theirs) for _ in sent] == sent
        assert protocol.receive(theirs) is None


def test_a_message_as_large_as_allowed_passes_and_one_byte_more_is_refused_before_it_is_sent(pair: Pair) -> None:
    ours, theirs = pair
    overhead = len(msgpack.packb({"d": b"x" * 70_000})) - 70_000
    whole = {"d": b"x" * (protocol.FRAME_LIMIT - overhead)}
    writer = threading.Thread(target=protocol.send, args=(ours, whole))
    writer.start()
    assert protocol.receive(theirs) == whole
    writer.join(10)
    with pytest.raises(ProtocolError, match=f"{protocol.FRAME_LIMIT + 1} bytes exceeds the limit"):
        protocol.send(ours, {"d": b"x" * (protocol.FRAME_LIMIT - overhead + 1)})
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)


@pytest.mark.parametrize("length", [protocol.FRAME_LIMIT + 1, 2**31, 2**32 - 1])
def test_an_announced_length_over_the_limit_is_refused_without_reading_on(pair: Pair, length: int) -> None:
    ours, theirs = pair
    ours.sendall(struct.pack(">I", length))  # and nothing more: whoever reads on waits
    with pytest.raises(ProtocolError, match=f"{length} bytes was announced"):
        protocol.receive(theirs)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_connection_that_ends_inside_the_length_is_an_error(kept: int) -> None:
    with pytest.raises(ProtocolError, match="inside a frame's length"):
        received(frame(msgpack.packb({"do": "status"}))[:kept])


@pytest.mark.parametrize("size", [4, 17])
def test_a_connection_that_ends_inside_the_frame_is_an_error(size: int) -> None:
    for kept in range(4, 4 + size):
        with pytest.raises(ProtocolError, match="connection ended inside"):
            received(frame(b"\x81" * size)[:kept])


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x81\xa1a", b"\x80\x80", b"\xdf\xff\xff\xff\xff", b"\x91" * 5000, b"\xa1\xff"]
)
def test_what_is_not_one_whole_msgpack_value_is_an_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"frame of {len(payload)} bytes is not msgpack"):
        received(frame(payload))


@pytest.mark.parametrize("value", [[1], 3, None, "status", b"x", True])
def test_a_frame_that_holds_no_map_is_an_error(value: Any) -> None:
    with pytest.raises(ProtocolError, match=f"holds a {type(value).__name__} where a map was expected"):
        received(frame(msgpack.packb(value)))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_a_map_nothing_or_a_protocol_error(raw: bytes) -> None:
    try:
        found = received(raw)
    except ProtocolError as error:
        assert str(error)
    else:
        assert found is None and raw == b"" or isinstance(found, dict)


def test_a_refusal_arrives_as_the_error_that_was_raised() -> None:
    for kind in (BudgetError, FencedError, errors.ResumeError):
        with pytest.raises(kind, match="12 bytes") as caught:
            protocol.raise_refusal(protocol.refusal(kind("12 bytes")))
        assert type(caught.value) is kind
    protocol.raise_refusal({"ok": True})


@pytest.mark.parametrize("name", ["EXIT_REFUSED", "KeyboardInterrupt", "__doc__", None, 3, "NoSuchError"])
def test_a_refusal_of_unknown_kind_is_a_protocol_error(name: Any) -> None:
    with pytest.raises(ProtocolError, match="because"):
        protocol.raise_refusal({"ok": False, "error": name, "message": "because"})
    with pytest.raises(ProtocolError, match="without saying why"):
        protocol.raise_refusal({"ok": 1})


def test_a_field_of_the_wrong_type_is_named() -> None:
    message = {"do": "attach", "rank": 3, "fresh": True, "pid": None}
    assert protocol.field(message, "rank", int) == 3 and protocol.field(message, "fresh", bool) is True
    for name, kind in (("fresh", int), ("rank", bool), ("pid", int), ("token", int), ("rank", str)):
        with pytest.raises(ProtocolError, match=f"attach: field '{name}' should be a {kind.__name__}"):
            protocol.field(message, name, kind)


def test_a_peer_of_this_user_is_let_in(pair: Pair) -> None:
    protocol.check_peer(pair[0])
