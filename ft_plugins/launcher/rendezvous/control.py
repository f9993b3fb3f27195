"""Ask a running job something from the command line of one of its nodes, as a node that knows the secret.

Invariant: what controls the job is authenticated: only who can read the job's secret file is answered. The file in the
run directory names that file, not the secret.

In: the run directory of a node whose `ft-run` runs. Out: the leader's reply. Raises FtError, ConnectionError.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ...base import files
from ...base.intake import Flag, parsed, read_json, shown
from ...base.run_directories import NAME_PATTERN
from ...errors import ConfigError, FtError
from .. import job_identity
from ..rounds.node_messages import DrainReply, Meeting
from ..rounds.rounds import ALL
from . import peers
from .peers import Credentials
from .rendezvous_settings import RendezvousSettings

_FILE = "rendezvous.json"
_REACH_SECONDS = 5.0  # for one request


@dataclass(frozen=True)
class ControlPlace:
    """Where the `ft-run` of a node answers, and with what to authenticate."""

    run: str
    endpoint: str
    secret_file: str
    encrypt: Flag


_PLACE = TypeAdapter(ControlPlace)


def leave(settings: RendezvousSettings, own: str) -> None:
    """Leave in the run directory how the command line reaches this node, at endpoint `own`."""
    if settings.run_dir:
        with contextlib.suppress(OSError):
            place = ControlPlace(settings.run, own, settings.secret_file, settings.encrypt)
            files.write_json(settings.run_dir / _FILE, asdict(place))


def drain(run_dir: Path, node: str) -> str:
    """Have `node`, or ALL nodes, leave the job at its next version. Returns why they do not, '' if they do."""
    if node != ALL and not re.fullmatch(NAME_PATTERN, node):  # no name at all would take a drain back
        raise ConfigError(f"{shown(node)} is not the name of a node; expected one that `ft-plugins status` shows")
    try:
        place = read_json(run_dir / _FILE, _PLACE)
    except (OSError, ValueError) as error:
        raise FtError(f"{run_dir / _FILE}: cannot be read ({error}); is --rdzv-backend given?") from error
    us = Credentials(job_identity.load_secret(place.secret_file or None), place.run, run_dir.name, place.encrypt)
    meeting = parsed(Meeting, peers.ask(place.endpoint, {"do": "meet", "lead": None}, _REACH_SECONDS, us))
    known = [meeting.leading] if meeting.leading else sorted(meeting.known, key=lambda each: -each.generation)
    for leader in known:
        request = {"do": "drain", "token": secrets.token_hex(8), "node": node}
        reply = peers.ask(leader.endpoint, request, _REACH_SECONDS, us)
        if not reply.get("moved"):
            return parsed(DrainReply, reply).refused
    raise FtError("no node leads the job now: its nodes begin another round; give this again when it trains")
