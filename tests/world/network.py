"""The world's network: connections that deliver in order, late, or never; and what selects on them.

A connection behaves as TCP: what is sent on it arrives in order or not at all. Between two machines it may be slow, cut
in one direction or in both; what was sent meanwhile arrives once that is over. A process that is gone resets its
connections, a machine that is gone does not.

Invariant: nothing here reads a message.
"""

import selectors
from collections import deque
from types import SimpleNamespace

from ft_plugins.errors import FtError, ProtocolError
from ft_plugins.transport import protocol
from ft_plugins.transport.calls import Handover
from ft_plugins.transport.framed import EndedError

from .hub import Signal

_END = object()  # of a connection
DELAY = (0.0002, 0.002)  # seconds, usually


class Machine:
    """One host: its files and its shared memory outlive its processes."""

    def __init__(self, name):
        self.name, self.alive = name, True
        self.files, self.memory = {}, {}
        self.full = self.slow = self.lies = False  # its disk; its way to the checkpoints; its SMP


class End:
    """One end of a connection."""

    def __init__(self, network, process, node):
        self.network, self.process, self.node = network, process, node
        self.other = None
        self.inbox, self.is_ended, self.is_open = deque(), False, True
        self.watchers = {}  # selectors, in order
        self.taken = None  # called with each message, in place of the inbox
        self.last, self.stalled = 0.0, deque()
        process.at_end.append(self._died)

    def _died(self):
        if self.process.machine.alive:
            self.close()

    @property
    def readable(self):
        return bool(self.inbox) or self.is_ended

    def send(self, message):
        if not self.is_open or self.is_ended:
            raise BrokenPipeError(32, "Broken pipe")
        self.network.carry(self, message)

    def close(self):
        if self.is_open:
            self.is_open = False
            self.network.carry(self, _END)
            for watcher in list(self.watchers):  # a thread of this process that waits for a reply
                watcher.wake()

    def arrived(self, what):
        if what is _END:
            self.is_ended = True
        elif not self.is_open:
            return
        elif self.taken is not None:
            self.taken(what)
            return
        else:
            self.inbox.append(what)
        for watcher in list(self.watchers):
            watcher.wake()

    def receive(self, seconds):
        """The next message. Raises TimeoutError, EndedError."""
        if not self.readable and self.is_open:
            waiting = Waiting(self.network.hub)
            self.watchers.setdefault(waiting)
            waiting.signal.wait(seconds)
            self.watchers.pop(waiting, None)
        if self.inbox:
            return self.inbox.popleft()
        if self.is_ended or not self.is_open:
            raise EndedError("it hung up")
        raise TimeoutError("timed out")


class Waiting:
    """Watches an end: something has arrived."""

    def __init__(self, hub, wake=None):
        self.signal = Signal(hub)
        self.wake = wake or self.signal.set


