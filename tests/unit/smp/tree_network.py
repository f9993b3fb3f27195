"""A job of which only the tree's nodes exist: real `TreeState`s, and a network and a clock that are made up."""

import heapq
import itertools
from dataclasses import dataclass
from random import Random

from ft_plugins.smp.tree.agreement import ExchangeEpoch, NodeReport
from ft_plugins.smp.tree.tree_state import TreeState
from ft_plugins.snapshot.segment.slots import Version

DETECT = 10.0
REPORT_SECONDS = 0.5  # between two reports of a driver
LATENCY = 0.002
TIMEOUT = DETECT / 4  # of a connection to a machine without power


@dataclass
class Machine:
    """One node: its place in the tree, and a driver that follows announcements."""

    state: TreeState
    alive: bool = True
    hung: bool = False  # its driver
    powered: bool = True  # else a connection is not even refused
    begun: int = 0
    exchange: Version | None = None
    encoded: Version | None = None
    committed: Version | None = None

    def report(self):
        return NodeReport(self.begun, self.exchange, None, self.encoded, self.committed)


class Network:
    """All nodes. `sent` counts messages by kind; `known` is what each node was the first to know, and when."""

    def __init__(self, nodes, seed=0, encoding=0.3):
        self.now = 100.0
        self.random = Random(seed)
        self.encoding = encoding  # seconds until a node has encoded a version, at most
        self.epoch = ExchangeEpoch(1, None, nodes, 1)
        self.machines = [Machine(TreeState(self.epoch, at, DETECT, self.now)) for at in range(nodes)]
        self.links = {at: set() for at in range(nodes)}  # of each child, to parents
        self.cut = set()  # links over which nothing passes any more, by child and parent
        self.slow = {}  # latency by source and target, if it is not LATENCY
        self.up = dict.fromkeys(range(nodes), 0)
        self.down = dict.fromkeys(range(nodes), 0)
        self.commits = {}  # when position 0 announced it
        self._events = []
        self._numbers = itertools.count()
        self._wakes = {}
        self._arrivals = {}  # of the last message, by source and target
        for at in range(nodes):
            self.after(self.random.uniform(0, 0.2), lambda at=at: self._start(at))

    def after(self, seconds, happens):
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), happens))

    def run(self, seconds, until=lambda: False):
        """Whether `until` came true within `seconds`."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, happens = heapq.heappop(self._events)
            happens()
            if until():
                return True
        self.now = end
        return until()

    def live(self):
        return [machine for machine in self.machines if machine.alive]

    def lost(self):
        """What is announced as lost, on all live nodes."""
        return {machine.state.announcement.lost for machine in self.live() if not machine.hung}

    def parents(self):
        return [machine.state.parent for machine in self.machines]

    # -- what happens --

    def kill(self, at, powered=True):
        machine = self.machines[at]
        machine.alive, machine.powered = False, powered
        for child, parents in self.links.items():
            for parent in list(parents):
                if at in (child, parent):
                    if powered:  # the kernel ends the connections; otherwise the other side hears nothing
                        parents.discard(parent)
                        other = parent if at == child else child
                        self.after(LATENCY, lambda other=other: self._hung_up(other, at))
                    else:
                        self.cut.add((child, parent))

    def replace_smp(self, at, seconds=1.0):
        """The SMP dies, and the watcher starts another one."""
        self.kill(at)

        def start():
            machine = self.machines[at]
            machine.state = TreeState(self.epoch, at, DETECT, self.now)
            machine.alive = True
            machine.exchange = None
            self._start(at)

        self.after(seconds, start)

    def suspend(self, seconds):
        """All processes of the job are stopped for a while, and go on as if nothing had been, but for their clocks."""
        self.now += seconds
        self._events = [(when + seconds, number, happens) for when, number, happens in self._events]
        self._wakes = {at: when + seconds for at, when in self._wakes.items()}
        self._arrivals = {link: when + seconds for link, when in self._arrivals.items()}

    def train(self, at):
        self.machines[at].begun += 1

    def _start(self, at):
        def report():
            machine = self.machines[at]
            if machine.alive and machine.state is state:
                if not machine.hung:
                    self._follow(machine)
                    machine.state.report(machine.report(), self.now)
                    self._advance(at)
                self.after(REPORT_SECONDS, report)

        state = self.machines[at].state
        report()

    def _follow(self, machine):
        decision = machine.state.announcement.decision
        if decision.committed is not None and (machine.committed is None or decision.committed > machine.committed):
            assert machine.encoded == decision.committed or not machine.exchange, "committed without its data"
            machine.committed = decision.committed
        if decision.exchange != machine.exchange:
            assert machine.exchange is None or decision.exchange is not None and decision.exchange > machine.exchange
            machine.exchange = decision.exchange

            def encode(version=decision.exchange):
                if machine.alive and not machine.hung and machine.exchange == version and version is not None:
                    machine.begun = max(machine.begun, version.iteration)
                    machine.encoded = version
                    machine.state.report(machine.report(), self.now)
                    self._advance(machine.state.position)

            if machine.encoded != decision.exchange:
                self.after(self.random.uniform(0, self.encoding), encode)

    def _advance(self, at):
        machine = self.machines[at]
        if not machine.alive:
            return
        before = machine.state.announcement
        outbox = machine.state.advance(self.now)
        if machine.state.announcement != before and not machine.hung:
            self._announced(at, machine.state.announcement)
        for parent in outbox.leave:
            self.links[at].discard(parent)
            self._send(at, parent, lambda parent=parent: self._left(parent, at), linked=False)
        if outbox.up is not None and machine.state.parent is not None:
            parent, summary = machine.state.parent, outbox.up
            self.up[at] += 1
            self._send(at, parent, lambda: self._hear_child(parent, at, summary))
        for child in outbox.down:
            if at in self.links[child]:
                self.down[at] += 1
                news = machine.state.announcement
                self._send(at, child, lambda child=child, news=news: self._hear_parent(child, at, news))
        if outbox.connect is not None:
            self._connect(at, outbox.connect)
        self._wake(at, outbox.wake)

    def _announced(self, at, announcement):
        version = announcement.decision.committed
        if at == 0 and version is not None and version not in self.commits:
            self.commits[version] = self.now
        self._follow(self.machines[at])

    def _wake(self, at, when):
        when = max(when, self.now + 1e-4)
        if self._wakes.get(at, 0.0) > self.now and self._wakes[at] <= when:
            return
        self._wakes[at] = when
        self.after(when - self.now, lambda: self._advance(at) if self._wakes.get(at) == when else None)

    # -- messages --

    def _send(self, source, target, arrives, linked=True):
        link = (max(source, target), min(source, target))

        def deliver():
            if self.machines[target].alive and link not in self.cut and (not linked or link[1] in self.links[link[0]]):
                arrives()
                self._advance(target)

        arrival = self.now + self.slow.get((source, target), LATENCY) * self.random.uniform(0.5, 1.0)
        arrival = self._arrivals[source, target] = max(arrival, self._arrivals.get((source, target), 0.0))  # in order
        self.after(arrival - self.now, deliver)

    def _hear_child(self, parent, child, summary):
        self.machines[parent].state.hear_child(child, summary, self.now)

    def _hear_parent(self, child, parent, news):
        state = self.machines[child].state
        before = state.announcement
        state.hear_parent(parent, news, self.now)
        if state.announcement != before and not self.machines[child].hung:
            self._announced(child, state.announcement)

    def _left(self, parent, child):
        self.machines[parent].state.child_left(child)

    def _hung_up(self, at, other):
        if self.machines[at].alive and self.machines[at].state.parent == other:
            self.machines[at].state.failed(other, "it hung up", self.now)
            self._advance(at)

    def _connect(self, at, parent):
        state = self.machines[at].state
        powered = self.machines[parent].powered and (at, parent) not in self.cut

        def arrive():
            if not self.machines[at].alive or self.machines[at].state is not state:
                return
            if self.machines[parent].alive and powered:
                self.links[at].add(parent)
                self.machines[parent].state.child_joined(at)
                state.joined(parent, self.now)
            else:
                state.failed(parent, "refused" if powered else "timed out", self.now)
            self._advance(at)

        self.after(LATENCY if powered else TIMEOUT, arrive)
