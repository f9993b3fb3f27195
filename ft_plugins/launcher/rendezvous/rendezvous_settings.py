"""The settings of the rendezvous on one node, read from torch's `RendezvousParameters`. Raises ConfigError.

--rdzv-endpoint host:port[,host:port...]    any nodes of the job; the same list on all
--rdzv-conf key=value[,key=value...]
    command         with which another node is started; default: that of this process
    node_name       name of this node; default: its host name
    node_rank       the group rank it should have in a first round; default: by its name
    sizes           allowed numbers of nodes, as 8/6/4; default: all that --nnodes allows
    last_call_timeout, wait_seconds    see `Rules`; default: 30, last_call_timeout
    join_timeout    seconds to complete a round, in addition to wait_seconds; default: 600
    detect_seconds  a node that is silent for this long is lost; default: 10
    run_dir         folder that stores the nodes of the last round; default: none
    encrypt         true: encrypt the messages of this rendezvous, on all nodes; default: only authenticate them
    secret_file     file of mode 0600 whose content authenticates nodes (ft-run: --ftp-secret-file); without it the
                    endpoint must be a loopback address, and other users of this machine are rejected
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.intake import SECONDS_LIMIT, shown
from ...base.run_directories import NAME_PATTERN, NAME_RULE
from ...errors import ConfigError
from .. import job_identity
from ..rounds.rounds import Rules
from . import endpoint, wait_report
from .endpoint import Endpoint

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

BACKEND = "ft_plugins"
_KEYS = (
    "command detect_seconds encrypt join_timeout last_call_timeout node_name node_rank run_dir secret_file sizes "
    "wait_seconds"
).split()
_LONGEST_REACH = 3.0  # for one request, including one retransmission of TCP
_RUN_LIMIT = 256  # characters of the job's name, as a handshake takes them
_OF_TORCH = ("timeout",)  # torch's launcher sets it for older back-ends


@dataclass(frozen=True)
class RendezvousSettings:
    """The settings of the rendezvous on this node."""

    run: str
    node: str
    endpoints: tuple[Endpoint, ...]
    address: str | None  # of this node, for others
    rules: Rules
    join: float  # seconds
    silence: float  # seconds
    wanted: int | None  # group rank
    run_dir: Path | None
    secret: bytes = field(repr=False)
    encrypt: bool
    loopback_only: bool  # no other machine takes part
    secret_file: str = ""  # absolute, '' for none
    command: str = ""  # to start another node with

    @property
    def reach(self) -> float:
        """Seconds for one request."""
        return min(_LONGEST_REACH, self.silence / 3)

    @classmethod
    def read(cls, parameters: RendezvousParameters) -> RendezvousSettings:
        """Raises ConfigError."""
        unknown = sorted(parameters.config.keys() - {*_KEYS, *_OF_TORCH})
        if unknown:
            raise ConfigError(f"--rdzv-conf: unknown key '{unknown[0]}'; {BACKEND} knows {', '.join(_KEYS)}")
        texts = [part for part in (parameters.endpoint or "").split(",") if part.strip()]
        endpoints = tuple(Endpoint.read(part) for part in texts)
        if parameters.max_nodes > 1 and not any(each.port for each in endpoints):
            raise ConfigError(
                f"--rdzv-endpoint: expected host:port of one of the {parameters.max_nodes} nodes, the same on all of "
                f"them, found {parameters.endpoint!r}"
            )
        run = parameters.run_id
        if not 0 < len(run) <= _RUN_LIMIT or not run.isprintable():
            raise ConfigError(f"--rdzv-id: expected 1 to {_RUN_LIMIT} printable characters, found {run!r:.80}")
        node = str(parameters.get("node_name") or job_identity.safe_name(socket.gethostname()))
        if not re.fullmatch(NAME_PATTERN, node):
            raise ConfigError(f"--rdzv-conf node_name: expected {NAME_RULE}, found {node!r:.80}")
        last_call = _seconds(parameters, "last_call_timeout", 30.0)
        run_dir, secret_file = parameters.get("run_dir"), parameters.get("secret_file")
        if not secret_file:
            _require_loopback(endpoints)
        return cls(
            run=run,
            node=node,
            endpoints=endpoints,
            address=parameters.local_addr,
            rules=Rules(
                parameters.min_nodes,
                parameters.max_nodes,
                _sizes(str(parameters.get("sizes") or "")),
                last_call,
                _seconds(parameters, "wait_seconds", last_call),
            ),
            join=_seconds(parameters, "join_timeout", 600.0),
            silence=_seconds(parameters, "detect_seconds", 10.0),
            wanted=_rank(parameters),
            run_dir=Path(run_dir) if run_dir else None,
            secret=job_identity.load_secret(secret_file),
            encrypt=str(parameters.get("encrypt", "")).lower() in ("true", "1"),
            loopback_only=not secret_file,
            secret_file=str(Path(secret_file).absolute()) if secret_file else "",
            command=str(parameters.get("command") or wait_report.command()),
        )


def _require_loopback(endpoints: Sequence[Endpoint]) -> None:
    """Raises ConfigError for an endpoint that other machines can reach: without a secret they are not authenticated."""
    for each in endpoints:
        if not endpoint.is_loopback(each.host):
            raise ConfigError(
                f"--rdzv-endpoint {each}: other machines can reach it, and without a secret any of them could end the "
                "job or take part in it; give --ftp-secret-file FILE, the same on all nodes (torchrun: --rdzv-conf "
                "secret_file=FILE); write one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"
            )


def _seconds(parameters: RendezvousParameters, key: str, default: float) -> float:
    value: Any = parameters.get(key, default)
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= SECONDS_LIMIT:
        raise ConfigError(f"--rdzv-conf {key}: expected seconds >= 0, found {shown(value)}")
    return seconds


def _sizes(text: str) -> tuple[int, ...]:
    parts = re.split(r"[,/ ]+", text.strip()) if text.strip() else []
    if not all(re.fullmatch("[0-9]{1,9}", part) for part in parts):
        raise ConfigError(f"--rdzv-conf sizes: expected numbers of nodes as 8/6/4, found {shown(text)}")
    return tuple(int(part) for part in parts)


def _rank(parameters: RendezvousParameters) -> int | None:
    value: Any = parameters.get("node_rank")
    if value is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", str(value)) or int(value) >= parameters.max_nodes:
        raise ConfigError(f"--rdzv-conf node_rank: expected 0 to {parameters.max_nodes - 1}, found {shown(value)}")
    return int(value)
