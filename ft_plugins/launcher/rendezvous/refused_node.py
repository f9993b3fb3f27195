"""Report to the other nodes of the job that this node was refused before it could join them.

Invariant: bounded in time, and without effect on a job that runs, or in which a live node has this node's name: a
command that is given twice does no harm. The leader decides what the refusal means (`RoundMachine.refuse`). If none can
be elected because the endpoint that all nodes were given is this node's, it opens its port to say that the job is over.

In: the settings of the rendezvous, the reason. Out: a request to the leader, or replies to nodes that look for one.
"""

from __future__ import annotations

import contextlib
import secrets
import time

from ...errors import FtError
from ...events import say
from ..rounds.field_types import reason_text
from ..rounds.node_service import NodeIdentity, NodeService
from ..rounds.roster_file import RosterFile
from . import peer_client
from .leader_search import LeaderSearch
from .local_node import LocalNode
from .peer_client import Credentials
from .rendezvous_settings import RendezvousSettings
from .round_join import pause


def report(settings: RendezvousSettings, reason: str, serves: bool) -> None:
    """Report it to the leader, once there is one. `serves`: no other process of this node takes part."""
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
            if leader and not peer_client.ask(leader.endpoint, request, settings.reach, us).get("moved"):
                return True
        pause()
    return False
