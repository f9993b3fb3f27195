"""What nodes ask each other at their ports, and what they reply: the fields of each, bounded.

    meet    who are you, whom do you follow? With `lead`: I lead, if you look for one.
    elect   may `lead` lead its generation?
    apply, look, serve, leave, finish    of nodes to their lead, see `Gathering`
    close   the rendezvous is over

A request is a map of its fields and `do`, its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .bounds import Count, Flag, Name, Reason, Seen, Token, Where
from .gathering import Application, Phase, Roster

Message = dict[str, Any]
REQUEST_LIMIT = 8 << 10  # bytes; the longest one names an endpoint or two, and a reason


@dataclass(frozen=True)
class Lead:
    """A node that leads the rendezvous, or did. `round` and `complete` tell how far it was when it said so."""

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
        """The greater one stays when two leads meet."""
        return (self.round, self.complete, self.generation, self.token)


# ---- requests ----


@dataclass(frozen=True)
class Meet:
    """Who are you, and whom do you follow?"""

    lead: Lead | None = None


@dataclass(frozen=True)
class Elect:
    """May this one lead?"""

    lead: Lead


@dataclass(frozen=True)
class Close:
    """The rendezvous is over."""

    reason: Reason
    in_order: Flag


@dataclass(frozen=True)
class Leave:
    """This process does not wait any more."""

    token: Token


@dataclass(frozen=True)
class Apply:
    """This process wants to take part."""

    token: Token
    application: Application


@dataclass(frozen=True)
class Look:
    """How does the round stand? `round`: the newest one that the process knows to be complete."""

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
    """What a node says of itself."""

    node: Name
    token: Token
    awake: Flag
    generation: Seen
    leading: Lead | None
    known: tuple[Lead, ...]
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
class View:
    """How the round stands for one process: `rank`, `size` and `store` where it was chosen, `roster` where the round is
    complete and it did not know. `missing` are of the last round. `opened`, `trained`: see `Proposal`. `first` is the
    global rank of the process's first worker, `workers` the number of all."""

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
    """What every reply says: why the rendezvous is over, if it is; `moved`: the one asked leads no more."""

    closed: Reason = ""
    in_order: Flag = False
    moved: Flag = False
