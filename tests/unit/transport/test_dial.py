"""Which of a peer's addresses is connected to."""

import contextlib
import socket
import time

import pytest

from ft_plugins.transport import dial
from ft_plugins.transport.channel import Party
from ft_plugins.transport.dial import Dialer

SECONDS = 3600.0


def known_as(monkeypatch, *addresses):
    """A name that has these addresses, the first of them first."""
    found = [(family, socket.SOCK_STREAM, 0, "", address) for family, address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


@pytest.fixture
def there():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


@pytest.fixture
def silent():
    """An address that answers no call: so many others wait there."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()


def connected(monkeypatch):
    """Where a dialler gets to."""
    monkeypatch.setattr("ft_plugins.transport.dial.prove", lambda *_: None)

    def greet(connection, channel):
        with connection:
            host, port = connection.getpeername()
            return str(host), int(port)

    return Dialer(("name", 1), bytes(16), Party("p", "j", "n")).connect(time.monotonic() + SECONDS, greet)


def test_where_the_first_address_is_of_a_kind_that_the_system_lacks_the_next_one_is_taken(monkeypatch, there):
    known_as(monkeypatch, (999, ("::1", 9)), (socket.AF_INET, there))
    assert connected(monkeypatch) == there


def test_where_the_first_address_does_not_answer_there_is_time_for_the_next_one(monkeypatch, silent, there):
    known_as(monkeypatch, (socket.AF_INET, silent), (socket.AF_INET, there))
    began, waits = time.monotonic(), list[float]()

    def wait(connection, until, address):
        waits.append(until)
        if len(waits) == 1:
            raise TimeoutError("it has not answered until then")

    monkeypatch.setattr(dial, "_wait_established", wait)
    assert connected(monkeypatch) == there
    assert waits[0] - began < 0.8 * SECONDS, "or none is left for the next one and the handshake"


def test_an_error_names_the_address_because_elsewhere_the_name_may_have_another(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()
    known_as(monkeypatch, (socket.AF_INET, closed))
    with pytest.raises(ConnectionRefusedError, match="Connection refused by 127.0.0.1"):
        connected(monkeypatch)
