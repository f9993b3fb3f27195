"""The parts of a failure story: a job, what happens to its nodes, what has to hold. Plain data.

Invariant: nothing here depends on the text of a story (`story_parser`) or on how it is carried out (`story_runner`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

EVERY = "every node"


class JobEnd(str, Enum):
    """How every node of a job ends."""

    ENDED = "has ended"
    REFUSED = "is refused"


class LossKind(str, Enum):
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
class VersionCommitted:
    """Until a version of this iteration or a later one is committed on every node."""

    iteration: int


@dataclass(frozen=True)
class IterationCaptured:
    """Until a rank of a node has captured this iteration or a later one."""

    node: str
    iteration: int


@dataclass(frozen=True)
class CheckpointStored:
    """Until a checkpoint of this iteration or a later one is complete."""

    iteration: int


@dataclass(frozen=True)
class SmpStopped:
    """Until the snapshot process of a node has stopped itself."""

    node: str


@dataclass(frozen=True)
class JobEnds:
    """Until every node has ended, in that way."""

    how: JobEnd


@dataclass(frozen=True)
class LoseNode:
    """Lose a node."""

    node: str
    fate: LossKind


@dataclass(frozen=True)
class StartNode:
    """Start a node whose address sorts before (`first`) or after those of all others."""

    node: str
    first: bool


@dataclass(frozen=True)
class RestoredFrom:
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
class RestoredCommitted:
    """A node restored the newest committed version while nodes were exchanging a newer one."""

    node: str


@dataclass(frozen=True)
class DeclaredLost:
    """The remaining nodes declared a silent node lost."""

    node: str


@dataclass(frozen=True)
class ReplicaDiverged:
    """One rank was found to differ from its replicas in that iteration, and none in any other."""

    rank: int
    iteration: int


@dataclass(frozen=True)
class RestoredCertified:
    """The version that a node restored was certified: its replicas had agreed."""

    node: str


@dataclass(frozen=True)
class ReplicasCompared:
    """Nodes have found their replicas equal, and sent each other no state for it."""


@dataclass(frozen=True)
class CheckpointNotStored:
    """There is no complete checkpoint of this iteration."""

    iteration: int


@dataclass(frozen=True)
class CheckpointsIntact:
    """Every complete checkpoint has all bytes of all ranks, the newest is of this iteration or later."""

    iteration: int


@dataclass(frozen=True)
class ReasonContains:
    """The reason that every node gives has these words."""

    words: str


@dataclass(frozen=True)
class SentInBubbles:
    """Copies went out while the gates of their ranks were open."""


@dataclass(frozen=True)
class NoFreshStart:
    """No rank has started from scratch once an iteration was completed."""


@dataclass(frozen=True)
class MatchesGolden:
    """State and losses are those of the unfailed run."""


StoryLine = (
    VersionCommitted | IterationCaptured | CheckpointStored | SmpStopped | JobEnds | LoseNode | StartNode
    | RestoredFrom | InTransfer | RestoredCommitted | DeclaredLost | ReplicasCompared | ReplicaDiverged
    | RestoredCertified | SentInBubbles | CheckpointNotStored | CheckpointsIntact | ReasonContains
    | NoFreshStart | MatchesGolden
)  # fmt: skip


@dataclass(frozen=True)
class Story:
    """A title, a job, what happens in order. `store`: iterations between two checkpoints, 0 for no storage."""

    name: str
    title: str
    job: JobShape
    lines: tuple[StoryLine, ...]
    flags: tuple[str, ...] = ()
    store: int = 0
    faults: dict[str, str] = field(default_factory=dict)  # by node
    all_configurations: bool = False

    @property
    def started(self) -> tuple[StartNode, ...]:
        """The nodes that come later, in their order."""
        return tuple(line for line in self.lines if isinstance(line, StartNode))
