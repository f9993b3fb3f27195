"""What a node of the world sends of a version: what its ranks hold, in one request to each node that keeps of it.

No thread sends here, and one takes on each side: a request is two steps of the hub. So most of a job's steps are the
product's own.

In: an exchange's source, a version. Out: `done` once every target has taken it, as of `smp.exchange.exchange`.
"""

from ft_plugins.errors import FtError, SegmentError

from . import hub as hubs
from .hub import Signal
from .memory import targets_of

_SECONDS = (0.005, 0.05)  # for one target, usually
_RETRY, _ASK_AGAIN, _STOPPED = 0.2, 0.02, 0.05
_CHECK = 10.0  # before a target that has everything is asked again: its machine may be gone without a word


class Sender:
    """As `smp.exchange.exchange.ExchangeSender`: sends what its ranks hold of a version until all have taken it."""

    differences = ()

    def __init__(self, source, version, pacers):
        self.version, self._source = version, source
        self.process, self._hub = hubs.ACTIVE.current.process, hubs.ACTIVE
        self._stopped, self.corrupt = False, False
        self._done = dict.fromkeys(targets_of(source.plan, source.position), False)
        self._peers = {at: source.connect(at) for at in self._done}
        self._lacking = len(self._done)
        for at in self._done:
            self._later(at, 0.0)
        self._hub.later(_CHECK, self._check)
        source.agreed(version)

    @property
    def done(self):
        return not self._lacking

    @property
    def target(self):
        return next((at for at, done in self._done.items() if not done), None)

    def stop(self):
        self._stopped = True

    def _later(self, at, pause):
        self._hub.later(pause + self._hub.random.uniform(*_SECONDS), lambda: self._send(at))

    def _check(self):
        if not self._stopped and self.process.alive:
            for at in self._done:
                self._later(at, 0.0)
            self._hub.later(_CHECK, self._check)

    def _send(self, at):
        source = self._source
        if self._stopped or self.corrupt or not self.process.alive:
            return
        if self.process.stopped:
            self._later(at, _STOPPED)
            return
        try:
            content = {rank: source.segments[rank].content(self.version) for rank in source.plan.ranks[source.position]}
        except SegmentError:
            self.corrupt = True
            source.progressed()
            return
        request = self.version, source.epoch, source.position, content
        self.process.hub.world.network.call(
            self.process, self._peers[at], request, lambda taken: self._taken(at, taken), lambda: self._lost(at)
        )

    def _lost(self, at):
        """The target's process is gone; that which replaces it has nothing."""
        self._taken(at, None)

    def _taken(self, at, taken):
        """What the target says; None: nothing."""
        if self._stopped or not self.process.alive:
            return
        self._lacking += self._done[at] - bool(taken)
        self._done[at] = bool(taken)
        if not taken:
            self._later(at, _RETRY if taken is None else _ASK_AGAIN)
        elif self.done:
            self._source.progressed()


class Taking:
    """What a node takes of others, in one thread."""

    def __init__(self, process, node, requests):
        self.process, self.node = process, node
        self._requests, self._queue, self._wake, self._work = requests, [], Signal(process.hub), None
        self.senders = {}  # calls, by process, once this one is gone
        process.at_end.append(self._gone)

    def take(self, request, sender, back, lost):
        self.senders[sender] = lost
        self._queue.append((request, back))
        self._wake.set()
        if self._work is None:
            self._work = self.process.spawn(self._run, "take")

    def _run(self):
        while True:
            queue, self._queue = self._queue, []
            for request, back in queue:
                back(self._take(*request))
            if not self._queue:
                self._wake = Signal(self.process.hub)
                self._wake.wait()

    def _take(self, version, epoch, source, content):
        try:
            store = self._requests.storing(epoch)
            taken = store.take(version, source, content)
        except FtError:
            return None
        if taken and store.receiving is None:
            self._requests.received()
        return taken

    def _gone(self):
        if self.process.machine.alive:
            for lost in self.senders.values():
                self.process.hub.later(0.001, lost)
