"""The parts of a failure story: a job, what happens to its nodes, and the claims to check. Plain data.

Independent of the text of a story (`story_parser`) and of how it runs (`story_runner`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

EVERY = "every node"
FRAMEWORK_NAMES = ("megatron", "deepspeed")
MOST_NODES = 6  # of a job, substitutes excluded


class JobEnd(str, Enum):
    """How all nodes of a job end."""

    ENDED = "has ended"
    REFUSED = "is refused"


class LossKind(str, Enum):
    """How a node is lost: with its memory, by its link, or stopped with its connections open."""

    KILL = "kill"
    CUT = "cut"
    FREEZE = "freeze"


@dataclass(frozen=True)
class JobShape:
    """The job of a story, to be run with each of `frameworks`."""

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
    """Wait until this iteration or a later one is committed on every node."""

    iteration: int


@dataclass(frozen=True)
class IterationCaptured:
    """Wait until a rank of a node has captured this iteration or a later one."""

    node: str
    iteration: int


@dataclass(frozen=True)
class CheckpointStored:
    """Wait until a checkpoint of this iteration or a later one is complete."""

    iteration: int


@dataclass(frozen=True)
class SmpStopped:
    """Wait until the SMP of a node has stopped at its fault point."""

    node: str


@dataclass(frozen=True)
class JobEnds:
    """Wait until every node has ended this way."""

    how: JobEnd


@dataclass(frozen=True)
class LoseNode:
    """Lose a node."""

    node: str
    fate: LossKind


@dataclass(frozen=True)
class StartNode:
    """Start a node whose address sorts before (`first`) or after all others."""

    node: str
    first: bool


@dataclass(frozen=True)
class RestoredFrom:
    """The last restore of a node, or of every remaining node, used this tier and this iteration or a later one."""

    node: str
    tier: str
    iteration: int
    exactly: bool = False  # this iteration only


@dataclass(frozen=True)
class BeingExchanged:
    """Nodes were exchanging this version when the job was restored for the first time."""

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
class ReplicaMismatched:
    """The replica of this rank was mismatched in this iteration, and no rank in any other."""

    rank: int
    iteration: int


@dataclass(frozen=True)
class RestoredCertified:
    """A node restored a certified version: its replicas had agreed."""

    node: str


@dataclass(frozen=True)
class ReplicasCompared:
    """Nodes found their replicas equal and sent each other digests instead of state."""


@dataclass(frozen=True)
class CheckpointNotStored:
    """The checkpoint of this iteration is not complete."""

    iteration: int


@dataclass(frozen=True)
class CheckpointsIntact:
    """Every complete checkpoint matches its digests; the newest is of this iteration or later."""

    iteration: int


@dataclass(frozen=True)
class ReasonContains:
    """The reason that every node reports contains these words."""

    words: str


@dataclass(frozen=True)
class SentInBubbles:
    """Some copies were sent in bubbles."""


@dataclass(frozen=True)
class NoFreshStart:
    """No rank started from scratch after a completed iteration."""


@dataclass(frozen=True)
class MatchesGolden:
    """Final state and losses are bit-identical to those of the unfailed run."""


StoryLine = (
    VersionCommitted | IterationCaptured | CheckpointStored | SmpStopped | JobEnds | LoseNode | StartNode
    | RestoredFrom | BeingExchanged | RestoredCommitted | DeclaredLost | ReplicasCompared | ReplicaMismatched
    | RestoredCertified | SentInBubbles | CheckpointNotStored | CheckpointsIntact | ReasonContains
    | NoFreshStart | MatchesGolden
)  # fmt: skip


@dataclass(frozen=True)
class Story:
    """A title, a job, and what happens, in order. `store`: iterations between two checkpoints, 0 for no storage."""

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
        """The nodes that are started later, in order."""
        return tuple(line for line in self.lines if isinstance(line, StartNode))
