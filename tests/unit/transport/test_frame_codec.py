"""Frames as bytes: whatever is cut, changed, announced or nested, at every place. No socket."""

import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import ProtocolError
from ft_plugins.transport import frame_codec
from ft_plugins.transport.channel import TAG, Opener, Sealer
from ft_plugins.transport.frame_codec import (
    DEPTH,
    FRAME_LIMIT,
    HANDSHAKE,
    PLAIN,
    UNIT,
    Decoder,
    FrameBounds,
    seal,
)

KEY = bytes(32)
WITH_PAYLOAD = FrameBounds(payload=8 * UNIT)
messages = st.dictionaries(
    st.text(max_size=10),
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text()
    | st.binary()
    | st.lists(st.integers(0, 9)),
)


def frame(packed):
    return struct.pack(">I", len(packed)) + packed


def fed(decoder, raw):
    """The messages and payloads that are complete with these bytes."""
    while raw:
        nbytes = min(len(raw), len(decoder.space[0]))
        decoder.space[0][:nbytes] = raw[:nbytes]
        raw = raw[nbytes:]
        if (complete := decoder.filled(nbytes)) is not None:
            yield complete


def received(raw, bounds=PLAIN):
    """What is made of bytes after which the peer closes."""
    decoder = Decoder(bounds)
    made = [*fed(decoder, raw)]
    decoder.end()
    return made


def nested(depth):
    found = 1
    for _ in range(depth):
        found = [found]
    return found


@given(st.lists(messages, max_size=5), st.data())
def test_messages_arrive_as_they_were_sent_however_they_are_cut(sent, data):
    raw = b"".join(part for message in sent for part in seal(message)[1])
    decoder, found = Decoder(PLAIN), []
    while raw:
        cut = data.draw(st.integers(1, len(raw)))
        found += [message for message, _ in fed(decoder, raw[:cut])]
        raw = raw[cut:]
    decoder.end()
    assert found == sent and decoder.is_between


@pytest.mark.parametrize("encrypt", [None, False, True], ids=["plain", "authenticated", "encrypted"])
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("sizes", [[0], [1, 0, UNIT], [UNIT + 1, 5 * UNIT + 3], [0] * 300])
def test_payloads_arrive_whole_and_in_order(sizes, placed, encrypt):
    sealer = None if encrypt is None else Sealer(KEY, encrypt)
    decoder = Decoder(WITH_PAYLOAD, None if encrypt is None else Opener(KEY, encrypt))
    places = [bytearray(size) for size in sizes]
    if placed:
        left = [memoryview(place) for place in places if place]
        decoder.room = lambda message, nbytes: left.pop(0)
    payloads = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    sent = [seal({"number": number}, payload, sealer, WITH_PAYLOAD) for number, payload in enumerate(payloads)]
    wires = [b"".join(buffers) for _, buffers in sent]
    assert [len(wire) for wire in wires] == [nbytes for nbytes, _ in sent]
    found = [*fed(decoder, b"".join(wires))]
    assert [message["number"] for message, _ in found] == [*range(len(sizes))]
    assert [bytes(payload) for _, payload in found] == payloads and decoder.is_between
    assert not placed or places == payloads


def test_no_byte_beyond_a_frame_is_asked_for():
    """So the connection can be handed on after each frame."""
    sealer, decoder = Sealer(KEY, False), Decoder(WITH_PAYLOAD, Opener(KEY, False))
    raw = b"".join(seal({"do": "it"}, bytes(UNIT + 7), sealer, WITH_PAYLOAD)[1])
    at = 0
    while True:
        for part in decoder.space:
            part[:] = raw[at : at + len(part)]
            at += len(part)
        if (complete := decoder.filled(sum(map(len, decoder.space)))) is not None:
            break
    assert at == len(raw) and len(complete[1]) == UNIT + 7


@pytest.mark.parametrize("at", [0, 3, 4, 10, 25, -TAG - 1, -1])
def test_a_byte_that_was_altered_on_the_way_is_noticed(at):
    raw = bytearray(b"".join(seal({"do": "it"}, b"payload", Sealer(KEY, False), WITH_PAYLOAD)[1]))
    raw[at] ^= 1
    decoder = Decoder(WITH_PAYLOAD, Opener(KEY, False))
    with pytest.raises(ProtocolError):
        assert not [*fed(decoder, raw)]
        decoder.end()


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (0, 0, 1, 2), (0, 1, 1), (0, 2), (1, 2)])
def test_units_of_a_frame_cannot_be_exchanged_repeated_or_left_out(order):
    payload = bytes(UNIT) + b"\1" * UNIT
    length, *rest = seal({"do": "it"}, payload, Sealer(KEY, False), WITH_PAYLOAD)[1]
    units = [b"".join(rest[at : at + 2]) for at in range(0, len(rest), 2)]
    with pytest.raises(ProtocolError):
        assert not [*fed(Decoder(WITH_PAYLOAD, Opener(KEY, False)), b"".join([length, *(units[at] for at in order)]))]
        raise ProtocolError("it is not whole")


def test_an_encrypted_frame_shows_its_length_and_no_content():
    for encrypt in (True, False):
        raw = b"".join(seal({"do": "read"}, b"precious", Sealer(KEY, encrypt), WITH_PAYLOAD)[1])
        assert any(word in raw for word in (b"do", b"read", b"precious")) is not encrypt


