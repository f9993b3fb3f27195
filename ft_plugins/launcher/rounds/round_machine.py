"""State machine of the rendezvous rounds, on the leader: which nodes wait, are chosen, take part. Pure.

Invariant: a round is complete only when each of its nodes has reported after it was chosen that it is ready (it may be
checked first), and its store exists. It has begun when each of them has acknowledged it. If one is silent or leaves in
between, it is dropped and the round opens again, so no node begins a round without the others. A waiting node takes the
place of one that is lost, not of one that is alive and slow to return, unless that one takes `Rules.wait`. A node that
has failed often becomes a spare where there is another one (`rounds.left_out`). Time comes from outside.

    OPEN -> PROPOSED      enough nodes wait: ranks are assigned, the node of rank 0 creates the round's store
    PROPOSED -> OPEN      a chosen node was lost
    PROPOSED -> COMPLETE  all have reported since that they are ready
    COMPLETE -> OPEN      a node was lost before the round began, a node of the round is back, the round can become
                          larger, or a waiting node can replace one whose connection has ended

In: applications and looks of nodes, which of them answer at their ports, the time. Out: the phase, a `Roster` for each
complete round.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate

from . import rounds
from .field_types import reason_text
from .last_messages import LastMessages
from .roster import Place, Roster
from .rounds import Rules
from .waiting_nodes import Application, WaitingNodes

_PAUSE_SECONDS = 1.0  # maximum between two steps; if they are further apart, this process was stopped


class Phase(Enum):
    """The state of a round."""

    OPEN = "open"
    PROPOSED = "proposed"
    COMPLETE = "complete"


_NEXT = {
    Phase.OPEN: {Phase.PROPOSED},
    Phase.PROPOSED: {Phase.OPEN, Phase.COMPLETE},
    Phase.COMPLETE: {Phase.OPEN},
}


@dataclass(frozen=True)
class Proposal:
    """Ranks by token, and the endpoint of the round's store, '' until rank 0 reports it.

    `opened`, `trained`: whether any of its nodes has `Application.opened`, `Application.trained`. `first_workers`: the
    global rank of each node's first worker, by rank, then the number of all workers.
    """

    round: int
    ranks: dict[str, int]
    store: str = ""
    opened: bool = False
    trained: bool = False
    first_workers: tuple[int, ...] = (0,)


class RoundMachine:
    """The rounds of one rendezvous, led by this node. `last`: the last complete round that it knows of.

    `revision` counts what all looks show. `changes` counts what a node must learn at once: another phase, the
    beginning of a round, a lost node, the last node whose workers have succeeded. No look searches all nodes; a step
    does so only when it assigns ranks or completes a round.
    """

    def __init__(self, rules: Rules, silence: float, last: Roster | None, now: float, own: str = "") -> None:
        """`silence`: seconds without a message after which a node is lost. `own`: this node's name."""
        self.phase = Phase.OPEN
        self.roster = last or Roster(0)
        self.proposal: Proposal | None = None  # of the proposed or complete round
        self._failures: Counter[str] = Counter()  # of nodes, under this leader: see `Candidate`
        self._blamed = False  # a node was the first to fail in the last round
        self.drained = ""  # the node that has left the last round as it was asked
        self.left = ""  # the one that had left so before this round
        self.draining = ""  # the node of the round that is to leave at the next version, or ALL; '' for none
        self.done: set[str] = set()  # tokens of nodes whose workers have succeeded in the complete round
        self.revision = self.changes = 1
        self._rules = rules
        self._silence = silence
        self._waiting = WaitingNodes(self.roster)
        self._alive = LastMessages(silence)  # watches those that wait and those that have not acknowledged the round
        self._members: dict[str, str] = {}  # token by node, of the complete round
        self._nodes: dict[str, str] = {}  # node by token, of the complete round
        self._back: set[str] = set()  # nodes of the complete round that wait
        self._unheard: set[str] = set()  # chosen tokens that have not reported since that they are ready
        self._unaware: set[str] = set()  # tokens of the members that have not acknowledged the round
        self._ended: dict[str, float] = {}  # by token of a member: since when it has no connection, in order of time
        self._lost: dict[str, None] = {}  # members whose connections ended too long ago
        self._answers: dict[str, str] = {}  # by endpoint: the node that answers there, '' for none; of an open round
        self._own = own
        self._refused: dict[str, str] = {}  # why, by node
        self._refused_at = 0.0
        self.is_hopeless = False  # no round can come without a node that was refused
        self._enough_since: float | None = None
        self._looked = now

    def allow(self, rules: Rules) -> None:
        """Change which sizes are allowed."""
        self._rules = rules

    @property
    def round(self) -> int:
        """The number of the complete round, else of the next one."""
        return self.proposal.round if self.proposal else self.last_round + 1

    @property
    def last_round(self) -> int:
        """The newest complete round that this node or a waiting one knows of."""
        return max(self.roster.round, self._waiting.newest_round)

    @property
    def begun(self) -> bool:
        """Whether all nodes of the complete round have acknowledged it, so that each can rely on the others."""
        return self.phase is Phase.COMPLETE and not self._unaware

    @property
    def waiting_count(self) -> int:
        """How many nodes wait."""
        return len(self._waiting)

    def waiting(self, most: int | None = None) -> list[str]:
        """Names of the waiting nodes, in natural order: all, or the first `most`."""
        return self._waiting.names(most)

    def missing(self, most: int | None = None) -> list[str]:
        """Names of the nodes of the last round that do not wait, by rank: all, or the first `most`."""
        return self._waiting.missing(most)

    def absent(self, most: int, now: float) -> list[str]:
        """Those of the first `missing` nodes that are not known to live."""
        return [
            node for node in self.missing(most) if not self._is_alive(self.roster.members[self.roster.ranks[node]], now)
        ]

    @property
    def places(self) -> list[Place]:
        """The waiting nodes, in order of arrival."""
        return [Place(each.node, each.endpoint) for each in self._waiting]

    @property
    def lost_count(self) -> int:
        """How many nodes of the complete round are lost, as of the last step."""
        return len(self._lost)

    def is_waiting(self, token: str) -> bool:
        """Whether a process waits."""
        return token in self._waiting

    def knows(self, token: str) -> bool:
        """Whether a process waits, or is a member of the last complete round."""
        return token in self._waiting or token in self._nodes

    def apply(self, application: Application, now: float) -> bool:
        """Add a node that waits for a round. False while another live process has its name: to be tried again."""
        token, node = application.token, application.node
        holders = [each for each in (self._waiting.token(node), self._members.get(node)) if each]
        if any(each != token and not self._alive.is_silent(each, now) for each in holders):
            return False
        for each in (*holders, token):
            self.leave(each)
        self._waiting.add(application)
        if application.failed and node in self.roster.ranks and not self._blamed:
            self._blamed = True
            self._failures[node] += 1
        self._refused.pop(node, None)
        self._alive.watch(token, now)
        if node in self._members:
            self._back.add(node)
        self.revision += 1
        self._reopen(now)
        self.note_answers({application.endpoint: node})  # its port is not asked while it waits
        return True

    def hear(self, token: str, knows: int, now: float, ready: bool = True) -> bool:
        """Note that a process is alive, that it `knows` a round to be complete, and whether it is `ready` for the one
        for which it was chosen. False if it does not wait here."""
        if token in self._alive:
            self._alive.hear(token, now)
            if ready:
                self._unheard.discard(token)
            self._ended.pop(token, None)
            self._find(token)
        if token in self._unaware and self.phase is Phase.COMPLETE and knows == self.round:
            self._unaware.remove(token)
            if token not in self._waiting:
                self._alive.rest(token)
            if not self._unaware:
                self._changed()
        return token in self._waiting

    def note_answers(self, answers: dict[str, str]) -> None:
        """Note which node answers at an endpoint, '' for none."""
        if self.phase is not Phase.COMPLETE:
            self._answers |= answers

    def hang_up(self, token: str, now: float) -> None:
        """Note that a process has closed its connection: it is lost unless it sends another message."""
        self._alive.hang_up(token)
        if token in self._nodes:
            self._ended.pop(token, None)
            self._find(token)
            self._ended[token] = now

    def lost(self, now: float) -> list[str]:
        """Nodes of the complete round whose connections ended before their workers succeeded."""
        self._search_lost(now)
        return [self._nodes[token] for token in self._lost]

    def _search_lost(self, now: float) -> None:
        while self._ended:
            token, since = next(iter(self._ended.items()))
            if now - since <= self._silence:
                break
            del self._ended[token]
            if token not in self.done:
                self._lost[token] = None
                self.revision += 1
                self.changes += self.phase is Phase.COMPLETE

    def _find(self, token: str) -> None:
        """Take a node no longer for lost."""
        if token in self._lost:
            del self._lost[token]
            self.revision += 1

    def leave(self, token: str) -> None:
        """Remove a waiting node."""
        application = self._waiting.remove(token)
        if application is None:
            return
        self._back.discard(application.node)
        if token in self._nodes:
            self._alive.rest(token)
        else:
            self._alive.forget(token)
        self.revision += 1
        if self.phase is Phase.PROPOSED and self.proposal and token in self.proposal.ranks:
            self._turn(Phase.OPEN)

    def serve(self, token: str, store: str) -> None:
        """Note the endpoint of the proposed round's store, reported by the node of rank 0."""
        if self.phase is Phase.PROPOSED and self.proposal and self.proposal.ranks.get(token) == 0:
            self.proposal = replace(self.proposal, store=store)

    def refuse(self, node: str, reason: str, now: float, token: str = "") -> None:
        """Note that a node could not join, unless the round goes on without it or another live process than that of
        `token` has its name."""
        holder = self._members.get(node)
        alive = (
            self._waiting.token(node)
            or node == self._own
            or (holder and holder != token and not self._alive.is_silent(holder, now))
        )
        if self.phase is not Phase.COMPLETE and not alive:
            self._refused[node], self._refused_at = reason, now
            self._changed()

    def drain(self, node: str) -> str:
        """Have `node`, or ALL, leave at the next version; '' for none any more. Returns why not, '' if it will."""
        facts = [*self._members], self._waiting.names(), self.draining, self.begun, len(self._lost), self._own
        why = rounds.why_not_drained(node, *facts) if node else ""
        if not why and node != self.draining:
            self.draining = node
            self._changed()
        return why

    def depart(self, token: str, now: float) -> None:
        """A node of the round has left for good: what it held is on the others."""
        if self.phase is Phase.COMPLETE and token in self._nodes:
            self._alive.hang_up(token)
            self._lost[token] = None
            self.drained, self.draining = self._nodes[token], ""
            self._changed()
            self._reopen(now)

    @property
    def refused(self) -> str:
        """Which nodes could not join, and why; '' for none."""
        return reason_text("; ".join(f"node {node} was refused: {why}" for node, why in self._refused.items()))

    def finish(self, token: str, number: int) -> None:
        """Note that the workers of a node have succeeded in round `number`."""
        if self.phase is Phase.COMPLETE and number == self.round and token in self._nodes and token not in self.done:
            self.done.add(token)
            self._find(token)
            self.revision += 1
            if len(self.done) == len(self._nodes):
                self._changed()

    def step(self, now: float) -> None:
        """Advance to time `now`: drop silent nodes, choose, complete."""
        stopped = max(0.0, now - self._looked - _PAUSE_SECONDS)
        self._looked = now
        if stopped:  # no message could arrive meanwhile
            self._alive.was_stopped(stopped, now)
        silent = self._alive.silent(now)
        for token in silent:
            self.leave(token)
        self._search_lost(now)
        self._reopen(now)
        if self.draining not in ("", rounds.ALL) and not len(self._waiting):
            self.drain("")  # no node would take its place any more
        if self.phase is Phase.OPEN:
            self._choose(now)
        elif self.phase is Phase.PROPOSED and self.proposal and self.proposal.store:
            if not self._unheard:
                self._complete(self.proposal)
        elif self.phase is Phase.COMPLETE and not self._unaware.isdisjoint(silent):
            self._turn(Phase.OPEN)

    def _reopen(self, now: float) -> None:
        """End a complete round if one of its nodes is back, or it can become larger, or replace a lost node."""
        size, waiting = len(self._members), len(self._waiting)
        if self.phase is not Phase.COMPLETE or not waiting:
            return
        self._search_lost(now)
        if self._back or self._rules.fit(size + waiting) > size or self._lost:
            self._turn(Phase.OPEN)

    def _choose(self, now: float) -> None:
        turnout = self._waiting.turnout
        if self._refused:
            since = now - self._refused_at
            self.is_hopeless = rounds.is_hopeless(self._rules, turnout, self._goes_on, self._silence, since)
        if not self._rules.fit(turnout.nodes):
            self._enough_since = None
            return
        self._enough_since = now if self._enough_since is None else self._enough_since
        waited = now - self._enough_since
        if rounds.size_of(self._rules, turnout, waited):
            late = self._starts_again(turnout) and waited < self._rules.last_call
            turnout = replace(turnout, expected=late or self._expects_any(turnout.last, now))
        if size := rounds.size_of(self._rules, turnout, waited):
            self._propose(size)

    @property
    def _goes_on(self) -> bool:
        """Whether processes of this command were in a round: under this leader or, if it is a new one, as they say."""
        return bool(self._members) or any(each.took_part for each in self._waiting)

    def _starts_again(self, turnout: rounds.Turnout) -> bool:
        """Whether all nodes of a job are being started again, of which some are not here yet: a spare that comes first
        must not take the place of one that holds state."""
        return not self._goes_on and turnout.back + len(self._refused) < turnout.last_size

    def _expects_any(self, last: int, now: float) -> bool:
        """Whether a node of the last round that does not wait yet is alive; not known of a round of other leaders that
        this node does not remember. `last`: the newest in which a waiting node had a seat; spares alone had none."""
        if last > self.roster.round:
            return False
        missing = (self.roster.members[self.roster.ranks[node]] for node in self._waiting.missing())
        return any(self._is_alive(place, now) for place in missing)

    def _is_alive(self, place: Place, now: float) -> bool:
        token = self._members.get(place.node)
        if place.node in self._refused or place.node == self.drained:
            return False
        if place.node == self._own or token and not self._alive.is_silent(token, now):
            return True
        in_doubt = token is None or not self._alive.has_hung_up(token)  # until its port is asked
        return self._answers.get(place.endpoint, place.node if in_doubt else "") == place.node

    def _propose(self, size: int) -> None:
        assigned = rounds.ranks(self._waiting.candidates(self._failures), size, self._own)
        tokens = {node: self._waiting.token(node) or "" for node in sorted(assigned, key=assigned.__getitem__)}
        chosen = [self._waiting[token] for token in tokens.values()]  # by rank
        self.proposal = Proposal(
            self.round,
            {tokens[node]: rank for node, rank in assigned.items()},
            opened=any(each.opened for each in chosen),
            trained=any(each.trained for each in chosen),
            first_workers=tuple(accumulate((each.workers for each in chosen), initial=0)),
        )
        self._unheard = set(tokens.values())
        self._turn(Phase.PROPOSED)

    def _complete(self, proposal: Proposal) -> None:
        by_rank = [self._waiting[token] for token in sorted(proposal.ranks, key=proposal.ranks.__getitem__)]
        gone = self._waiting.missing()  # lost, but for those that were drained or refused
        self._failures.update(node for node in gone if node not in self._refused and node != self.drained)
        for each in by_rank:
            self._waiting.remove(each.token)
        members = tuple(Place(each.node, each.endpoint) for each in by_rank)
        self._blamed, self.left, self.drained = False, self.drained, ""
        self._members = {each.node: each.token for each in by_rank}
        self._nodes = {each.token: each.node for each in by_rank}
        self._back = set()
        self._unaware = set(proposal.ranks)
        self.roster = Roster(proposal.round, members, tuple(self.places))
        self._waiting.follow(self.roster)
        self._alive.keep((*proposal.ranks, *(each.token for each in self._waiting)))
        self._ended, self._lost, self.done, self._refused = {}, {}, set(), {}
        self.draining = self.draining if self.draining in (rounds.ALL, *self._members) else ""
        self._turn(Phase.COMPLETE)

    def _turn(self, phase: Phase) -> None:
        if phase not in _NEXT[self.phase]:
            raise RuntimeError(f"a round cannot go from {self.phase.value} to {phase.value}")
        if phase is Phase.OPEN:
            self.proposal = None
        if self.phase is Phase.COMPLETE:
            self._enough_since, self._answers = None, {}
            for token in self._unaware:
                if token not in self._waiting:
                    self._alive.rest(token)
        self.phase = phase
        self._changed()

    def _changed(self) -> None:
        self.revision += 1
        self.changes += 1
