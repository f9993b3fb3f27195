"""The parts of this node's rendezvous: its port, the service behind it, the search for a leader and the link to it.

In: `RendezvousSettings`. Out: parts that share one identity and one set of credentials. The port is open once it is
constructed.
"""

from __future__ import annotations

import secrets

from ..events import Events
from ..recovery.resize.sizes import SizeReport
from . import endpoint, peer_client
from .endpoint import Endpoint
from .leader_link import LeaderLink
from .leader_search import LeaderSearch
from .node_service import NodeIdentity, NodeService
from .peer_client import Credentials
from .peer_server import PeerServer
from .rendezvous_settings import RendezvousSettings
from .roster_file import RosterFile

_LONGEST_REACH = 3.0  # for one request, including one retransmission of TCP
_REST_SECONDS = 1.0  # between two looks at a complete round; as torch


class LocalNode:
    """This node of a job. `reach`: seconds for one request. `rest`: seconds between two looks at a complete round."""

    def __init__(self, settings: RendezvousSettings) -> None:
        self.settings = settings
        self.reach = min(_LONGEST_REACH, settings.silence / 3)
        self.rest = min(_REST_SECONDS, settings.silence / 10)
        self.events = Events(settings.node)  # rejected connections
        self.listener, self.host = endpoint.open_port(
            settings.endpoints, settings.address, settings.loopback_only, peer_client.node_answers
        )
        own = str(Endpoint(self.host, int(self.listener.getsockname()[1])))
        given = [str(each) for each in settings.endpoints if each.port] or [own]
        self.credentials = Credentials(settings.secret, settings.run, settings.node, settings.encrypt)
        self.me = NodeIdentity(settings.run, settings.node, secrets.token_hex(8), own)
        self.service = service = NodeService(self.me, settings.rules, settings.silence)
        self.roster_file = RosterFile(settings.run, settings.run_dir)
        self.search = LeaderSearch(service, self.roster_file, given, self.reach, self.credentials)
        self.link = LeaderLink(service, self.reach, settings.silence, self.credentials)
        self.server = PeerServer(
            self.listener, self.credentials, service.answer, service.gone, service.tick, self.events
        )
        self._sizes = SizeReport()

    def read_sizes(self) -> None:
        """Read with how many nodes the job can be trained, as ranks of this node report."""
        sizes = self.roster_file.sizes()
        if sizes != self._sizes:
            self._sizes = sizes
            self.service.allow(sizes)

    def close(self) -> None:
        """Close the port and the connection to the leader."""
        self.link.close()
        self.server.close()