class Network:
    """All machines. `cut` holds the pairs (from, to) between which nothing arrives."""

    def __init__(self, hub):
        self.hub = hub
        self.listeners = {}  # by (host, port): process, accept
        self.taking = {}  # by (host, port): what takes versions there
        self.cut, self.slow = set(), {}
        self.held, self.held_calls = [], []  # ends with what could not be delivered; calls on the way
        self._ports = 20000

    def delay(self, source, target):
        low, high = DELAY
        extra = self.slow.get((source, target), 0.0)
        return (low + (high - low) * self.hub.random.random() ** 3 + extra) if source != target else 0.00005

    def carry(self, end, what):
        source, target = end.process.machine, end.other.process.machine
        end.last = max(end.last + 1e-7, self.hub.now + self.delay(source.name, target.name))
        self.hub.later(end.last - self.hub.now, lambda: self._deliver(end, what))

    def _deliver(self, end, what):
        source, target = end.process.machine, end.other.process.machine
        if not target.alive or not end.other.process.alive:
            if target.alive and what is not _END and not end.is_ended:  # a reset
                self.hub.later(self.delay(target.name, source.name), lambda: end.arrived(_END))
            return
        if end.stalled or (source.name, target.name) in self.cut:
            end.stalled.append(what)
            self.held.append(end)
            return
        end.other.arrived(what)

    def heal(self):
        """Everything arrives again."""
        self.cut.clear()
        self.slow.clear()
        held, self.held = self.held, []
        for end in held:
            stalled, end.stalled = end.stalled, deque()
            for what in stalled:
                self._deliver(end, what)
        calls, self.held_calls = self.held_calls, []
        for call in calls:
            call()

    def call(self, process, peer, request, answered, lost):
        """One request to what takes versions at `peer`, and its answer; None if it is refused, or no machine is there.
        `lost()` once the process there is gone."""
        source, target = process.machine.name, self.hub.world.machine_at(peer.endpoint[0])

        def arrive():
            if (source, target.name) in self.cut:
                self.held_calls.append(arrive)
            elif not target.alive:
                self.hub.later(peer.seconds, lambda: answered(None))
            else:
                there = self.taking.get(peer.endpoint)
                if there is None or not there.process.alive or peer.node not in ("", there.node):
                    back(None)
                else:
                    there.take(request, process.pid, back, lost)

        def back(answer):
            self.hub.later(self.delay(target.name, source), lambda: returned(answer))

        def returned(answer):
            if (target.name, source) in self.cut:
                self.held_calls.append(lambda: returned(answer))
            elif process.stopped:
                self.hub.later(0.05, lambda: returned(answer))
            else:
                answered(answer)

        self.hub.later(self.delay(source, target.name), arrive)

    def port(self):
        self._ports += 1
        return self._ports

    def listen(self, process, where, accept):
        """`accept(end)` runs in a thread of `process` for each connection. Raises OSError if the port is taken."""
        if where in self.listeners and (at := self.listeners[where][0]).alive and at.machine is process.machine:
            raise OSError(98, "Address already in use")
        self.listeners[where] = (process, accept)

    def connect(self, process, node, where, seconds, signal=None):
        """A connection. `signal` gives up. Raises TimeoutError, ConnectionRefusedError."""
        signal, found = signal or Signal(self.hub), []
        target = self.hub.world.machine_at(where[0])
        source = process.machine

        def reached(back):
            if target.alive and (target.name, source.name) not in self.cut:
                self.hub.later(self.delay(target.name, source.name), back)

        def refused():
            signal.set()

        def arrive():
            if not target.alive or (source.name, target.name) in self.cut:
                return
            server, accept = self.listeners.get(where, (None, None))
            if server is None or not server.alive:
                reached(refused)
                return
            mine, theirs = End(self, process, ""), End(self, server, node)
            mine.other, theirs.other = theirs, mine

            def admit():
                mine.node = accept(theirs)
                reached(admitted)

            def admitted():
                found.append(mine)
                signal.set()

            server.spawn(admit, "accept")

        self.hub.later(self.delay(source.name, target.name), arrive)
        if not signal.wait(seconds):
            raise TimeoutError("timed out")
        if not found:
            raise ConnectionRefusedError(111, "Connection refused")
        return found[0]


class Peer:
    """As `transport.calls.Peer`: requests to another node's SMP."""

    def __init__(self, endpoint, process, me, seconds, node=""):
        self.endpoint = endpoint
        self._process, self._me, self.seconds, self.node = process, me, seconds, node
        self._network = process.hub.world.network
        self._end, self._closed, self._signal = None, False, None

    def _connect(self):
        if self._closed:
            raise ProtocolError("this side has hung up")
        if self._end is None:
            self._signal = Signal(self._process.hub)
            end = self._network.connect(self._process, self._me, self.endpoint, self.seconds, self._signal)
            if self._closed:
                end.close()
                raise ProtocolError("this side has hung up")
            self._end = end
            if self.node not in ("", self._end.node):
                found, self._end = self._end.node, self._end.close()
                raise ProtocolError(f"expected the SMP of node {self.node} there, found that of node {found}")
        return self._end

    def ask(self, name, payload=None, **fields):
        existed = self._end is not None
        try:
            try:
                reply, received = self._once(name, payload, fields)
            except (EndedError, BrokenPipeError):
                if not existed:
                    raise
                self.drop()
                reply, received = self._once(name, payload, fields)
        except (OSError, ProtocolError) as error:
            self.drop()
            raise ProtocolError(f"the SMP at {self.endpoint} does not answer '{name}': {error}") from error
        protocol.raise_refusal(reply)
        return reply, received

    def _once(self, name, payload, fields):
        end = self._connect()
        end.send(({"do": name, **fields}, payload))
        return end.receive(self.seconds)

    def is_readable(self, seconds):
        """Whether the connection has ended within so many seconds; replies are awaited elsewhere."""
        if self._end is None or self._end.readable:
            return True
        waiting = Waiting(self._network.hub)
        self._end.watchers.setdefault(waiting)
        return waiting.signal.wait(seconds)

    def surrender(self):
        end, self._end = self._end, None
        if end is None:
            raise ProtocolError("this side has hung up")
        return end, SimpleNamespace(node=end.node)

    def drop(self):
        end, self._end = self._end, None
        if end is not None:
            end.close()

    def close(self):
        self._closed = True
        self.drop()
        if self._signal is not None:
            self._signal.set()


