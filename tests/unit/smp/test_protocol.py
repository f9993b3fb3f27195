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
from ft_plugins.transport import protocol

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
    with pytest.raises(ProtocolError, match="without a reason"):
        protocol.raise_refusal({"ok": 1})


def test_a_field_of_the_wrong_type_or_range_is_named() -> None:
    assert protocol.number({"do": "attach", "rank": 3}, "rank") == 3
    for value in (None, "3", True, 3.0, -1, 8):
        with pytest.raises(ProtocolError, match="attach: field 'rank' should be from 0 to 7"):
            protocol.number({"do": "attach", "rank": value}, "rank", 8)


def test_a_peer_of_this_user_is_let_in(pair: Pair) -> None:
    protocol.check_peer(pair[0])


# ---- what is bounded ----


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


def packed(depth: int) -> bytes:
    """A map that holds so many lists within each other."""
    return b"\x81\xa1a" + b"\x91" * depth + b"\x01"


def test_nesting_is_bounded_at_both_ends() -> None:
    held = protocol.DEPTH - 1
    assert received(frame(packed(held))) == {"a": nested(held)}
    for depth in (protocol.DEPTH, 500, 1010, 100_000):
        with pytest.raises(ProtocolError, match="nested deeper than|is not msgpack"):
            received(frame(packed(depth)))
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ProtocolError, match="cannot be packed"):
        protocol.send(ours, {"a": nested(2000)})


@pytest.mark.parametrize("value", [1 << 64, object(), "\ud800"], ids=["a large number", "an object", "a surrogate"])
def test_what_msgpack_cannot_hold_is_an_error_before_anything_is_sent(pair: Pair, value: Any) -> None:
    ours, theirs = pair
    with pytest.raises(ProtocolError, match="cannot be packed"):
        protocol.send(ours, {"a": value})
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x81\x01\x02",  # a number as key
        b"\x81\xc4\x01a\x02",  # bytes
        b"\x81\xa1a\x81\xc4\x01a\x02",  # within
        b"\x81\x91\x01\x02",  # a list, which cannot be one
        b"\x81\xa1a\xd6\xff\x00\x00\x00\x00",  # a time
        b"\x81\xa1a\xa3\xed\xa0\x80",  # a surrogate
    ],
)
def test_keys_are_text_and_values_plain(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="is not msgpack|a key that is not text"):
        received(frame(payload))


@pytest.mark.parametrize("length", [4097, protocol.FRAME_LIMIT])
def test_a_frame_of_a_handshake_has_its_own_limit(pair: Pair, length: int) -> None:
    ours, theirs = pair
    ours.sendall(struct.pack(">I", length))
    with pytest.raises(ProtocolError, match=f"{length} bytes was announced; the limit is 4096"):
        protocol.receive(theirs, limit=4096)


@pytest.mark.parametrize(
    "message",
    [{"a": [1]}, {str(n): 1 for n in range(9)}, {"a": "x" * 1025}, {"a": b"x" * 65}],
    ids=["a list", "many fields", "a long text", "many bytes"],
)
def test_a_frame_of_a_handshake_holds_no_more_than_one_needs(message: dict[str, Any]) -> None:
    raw = msgpack.packb(message)
    assert protocol.unpack(raw) == message
    with pytest.raises(ProtocolError, match="is not msgpack"):
        protocol.unpack(raw, proven=False)


def test_what_is_repeated_from_outside_is_short_and_has_no_control_characters() -> None:
    name = "\x1b[2J\r\n" + "x" * 100_000
    with pytest.raises(ProtocolError) as caught:
        protocol.number({"do": name}, "rank")
    assert str(caught.value).startswith("\\x1b[2J\\r\nxxx") and len(str(caught.value)) < 200
    with pytest.raises(ProtocolError) as caught:
        protocol.number({"do": [name], "rank": -1}, "rank")
    assert len(str(caught.value)) < 200
    reply = protocol.refusal(BudgetError("one\ntwo \x1b[31m" + "y" * (2 << 20)))
    assert len(msgpack.packb(reply)) < 5000
    with pytest.raises(BudgetError, match=r"^one\ntwo \\x1b\[31myyy") as refused:
        protocol.raise_refusal({"ok": False, "error": "BudgetError", "message": "one\ntwo \x1b[31m" + "y" * 5000})
    assert len(str(refused.value)) <= protocol.TEXT_LIMIT + len("\\x1b...")


def test_an_error_of_another_kind_is_a_line_with_its_place() -> None:
    try:
        {}["holders"]  # noqa: B018
    except KeyError as error:
        found = protocol.unexpected(error)
    assert str(found).startswith("KeyError: 'holders' (test_protocol.py:") and "\n" not in str(found)


def test_a_process_of_another_user_is_rejected_by_its_uid(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = protocol.os.getuid()
    monkeypatch.setattr(protocol.os, "getuid", lambda: uid + 1)
    with pytest.raises(ProtocolError, match=f"rejected connection from uid {uid}; only uid {uid + 1} is allowed"):
        protocol.check_peer(pair[0])
