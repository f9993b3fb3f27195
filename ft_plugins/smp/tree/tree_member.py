"""Drive a node of the tree: one loop for all tree connections of an SMP, in both directions.

Invariant: everything that has arrived is read before the state is asked what is due (`loop`), so a node that was itself
stopped for a while presumes none of its neighbours lost before it has read their messages. An error ends one
connection, never the thread.

A frame has no payload. A peer that reads nothing costs at most _WAITING_LIMIT bytes.

In: reports of this node, connections from children, a function that connects to parents. Out: announcements; a call
whenever a new one is there.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import FtError, ProtocolError
from ...transport import protocol
from ...transport.channel import Channel
from ...transport.frame_codec import FrameBounds
from ...transport.framed import EndedError, Link
from ...transport.loop import Loop
from .agreement import Announcement, NodeReport
from .tree_messages import LEAVE, MESSAGE_LIMIT, from_child, from_parent, packed_announcement, packed_summary
from .tree_state import TreeState

_WAITING_LIMIT = 4 * MESSAGE_LIMIT
_BOUNDS = FrameBounds(MESSAGE_LIMIT, sent=MESSAGE_LIMIT)


class TreeLink(Link):
    """A connection to the SMP at `position`. For one thread."""

    def __init__(
        self, position: int, connection: socket.socket, channel: Channel, ended: Callable[[], None] = lambda: None
    ) -> None:
        """`ended` is called once it is closed."""
        super().__init__(connection, channel, _BOUNDS)
        self.position = position
        self.node = channel.node
        self.sent_messages = 0
        self._ended: Callable[[], None] | None = ended

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or keep what the connection does not take now. Raises ProtocolError, OSError."""
        if self.waiting > _WAITING_LIMIT:
            raise ProtocolError(f"its peer has not read {self.waiting} bytes")
        self.push(dict(message))
        self.sent_messages += 1
        self.write()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        ended, self._ended = self._ended, None
        if ended is not None:
            self.connection.close()
            ended()


@dataclass(frozen=True)
class Connected:
    """A connection to a parent that has answered a `join`."""

    connection: socket.socket
    channel: Channel


Connect = Callable[[int, Callable[[Connected | str], None]], None]