def serve(process, end, handle, others=None):
    """Answer the requests on a connection, each in a thread of `process`, as `transport.serving` does. `others`:
    requests of the world's own."""

    def taken(received):
        process.spawn(lambda: answer(*received), "request")

    def answer(message, payload):
        try:
            given = others(message, payload) if others else None
            given = given or handle(message, payload)
        except FtError as error:
            given = protocol.refusal(error), None
        if isinstance(given, Handover):
            end.taken = None
            if end.is_open and not end.is_ended:
                end.send(({"ok": True}, None))
            given.take(end, SimpleNamespace(node=end.node), lambda: None)
            return
        reply, back = given
        if end.is_open and not end.is_ended:
            end.send(({"ok": True, **reply}, back))

    end.taken = taken


# ---- what `transport.loop` needs ----


class Waker:
    """Both ends of the socket pair that wakes a loop."""

    def __init__(self):
        self.readable, self.watchers = False, {}

    def setblocking(self, _):
        pass

    def send(self, _):
        self.readable = True
        for watcher in list(self.watchers):
            watcher.wake()

    def recv(self, _):
        self.readable = False

    def close(self):
        pass


class Selector:
    """As `selectors.DefaultSelector`, for ends of the world's connections."""

    def __init__(self):
        self._keys, self._signal = {}, None

    def register(self, fileobj, events):
        self._keys[fileobj] = SimpleNamespace(fileobj=fileobj, events=events)
        fileobj.watchers.setdefault(self)

    def modify(self, fileobj, events):
        self._keys[fileobj].events = events

    def unregister(self, fileobj):
        del self._keys[fileobj]
        fileobj.watchers.pop(self, None)

    def get_key(self, fileobj):
        return self._keys[fileobj]

    def close(self):
        for fileobj in list(self._keys):
            self.unregister(fileobj)

    def wake(self):
        if self._signal is not None:
            self._signal.set()

    def select(self, timeout):
        found = self._found()
        if not found and timeout > 0:
            from . import hub as hubs

            self._signal = Signal(hubs.ACTIVE)
            self._signal.wait(timeout)
            self._signal = None
            found = self._found()
        return found

    def _found(self):
        return [(key, selectors.EVENT_READ) for key in self._keys.values() if key.fileobj.readable]


def pair():
    """As `socket.socketpair`."""
    waker = Waker()
    return waker, waker


class TreeLink:
    """As `smp.tree.tree_member.TreeLink`."""

    waiting = 0

    def __init__(self, position, connection, channel, ended=lambda: None):
        self.position, self.connection, self.node = position, connection, channel.node
        self._ended = ended
        self.sent_messages = 0

    def send(self, message):
        self.connection.send(message)
        self.sent_messages += 1

    def write(self):
        pass

    def read(self):
        while self.connection.inbox:
            yield self.connection.inbox.popleft(), None
        if self.connection.is_ended:
            raise EndedError("it hung up")

    def close(self):
        ended, self._ended = self._ended, None
        if ended is not None:
            self.connection.close()
            ended()
