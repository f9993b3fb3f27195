"""Requests and replies between the launchers of a job's nodes, as types with bounded fields.

    meet    who are you, and which lead do you follow? With `lead`: I lead, if you are looking for one.
    elect   may `lead` lead its generation?
    apply, look, serve, leave, finish    from nodes to their lead, see `RoundMachine`
    close   the rendezvous is over

A request is a map of its fields and its name, `do`. `intake.parsed` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..intake import Flag
from .field_types import Count, Name, Reason, Seen, Token, Where
from .round_machine import Application, Phase, Roster

Message = dict[str, Any]
REQUEST_LIMIT = 8 << 10  # bytes; the longest one names an endpoint or two, and a reason


@dataclass(frozen=True)
class Leader:
    """A node that leads the rendezvous, or did. `round` and `complete` are its progress when it sent this."""

    node: Name
    token: Token
    endpoint: Where
    generation: Seen
    round: Count = 0
    complete: Flag = False

    def __post_init__(self) -> None:
        if not self.generation:
            raise ValueError("expected a generation from 1")

    @property
    def standing(self) -> tuple[int, bool, int, str]:
        """When two leads meet, the one with the greater standing stays."""
        return (self.round, self.complete, self.generation, self.token)


# ---- requests ----


@dataclass(frozen=True)
class Meet:
    """Who are you, and which lead do you follow?"""

    lead: Leader | None = None


@dataclass(frozen=True)
class Elect:
    """May this one lead?"""

    lead: Leader


@dataclass(frozen=True)
class Close:
    """The rendezvous is over."""

    reason: Reason
    in_order: Flag


@dataclass(frozen=True)
class Leave:
    """This process no longer waits."""

    token: Token


@dataclass(frozen=True)
class Apply:
    """This process wants to take part."""

    token: Token
    application: Application


@dataclass(frozen=True)
class Look:
    """What is the state of the round? `round`: the newest one that the process knows to be complete."""

    token: Token
    round: Seen = 0


@dataclass(frozen=True)
class Serve:
    """Where the store of the proposed round is."""

    token: Token
    store: Where


@dataclass(frozen=True)
class Finish:
    """The workers of this process have succeeded in a round."""

    token: Token
    round: Count


OF_ANYONE = {"meet": Meet, "elect": Elect, "leave": Leave, "close": Close}
OF_LEADS = {"apply": Apply, "look": Look, "serve": Serve, "finish": Finish}


# ---- replies ----


@dataclass(frozen=True)
class Meeting:
    """The state of a node."""

    node: Name
    token: Token
    awake: Flag
    generation: Seen
    leading: Leader | None
    known: tuple[Leader, ...]
    closed: Reason = ""
    in_order: Flag = False


@dataclass(frozen=True)
class Vote:
    """Whether a node consents, and the newest generation that it knows of."""

    granted: Flag
    generation: Seen


@dataclass(frozen=True)
class Admission:
    """Whether an application was accepted, and the last complete round."""

    accepted: Flag
    roster: Roster


@dataclass(frozen=True)
class RoundView:
    """The round as one process sees it: `rank`, `size` and `store` if it was chosen, `roster` if the round is complete
    and the process did not know. `missing` are nodes of the last round. `opened`, `trained`: see `Proposal`. `first` is
    the global rank of the process's first worker, `workers` the number of all."""

    phase: Phase
    round: Count
    begun: Flag
    waits: Flag
    waiting: Count
    names: tuple[Name, ...]
    missing: tuple[Name, ...]
    done: Count
    lost: Count
    rank: Count | None = None
    size: Count = 0
    store: Where | None = None
    opened: Flag = False
    trained: Flag = False
    first: Count = 0
    workers: Count = 0
    roster: Roster | None = None


@dataclass(frozen=True)
class Answered:
    """Part of every reply: why the rendezvous is over, if it is; `moved`: the node asked no longer leads."""

    closed: Reason = ""
    in_order: Flag = False
    moved: Flag = False
