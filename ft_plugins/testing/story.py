"""What a failure story consists of: a job, what happens to its nodes, what has to hold. Plain facts.

Invariant: nothing here knows of text, or of how it is carried out: `stories` reads them, `storyteller` tells them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

EVERY = "every node"


class End(str, Enum):
    """How every node of a job ends."""

    ENDED = "has ended"
    REFUSED = "is refused"


class Fate(str, Enum):
    """What is done to a node."""

    KILL = "kill"
    CUT = "cut"
    FREEZE = "freeze"


@dataclass(frozen=True)
class JobShape:
    """The job of a story, by any of `frameworks`."""

    frameworks: tuple[str, ...]
    tp: int
    pp: int
    dp: int
    nodes: int
    distributed: bool = False
    iterations: int = 10
    global_batch: int | None = None

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Counts:
    """Until a version of this iteration or a later one counts on every node."""

    iteration: int


@dataclass(frozen=True)
class Captured:
    """Until a rank of a node has captured this iteration or a later one."""

    node: str
    iteration: int


@dataclass(frozen=True)
class Stored:
    """Until a checkpoint of this iteration or a later one is complete."""

    iteration: int


@dataclass(frozen=True)
class Stopped:
    """Until the snapshot process of a node has stopped itself."""

    node: str


@dataclass(frozen=True)
class Ends:
    """Until every node has ended, in that way."""

    how: End


@dataclass(frozen=True)
class Lose:
    """Lose a node."""

    node: str
    fate: Fate


@dataclass(frozen=True)
class Start:
    """Start a node whose address sorts before (`first`) or behind those of all others."""

    node: str
    first: bool


@dataclass(frozen=True)
class Restored:
    """The last restore of a node, or of all of those that are left, was from that tier, of that iteration or later."""

    node: str
    tier: str
    iteration: int
    exactly: bool = False  # of that iteration and no other


@dataclass(frozen=True)
class InTransfer:
    """When the job was restored for the first time, nodes were sending this version to each other."""

    iteration: int


@dataclass(frozen=True)
class Older:
    """A node restored the newest version that counted, while a newer one was being sent."""

    node: str


@dataclass(frozen=True)
class DeclaredLost:
    """The others missed a node that had gone silent."""

    node: str


@dataclass(frozen=True)
class Differed:
    """One rank was found to differ from its replicas in that iteration, and none in any other."""

    rank: int
    iteration: int


@dataclass(frozen=True)
class Certified:
    """What a node restored was known to be of replicas that agreed."""

    node: str


@dataclass(frozen=True)
class Compared:
    """Nodes have found their replicas equal, and sent each other no state for it."""


@dataclass(frozen=True)
class NotStored:
    """There is no complete checkpoint of this iteration."""

    iteration: int


@dataclass(frozen=True)
class Whole:
    """Every complete checkpoint has all bytes of all ranks, the newest is of this iteration or later."""

    iteration: int


@dataclass(frozen=True)
class Reason:
    """The reason that every node gives has these words."""

    words: str


@dataclass(frozen=True)
class InBubbles:
    """Copies went out while the gates of their ranks were open."""


@dataclass(frozen=True)
class NotAnew:
    """No rank has started from the beginning after something was completed."""


@dataclass(frozen=True)
class Golden:
    """State and losses are those of the unfailed run."""


Line = (
    Counts | Captured | Stored | Stopped | Ends | Lose | Start
    | Restored | InTransfer | Older | DeclaredLost | Compared | Differed | Certified | InBubbles | NotStored | Whole
    | Reason | NotAnew | Golden
)  # fmt: skip


@dataclass(frozen=True)
class Story:
    """A title, a job, what happens in order. `store`: iterations between two checkpoints, 0 for no storage."""

    name: str
    title: str
    job: JobShape
    lines: tuple[Line, ...]
    flags: tuple[str, ...] = ()
    store: int = 0
    faults: dict[str, str] = field(default_factory=dict)  # by node
    all_configurations: bool = False

    @property
    def started(self) -> tuple[Start, ...]:
        """The nodes that come later, in their order."""
        return tuple(line for line in self.lines if isinstance(line, Start))
