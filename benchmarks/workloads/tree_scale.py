"""Measure the tree of SMPs: up to thousands of nodes in one process, with real state, real agreement, real sockets.

Every node is a `TreeMember` as in an SMP: it decides, merges, sends and receives as there, on authenticated connections
of its own over the loopback. What differs from a job: all nodes share one loop, thus one core, so seconds that pass
between a report and its effect are an upper bound, as each hop waits for the processing of all other nodes. Shares of a
processor are counted per node, by thread time, and include what a selector of its own would cost. Connections are
authenticated as usual, but without the server's thread; a driver reports what a node's memory would show.

In: number of nodes, seconds to run. Out: `TreeFigures`.
"""

from __future__ import annotations

import heapq
import itertools
import random
import selectors
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

from ft_plugins.smp.tree import tree
from ft_plugins.smp.tree.agreement import ExchangeEpoch, NodeReport
from ft_plugins.smp.tree.tree_member import Connected, TreeLink, TreeMember
from ft_plugins.smp.tree.tree_state import TreeState
from ft_plugins.snapshot.segment.slots import Version
from ft_plugins.transport import door, protocol
from ft_plugins.transport.channel import ClientHandshake, Party, ServerHandshake
from ft_plugins.transport.loop import Loop

DETECT_SECONDS = 10.0  # the default of --ftp-detect-seconds
# Every iteration is exchanged. It takes a second, less than in most jobs, or as long as all nodes together need on one
# core: at least so many seconds per node.
_ITERATION_SECONDS = 1.0
_NODE_SECONDS = 0.0025
_SATURATED = 0.9  # of a processor
_SPREAD_SECONDS = 0.1  # between the first node that begins an iteration, or has encoded it, and the last
_ENCODING_SECONDS = 0.3
_PATIENCE_SECONDS = 60.0  # for all nodes to join, to commit a version, and, in addition to its time, to find a lost one
_ASK_SECONDS = 0.02
_SECRET = b"a secret of this measurement"


@dataclass(frozen=True)
class TreeFigures:
    """What the tree costs a node, and how fast it is. Messages and bytes are those sent, per node and iteration, with
    the heartbeats of `iteration_seconds`; shares are of one processor."""

    nodes: int
    depth: int
    iterations: int
    iteration_seconds: float
    elapsed_seconds: float  # of all iterations; longer than they are to take if a version was committed too late
    messages: float  # of the mean node
    messages_busiest: float
    bytes: float
    bytes_busiest: float
    processor_share: float  # of the mean node
    processor_share_busiest: float
    processor_share_all: float  # of the whole measurement, all nodes together
    commit_seconds: float  # from 'all have encoded' to 'committed everywhere', median; all nodes on one core
    lost_seconds: float  # until every live node knows of a lost inner node (of a leaf if there is none)
    detect_seconds: float
    threads: int  # of the tree, per node
    sockets: int  # of the tree, of the node with the most
    sockets_after_loss: int

    @property
    def kept_up(self) -> bool:
        """Whether this process had enough of a processor for all nodes: else the figures are those of its backlog."""
        return (
            self.processor_share_all <= _SATURATED
            and self.commit_seconds <= self.iteration_seconds
            and self.elapsed_seconds < (self.iterations + 1) * self.iteration_seconds
        )


class _Member(TreeMember):
    """Counts its thread's seconds, and how often a loop of its own would have woken."""

    seconds = 0.0
    wakes = 0

    def _ready(self, link: TreeLink) -> None:
        began = time.thread_time()
        super()._ready(link)
        self.seconds += time.thread_time() - began

    def advance(self, now: float) -> None:
        began = time.thread_time()
        super().advance(now)
        self.seconds += time.thread_time() - began
        self.wakes += 1

    def _report(self, report: NodeReport) -> None:
        began = time.thread_time()
        super()._report(report)
        self.seconds += time.thread_time() - began