def test_a_connection_that_ends_inside_a_frame_is_an_error():
    raw = b"".join(seal({"do": "it"}, b"payload", bounds=WITH_PAYLOAD)[1])
    for kept in range(1, len(raw)):
        with pytest.raises(ProtocolError, match="the connection ended inside a (frame|payload)"):
            received(raw[:kept], WITH_PAYLOAD)


@pytest.mark.parametrize("bounds", [PLAIN, HANDSHAKE, FrameBounds(0)])
def test_a_length_over_the_limit_is_refused_as_soon_as_it_is_announced(bounds):
    for length in (bounds.message + 1, 2**31, 2**32 - 1):
        with pytest.raises(ProtocolError, match=f"{length} bytes was announced; the limit is {bounds.message}"):
            received(struct.pack(">I", length), bounds)


@pytest.mark.parametrize("announced", [8 * UNIT + 1, 2**63, -1, "1", True, None, [1]])
def test_a_payload_over_the_limit_is_refused_as_soon_as_it_is_announced(announced):
    with pytest.raises(ProtocolError, match=f"was announced; the limit is {8 * UNIT}"):
        received(frame(msgpack.packb({"bytes": announced})), WITH_PAYLOAD)
    assert received(frame(msgpack.packb({"bytes": announced}))) == [({"bytes": announced}, b"")], "a field like others"


def test_no_memory_is_taken_for_a_payload_that_does_not_come():
    decoder = Decoder(FrameBounds(payload=1 << 40))
    assert not [*fed(decoder, frame(msgpack.packb({"bytes": 1 << 40})))]
    assert sum(map(len, decoder.space)) == UNIT


def test_what_is_too_large_is_not_sent():
    overhead = len(frame_codec.pack({"d": b""})) + 3
    whole = {"d": b"x" * (FRAME_LIMIT - overhead)}
    assert received(b"".join(seal(whole)[1])) == [(whole, b"")]
    with pytest.raises(ProtocolError, match=f"a message of {FRAME_LIMIT + 1} bytes exceeds the limit"):
        seal({"d": b"x" * (FRAME_LIMIT - overhead + 1)})
    with pytest.raises(ProtocolError, match="a message of 11 bytes exceeds the limit of 10"):
        seal({"d": b"x" * 6}, bounds=FrameBounds(sent=10))
    with pytest.raises(ProtocolError, match=f"a payload of {8 * UNIT + 1} bytes exceeds the limit of {8 * UNIT}"):
        seal({}, bytes(8 * UNIT + 1), bounds=WITH_PAYLOAD)


@pytest.mark.parametrize("value", [1 << 64, object(), "\ud800"], ids=["a large number", "an object", "a surrogate"])
def test_what_msgpack_cannot_hold_is_an_error_before_anything_is_sent(value):
    with pytest.raises(ProtocolError, match="a message cannot be packed: "):
        seal({"a": value})


# ---- what a message may hold ----


@pytest.mark.parametrize(
    "packed", [b"", b"\xc1", b"\x81\xa1a", b"\x80\x80", b"\xdf\xff\xff\xff\xff", b"\x91" * 5000, b"\xa1\xff"]
)
def test_what_is_not_one_whole_msgpack_value_is_an_error(packed):
    with pytest.raises(ProtocolError, match=f"frame of {len(packed)} bytes is not msgpack"):
        received(frame(packed))


@pytest.mark.parametrize("value", [[1], 3, None, "status", b"x", True])
def test_a_frame_that_holds_no_map_is_an_error(value):
    with pytest.raises(ProtocolError, match=f"holds a {type(value).__name__} where a map was expected"):
        received(frame(msgpack.packb(value)))


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_messages_or_a_protocol_error(raw):
    for bounds in (PLAIN, HANDSHAKE, WITH_PAYLOAD):
        try:
            found = received(raw, bounds)
        except ProtocolError as error:
            assert str(error)
        else:
            assert bool(found) is bool(raw) and all(isinstance(message, dict) for message, _ in found)


def test_nesting_is_bounded_at_both_ends():
    held = DEPTH - 1
    assert received(frame(b"\x81\xa1a" + b"\x91" * held + b"\x01")) == [({"a": nested(held)}, b"")]
    for depth in (DEPTH, 500, 1010, 100_000):
        with pytest.raises(ProtocolError, match="nested deeper than|is not msgpack"):
            received(frame(b"\x81\xa1a" + b"\x91" * depth + b"\x01"))
    with pytest.raises(ProtocolError, match="cannot be packed"):
        seal({"a": nested(2000)})


@pytest.mark.parametrize(
    "packed",
    [
        b"\x81\x01\x02",  # a number as key
        b"\x81\xc4\x01a\x02",  # bytes
        b"\x81\xa1a\x81\xc4\x01a\x02",  # within
        b"\x81\x91\x01\x02",  # a list, which cannot be one
        b"\x81\xa1a\xd6\xff\x00\x00\x00\x00",  # a time
        b"\x81\xa1a\xa3\xed\xa0\x80",  # a surrogate
    ],
)
def test_keys_are_text_and_values_plain(packed):
    with pytest.raises(ProtocolError, match="is not msgpack|a key that is not text"):
        received(frame(packed))


@pytest.mark.parametrize(
    "message",
    [{"a": [1]}, {str(n): 1 for n in range(9)}, {"a": "x" * 1025}, {"a": b"x" * 65}],
    ids=["a list", "many fields", "a long text", "many bytes"],
)
def test_a_handshake_holds_no_more_than_one_needs(message):
    raw = frame(msgpack.packb(message))
    assert received(raw) == [(message, b"")]
    with pytest.raises(ProtocolError, match="is not msgpack"):
        received(raw, HANDSHAKE)
