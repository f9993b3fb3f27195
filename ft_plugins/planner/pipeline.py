"""One pipeline, and the words in which a schedule is written: passes, posts and waits.

Stages are numbered through the model: stage = chunk x ranks + rank. A message has a number too: (2 x the stage that
makes it + 1 for a gradient) x microbatches + microbatch.

Invariant: a `Pipeline` that exists can be run; what the framework refuses is refused here.

In: sizes. Out: `Pipeline`, read by schedules and simulator; `Compute`, `MessagePost` and `Wait`, a rank's program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..errors import ConfigError

Messages = tuple[int, ...]


class PipelineSchedule(Enum):
    """The order of passes; the value is its name for programs."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    DEEPSPEED = "deepspeed"
    ZERO_BUBBLE = "zero-bubble"


class Pass(Enum):
    """A piece of compute. WEIGHT is the part of a backward pass that a schedule puts off; BACKWARD is then the rest."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"


class Compute(NamedTuple):
    """One pass of one microbatch through one chunk."""

    what: Pass
    microbatch: int
    chunk: int


class MessagePost(NamedTuple):
    """Begin to send and to receive; where `blocking`, go on when all of it is done."""

    sends: Messages
    receives: Messages
    blocking: bool


class Wait(NamedTuple):
    """Go on when these, posted before, are done."""

    sends: Messages
    receives: Messages


Operation = Compute | MessagePost | Wait


@dataclass(frozen=True)
class Pipeline:
    """One pipeline and its schedule. `group`: contiguous microbatches of a chunk, 0 for one each rank. Raises
    ConfigError for what the framework refuses too."""

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

    def _check_chunks(self) -> None:
        if self.chunks < 2 or self.ranks < 2:
            raise ConfigError(
                f"interleaved: expected at least 2 chunks and 2 ranks, found {self.chunks} and {self.ranks}; "
                "with one of either use 1f1b"
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
    def stages(self) -> int:
        """Stages of the model, on all ranks together."""
        return self.ranks * self.chunks

    @property
    def messages(self) -> int:
        """Message numbers are below this."""
        return 2 * self.stages * self.microbatches

    def activation(self, stage: int, microbatch: int) -> int:
        """The message from `stage` to the one after it."""
        return 2 * stage * self.microbatches + microbatch

    def gradient(self, stage: int, microbatch: int) -> int:
        """The message from `stage` to the one before it."""
        return (2 * stage + 1) * self.microbatches + microbatch


def exchange(sends: Messages, receives: Messages) -> Iterator[Operation]:
    """Both at once, blocking; nothing where there is nothing to do."""
    if sends or receives:
        yield MessagePost(sends, receives, True)
