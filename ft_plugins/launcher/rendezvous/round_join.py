"""How this node gets into the next round: find the leader, apply, wait until the round begins.

Invariant: the wait is bounded by `join_timeout` and `wait_seconds`, except a spare's for a vacant rank. The node of
rank 0 serves the round's store before the round is complete.

In: a `LocalNode`. Out: the view of a complete round in which this node has a rank, and the store if it serves it. In
place of that, from a node that was refused: a request to the leader, or replies to nodes that look for one.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from ...base.intake import parsed
from ...errors import ConfigError, FtError, ProtocolError
from ...events import say
from ...smp.watch.job_history import FtRunNote, FtRunPhase, write_note
from ...smp.watch.job_state import NOTHING
from ..agent.node_check import NodeCheck
from ..rounds import round_store
from ..rounds.field_types import reason_text
from ..rounds.node_messages import Admission, Leader, Meeting, RoundView
from ..rounds.node_service import NodeIdentity, NodeService
from ..rounds.roster import Roster, RosterPage
from ..rounds.roster_file import RosterFile
from ..rounds.round_machine import Phase
from ..rounds.waiting_nodes import Application
from . import peers
from .endpoint import Endpoint
from .leader_search import LeaderSearch
from .local_node import LocalNode
from .peers import Credentials
from .rendezvous_settings import RendezvousSettings
from .wait_report import REPEAT_SECONDS, WaitReport, awaited, incomplete

LOOK_SECONDS = 0.1  # between two looks at an incomplete round, on the leader; between two checks, on other nodes
_SEARCH_GROWTH, _LONGEST_SEARCH_PAUSE = 1.5, 1.0  # of the pauses between two searches of the leader
_SEARCHES = 512  # a second, by all nodes together in the end
_LEAST_PAUSE = 0.005  # of the leader between two looks, during which many nodes may send requests
_TAKEN_SECONDS = 3.0  # of a search, before this node reports that another process has the port of an endpoint
_SPARE = "this node is a spare: every place in the job is taken"
_MEET_SECONDS = 1.0  # between two searches of the leader for absent nodes


class RoundJoin:
    """This node's way into each round."""

    def __init__(self, node: LocalNode, store_bound: timedelta) -> None:
        self.is_spare = False
        self.served_store: TCPStore | None = None  # of the next round, on the node of rank 0
        self.asked = ""  # the node of the last round that left as it was asked, '' for none
        self._led_by = ""  # token of the node that led the last round; another one does not know who left it
        self._node = node
        self._store_bound = store_bound
        self._opened = self._trained = self._took_part = False
        self.failed = self.replaceable = False  # see `Application`
        self._workers = 0
        self._acknowledged = 0  # a complete round that this node has acknowledged: the others rely on it
        self._last_view: RoundView | None = None  # the leader's last reply about an incomplete round
        self._deadline = 0.0  # monotonic; for the round to be complete
        self._wait_report: WaitReport | None = None
        self._noted = ""  # for what this node waits, in the run directory
        self._refused = ""  # nodes that could not join, as reported last
        self.node_check: NodeCheck | None = None  # before each round; None for none

    def begin(self, opened: bool, trained: bool, took_part: bool, workers: int) -> None:
        """Start to wait for the next round; see `Application` for the arguments."""
        self._opened, self._trained, self._took_part, self._workers = opened, trained, took_part, workers
        self.is_spare, self._acknowledged, self._last_view, self._noted = False, 0, None, ""
        self._extend_deadline()
        if took_part and self.node_check:
            self.node_check.forget()
        settings = self._node.settings
        self._wait_report = WaitReport(settings.silence, settings.command, self._trouble)

    def _trouble(self) -> str:
        """Why other nodes may not come, if that is known; ''. What to do is its last part, after a semicolon."""
        return self._node.search.other_job() or self._node.search.taken() or self._node.server.rejected

    def _extend_deadline(self) -> None:
        self._deadline = time.monotonic() + self._patience

    @property
    def _patience(self) -> float:
        """Seconds for a round to be complete. The check of any node may take as long as that of this one."""
        checked = self.node_check.seconds if self.node_check else 0.0
        return self._node.settings.join + self._node.settings.rules.wait + checked

    def find_leader(self) -> Leader:
        """The leader; finally this node, if it is elected. Raises what `check` does, and ConfigError."""
        began = time.monotonic()
        pauses = search_pauses(self._node.settings.rules.max_nodes)
        due = _TAKEN_SECONDS
        while True:
            self.check()
            searched = time.monotonic() - began
            if leader := self._node.search.look(searched <= 2 * self._node.settings.silence, self.check):
                return leader
            if searched > due:
                due = searched + self._report_search(searched)
            pause(next(pauses))

    def _report_search(self, searched: float) -> float:
        """Report where no node of the job answers; early only if another process of this machine listens there. Returns
        in how many seconds to do so again. Raises ConfigError if a node of another job answers and there is no secret:
        it is on this machine.

        With a secret the search goes on, because refusing this node needs no proof: any process that takes over an
        endpoint for a while can do it.
        """
        search, settings = self._node.search, self._node.settings
        other = search.other_job() if searched > 2 * settings.silence else ""
        if other and settings.loopback_only:
            raise ConfigError(other)
        if not (
            reason := other
            if search.foreign
            else search.taken() or (search.no_node() if searched > settings.silence else "")
        ):
            return settings.silence
        self._note_wait("", reason)
        left = max(0.0, self._deadline - time.monotonic())
        say(f"{reason} (this node goes on looking for {left:.0f} s at most)", alarm=True, who="ft-run: ")
        return REPEAT_SECONDS

    def take_part(self, leader: Leader) -> RoundView:
        """Apply to `leader` and wait until the round begins. Raises ConnectionError if it no longer leads.

        A node that has acknowledged a complete round does not apply again when the leader is back: others are in it.
        """
        node, link = self._node, self._node.link
        leads = leader.token == node.me.token
        link.follow(leader)
        self.asked = self.asked if leader.token != self._led_by else ""  # it may have died before it left
        if not self._acknowledged:
            self._apply()
        seen, checking = 0, False
        try:
            while True:
                self.check()
                known = node.roster_file.roster
                checking = checking and not self._passes(known)
                if leads:
                    node.search.meet_absent(_MEET_SECONDS, node.reach)
                    if node.service.advance():
                        node.server.look()
                view = link.watch_patiently(self.check, known.round, LOOK_SECONDS, known, self._is_checked)
                if view is None:
                    self._report(leads)
                    if self.is_spare:
                        self._extend_deadline()
                    continue
                self._remember(view.roster)
                self.asked = view.drained or self.asked
                complete, chosen = view.phase is Phase.COMPLETE, view.rank is not None
                self._acknowledged = view.round if chosen and complete else 0
                if chosen and complete and view.begun:
                    self._acknowledged, self._led_by = 0, leader.token
                    return view
                if chosen and not complete and view.rank == 0 and not view.store:
                    self.served_store = self.served_store or round_store.serve(
                        node.listener, node.host, self._store_bound
                    )
                    link.ask_patiently(self.check, "serve", store=str(Endpoint(node.host, self.served_store.port)))
                elif not (view.waits or chosen):
                    raise ConnectionError("it no longer knew this node")
                self.is_spare = complete and not chosen
                if self.is_spare:
                    self._extend_deadline()
                    if self.node_check:
                        self.node_check.forget()
                checking = chosen and not complete and not self._is_checked
                self._last_view = view
                self._report(leads)
                self._report_refused(view.refused)
                if view.changes == seen:
                    seconds = node.rest if self.is_spare else LOOK_SECONDS
                    if leads:
                        time.sleep(_LEAST_PAUSE)
                        node.service.wait_for_request(seconds - _LEAST_PAUSE)
                    else:
                        pause(seconds)
                seen = view.changes
        except (ConnectionError, ProtocolError):
            raise  # there is no leader left to notify
        except BaseException:
            if self.node_check:
                self.node_check.stop()
            with contextlib.suppress(ConnectionError, ProtocolError):
                link.ask("leave")
            raise

    @property
    def _is_checked(self) -> bool:
        """Whether a round for which this node is chosen need not wait for its check."""
        return self.node_check is None or self.node_check.passed

    def _passes(self, known: Roster) -> bool:
        """Whether the check of this node has passed, which the leader then learns at once. Raises NodeError."""
        if self.node_check is None or not self.node_check.look():
            return False
        self._node.link.ask_patiently(self.check, "look", round=known.round)
        return True

    def _report(self, leads: bool) -> None:
        """Report an incomplete round for which this node is not chosen, if it is time to."""
        view, settings = self._last_view, self._node.settings
        if self.is_spare and self._note(FtRunNote(FtRunPhase.SPARE, _SPARE)):
            say(f"{_SPARE}; {self._node.me.node} waits, and takes the place of a node that is lost", who="ft-run: ")
        leader = self._node.link.leader
        if self._wait_report and leader and view and view.phase is not Phase.COMPLETE and view.rank is None:
            needed, start = awaited(settings.rules, view.waiting, view.missing, view.absent)
            self._wait_report.update(needed, start, leads, self._deadline, leader.endpoint, view.absent)
            if needed:
                self._note_wait(needed, self._wait_report.trouble, "" if start else NOTHING)

    def _note_wait(self, words: str, trouble: str, remedy: str = "") -> None:
        """Leave what this node waits for, why others may not come, and what to do about it, for `status`."""
        found, _, cure = trouble.rpartition("; ")
        self._note(FtRunNote(FtRunPhase.WAITING, ": ".join(filter(None, (words, found))), remedy=cure or remedy))

    def _note(self, note: FtRunNote) -> bool:
        """Leave in the run directory what this node waits for, once. Returns whether that is new."""
        if note.reason == self._noted:
            return False
        self._noted = note.reason
        if self._node.settings.run_dir:
            write_note(self._node.settings.run_dir, note)
        return True

    def _report_refused(self, refused: str) -> None:
        if refused and refused != self._refused:
            say(f"{refused} (mend that, or start another node in its place)", alarm=True, who="ft-run: ")
        self._refused = refused

    def _remember(self, first: RosterPage | None) -> None:
        """Store the roster whose first page has arrived."""
        file = self._node.roster_file
        if first and (roster := self._node.link.read_roster(first, file.roster)):
            file.remember(roster)

    def _apply(self) -> None:
        """Apply to the leader until it accepts. Raises ConfigError if another live node has this node's name."""
        node, me, roster = self._node, self._node.me, self._node.roster_file.roster
        application = Application(
            node=me.node,
            token=me.token,
            endpoint=me.endpoint,
            seat=roster.seat(me.node),
            wanted=node.settings.wanted,
            knows=roster.round,
            opened=self._opened,
            trained=self._trained,
            took_part=self._took_part,
            workers=self._workers,
            failed=self.failed,
            replaceable=self.replaceable,
        )
        fields = asdict(application)
        began = time.monotonic()
        while True:
            admission = parsed(
                Admission, node.link.ask_patiently(self.check, "apply", application=fields, base=roster.digest)
            )
            if admission.accepted:
                break
            self.check()
            if time.monotonic() - began > 2 * node.settings.silence:
                raise ConfigError(
                    f"node name '{me.node}': another live node of job '{me.run}' has this name; give this node another "
                    "one (--ftp-node-name, or node_name in --rdzv-conf)"
                )
            pause()
        self._remember(admission.roster)
        self.served_store = None

    def check(self) -> None:
        """Note that this node is awake. Raises what ends the wait for a round."""
        node, name, run = self._node, self._node.me.node, self._node.me.run
        node.server.check()
        node.service.wake()
        if reason := node.service.closed:
            if self.is_spare:
                raise RendezvousGracefulExitError(f"node {name} was a spare of job '{run}', which is over: {reason}")
            raise RendezvousClosedError(
                f"node {name} cannot take part in job '{run}', which is over: {reason}; to go on, start it again on "
                "all nodes"
            )
        if time.monotonic() > self._deadline:
            raise RendezvousTimeoutError(self._timeout_reason())

    def _timeout_reason(self) -> str:
        node, settings, view = self._node, self._node.settings, self._last_view
        if node.link.leader and view:
            missing = incomplete(settings.rules, view.round, view.waiting, view.names)
        else:
            missing = node.search.no_node()
        trouble = self._trouble()
        return (
            f"node {node.me.node}, job '{node.me.run}': no round was complete within "
            f"{self._patience:g} s: {missing}" + (f"; {trouble}" if trouble else "")
        )


