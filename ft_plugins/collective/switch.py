"""Serve a rank's connections in the tree of ranks, in a thread of its own: frames go on while the rank computes.

Invariant: `Operations` decides what is sent. A result is given to the caller only when the ranks below can have it,
even if this process ends at once. A connection that is lost, or breaks the rules, fails every operation that is not
finished and all later ones, on all ranks, with the same reason. A rank that closes in order says so first, and
is not lost.

A loss raises nothing by itself, and costs no version, but for figures that are on their way (`capture_times`). Nearly
always the neighbour's process has ended, and the launcher restarts the job: what was captured by then is needed.
Otherwise only the connection is gone, training goes on, and there is one thing that no rank can do any more, to
announce a word; `announce` says so at once, and `lost` says it before, on the ranks at both ends of the connection
alone.

In: links, calls of this rank. Out: results; ProtocolError after a loss or a timeout.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import ProtocolError
from ..transport.channel import Channel
from ..transport.frame_codec import FrameBounds
from ..transport.framed import Link
from ..transport.loop import Loop
from .operations import Action, Buffer, Finished, FrameKind, Known, Operations, RankFrame, RankPlace, SendFrame

BODY_LIMIT = 1 << 30  # bytes: a payload of 64 KiB from each of 16,384 ranks
_BOUNDS = FrameBounds(64, BODY_LIMIT)
_KINDS = frozenset(FrameKind)
_PARTING_SECONDS = 1.0  # in which the reason of a loss is sent on
_SWITCHES: weakref.WeakSet[Switch] = weakref.WeakSet()  # of this process


class RankLink(Link):
    """One connection, on a non-blocking socket. Not safe for threads."""

    def __init__(self, rank: int, connection: socket.socket, channel: Channel) -> None:
        """`rank` is the neighbour's."""
        super().__init__(connection, channel, _BOUNDS)
        self.rank = rank

    def send(self, frame: RankFrame) -> None:
        """Queue a frame for `write`. Raises ProtocolError if it is too large."""
        self.push({"kind": int(frame.kind), "number": frame.number}, frame.body)

    def frames(self) -> Iterator[RankFrame]:
        """Those that have arrived. Raises ProtocolError; ConnectionError if the neighbour has closed."""
        for message, body in self.read():
            kind, number = message.get("kind"), message.get("number")
            if type(kind) is not int or kind not in _KINDS or type(number) is not int or number < 0:
                raise ProtocolError("a frame of another rank cannot be read")
            yield RankFrame(FrameKind(kind), number, body)


@dataclass(frozen=True)
class LostNeighbour:
    """A neighbour whose connection this rank saw end, at `time.monotonic()`, without an orderly end."""

    rank: int
    reason: str
    at: float


@dataclass
class Call:
    """An operation that this rank has called."""

    number: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    body: Buffer = b""
    reason: str = ""  # why it has failed
    refused: bool = False  # nothing of it was sent


