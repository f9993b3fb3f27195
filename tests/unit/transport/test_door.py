"""When a port is closed, and when a server fails to admit a peer."""

import queue
import socket
import time
from contextlib import closing

from ft_plugins.events import Events
from ft_plugins.transport.channel import Party
from ft_plugins.transport.dial import ADMITTED, Dialer
from ft_plugins.transport.door import Door, DoorLimits, RejectedConnections
from ft_plugins.transport.framed import Link
from ft_plugins.transport.loop import Loop


def test_a_port_is_closed_though_a_process_that_was_forked_meanwhile_has_it_open():
    """Else a peer would wait there for an answer that never comes."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener.dup() as inherited, closing(Loop("test")) as loop:
        me, rejected = Party("test", "job", "node"), RejectedConnections(Events("node"))
        door = Door(loop, listener, bytes(16), me, lambda *_: None, rejected, DoorLimits())
        assert inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        door.close()
        door.close()
        assert not inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_an_admission_that_fails_costs_that_connection_and_the_next_one_gets_in():
    seen = queue.Queue()
    events, failures = Events("node"), [KeyError("an error of ours")]
    events.subscribe(seen.put)

    def admit(connection, address, channel):
        if failures:
            raise failures.pop()
        link = Link(connection, channel)
        link.push(ADMITTED)
        link.write()
        connection.close()

    me, loop = Party("test", "job", "node"), Loop("test")
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(loop):
        door = Door(loop, listener, bytes(16), me, admit, RejectedConnections(events), DoorLimits())
        loop.start()
        dialer = Dialer(listener.getsockname(), bytes(16), me)
        assert dialer.connect(time.monotonic() + 20.0, lambda connection, channel: channel.node) == "node"
        dialer.drop()
        loop.stop()
        door.close()
    (reason,) = seen.get(timeout=300).fields["reasons"]
    assert reason.startswith("KeyError: 'an error of ours' (test_door.py:") and not failures