def search_pauses(nodes: int) -> Iterator[float]:
    """Seconds between two searches of the leader, where so many nodes may search it: longer and longer."""
    longest = min(_LONGEST_SEARCH_PAUSE, max(LOOK_SECONDS, nodes / _SEARCHES))
    seconds = LOOK_SECONDS
    while True:
        yield seconds
        seconds = min(longest, seconds * _SEARCH_GROWTH)


def pause(seconds: float = LOOK_SECONDS) -> None:
    """Sleep for about `seconds`, at a random time."""
    time.sleep(seconds * random.uniform(0.5, 1.0))


def require_alone(us: Credentials, run_dir: Path) -> None:
    """Raises ConfigError if this node, which is started as the only one of its job, has a part in one whose other nodes
    live: it would be a second job of that name."""
    known = RosterFile(us.run, run_dir).roster.places
    others = {place.endpoint: place.node for place in known if place.node != us.node}
    replies = peers.ask_all(list(others), {"do": "meet", "lead": None}, _MEET_SECONDS, us) if others else {}
    for endpoint, reply in replies.items():
        if not isinstance(reply, ConnectionError) and not parsed(Meeting, reply).closed:
            raise ConfigError(
                f"node {us.node} has a part in job '{us.run}', whose node {others[endpoint]} lives: give the command "
                f"with which that job waits for it, which is in its log (--nnodes, --rdzv-endpoint {endpoint}), or end "
                "the job there first"
            )


