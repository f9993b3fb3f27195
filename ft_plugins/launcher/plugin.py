"""The rendezvous as torch finds it: `torchrun --rdzv-backend=ft_plugins`, by the entry-point group `torchrun.handlers`.

Invariant: torch looks for this module whenever its elastic part is imported, in the middle of that import: nothing of
torch, nor the rendezvous itself, is imported before a handler is wanted.

In: torch's `RendezvousParameters`. Out: `Settings`, a handler.

    --rdzv-endpoint host:port[,host:port...]    any nodes of the job; the same list on all
    --rdzv-conf key=value[,key=value...]
        node_name       this node among the others; default: its host name
        node_rank       the group rank it should have in a first round; default: by its name
        sizes           allowed numbers of nodes, as 8/6/4; default: all that --nnodes allows
        last_call_timeout, wait_seconds    see `Rules`; default: 30, last_call_timeout
        join_timeout    seconds for a round to be put together, beside wait_seconds; default: 600
        detect_seconds  a node that is silent for so long is gone; default: 10
        run_dir         folder in which the nodes of the last round are remembered; default: nowhere
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from . import waiting
from .rounds import Rules

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    from .post import Endpoint

BACKEND = "ft_plugins"
_KEYS = "detect_seconds join_timeout last_call_timeout node_name node_rank run_dir sizes wait_seconds".split()
_OF_TORCH = ("timeout",)  # torch's launcher sets it for back-ends of old


@dataclass(frozen=True)
class Settings:
    """What this node was told about the rendezvous."""

    run: str
    node: str
    endpoints: tuple[Endpoint, ...]
    address: str | None  # of this node, for others
    rules: Rules
    join: float  # seconds
    silence: float  # seconds
    wanted: int | None
    run_dir: Path | None
    command: str = ""  # as it is to be given on another node

    @classmethod
    def read(cls, parameters: RendezvousParameters) -> Settings:
        """Raises ConfigError."""
        from .post import Endpoint

        unknown = sorted(parameters.config.keys() - {*_KEYS, *_OF_TORCH})
        if unknown:
            raise ConfigError(f"--rdzv-conf: unknown key '{unknown[0]}'; {BACKEND} knows {', '.join(_KEYS)}")
        texts = [part for part in (parameters.endpoint or "").split(",") if part.strip()]
        endpoints = tuple(Endpoint.read(part) for part in texts)
        findable = [endpoint for endpoint in endpoints if endpoint.port]
        if parameters.max_nodes > 1 and not findable:
            raise ConfigError(
                f"--rdzv-endpoint: expected host:port of one of the {parameters.max_nodes} nodes, the same on all of "
                f"them, found {parameters.endpoint!r}"
            )
        last_call = _seconds(parameters, "last_call_timeout", 30.0)
        run_dir = parameters.get("run_dir")
        return cls(
            run=parameters.run_id,
            node=str(parameters.get("node_name") or socket.gethostname()),
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
            command=waiting.command(),
        )


def torchrun_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point: torch calls it to get the function that makes a handler."""
    return create


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """A handler that has opened this node's port. Raises ConfigError."""
    from .rendezvous import Rendezvous

    return Rendezvous(Settings.read(parameters))


def _seconds(parameters: RendezvousParameters, key: str, usual: float) -> float:
    found: Any = parameters.get(key, usual)
    try:
        seconds = float(found)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"--rdzv-conf {key}: expected seconds >= 0, found {found!r}")
    return seconds


def _sizes(text: str) -> tuple[int, ...]:
    parts = re.split(r"[,/ ]+", text.strip()) if text.strip() else []
    if not all(part.isdigit() for part in parts):
        raise ConfigError(f"--rdzv-conf sizes: expected numbers of nodes as 8/6/4, found {text!r}")
    return tuple(int(part) for part in parts)


def _rank(parameters: RendezvousParameters) -> int | None:
    found: Any = parameters.get("node_rank")
    if found is None:
        return None
    if not str(found).isdigit() or int(found) >= parameters.max_nodes:
        raise ConfigError(f"--rdzv-conf node_rank: expected 0 to {parameters.max_nodes - 1}, found {found!r}")
    return int(found)
