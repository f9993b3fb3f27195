"""Requests and replies between the launchers of a job's nodes, as types with bounded fields.

A request is a map of its fields and its name, `do`. `intake.parsed` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...base.intake import Flag
from ..agent.restarts import Status
from .field_types import Count, EndpointText, Name, Reason, Reported, Token, Wait
from .roster import Digest, PageNumber, RosterPage
from .round_machine import Phase
from .waiting_nodes import Application

Message = dict[str, Any]
REQUEST_LIMIT = 8 << 10  # bytes; the longest one names an endpoint or two, and a reason


@dataclass(frozen=True)
class Leader:
    """A node that is or was the leader. `round` and `complete` are its progress when it sent this."""

    node: Name
    token: Token
    endpoint: EndpointText
    generation: Reported
    round: Count = 0
    complete: Flag = False

    def __post_init__(self) -> None:
        if not self.generation:
            raise ValueError("expected a generation from 1")

    @property
    def standing(self) -> tuple[int, bool, int, str]:
        """Of two leaders that meet, the one of greater standing stays."""
        return (self.round, self.complete, self.generation, self.token)


# ---- requests ----


@dataclass(frozen=True)
class Meet:
    """Identify yourself and the leader that you follow. `lead` introduces the sender as a leader."""

    lead: Leader | None = None


@dataclass(frozen=True)
class Elect:
    """Consent to `lead` as the leader of its generation."""

    lead: Leader


@dataclass(frozen=True)
class Close:
    """The rendezvous is over, because the job has ended so."""

    reason: Reason
    status: Status


@dataclass(frozen=True)
class Leave:
    """This process no longer waits."""

    token: Token


@dataclass(frozen=True)
class Apply:
    """This process applies to take part. `base`: the digest of the roster that it knows."""

    token: Token
    application: Application
    base: Digest = ""


@dataclass(frozen=True)
class Look:
    """Report the state of the round. `round`: the newest one that this process knows to be complete.

    `wait`: seconds for which the reply may be held back while nothing has changed that the process must learn at once.
    `seen`: the `RoundView.changes` that it knows. `roster`: it wants that of a newer round; `base`: the digest of the
    one that it knows. `ready`: a round for which it is chosen need not wait for a check of its node.
    """

    token: Token
    round: Reported = 0
    wait: Wait = 0.0
    seen: Count = 0
    roster: Flag = False
    base: Digest = ""
    ready: Flag = True


@dataclass(frozen=True)
class ReadRoster:
    """One page of the last complete round's roster; see `RosterPages.page`."""

    token: Token
    base: Digest = ""
    page: PageNumber = 0


@dataclass(frozen=True)
class Serve:
    """The endpoint of the proposed round's store."""

    token: Token
    store: EndpointText


@dataclass(frozen=True)
class Finish:
    """The workers of this process have succeeded in a round."""

    token: Token
    round: Count


@dataclass(frozen=True)
class Refuse:
    """A node was refused before or while it joined: nodes that wait for it need not expect it."""

    token: Token
    node: Name
    reason: Reason


@dataclass(frozen=True)
class Drain:
    """Have a node, or all (`rounds.ALL`), leave the job at the next version; '' for none any more."""

    token: Token
    node: Name | Literal["", "*"]


@dataclass(frozen=True)
class Depart:
    """This process has left its round for good, and needs no substitute's patience."""

    token: Token


ANSWERED_BY_ALL = {"meet": Meet, "elect": Elect, "leave": Leave, "close": Close}
ANSWERED_BY_LEADER = {
    "apply": Apply, "look": Look, "roster": ReadRoster, "serve": Serve, "finish": Finish, "refuse": Refuse,
    "drain": Drain, "depart": Depart,
}  # fmt: skip


# ---- replies ----


@dataclass(frozen=True)
class Meeting:
    """The state of a node. `knows`: the newest complete round that it remembers."""

    node: Name
    token: Token
    awake: Flag
    generation: Reported
    leading: Leader | None
    known: tuple[Leader, ...]
    closed: Reason = ""
    status: Status | None = None
    knows: Reported = 0


@dataclass(frozen=True)
class Vote:
    """Whether a node consents, and the newest generation that it knows of."""

    granted: Flag
    generation: Reported


@dataclass(frozen=True)
class Admission:
    """Whether an application was accepted, and the first page of the last complete round if the process did not know
    that one."""

    accepted: Flag
    roster: RosterPage | None = None


@dataclass(frozen=True)
class RosterReply:
    """A page of the last complete round's roster."""

    roster: RosterPage


@dataclass(frozen=True)
class DrainReply:
    """Why a node is not drained, '' if it is."""

    refused: Reason


@dataclass(frozen=True)
class RoundView:
    """The round as one process sees it.

    `rank`, `size`, `store`: if the process was chosen. `roster`: the first page, if the process asked for that of a
    newer round. `changes`: see `Look.seen`.
    `names`, `missing`: of waiting nodes, of nodes of the last round that do not wait; not all if there are many.
    `absent`: those of the missing ones that are not known to live.
    `refused`: which nodes could not join, and why. `draining`: the node that is to leave at the next version, or
    all (`rounds.ALL`);
    `drained`: the one that has left so last, before this round or the next.
    `opened`, `trained`: see `Proposal`. `first`: global rank of the process's first worker; `workers`: number of all.
    """

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
    store: EndpointText | None = None
    opened: Flag = False
    trained: Flag = False
    first: Count = 0
    workers: Count = 0
    roster: RosterPage | None = None
    changes: Count = 0
    refused: Reason = ""
    draining: Name | Literal["", "*"] = ""
    drained: Name | Literal[""] = ""
    absent: tuple[Name, ...] = ()


@dataclass(frozen=True)
class Answered:
    """Part of every reply. `closed`, `status`: why the rendezvous is over and how the job has ended, if it is.
    `moved`: this node does not lead."""

    closed: Reason = ""
    status: Status | None = None
    moved: Flag = False
