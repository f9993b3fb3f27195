"""When a port is closed."""

from __future__ import annotations

import socket
from contextlib import closing

from ft_plugins.events import Events
from ft_plugins.transport.channel import Party
from ft_plugins.transport.connections import RejectedConnections
from ft_plugins.transport.door import Door, DoorLimits
from ft_plugins.transport.loop import Loop


def test_a_port_is_closed_though_a_process_that_was_forked_meanwhile_has_it_open() -> None:
    """Else a peer would wait there for an answer that nobody gives."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener.dup() as inherited, closing(Loop("test")) as loop:
        me, rejected = Party("test", "job", "node"), RejectedConnections(Events("node"))
        door = Door(loop, listener, bytes(16), me, lambda *_: None, rejected, DoorLimits())
        assert inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        door.close()
        door.close()
        assert not inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
