"""A rendezvous that keeps every node's rank, has spares, and outlives the node that serves it.

Invariant: a node of the last round that comes back has its old group rank, a substitute the vacant one (`rounds`). The
node that leads the rounds may be lost like any other: the rest elect another one (`search`), and each brings along what
it remembers. A round is complete only with nodes that were heard of just before, and with no fewer than allowed: nodes
that cannot reach each other never make two jobs of one as long as the smallest size is more than half of the nodes.

Every node listens on a port: the first of --rdzv-endpoint that is its own and free, else any. Nodes prove to each other
that they know the job's secret; without one they are reached from this machine alone. Every wait is bounded, except a
spare's for a vacant rank.

In: `RendezvousSettings`. Out: torch's `RendezvousInfo` for each round: a rank, and a new store, served by the node of
rank 0 on the address of its port; `nodes.json` in the run directory, from which a restarted node knows the others.
The store accepts anyone: no decision about the job is read from it.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from ..errors import ConfigError, ProtocolError
from ..events import Events, say
from ..intake import parsed
from ..recovery.resize.sizes import SizeReport
from . import endpoint as places
from . import peer_client, round_store
from .endpoint import Endpoint
from .leader_search import LeaderSearch
from .node_messages import Admission, Answered, Leader, Message, RoundView
from .node_service import NodeIdentity, NodeService
from .peer_client import Credentials, PeerConnection
from .peer_server import PeerServer
from .plugin import BACKEND, RendezvousSettings
from .roster_file import RosterFile
from .round_machine import Application, Phase
from .wait_report import WaitReport

_LOOK_SECONDS = 0.1  # between two looks at a round that is being put together
_REST_SECONDS = 1.0  # between two looks at a complete one; as torch
_MEET_SECONDS = 1.0  # between two looks for nodes that are not there yet, by the lead
_LONGEST_REACH = 3.0  # a second try of TCP included; a node that is further away is none
_STORE_SECONDS = 60.0  # at most, for one operation on a round's store; as torch's `read_timeout`
_LEAST_STORE_SECONDS = 15.0
_STRANGER_SECONDS = 0.25  # for endpoints where somebody may wait, while workers run


class Rendezvous(RendezvousHandler):
    """torch's handler of one node. To be used from one thread; its port is answered from another one."""

    def __init__(self, settings: RendezvousSettings) -> None:
        """Open this node's port."""
        self.in_order = False  # to be told to the others at `shutdown`: whether the job has succeeded
        self.over = ""  # why nodes are said to wait, for people
        self.opened = False  # sent to the other nodes: whether ranks of this node have captured under this command
        self.opened_anywhere = False  # of this round: whether those of any of its nodes have
        self.trained = False  # sent to the other nodes: whether ranks of this node have completed an iteration
        self.trained_anywhere = False  # of this round, when it began
        self.workers = 0  # sent to the other nodes: how many this node starts
        self.first_rank, self.all_workers = 0, 0  # of this round: that of the first worker here, how many on all nodes
        self.events = Events(settings.node)  # what comes to the port and is rejected
        self._settings = settings
        self._reach = min(_LONGEST_REACH, settings.silence / 3)
        self._rest = min(_REST_SECONDS, settings.silence / 10)
        bound = min(_STORE_SECONDS, max(_LEAST_STORE_SECONDS, 3 * settings.silence))  # all are there when it begins
        self._store_bound = timedelta(seconds=bound)
        listener, host = _open_port(settings)
        self._host = host
        self._listener = listener
        self._credentials = Credentials(settings.secret, settings.run, settings.node, settings.encrypt)
        endpoint = str(Endpoint(host, int(listener.getsockname()[1])))
        self._me = NodeIdentity(settings.run, settings.node, secrets.token_hex(8), endpoint)
        self._station = NodeService(self._me, settings.rules, settings.silence)
        self._memory = RosterFile(settings.run, settings.run_dir)
        initial = [str(found) for found in settings.endpoints if found.port] or [endpoint]  # it is alone
        self._search = LeaderSearch(self._station, self._memory, initial, self._reach, self._credentials)
        self._post = PeerServer(
            listener,
            self._credentials,
            self._station.answer,
            self._station.gone,
            self._station.tick,
            self.events,
        )
        self._sizes = SizeReport()  # of the job's ranks
        self._line: PeerConnection | None = None
        self._lead: Leader | None = None
        self._round, self._size = 0, 0  # in which this node takes part
        self._spare = False
        self._promised = 0  # a round of which this node has said that it knows, and in which others count on it
        self._served: TCPStore | None = None  # for a round that is being put together, by the node of rank 0
        self._seen: RoundView | None = None  # what the lead said last about a round that is being put together
        self._store: Store | None = None  # of this round; on the node of rank 0 it serves as long as it is held
        self._limit = 0.0  # monotonic; for the round to be complete
        self._next_look = self._next_meeting = self._heard = 0.0  # monotonic
        self._waiting = 0
        self._said: WaitReport | None = None  # about the round that is waited for
        self._complained = False  # about those who are not of this job
        self._shut = False

    def get_backend(self) -> str:
        """The name by which torch knows this handler."""
        return BACKEND

    def get_run_id(self) -> str:
        """The job, as all its nodes call it."""
        return self._settings.run

    @property
    def use_agent_store(self) -> bool:
        """Workers use the store of the round, as clients: it has been served by no earlier one."""
        return True

    @property
    def not_needed(self) -> bool:
        """Whether this node waited as a spare until the job had succeeded."""
        return self._spare and self._station.in_order

    # ---- taking part ----

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round and take part in it; as a spare, for as long as the job lasts.

        Raises RendezvousTimeoutError, RendezvousClosedError; RendezvousGracefulExitError on a spare that was not
        needed; ConfigError where another node has this one's name, or another job the endpoint.
        """
        self._round, self._spare, self._promised = 0, False, 0
        self._learn_sizes()
        self._allow()
        settings = self._settings
        self._said = WaitReport(settings.rules, settings.silence, settings.command)
        while True:
            lead = self._find()
            try:
                return self._take_part(lead)
            except (ConnectionError, ProtocolError) as error:
                self._search.unreached[lead.endpoint] = f"{lead.node} led, then {error}"
                self._hang_up()
                self._pause()

    def _allow(self) -> None:
        """A whole patience from now: for a substitute, and for all of them to be there."""
        self._limit = time.monotonic() + self._settings.join + self._settings.rules.wait

    def _learn_sizes(self) -> None:
        """Take over what ranks of this node have told of the job: with how many nodes it can be trained."""
        told = self._memory.sizes()
        if told != self._sizes:
            self._sizes = told
            self._station.allow(told)

    def _find(self) -> Leader:
        """The node that leads; in the end this one, if it may."""
        began = time.monotonic()
        while True:
            self._check()
            searched = time.monotonic() - began
            found = self._search.look(searched <= 2 * self._settings.silence, self._check)
            if found:
                return found
            if searched > 2 * self._settings.silence:
                self._complain()
            self._pause()

    def _complain(self) -> None:
        """Say once who answered that is not of this job. Without a secret it is the end: strangers are of this machine.

        With one it is none: whoever takes the place of a node for a while can say that, and needs no proof to do so.
        """
        foreign = self._foreign()
        if foreign and self._settings.only_here:
            raise ConfigError(foreign)
        if foreign and not self._complained:
            self._complained = True
            say(f"{foreign} (it goes on looking)", alarm=True, who="ft-run: ")

    def _foreign(self) -> str:
        """Where somebody answers that is not of this job, and what to check; '' for nowhere."""
        if not self._search.foreign:
            return ""
        endpoint, why = next(iter(self._search.foreign.items()))
        return (
            f"--rdzv-endpoint {endpoint}: expected a node of job '{self._me.run}', found that {why}; choose another "
            "port, or give the same --rdzv-id (--ftp-job) and --ftp-secret-file on all nodes"
        )

    def _take_part(self, lead: Leader) -> RendezvousInfo:
        """Apply to `lead`, wait until the round has begun. ConnectionError: it does not lead any more.

        Who has said that it knows of a complete round does not apply anew when the lead is back: others are in it.
        """
        self._lead, self._heard = lead, time.monotonic()
        self._station.follow(lead)
        if not self._promised:
            self._apply(lead)
        try:
            while True:
                self._check()
                if lead.token == self._me.token:
                    self._meet_others(_MEET_SECONDS, self._reach)
                view = parsed(RoundView, self._ask_patiently("look", round=self._memory.roster.round))
                if view.roster:
                    self._memory.keep(view.roster)
                complete, chosen = view.phase is Phase.COMPLETE, view.rank is not None
                self._promised = view.round if chosen and complete else 0
                if chosen and complete and view.begun:
                    return self._enter(view)
                if chosen and not complete and view.rank == 0 and not view.store:
                    self._served = self._served or round_store.serve(self._listener, self._host, self._store_bound)
                    self._ask_patiently("serve", store=str(Endpoint(self._host, self._served.port)))
                elif not (view.waits or chosen):
                    raise ConnectionError("did not know this node any more")
                self._spare = complete and not chosen
                if self._spare:
                    self._allow()
                self._seen = view
                if self._said and not (complete or chosen):
                    self._said.look(view.waiting, view.missing, lead.token == self._me.token, self._limit)
                self._pause(self._rest if self._spare else _LOOK_SECONDS)
        except (ConnectionError, ProtocolError):
            raise  # there is no lead to leave
        except BaseException:
            with contextlib.suppress(ConnectionError, ProtocolError):
                self._ask("leave")
            raise

    def _apply(self, lead: Leader) -> None:
        me, roster = self._me, self._memory.roster
        seat = roster.seat(me.node)
        application = Application(
            me.node,
            me.token,
            me.endpoint,
            seat,
            self._settings.wanted,
            roster.round,
            self.opened,
            self.trained,
            self.workers,
        )
        began = time.monotonic()
        while not (found := parsed(Admission, self._ask_patiently("apply", application=asdict(application)))).accepted:
            self._check()
            if time.monotonic() - began > 2 * self._settings.silence:
                raise ConfigError(
                    f"node name '{me.node}': another node of job '{me.run}' has it and is alive; name this one "
                    f"otherwise (--ftp-node-name, or node_name in --rdzv-conf)"
                )
            self._pause()
        self._memory.keep(found.roster)
        self._served = None

    def _enter(self, view: RoundView) -> RendezvousInfo:
        """Begin a complete round. ConnectionError: its store is gone already."""
        self._promised = 0  # kept now, or not to be kept
        if view.rank is None or not view.store:
            raise ProtocolError(f"round {view.round} is complete without a rank or a store for this node")
        if view.first + self.workers > view.workers:
            raise ProtocolError(f"round {view.round} has {view.workers} workers, from {view.first} here {self.workers}")
        place = Endpoint.read(view.store)
        own = self._served if view.rank == 0 else None
        found = own or round_store.connect(place, self._store_bound, self._reach)
        self._round, self._size, self._spare, self._store = view.round, view.size, False, found
        self._served, self.opened_anywhere, self.trained_anywhere = None, view.opened, view.trained
        self.first_rank, self.all_workers = view.first, view.workers
        self._waiting, self._heard, self._next_look = 0, time.monotonic(), 0.0
        prefix = PrefixStore(f"{BACKEND}/round/{self._round}", found)
        return RendezvousInfo(prefix, view.rank, self._size, RendezvousStoreInfo(place.host, place.port))

    def _check(self) -> None:
        """Say that this node is awake. Raises what ends the waiting."""
        self._post.check()
        self._station.wake()
        node, run = self._me.node, self._me.run
        if why := self._station.closed:
            if self._spare:
                raise RendezvousGracefulExitError(f"node {node} was a spare of job '{run}', which is over: {why}")
            raise RendezvousClosedError(
                f"node {node} cannot take part in job '{run}', which is over: {why}; to go on, start it again on all "
                "nodes"
            )
        if time.monotonic() > self._limit:
            raise RendezvousTimeoutError(self._too_late())

    def _too_late(self) -> str:
        foreign = self._foreign()
        return f"{self._nobody_came()}; {foreign}" if foreign else self._nobody_came()

    def _nobody_came(self) -> str:
        rules, seconds = self._settings.rules, self._settings.join + self._settings.rules.wait
        begin = f"node {self._me.node}, job '{self._me.run}': no round was put together within {seconds:g} s"
        if self._lead and self._seen:
            sizes = " or ".join(map(str, rules.sizes)) or f"{rules.min_nodes} to {rules.max_nodes}"
            names = ", ".join(self._seen.names)
            return (
                f"{begin}: round {self._seen.round} expected {sizes} nodes, found {self._seen.waiting} "
                f"({names}); start the missing ones with the same command, or allow fewer with --nnodes"
            )
        asked = "; ".join(f"{endpoint}: {why}" for endpoint, why in self._search.unreached.items())
        return (
            f"{begin}: expected a node of the job at one of {', '.join(self._search.order())}, found none ({asked}); "
            "give the endpoint of a living node in --rdzv-endpoint, the same on all nodes"
        )

    def _pause(self, seconds: float = _LOOK_SECONDS) -> None:
        time.sleep(seconds * random.uniform(0.5, 1.0))

    # ---- speaking with the lead ----

    def _ask(self, name: str, **fields: Any) -> Message:
        """The lead's reply. ConnectionError: it cannot be reached, or leads no more."""
        lead = self._lead
        if lead is None:
            raise ConnectionError("there is no lead")
        message = {"do": name, "token": self._me.token, **fields}
        if lead.token == self._me.token:
            reply = self._station.answer(message)
        else:
            if self._line is None:
                self._line = PeerConnection(lead.endpoint, self._reach, self._credentials)
            try:
                reply = self._line.ask(message)
            except ConnectionError:
                self._hang_up()
                raise
        answered = parsed(Answered, reply)
        if answered.closed:
            self._station.close(answered.closed, answered.in_order)
        if answered.moved:
            self._hang_up()
            raise ConnectionError("resigned")
        return reply

    def _ask_patiently(self, name: str, **fields: Any) -> Message:
        """The lead's reply to what may be said twice; one that is only slow is asked again."""
        while True:
            try:
                reply = self._ask(name, **fields)
            except ConnectionError as error:
                if not self._only_slow(error):
                    raise
                self._check()
                continue
            self._heard = time.monotonic()
            return reply

    def _hang_up(self) -> None:
        if self._line:
            self._line.close()
            self._line = None

    def _meet_others(self, pause: float, reach: float) -> None:
        """As the lead, now and then: say who leads to those that are absent. Resigns before one of higher standing."""
        lead, now = self._station.leading, time.monotonic()
        if lead is None:
            raise ConnectionError("this node leads no more")
        if now < self._next_meeting:
            return
        here = {place.endpoint for place in self._station.present}
        if lead.complete:
            here |= set(self._memory.roster.endpoints)
        absent = [place for place in self._search.order() if place not in here]
        found = self._search.meet([self._me.endpoint, *absent], lead, reach)
        better = self._search.best(found, reach)
        spent = time.monotonic() - now
        self._next_meeting = now + spent + max(pause, spent)
        lead = self._station.leading  # its round may have become complete while others were asked
        if lead and better and not lead.complete and better.standing > lead.standing:
            self._station.resign()
            raise ConnectionError(f"this node resigned before {better.node}")

    # ---- while workers run ----

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for a round in which this one should take part; 1 if the lead is lost, or
        nobody can ask this node any more. Never raises."""
        now = time.monotonic()
        if self._round == 0 or self._shut:
            return 0
        self._station.wake()
        if now >= self._next_look:
            self._next_look = now + self._rest
            self._learn_sizes()
            failed = (1, "the port of this node is not answered any more")
            self._waiting, self.over = self._nodes_waiting() if self._post.is_serving else failed
        return self._waiting

    def _nodes_waiting(self) -> tuple[int, str]:
        try:
            view = self._look_again()
            if self._station.leading:
                self._meet_others(self._settings.silence, _STRANGER_SECONDS)
        except (ConnectionError, ProtocolError) as error:
            if self._only_slow(error):
                return 0, ""
            lead, silent = self._lead.node if self._lead else "?", time.monotonic() - self._heard
            return 1, f"node {lead}, which leads, has not answered for {silent:.1f} s: {error}"
        self._heard = time.monotonic()
        if view.phase is Phase.COMPLETE and view.round == self._round:
            return 0, ""
        names = ", ".join(view.names) or "no node yet"
        return max(1, view.waiting), (
            f"round {self._round} is over (a node joined, left, or was not heard of for {self._settings.silence:g} s): "
            f"round {view.round} is {view.phase.value}, and there wait: {names}"
        )

    def _look_again(self) -> RoundView:
        """The lead's reply about the round; on a new connection if the old one has ended."""
        had_line = self._line is not None
        try:
            return parsed(RoundView, self._ask("look", round=self._round))
        except ConnectionError:
            if not had_line:
                raise
            return parsed(RoundView, self._ask("look", round=self._round))

    def _only_slow(self, error: Exception) -> bool:
        """Whether the lead has not answered, but did so not long ago."""
        return isinstance(error.__cause__, TimeoutError) and time.monotonic() - self._heard < self._settings.silence

    def wait_for_all(self, seconds: float) -> bool:
        """The workers of this node have succeeded: wait until those of all nodes of the round have, or the job is over.

        False if the round came to an end before: another node was lost or began anew, and workers are needed again.
        After `seconds` it is true as well: as torch, this node then waits for nobody.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._station.closed:
            self._station.wake()
            try:
                self._ask("finish", round=self._round)
                view = self._look_again()
            except (ConnectionError, ProtocolError) as error:
                if self._station.closed:
                    break
                if self._only_slow(error):
                    continue
                return False
            self._heard = time.monotonic()
            if view.phase is not Phase.COMPLETE or view.round != self._round or view.lost:
                return False
            if view.done >= self._size:
                break
            self._pause()
        return True

    # ---- the end ----

    def is_closed(self) -> bool:
        """Whether the job is over, as far as this node has heard."""
        if not self._station.closed and not self._shut:
            with contextlib.suppress(ConnectionError, ProtocolError):
                self._ask("look", round=self._round)
        return bool(self._station.closed)

    def set_closed(self) -> None:
        """No round is to follow, on any node."""
        how = "it has succeeded" if self.in_order else "it has ended there, and was not to go on"
        self._station.close(f"node {self._me.node} says that {how}", self.in_order)
        message = {"reason": self._station.closed, "in_order": self._station.in_order}
        if not self._station.leading:
            with contextlib.suppress(ConnectionError, ProtocolError):
                self._ask("close", **message)
                return
        others = {*self._memory.roster.endpoints, *(place.endpoint for place in self._station.present)}
        peer_client.ask_all(others - {self._me.endpoint}, {"do": "close", **message}, self._reach, self._credentials)

    def shutdown(self) -> bool:
        """Close this node's port; and the rendezvous for all nodes, if this one has ended within a round. Idempotent.

        One that was never needed, or has waited in vain, is to the others a node that left, like one that was lost.
        """
        if not self._shut:
            if self._round:
                self.set_closed()
            self._shut = True
            self._hang_up()
            self._post.close()
            self._store = None
        return True


def _open_port(settings: RendezvousSettings) -> tuple[socket.socket, str]:
    """A listening socket, and the host by which others reach it."""
    for endpoint in settings.endpoints:
        if places.emulated_apart(endpoint.host, settings.address):
            continue
        if listener := places.listen_as(endpoint, peer_client.node_answers):
            return listener, endpoint.host
    host = settings.address
    if settings.only_here or not any(endpoint.port for endpoint in settings.endpoints):  # no other machine is expected
        host = host if host and places.literal(host) and places.only_here(host) else places.LOOPBACK
        return places.listen_on(host), host
    return places.listen_anywhere(host), host or socket.getfqdn()