class TreeMember:
    """One node of the tree: its state, and its connections."""

    def __init__(
        self,
        loop: Loop,
        state: TreeState,
        connect: Connect,
        changed: Callable[[], None],
        failed: Callable[[str, str], None] = lambda node, reason: None,
        rejected: Callable[[int, str], None] = lambda position, reason: None,
    ) -> None:
        """`connect(position, done)` connects to the SMP at a position, without blocking, and calls `done` in any thread
        with the connection or with the reason why there is none. `changed` is called, in the loop's thread, when there
        is another announcement; `failed` with a node and a reason when its connection was closed because of an
        error; `rejected` with a position and a reason when it begins to report what cannot be."""
        self._loop = loop
        self._state = state
        self._connect = connect
        self._changed = changed
        self._failed = failed
        self._rejected = rejected
        self._links: dict[int, TreeLink] = {}
        self._closed = False
        loop.call(lambda: loop.soon(self.advance))

    # ---- from any thread ----

    @property
    def announcement(self) -> Announcement:
        """The newest decision and lost positions known here."""
        return self._state.announcement

    @property
    def reason(self) -> str:
        """Why position 0 is presumed lost; '' unless this node acts as root in its place."""
        return self._state.reason if self._state.acts_as_root and self._state.position else ""

    def report(self, report: NodeReport) -> None:
        """Take this node's own state."""
        self._loop.call(lambda: self._report(report))

    def adopt(self, position: int, connected: Connected, ended: Callable[[], None]) -> None:
        """Take over the connection of a child; `ended` is called once it is closed."""
        self._loop.call(lambda: self._adopt(TreeLink(position, connected.connection, connected.channel, ended)))

    # ---- in the loop's thread, or after it has ended ----

    def close(self) -> None:
        """Close all connections. A neighbour that misses this node long enough presumes it lost."""
        self._closed = True
        for link in list(self._links.values()):
            self._drop(link)

    @property
    def links(self) -> tuple[TreeLink, ...]:
        """The connections."""
        return tuple(self._links.values())

    def _report(self, report: NodeReport) -> None:
        if not self._closed:
            self._following(lambda: self._state.report(report, time.monotonic()))
            self._loop.soon(self.advance)

    def _adopt(self, link: TreeLink) -> None:
        if self._closed:
            link.close()
            return
        if self._add(link):
            self._state.child_joined(link.position)
            self._loop.soon(self.advance)

    def _add(self, link: TreeLink) -> bool:
        """Wait for one more connection; false if the system refuses that."""
        if link.position in self._links:
            self._drop(self._links[link.position])
        try:
            self._watch(link)
        except OSError as error:  # no memory
            link.close()
            self._words(link, error)
            return False
        self._links[link.position] = link
        return True

    def _watch(self, link: TreeLink) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.waiting else 0)
        self._loop.watch(link.connection, lambda _: self._ready(link), events)

    def _ready(self, link: TreeLink) -> None:
        """Read and write what can be."""
        self._loop.soon(self.advance)
        try:
            link.write()
            for message, _ in link.read():
                self._hear(link, message)
                if self._links.get(link.position) is not link:
                    return  # closed by that
            self._watch(link)
        except EndedError:
            self._end(link, "it hung up")
        except Exception as error:  # any error: this thread serves all connections
            self._end(link, self._words(link, error))

    def _hear(self, link: TreeLink, message: dict[str, object]) -> None:
        now = time.monotonic()
        if link.position < self._state.position:
            announcement = from_parent(message)
            self._following(lambda: self._state.hear_parent(link.position, announcement, now))
        elif (summary := from_child(message)) is not None:
            self._state.hear_child(link.position, summary, now)
        else:
            self._state.child_left(link.position)

    def _words(self, link: TreeLink, error: Exception) -> str:
        known = isinstance(error, (FtError, OSError))
        reason = protocol.legible(error) if known else str(protocol.unexpected(error))
        self._failed(link.node, reason)
        return reason

    def _end(self, link: TreeLink, reason: str) -> None:
        if self._links.get(link.position) is link:
            self._drop(link)
            if link.position < self._state.position:
                self._state.failed(link.position, reason, time.monotonic())

    def _drop(self, link: TreeLink) -> None:
        self._loop.forget(link.connection)
        del self._links[link.position]
        link.close()

    def _following(self, happens: Callable[[], None]) -> None:
        """Let something happen that may change the announcement."""
        before = self._state.announcement
        happens()
        if self._state.announcement != before:
            self._changed()

    def advance(self, now: float) -> None:
        """Do what is due at `now`."""
        if self._closed:
            return
        before = self._state.announcement
        outbox = self._state.advance(now)
        for position, reason in outbox.rejected:
            self._rejected(position, reason)
        if self._state.announcement != before:
            self._changed()
        for position in outbox.leave:
            if (link := self._links.get(position)) is not None:
                with contextlib.suppress(FtError, OSError):
                    link.send(LEAVE)
                self._drop(link)
        if outbox.up is not None and self._state.parent is not None:
            self._send(self._state.parent, packed_summary(outbox.up))
        if outbox.down:
            announcement = packed_announcement(self._state.announcement)
            for position in outbox.down:
                self._send(position, announcement)
        if outbox.connect is not None:
            self._join(outbox.connect)
        self._loop.at(outbox.wake, self.advance)

    def _send(self, position: int, message: dict[str, object]) -> None:
        link = self._links.get(position)
        if link is None:
            return
        try:
            link.send(message)
            self._watch(link)
        except (FtError, OSError) as error:
            self._end(link, str(error))
            self._loop.soon(self.advance)

    def _join(self, position: int) -> None:
        def done(result: Connected | str) -> None:
            self._loop.call(lambda: self._joined(position, result))

        try:
            self._connect(position, done)
        except RuntimeError as error:  # no thread
            done(str(error))

    def _joined(self, position: int, result: Connected | str) -> None:
        if self._closed:
            if isinstance(result, Connected):
                result.connection.close()
        elif isinstance(result, str):
            self._state.failed(position, result, time.monotonic())
        elif self._add(TreeLink(position, result.connection, result.channel)):
            self._state.joined(position, time.monotonic())
        else:
            self._state.failed(position, "its connection cannot be used", time.monotonic())
        self._loop.soon(self.advance)
