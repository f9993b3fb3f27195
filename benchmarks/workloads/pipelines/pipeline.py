"""A pipeline, and the operations of a schedule: passes, posts and waits.

Stages are numbered through the model: stage = chunk x ranks + rank. Messages are numbered (2 x the stage that makes it
+ 1 for a gradient) x microbatches + microbatch.

Invariant: a `Pipeline` is valid; sizes that the framework refuses are refused here.

In: sizes. Out: `Pipeline`, read by schedules and simulator; `Compute`, `MessagePost` and `Wait`, a rank's program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ft_plugins.errors import ConfigError

Messages = tuple[int, ...]


class PipelineSchedule(Enum):
    """The order of passes; the value is its machine-readable name."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    DEEPSPEED = "deepspeed"
    ZERO_BUBBLE = "zero-bubble"
    CHIMERA = "chimera"


class Pass(Enum):
    """A kind of compute. WEIGHT is the part of a backward pass that a schedule defers; BACKWARD is then the rest."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"


class Compute(NamedTuple):
    """One pass of one microbatch through one chunk."""

    what: Pass
    microbatch: int
    chunk: int


class MessagePost(NamedTuple):
    """Start sends and receives; if `blocking`, wait until all are done."""

    sends: Messages
    receives: Messages
    blocking: bool


class Wait(NamedTuple):
    """Wait until these messages, posted earlier, are done."""

    sends: Messages
    receives: Messages


Operation = Compute | MessagePost | Wait


@dataclass(frozen=True)
class Pipeline:
    """One pipeline and its schedule. `group`: contiguous microbatches of a chunk, 0 for one per rank. Raises
    ConfigError for sizes that the framework refuses."""

    schedule: PipelineSchedule
    ranks: int
    microbatches: int
    chunks: int = 1
    group: int = 0
    overlap: bool = False

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("microbatches", 1), ("chunks", 1), ("group", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}: expected an integer >= {least}, found {value!r}")
        if self.schedule is PipelineSchedule.INTERLEAVED:
            self._check_chunks()
        elif self.chunks != 1 or self.group or self.overlap:
            raise ConfigError(f"chunks, group, overlap: without effect in the schedule {self.schedule.value}")
        elif self.schedule is PipelineSchedule.CHIMERA and self.ranks % 2:
            raise ConfigError(f"chimera: expected an even number of ranks, found {self.ranks}")

    def _check_chunks(self) -> None:
        if self.chunks < 2 or self.ranks < 2:
            raise ConfigError(
                f"interleaved: expected at least 2 chunks and 2 ranks, found {self.chunks} and {self.ranks}; "
                "use 1f1b for fewer"
            )
        if not self.ranks <= self.grouped <= self.microbatches:
            raise ConfigError(
                f"group: expected from ranks ({self.ranks}) to microbatches ({self.microbatches}), found {self.grouped}"
            )
        rest = self.microbatches % self.grouped
        if 0 < rest < self.ranks:
            raise ConfigError(
                f"microbatches: expected a multiple of group ({self.grouped}), or a rest of at least ranks "
                f"({self.ranks}), found {self.microbatches}, rest {rest}"
            )

    @property
    def grouped(self) -> int:
        """Contiguous microbatches of a chunk."""
        return self.group or self.ranks

    @property
    def virtual_stages(self) -> int:
        """Stages of the model, on all ranks: a rank has as many as it has chunks."""
        return self.ranks * self.chunks

    def upward(self, microbatch: int) -> bool:
        """Whether it begins on the last rank: of chimera, the second half of as many as there are ranks."""
        if self.schedule is not PipelineSchedule.CHIMERA:
            return False
        unit, place = divmod(microbatch, self.ranks)
        return place >= (min(self.ranks, self.microbatches - unit * self.ranks) + 1) // 2

    @property
    def messages(self) -> int:
        """The bound of message numbers."""
        return 2 * self.virtual_stages * self.microbatches

    def activation(self, stage: int, microbatch: int) -> int:
        """The message from `stage` to the one after it."""
        return 2 * stage * self.microbatches + microbatch

    def gradient(self, stage: int, microbatch: int) -> int:
        """The message from `stage` to the one before it."""
        return (2 * stage + 1) * self.microbatches + microbatch


def post_blocking(sends: Messages, receives: Messages) -> Iterator[Operation]:
    """One blocking post of both; nothing if both are empty."""
    if sends or receives:
        yield MessagePost(sends, receives, True)
