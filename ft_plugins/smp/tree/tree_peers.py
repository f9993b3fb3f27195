"""Connect one node to its neighbours in the tree: to parents as `calls.Peer` does, from children by the `join` request.

Invariant: a child is the node that the plan names at its position. A connection attempt ends within twice CONNECTING of
`detect_seconds`, in a thread of its own that ends with it.

In: one incarnation's `Protection`, connections of `calls`. Out: connections for a `TreeMember`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

from ...errors import FtError, ProtocolError
from ...events import Events, catalogue
from ...transport.calls import Handover, Peer
from ...transport.channel import Channel
from ...transport.protocol import unexpected
from .protection import Protection
from .tree_member import Connected, TreeMember

CONNECTING = 0.2  # of `detect_seconds`, for a connection to a parent, and for its answer


class TreePeers:
    """The neighbours of one node in one incarnation. `nodes` are the names by position."""

    def __init__(
        self, protection: Protection, nodes: Sequence[str], connect: Callable[..., Peer], events: Events
    ) -> None:
        """`connect(position, patience)` makes a connection within that share of `detect_seconds`."""
        self._protection = protection
        self._nodes = nodes
        self._connect = connect
        self._events = events
        self._lock = threading.Lock()
        self._trying: Peer | None = None
        self._closed = False

    def connect(self, position: int, done: Callable[[Connected | str], None]) -> None:
        """Have the SMP at `position` accept this one's reports; calls `done` later. Raises RuntimeError if there is no
        thread."""
        threading.Thread(target=self._ask, args=(position, done), name="smp-tree-join", daemon=True).start()

    def _ask(self, position: int, done: Callable[[Connected | str], None]) -> None:
        peer: Peer | None = None
        try:
            peer = self._connect(position, CONNECTING)
            with self._lock:
                self._trying = peer
                if self._closed:
                    peer.close()
            peer.ask("join", epoch=self._protection.lineage, position=self._protection.position)
            result: Connected | str = Connected(*peer.surrender())
        except Exception as error:  # any error: without a result this node would never look for a parent again
            if peer is not None:
                peer.close()
            result = str(error if isinstance(error, (FtError, OSError)) else unexpected(error))
        done(result)

    def handover(self, position: int, member: TreeMember) -> Handover:
        """Have `member` take over the connection of the node at `position`. Raises ProtocolError."""
        own = self._protection.position
        if not own < position < len(self._nodes):
            raise ProtocolError(f"position {position} cannot report to position {own} of {len(self._nodes)} nodes")

        def take(connection: socket.socket, channel: Channel, ended: Callable[[], None]) -> None:
            if channel.node == self._nodes[position]:
                member.adopt(position, Connected(connection, channel), ended)
                return
            connection.close()
            ended()
            expected = f"node {self._nodes[position]} is at position {position}"
            self.disconnected(channel.node, f"it wants to report for another node: {expected}")

        return Handover(take)

    def disconnected(self, node: str, reason: str) -> None:
        """Record that a connection was closed because of an error."""
        self._events.emit(catalogue.PEER_DISCONNECTED, peer=node, reason=reason)

    def rejected(self, position: int, reason: str) -> None:
        """Record that a neighbour reports what cannot be."""
        self._events.emit(catalogue.REPORT_REJECTED, peer=self._nodes[position], reason=reason)

    def close(self) -> None:
        """End a connection attempt."""
        with self._lock:
            self._closed = True
            if self._trying is not None:
                self._trying.close()