def report_refusal(settings: RendezvousSettings, reason: str, serves: bool) -> None:
    """Report to the other nodes of the job that this node was refused before it could join them. `serves`: no other
    process of this node takes part.

    Bounded in time, and without effect on a job that runs, or in which a live node has this node's name: a command that
    is given twice does no harm. The leader decides what the refusal means (`RoundMachine.refuse`). If none can be
    elected because the endpoint that all nodes were given is this node's, it opens its port to say that the job is
    over."""
    given = [str(each) for each in settings.endpoints if each.port]
    say(f"{reason} (this is being reported to the other nodes of job '{settings.run}')", alarm=True, who="ft-run: ")
    if _reach_leader(settings, given, reason) or not serves or not settings.rules.is_fixed:
        return
    with contextlib.suppress(FtError, OSError), contextlib.closing(LocalNode(settings)) as node:
        if node.me.endpoint in given:
            node.service.close(reason_text(f"node {settings.node} was refused: {reason}"), "refused")
            time.sleep(settings.silence)  # others look for a leader at least once a second


def _reach_leader(settings: RendezvousSettings, given: list[str], reason: str) -> bool:
    """Whether a leader was found within the time after which a silent node is lost, or the job is over."""
    me = NodeIdentity(settings.run, settings.node, secrets.token_hex(8), "")
    service = NodeService(me, settings.rules, settings.silence)
    us = Credentials(settings.secret, settings.run, settings.node, settings.encrypt)
    search = LeaderSearch(service, RosterFile(settings.run, settings.run_dir), given, settings.reach, us)
    request = {"do": "refuse", "token": me.token, "node": me.node, "reason": reason_text(reason)}
    until = time.monotonic() + settings.silence
    while time.monotonic() < until:
        leader = search.best(search.meet(search.order()))
        if service.closed:
            return True
        with contextlib.suppress(ConnectionError):
            if leader and not peers.ask(leader.endpoint, request, settings.reach, us).get("moved"):
                return True
        pause()
    return False
