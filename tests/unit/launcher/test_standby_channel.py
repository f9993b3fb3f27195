"""Messages between an agent and a standby worker."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ft_plugins.launcher.preload import standby_channel
from ft_plugins.launcher.preload.standby_channel import StandbyChannel

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


def test_a_descriptor_may_have_any_number(ends: Ends) -> None:
    """The leader of a large job has thousands of them; `select` fails from 1024 on."""
    one, other, theirs = ends
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    high = StandbyChannel(socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 1100)))
    try:
        assert not high.pending()
        one.send({"ready": 1.0})
        assert high.pending() and high.receive(5) == ({"ready": 1.0}, [])
    finally:
        high.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_whoever_sends_does_not_wait_for_ever_for_one_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_channel, "_SEND_SECONDS", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        StandbyChannel(ours).send({"environment": {"LONG": "x" * (4 << 20)}})


def test_a_message_longer_than_the_kernel_keeps_arrives_whole(ends: Ends) -> None:
    one, other, _ = ends
    message = {"environment": {"LONG": "x" * (3 << 20)}}
    reader, writer = os.pipe()
    sender = threading.Thread(target=one.send, args=(message, [reader, writer]))
    sender.start()
    received, descriptors = other.receive(20)
    sender.join(20)
    assert received == message and len(descriptors) == 2
    for each in (reader, writer, *descriptors):
        os.close(each)


def test_sending_is_over_when_all_of_it_is_sent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side may read it and close at that moment."""
    one, _, theirs = ends
    own = one._socket

    def send(content: bytes) -> int:
        sent = own.send(content)
        theirs.close()
        return sent

    with monkeypatch.context() as patch:
        patch.setattr(one, "_socket", SimpleNamespace(send=send, sendall=own.sendall))
        one.send({"refusal": ""})