class _Job:
    """All nodes, and the drivers that report for them."""

    def __init__(self, nodes: int, detect_seconds: float) -> None:
        self.epoch = ExchangeEpoch(1, None, nodes, 1)
        self.detect = detect_seconds
        self.loop = Loop("tree")
        self.alive = [True] * nodes
        self.reports = [NodeReport(0) for _ in range(nodes)]
        self.followed: dict[int, float] = {}  # when a node knew that the version of an iteration is committed, the last
        self.encoded_at: dict[int, float] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._random = random.Random(1)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        now = time.monotonic()
        self.members = [
            _Member(
                self.loop, TreeState(self.epoch, position, detect_seconds, now), self._connector(position),
                self._follower(position),
            )
            for position in range(nodes)
        ]  # fmt: skip
        for position in range(nodes):
            self._refresh(position)

    def _connector(self, child: int) -> Callable[[int, Callable[[Connected | str], None]], None]:
        def connect(parent: int, done: Callable[[Connected | str], None]) -> None:
            if not self.alive[parent]:
                done("refused")
                return
            outgoing = socket.create_connection(self._listener.getsockname())
            incoming, _ = self._listener.accept()
            client, server = (Party("smp", "job", f"n{position}") for position in (child, parent))
            asking, answering = ClientHandshake(_SECRET, client), ServerHandshake(_SECRET, server)
            protocol.send(outgoing, asking.hello())
            protocol.send(incoming, answering.challenge(_received(incoming)))
            answer, channel = asking.answer(_received(outgoing))
            protocol.send(outgoing, answer)
            accepted = answering.finish(_received(incoming))
            self.members[parent].adopt(child, Connected(incoming, accepted), lambda: None)
            done(Connected(outgoing, channel))

        return connect

    def _follower(self, position: int) -> Callable[[], None]:
        def follow() -> None:
            decision = self.members[position].announcement.decision
            report = self.reports[position]
            if decision.committed is not None and decision.committed != report.committed:
                self.followed[decision.committed.iteration] = time.monotonic()
            if (decision.exchange, decision.committed) != (report.exchange, report.committed):
                changed = replace(report, exchange=decision.exchange, committed=decision.committed)
                self.later(0.0, lambda: self.report(position, changed))

        return follow

    def report(self, position: int, report: NodeReport) -> None:
        """A driver has news."""
        self.reports[position] = report
        if self.alive[position]:
            self.members[position].report(report)

    def _refresh(self, position: int) -> None:
        """The sign of life of a driver."""
        self.report(position, self.reports[position])
        self.later(self.detect / 10 * self._random.uniform(0.9, 1.0), lambda: self._refresh(position))

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), what))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Whether `until`, which is asked now and then, came true within `seconds`."""
        end, ask_at = time.monotonic() + seconds, 0.0
        while (now := time.monotonic()) < end:
            if now >= ask_at:
                if until():
                    return True
                ask_at = time.monotonic() + _ASK_SECONDS
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            until_then = min(self._due[0][0] if self._due else end, end, now + _ASK_SECONDS)
            self.loop.step(max(0.0, until_then - time.monotonic()))
        return until()

    def has_committed(self, iteration: int) -> bool:
        """Whether every node has reported that a version is committed, and which one is next."""
        version = Version(self.epoch.lineage, iteration)
        return all(
            (report.committed, report.exchange) == (version, replace(version, iteration=iteration + 1))
            for report in self.reports
        )

    def iterate(self, iteration: int) -> None:
        """All nodes capture an iteration and, if it was announced, encode it."""

        def begin(position: int) -> None:
            self.report(position, replace(self.reports[position], begun=iteration))

        def encode(position: int) -> None:
            report = self.reports[position]
            self.report(position, replace(report, encoded=report.exchange))
            self.encoded_at[iteration] = time.monotonic()

        for position in range(len(self.members)):
            self.later(self._random.uniform(0, _SPREAD_SECONDS), lambda at=position: begin(at))  # type: ignore[misc]
            seconds = _ENCODING_SECONDS + self._random.uniform(0, _SPREAD_SECONDS)
            self.later(seconds, lambda at=position: encode(at))  # type: ignore[misc]

    def lose(self, position: int) -> None:
        """The SMP dies."""
        self.alive[position] = False
        self.members[position].close()

    def sockets(self) -> int:
        return max(len(member.links) for member in self.members)

    def close(self) -> None:
        self._listener.close()
        for member in self.members:
            member.close()
        self.loop.close()


def _received(connection: socket.socket) -> dict[str, object]:
    message = protocol.receive(connection)
    assert message is not None
    return message


def _select_seconds() -> float:
    """What one wake of a selector with the connections of an inner node costs."""
    with selectors.DefaultSelector() as selector:
        pairs = [socket.socketpair() for _ in range(tree.ARITY + 1)]
        for one, _ in pairs:
            selector.register(one, selectors.EVENT_READ)
        pairs[0][1].send(b"1")
        began = time.thread_time()
        for _ in range(1000):
            selector.select(0)
        seconds = (time.thread_time() - began) / 1000
    for one, other in pairs:
        one.close()
        other.close()
    return seconds


def measure(nodes: int, seconds: float, detect_seconds: float = DETECT_SECONDS) -> TreeFigures:
    """Run a job of `nodes` for about `seconds`, then lose one of them. Needs 2 descriptors per node.

    An iteration begins when it is due and all nodes know that the version of the one before is committed. Raises
    TimeoutError if the nodes do not join, commit a version, or find the lost one within `_PATIENCE_SECONDS`."""
    door.raise_limit()
    with closing(_Job(nodes, detect_seconds)) as job:
        whole = len(job.members) - 1
        joined = job.run(_PATIENCE_SECONDS, lambda: _joined(job) and all(r.exchange for r in job.reports))
        if not joined:
            raise TimeoutError(f"{nodes} nodes did not join within {_PATIENCE_SECONDS:g} s")
        sockets = job.sockets()
        job.run(1.0)
        for member in job.members:
            member.seconds, member.wakes = 0.0, 0
        before = [_sent(member) for member in job.members]
        iteration_seconds = max(_ITERATION_SECONDS, nodes * _NODE_SECONDS)
        iterations = max(1, round(seconds / iteration_seconds))
        first = max(report.begun for report in job.reports) + 1
        began, used = time.monotonic(), time.thread_time()
        for iteration in range(first, first + iterations):
            job.iterate(iteration)
            job.run(began + (iteration - first + 1) * iteration_seconds - time.monotonic())
            if not job.run(_PATIENCE_SECONDS, lambda at=iteration: job.has_committed(at)):  # type: ignore[misc]
                raise TimeoutError(f"iteration {iteration} was not committed by all {nodes} nodes in time")
        elapsed = time.monotonic() - began
        share = (time.thread_time() - used) / elapsed
        sent = [_sent(member) for member in job.members]
        messages = [(now[0] - then[0]) / iterations for now, then in zip(sent, before, strict=True)]
        nbytes = [(now[1] - then[1]) / iterations for now, then in zip(sent, before, strict=True)]
        wake = _select_seconds()
        shares = [(member.seconds + member.wakes * wake) / elapsed for member in job.members]
        commits = [job.followed[at] - job.encoded_at[at] for at in range(first, first + iterations)]
        lost_seconds = _lose_one(job, 3 if whole > tree.ARITY else whole) if whole else 0.0
        return TreeFigures(
            nodes, tree.depth_of(whole), iterations, iteration_seconds, elapsed, statistics.mean(messages),
            max(messages), statistics.mean(nbytes), max(nbytes), statistics.mean(shares), max(shares), share,
            statistics.median(commits), lost_seconds, detect_seconds, 1, sockets, job.sockets(),
        )  # fmt: skip


def _joined(job: _Job) -> bool:
    return sum(len(member.links) for member in job.members) >= 2 * (len(job.members) - 1)


def _sent(member: TreeMember) -> tuple[int, int]:
    return sum(link.sent_messages for link in member.links), sum(link.written for link in member.links)


def _lose_one(job: _Job, position: int) -> float:
    """Seconds until all others know that `position` is lost."""
    job.lose(position)
    began = time.monotonic()
    others = [member for member, alive in zip(job.members, job.alive, strict=True) if alive]
    seconds = 3 * job.detect + _PATIENCE_SECONDS
    if not job.run(seconds, lambda: all(member.announcement.lost == (position,) for member in others)):
        raise TimeoutError(f"the loss of position {position} is not known everywhere within {seconds:g} s")
    return time.monotonic() - began
