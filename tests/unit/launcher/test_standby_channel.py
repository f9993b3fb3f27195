"""Messages between an agent and a standby worker."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from ft_plugins.launcher.standby_channel import StandbyChannel

Ends = tuple[StandbyChannel, StandbyChannel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both, and the socket of the second."""
    ours, theirs = socket.socketpair()
    yield StandbyChannel(ours), StandbyChannel(theirs), theirs
    ours.close()
    theirs.close()


def test_a_message_arrives_with_its_descriptors(ends: Ends) -> None:
    one, other, _ = ends
    reader, writer = os.pipe()
    one.send({"environment": {"A": "\udcff"}}, [writer, writer])
    os.close(writer)
    message, descriptors = other.receive(5)
    assert message == {"environment": {"A": "\udcff"}} and len(descriptors) == 2
    os.write(descriptors[1], b"x")
    assert os.read(reader, 1) == b"x"
    for each in (reader, *descriptors):
        os.close(each)


def test_whoever_waits_hears_of_the_end_and_does_not_wait_for_ever(ends: Ends) -> None:
    one, other, _ = ends
    assert not other.pending()
    with pytest.raises(TimeoutError):
        other.receive(0.01)
    one.close()
    assert other.pending()
    with pytest.raises(EOFError):
        other.receive(5)


@pytest.mark.parametrize(
    "content", [struct.pack("<I", 1 << 30), struct.pack("<I", 2) + b"[]", struct.pack("<I", 1) + b"{"]
)
def test_what_is_no_message_is_an_error(ends: Ends, content: bytes) -> None:
    one, _, theirs = ends
    theirs.sendall(content)
    with pytest.raises(ValueError):
        one.receive(5)
