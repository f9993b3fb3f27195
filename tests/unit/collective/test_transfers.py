"""How long a transfer waits for a rank that is busy."""

import socket
import threading
from contextlib import ExitStack

import numpy as np

from ft_plugins.collective import transfers as module
from ft_plugins.collective.meeting import RankDoor
from ft_plugins.events import Events
from ft_plugins.transport.framed import Link

KEY = bytes(32)


def test_a_rank_may_leave_unread_what_it_is_sent_for_as_long_as_a_transfer_waits(monkeypatch):
    made = []

    def link(*args):
        made.append(Link(*args))
        return made[-1]

    monkeypatch.setattr(module, "Link", link)
    sent = np.arange(9, dtype=np.uint8)
    received = np.zeros_like(sent)
    with ExitStack() as stack:
        doors = [RankDoor("127.0.0.1", KEY, "test", rank, Events("node")) for rank in range(2)]
        for door in doors:
            door.open()
        endpoints = [door.endpoint for door in doors]
        ends = [stack.enter_context(module.Transfers(rank, endpoints, doors[rank], KEY, 600.0)) for rank in range(2)]
        sender = threading.Thread(target=ends[0].swap, args=({1: sent}, {}))
        sender.start()
        ends[1].swap({}, {0: received})
        sender.join()
        options = [link.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for link in made]
    assert received.tolist() == sent.tolist()
    assert options == [600_000] * 2