class Switch:
    """The connections of one rank, until `close`."""

    def __init__(self, place: RankPlace, links: Mapping[int, RankLink], seconds: float) -> None:
        """`seconds` bounds each wait for other ranks."""
        self._place = place
        self._links = dict(links)
        self.seconds = seconds
        self._operations = Operations(place)
        self._calls: dict[int, Call] = {}
        self._words: dict[str, threading.Event] = {}  # announced here, until all ranks know them, or the tree is lost
        self._known: set[str] = set()  # announced here, known to all ranks
        self._requests: deque[tuple[Callable[[], None], Call | None]] = deque()
        self._finishing: deque[tuple[dict[int, int], Call]] = deque()  # until so many bytes of each link are written
        self._reason = ""  # of the loss
        self.lost: LostNeighbour | None = None  # if this rank noticed the loss, rather than another one
        self._lock = threading.Lock()
        self._closing = False
        self._loop = Loop("ft-ranks")
        for link in self._links.values():
            self._watch(link)
        _SWITCHES.add(self)
        self._thread = threading.Thread(target=self._run, name="ft-ranks", daemon=True)
        self._thread.start()

    # ---- calls of this rank ----

    def start(self, kind: FrameKind, body: Buffer) -> Call:
        """Take part in the next operation, which all ranks call. Does not wait."""
        call = Call()

        def begin() -> None:
            call.number, actions = self._operations.call(kind, body)
            self._calls[call.number] = call
            self._carry_out(actions)

        self._request(begin, call)
        return call

    def result(self, call: Call) -> Buffer:
        """The result of an operation. Raises ProtocolError if a rank was lost, or did not take part in time."""
        if not call.over.wait(self.seconds):
            missing = ", ".join(map(str, self._operations.missing()))
            raise ProtocolError(
                f"rank {self._place.rank}: waited {self.seconds:g} s in vain for rank {missing}, or for ranks behind "
                "it: they may hang; the job's timeout is that of torch.distributed.init_process_group"
            )
        if call.reason:
            raise ProtocolError(call.reason)
        return call.body

    def announce(self, word: str, seconds: float) -> str:
        """Send `word` to all ranks. Returns '' once all that have not ended know it, else why some may not: after
        `seconds`, or at once if the tree is lost."""
        over = self._words.setdefault(word, threading.Event())
        if self._request(lambda: self._carry_out(self._operations.announce(word))):
            over.wait(seconds)
        if word in self._known:
            return ""
        return self._reason or f"rank {self._place.rank}: no answer of some ranks for {seconds:g} s"

    def knows(self, word: str) -> bool:
        """Whether a rank has announced `word`. Sends nothing."""
        return word in self._operations.words

    def close(self) -> None:
        """End in order: close the connections, after what this rank has passed on was sent. Idempotent."""
        with self._lock:
            self._closing = True
        self._loop.wake()
        self._thread.join(2 * _PARTING_SECONDS)

    def close_copies(self) -> None:
        """In a child that was forked: close what it has inherited, so the others notice the end of this rank."""
        for link in self._links.values():
            link.connection.close()
        self._loop.close_copies()

    def _request(self, call: Callable[[], None], waiting: Call | None = None) -> bool:
        """Have the thread `call`. Returns whether it will; else `waiting` has failed."""
        with self._lock:
            if self._reason or self._closing:
                if waiting is not None:
                    waiting.refused = True
                _fail(waiting, self._reason or f"rank {self._place.rank}: the connections are closed")
                return False
            self._requests.append((call, waiting))
        self._loop.wake()
        return True

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # any error: the callers must not wait for a thread that has ended
            self._lose(f"rank {self._place.rank}: {type(error).__name__}: {error}")
        if not self._reason:
            for link in self._links.values():
                link.send(RankFrame(FrameKind.ENDED))
        self._part()

    def _turn(self) -> None:
        self._loop.step()
        while self._requests and not self._reason:
            request, call = self._requests.popleft()
            try:
                request()
            except ProtocolError as error:
                self._lose(f"rank {self._place.rank}: {error}")
                _fail(call, self._reason)
                return
        self._finish()

    def _serve(self, link: RankLink) -> None:
        """Write and read what there is."""
        if self._reason:
            return
        broken: OSError | None = None
        try:
            link.write()
        except OSError as error:  # what the neighbour sent before it closed may be the reason
            broken = error
        try:
            for frame in link.frames():
                if not self._take_frame(link, frame):
                    return
            if broken is not None:
                raise broken
            self._watch(link)
        except ProtocolError as error:
            self._lose_neighbour(link, str(error))
        except OSError as error:
            self._lose_neighbour(
                link,
                f"rank {self._place.rank}: the connection to rank {link.rank} is lost ({error.strerror or error}): "
                "it has ended, or its node cannot be reached",
            )

    def _take_frame(self, link: RankLink, frame: RankFrame) -> bool:
        """Returns whether more can follow."""
        if frame.kind is FrameKind.LOST:
            self._lose(bytes(frame.body).decode(errors="replace"), link)
            return False
        try:
            self._carry_out(self._operations.receive(link.rank, frame))
        except ProtocolError as error:
            self._lose(str(error))
            return False
        if frame.kind is FrameKind.ENDED:
            self._loop.forget(link.connection)
            del self._links[link.rank]
            link.close()
            return False
        return True

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendFrame(to, frame):
                    self._send(self._links[to], frame)
                case Finished(number, result):
                    self._take(number, result)
                case Known(word):
                    self._known.add(word)
                    self._words.setdefault(word, threading.Event()).set()

    def _send(self, link: RankLink, frame: RankFrame) -> None:
        link.send(frame)
        with contextlib.suppress(OSError):  # reading from it says what is wrong
            link.write()
        self._watch(link)

    def _watch(self, link: RankLink) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.waiting else 0)
        self._loop.watch(link.connection, lambda _: self._serve(link), events)

    def _take(self, number: int, result: Buffer) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            raise ProtocolError(f"rank {self._place.rank}: a result of operation {number}, which it has not called")
        call.body = result
        marks = {child: self._links[child].queued for child in self._place.children if child in self._links}
        self._finishing.append((marks, call))

    def _finish(self) -> None:
        """End the operations whose results have been written for the ranks below."""
        while self._finishing:
            marks, call = self._finishing[0]
            if any(child in self._links and self._links[child].written < marks[child] for child in marks):
                return
            self._finishing.popleft()[1].over.set()

    def _lose_neighbour(self, link: RankLink, reason: str) -> None:
        self.lost = LostNeighbour(link.rank, reason, time.monotonic())
        self._lose(reason, link)

    def _lose(self, reason: str, source: RankLink | None = None) -> None:
        """Fail whatever is not finished, and send all neighbours but `source`, which has it or is gone, the reason."""
        with self._lock:
            if self._reason:
                return
            self._reason = reason
            waiting = [*self._calls.values(), *(call for _, call in self._requests)]
        for link in self._links.values():
            if link is not source:
                link.send(RankFrame(FrameKind.LOST, body=reason.encode()))
        self._fail_all(waiting)
        self._closing = True

    def _fail_all(self, waiting: Sequence[Call | None]) -> None:
        """Fail what waits, for the reason of the loss; a result that is here is not lost."""
        for _, done in self._finishing:
            done.over.set()
        for call in waiting:
            _fail(call, self._reason)
        for word in tuple(self._words.values()):
            word.set()

    def _part(self) -> None:
        """Write what is queued, for a bounded time, then close."""
        until = time.monotonic() + _PARTING_SECONDS
        waiting = {link.connection.fileno(): link for link in self._links.values() if link.waiting}
        while waiting and (left := until - time.monotonic()) > 0:
            poller = select.poll()
            for descriptor in waiting:
                poller.register(descriptor, select.POLLOUT)
            for descriptor, _ in poller.poll(1000 * left):
                try:
                    waiting[descriptor].write()
                except OSError:
                    del waiting[descriptor]
                else:
                    if not waiting[descriptor].waiting:
                        del waiting[descriptor]
        with self._lock:
            self._reason = self._reason or f"rank {self._place.rank}: the connections are closed"
            left_over = [call for _, call in self._requests]
        self._fail_all([*self._calls.values(), *left_over])
        for link in self._links.values():
            link.close()
        self._loop.close()


def _close_copies() -> None:
    for switch in tuple(_SWITCHES):
        switch.close_copies()


os.register_at_fork(after_in_child=_close_copies)


def _fail(call: Call | None, reason: str) -> None:
    if call is not None and not call.over.is_set():
        call.reason = reason
        call.over.set()
