"""A rendezvous that keeps every node's rank, has spares, and survives the loss of the node that leads it.

Invariant: a node that returns gets its old group rank, a substitute the vacant one (`rounds`). If the leader is lost,
the others elect another one (`leader_search`), and each reports the rounds it remembers. A round is complete only when
each of its nodes was heard from just before, and never with fewer nodes than allowed: nodes that cannot reach each
other never split one job in two, provided the smallest size is more than half of the nodes.

Every node listens on a port: the first of --rdzv-endpoint that is its own and free, else the port of the first one,
else any. Nodes authenticate with the job's secret; without one only this machine can reach them. Every wait is bounded,
except a spare's for a vacant rank.

In: `RendezvousSettings`. Out: torch's `RendezvousInfo` for each round: a rank, and a new store, served by the node of
rank 0 on the address of its port; `nodes.json` in the run directory, from which a restarted node knows the others.
The store accepts anyone: no decision about the job is read from it.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from ...errors import ProtocolError
from ...events import catalogue, say
from ...smp.watch.job_state import span_text
from ..agent.node_check import NodeCheck
from ..agent.restarts import Status
from ..rounds import round_store
from ..rounds.field_types import reason_text
from ..rounds.node_messages import RoundView
from ..rounds.round_machine import Phase
from ..rounds.rounds import ALL
from . import peers
from .endpoint import Endpoint
from .local_node import LocalNode
from .rendezvous_settings import BACKEND, RendezvousSettings
from .round_join import LOOK_SECONDS, RoundJoin, pause
from .wait_report import REPEAT_SECONDS, how_to_start

_STORE_SECONDS = 60.0  # maximum for one operation on a round's store; as torch's `read_timeout`
_LEAST_STORE_SECONDS = 15.0
_DONE_REPORT_SECONDS = 300.0  # between two lines that ranks of other nodes have not ended yet
_STRANGER_SECONDS = 0.25  # for one request to an absent node while workers run


class Rendezvous(RendezvousHandler):
    """torch's handler of one node. To be used from one thread; another thread serves its port."""

    def __init__(self, settings: RendezvousSettings) -> None:
        """Open this node's port."""
        # sent to the other nodes
        self.status: Status = "failed"  # at `shutdown`: how the job has ended, and why unless it has succeeded
        self.reason = ""
        self.opened = False  # whether ranks of this node have captured under this command
        self.trained = False  # whether ranks of this node have completed an iteration
        self.workers = 0  # how many this node starts
        self.failed = False  # one of its workers failed, and does not only report that others were lost
        self.replaceable = False  # the other nodes can rebuild what this one holds
        # of the current round
        self.opened_anywhere = self.trained_anywhere = False  # `opened`, `trained` of any of its nodes when it began
        self.first_rank, self.all_workers = 0, 0  # rank of the first worker here, number of workers on all nodes
        self.waiting_reason = ""  # for people: why nodes wait for another round
        self.left = ""  # the node that has left this round as it was asked, which is why
        self.all_succeeded = False  # `wait_for_all` has seen that the workers of all nodes have
        self.leaves = ""  # the name of this node, or ALL: it is to leave at the next version, or all nodes are
        self._store_bound = timedelta(seconds=min(_STORE_SECONDS, max(_LEAST_STORE_SECONDS, 3 * settings.silence)))
        self._node = LocalNode(settings)
        self._join = RoundJoin(self._node, self._store_bound)
        self.events = self._node.events
        self._round, self._size = 0, 0  # in which this node takes part
        self._took_part = False  # in any round
        self._store: Store | None = None  # of this round; the node of rank 0 serves it as long as this refers to it
        self._next_look = self._next_report = 0.0  # monotonic
        self._waiting = 0
        self._is_shut = False

    def check_before_rounds(self, check: NodeCheck) -> None:
        """Take part in a round only if this node passes."""
        self._join.node_check = check

    def get_backend(self) -> str:
        """The name by which torch knows this handler."""
        return BACKEND

    def get_run_id(self) -> str:
        """The name of the job, equal on all nodes."""
        return self._node.settings.run

    @property
    def use_agent_store(self) -> bool:
        """True: workers connect to the store of the round, which is new in each round."""
        return True

    @property
    def over(self) -> tuple[Status, str] | None:
        """How the job has ended elsewhere while this node waited, and what is known of it. The job's success is only
        that of a spare."""
        status, reason = self._node.service.status, self._node.service.closed
        if status is None or self._is_shut:
            return None
        spare, failed = self._join.is_spare, status == "succeeded" or status == "stopped" and self.failed
        return ("succeeded" if spare and status == "stopped" else "failed" if failed and not spare else status), reason

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round and take part in it; as a spare, for as long as the job lasts.

        Raises RendezvousTimeoutError, RendezvousClosedError; RendezvousGracefulExitError on a spare that was not
        needed; ConfigError if another node has this one's name, or another job the endpoint.
        """
        self._round, self.leaves = 0, ""
        before = self.members if self._took_part else []
        self._node.read_sizes()
        self._join.failed, self._join.replaceable = self.failed, self.replaceable
        self._join.begin(self.opened, self.trained, self._took_part, self.workers)
        while True:
            leader = self._join.find_leader()
            try:
                view = self._join.take_part(leader)
                try:
                    found = self._enter(view)
                except ConnectionError as error:
                    self._report_lost(view.round, error)
                    raise
                self._report_gone(before, leader.endpoint)
                return found
            except (ConnectionError, ProtocolError) as error:
                self._node.search.unreached[leader.endpoint] = f"node {leader.node} led, then: {error}"
                self._node.link.close()
                pause()

    def _report_lost(self, number: int, error: ConnectionError) -> None:
        """Report that this node does not reach the store of a round, not every time."""
        if time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + REPEAT_SECONDS
            reason = (
                f"round {number} was lost: {error}; if it repeats, start the node that serves this store with "
                "--local-addr or --ftp-interface: an address of it that the others reach"
            )
            self.events.emit(catalogue.ROUND_LOST, reason=reason)
            say(reason, alarm=True, who="ft-run: ")

    def _report_gone(self, before: list[str], living: str) -> None:
        """Say which nodes of the round before, by rank, are no longer there, and what brings them back to the job at
        the endpoint `living`: the first one that is in both does."""
        now = self.members
        stay = set(before) & set(now)
        known = stay.union(place.node for place in self._node.roster_file.roster.spares)  # one may give up its place
        gone = [name for name in before if name not in known]
        new = [name for name in now if name not in stay]
        if gone and self._node.me.node == next((name for name in before if name in stay), ""):
            asked = [name for name in gone if name == self._join.asked]
            self.events.emit(catalogue.NODE_REPLACED, gone=gone, new=new, asked=asked)
            whose = ", ".join(f"{name} ({'asked to leave' if name in asked else 'lost'})" for name in gone)
            settings, more = self._node.settings, len(now) + 1
            say(
                f"the job goes on without {whose}; new: {', '.join(new) or 'none'}; "
                + how_to_start(settings.command, living, gone, ", as a spare" * (settings.rules.fit(more) < more)),
                alarm=True,
                who="ft-run: ",
            )
        self._join.asked = ""

    def _enter(self, view: RoundView) -> RendezvousInfo:
        """Begin a complete round. Raises ConnectionError if its store is lost already."""
        if view.rank is None or not view.store:
            raise ProtocolError(f"round {view.round} is complete without a rank or a store for this node")
        if view.first + self.workers > view.workers:
            raise ProtocolError(
                f"round {view.round} has {view.workers} workers, expected {self.workers} from rank {view.first} here"
            )
        place = Endpoint.read(view.store)
        own = self._join.served_store if view.rank == 0 else None
        self._store = own or round_store.connect(place, self._store_bound, self._node.reach)
        self._join.served_store, self._join.is_spare = None, False
        self._round, self._size, self._took_part = view.round, view.size, True
        self.opened_anywhere, self.trained_anywhere = view.opened, view.trained
        self.first_rank, self.all_workers = view.first, view.workers
        self._waiting, self._next_look, self.left = 0, 0.0, ""
        self._node.link.note_reply()
        prefix = PrefixStore(f"{BACKEND}/round/{self._round}", self._store)
        return RendezvousInfo(prefix, view.rank, self._size, RendezvousStoreInfo(place.host, place.port))

    @property
    def members(self) -> list[str]:
        """The nodes of the round that this one takes part in, by rank."""
        ranks = self._node.roster_file.roster.ranks
        return sorted(ranks, key=lambda name: ranks[name])

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for a round in which this one should take part; 1 if the leader is lost or this node's
        port no longer answers. Never raises."""
        now = time.monotonic()
        if self._round == 0 or self._is_shut:
            return 0
        self._node.service.wake()
        due = now >= self._next_look
        if due:
            self._next_look = now + self._node.rest
            self._node.read_sizes()
        if not self._node.server.is_serving:
            self._waiting, self.waiting_reason = 1, "the port of this node no longer answers"
        elif due or not self._node.service.leading:
            self._waiting, self.waiting_reason = self._nodes_waiting()
        return self._waiting

    def _nodes_waiting(self) -> tuple[int, str]:
        link, silence = self._node.link, self._node.settings.silence
        try:
            view = link.watch(self._round, 0.0)
            if self._node.service.leading:
                self._node.search.meet_absent(silence, _STRANGER_SECONDS)
        except (ConnectionError, ProtocolError) as error:
            if self._node.service.status == "succeeded" or link.is_only_slow(error):
                return 0, ""  # a leader that has ended with the job is missed by no worker
            node = link.leader.node if link.leader else "?"
            self.left = node if node == self._join.asked else self.left
            left = f"round {self._round} is over: node {node} has left, as it was asked" * (node == self.left)
            return 1, left or f"the leader, node {node}, has not answered for {link.silent_seconds:.1f} s: {error}"
        if self._node.service.status not in (None, "succeeded"):
            return 1, f"the job is over: {self._node.service.closed}"
        if view is None:
            return self._waiting, self.waiting_reason
        self.leaves = view.draining if view.draining in (ALL, self._node.me.node) else ""
        if view.phase is Phase.COMPLETE and view.round == self._round:
            self._join.asked = view.draining
            return 0, ""
        members = self._node.roster_file.roster.ranks
        self.left = view.drained if view.drained in members and view.drained not in view.names else ""
        back = [f"node {name} starts its workers again" for name in view.names if name in members]
        joined = [f"node {name} has joined" for name in view.names if name not in members]
        lost = f"{view.lost} of its nodes no longer answer" if view.lost else ""
        gone = f"node {self.left} has left, as it was asked" if self.left else lost
        why = ", ".join(filter(None, (gone, *back, *joined))) or f"a node left, or was silent for {silence:g} s"
        return max(1, view.waiting), f"round {self._round} is over: {why}"

    def wait_for_all(self, seconds: float = float("inf")) -> bool:
        """Wait, once the workers of this node have succeeded, until those of all nodes of the round have, or the job is
        over; `all_succeeded` says which. False if the round ends first: a node was lost or restarted, and workers are
        needed again.

        Without a time limit by default, unlike torch's barrier: a node that stops waiting takes its memory and the
        leader from ranks that may still be saving. A rank that never ends keeps all nodes waiting, as it would keep its
        own. Raises TimeoutError after so many `seconds`.
        """
        began = time.monotonic()
        report = began + _DONE_REPORT_SECONDS
        is_reported = self.all_succeeded = False
        while not self._node.service.closed:
            self._node.service.wake()
            if is_reported and time.monotonic() > began + seconds:
                raise TimeoutError
            if not self._node.server.is_serving:
                return False  # of a leader, no other node knows any more that it waits
            try:
                if not is_reported:
                    self._node.link.ask("finish", round=self._round)
                    is_reported = True
                view = self._node.link.watch(self._round, LOOK_SECONDS)
            except (ConnectionError, ProtocolError) as error:
                if self._node.service.closed:
                    break
                if self._node.link.is_only_slow(error):
                    continue
                return False
            if view is None:
                continue
            if view.phase is not Phase.COMPLETE or view.round != self._round or view.lost:
                return False
            if view.done >= self._size:
                self.all_succeeded = True
                return True
            if time.monotonic() >= report:
                report += _DONE_REPORT_SECONDS
                say(
                    f"the ranks of this node ended {span_text(time.monotonic() - began)} ago; on "
                    f"{self._size - view.done} of {self._size} nodes they have not ended yet",
                    who="ft-run: ",
                )
            pause()
        self.all_succeeded = self._node.service.status in ("succeeded", "stopped")
        return True

    def refuse_requests(self, undrainable: str, unstoppable: str) -> None:
        """Refuse to drain a node of this job, or to stop it, for these reasons; '' for none."""
        self._node.service.undrainable, self._node.service.unstoppable = undrainable, unstoppable

    def stay(self) -> None:
        """This node does not leave at the next version, as was asked."""
        self.leaves = ""
        with contextlib.suppress(ConnectionError, ProtocolError):
            self._node.link.ask("drain", node="")

    def depart(self) -> None:
        """Leave the round for good: others begin the next one without this node at once."""
        self._round = 0  # so that `shutdown` does not end the job
        with contextlib.suppress(ConnectionError, ProtocolError):
            self._node.link.ask("depart")

    def is_closed(self) -> bool:
        """Whether the job is over, as far as this node knows."""
        if not self._node.service.closed and not self._is_shut:
            with contextlib.suppress(ConnectionError, ProtocolError):
                self._node.link.ask("look", round=self._round)
        return bool(self._node.service.closed)

    def set_closed(self) -> None:
        """Allow no further round on any node."""
        how = f"has ended there ({self.reason or self.status}), and is not to go on"
        how = "has succeeded" if self.status == "succeeded" else how
        reason = reason_text(f"node {self._node.me.node} reports that it {how}")
        self._node.service.close(reason, self.status)
        message = {"reason": self._node.service.closed, "status": self._node.service.status}
        if not self._node.service.leading:
            with contextlib.suppress(ConnectionError, ProtocolError):
                self._node.link.ask("close", **message)
                return
        node = self._node
        others = {*node.roster_file.roster.endpoints, *(place.endpoint for place in node.service.present)}
        peers.ask_all(others - {node.me.endpoint}, {"do": "close", **message}, node.reach, node.credentials)

    def shutdown(self) -> bool:
        """Close this node's port, and the rendezvous on all nodes if it is over or this one took part in a round.
        Idempotent.

        A node that took part in none only leaves, as if it were lost; if it was refused, it reports that.
        """
        if not self._is_shut:
            if self._round or self._node.service.closed:
                self.set_closed()
            elif self.status == "refused":
                with contextlib.suppress(ConnectionError, ProtocolError):
                    self._node.link.ask("refuse", node=self._node.me.node, reason=reason_text(self.reason))
            self._is_shut = True
            self._node.close()
            self._store = None
        return True
