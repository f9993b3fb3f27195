"""The progress words of a rank: what it does, since when, and how long its iterations took, in shared memory.

They lie in the header page of the rank's segment, after the gate, without digests:

    0        iteration (32) | edges in it, but those of long phases (24) | phase (8)
    1, 2     edge, since
    3        token (32) | done (32)
    4        limit
    5        ranks of the job (32) | of the node (16) | stage (15) | shared (1)
    6, 7     longest, first
    8 .. 23  seconds (32) | computed (32)

`edge`: when the last edge was. `since`: when the rank began, completed its last iteration or left a long phase, the
latest of these. Both in nanoseconds of CLOCK_MONOTONIC, which is common to all processes of a machine. `done`:
iterations completed in this incarnation. `limit`: that of the job in nanoseconds, 0 for none, AUTOMATIC. `shared`: the
forward of a microbatch holds collectives. `longest`, `first`: nanoseconds of the longest iteration after the first, and
of the first. Edges into long phases, and out of a save, are not counted: one rank alone may evaluate or save, and ranks
are compared by their edges. The rest is a ring: microseconds of the last KEPT iterations after the first, and those of
them in which the rank computed; long phases are left out of all of them.

Invariant: each word is one store of 8 bytes, so none is torn; words of two neighbouring edges may be read together,
which changes no decision, because decisions are about seconds and are made again. A word of zero is none: the segments
of earlier versions have only such. A rank writes a token when everything else has been written, so words under another
token are those of an earlier incarnation. Writing never raises.

In: the edges of one rank. Out: words; `read` returns `RankProgress`, None if there are no words of this incarnation.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...model.progress import COMPUTING, LONG, WorkPhase
from .header import PROGRESS
from .shape import PAGE

KEPT = 16
AUTOMATIC = (1 << 64) - 1  # as a limit: to be derived from the iterations
_PLACE, _EDGE, _SINCE, _RUN, _LIMIT, _FACTS, _LONGEST, _FIRST, _RING = range(9)
WORDS = _RING + KEPT
_COMPUTES = tuple(number in COMPUTING for number in range(64))
_HALF = (1 << 32) - 1
_EDGES = (1 << 24) - 1
_SAVING = int(WorkPhase.SAVING)


@dataclass(frozen=True)
class ProgressFacts:
    """What does not change. `limit_seconds`: None for automatic, 0 for none."""

    token: int
    limit_seconds: float | None
    stage: int
    ranks: int
    ranks_of_node: int


@dataclass(frozen=True)
class RankProgress:
    """The words of one rank, times in seconds (monotonic). `done`: iterations completed in this incarnation.
    `seconds` and `computed`: of its last iterations after the first, the oldest first."""

    rank: int
    iteration: int
    edges: int
    phase: WorkPhase
    edge_at: float
    since: float
    done: int
    limit_seconds: float | None
    stage: int
    ranks: int
    ranks_of_node: int
    shared: bool
    longest: float = 0.0
    first: float = 0.0
    seconds: tuple[float, ...] = ()
    computed: tuple[float, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether other ranks can keep this one from its next edge."""
        return self.phase.sharded_waits if self.shared else self.phase.waits


class ProgressWriter:
    """Writes the words of this rank, from its training thread alone. A `model.progress.ProgressReceiver`."""

    def __init__(self, path: Path, facts: ProgressFacts) -> None:
        """`path`: the rank's segment, whose first page is mapped until `close`. Raises OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._page = mmap.mmap(descriptor, PAGE)
        finally:
            os.close(descriptor)
        self._words = words = memoryview(self._page)[PROGRESS : PROGRESS + 8 * WORDS].cast("Q")
        words[_RUN] = 0
        now = time.monotonic_ns()
        self._done, self._iteration, self._count = 0, 0, 0
        self._phase, self._at, self._began = WorkPhase.STARTING, now, now
        self._computed = self._left_out = self._longest = 0
        self.long_phases = 0  # a bit for each that has been
        for place in range(_LONGEST, WORDS):
            words[place] = 0
        limit = facts.limit_seconds
        words[_LIMIT] = AUTOMATIC if limit is None else min(round(limit * 1e9), AUTOMATIC - 1)
        words[_FACTS] = (
            (facts.ranks & _HALF) << 32 | min(facts.ranks_of_node, 0xFFFF) << 16 | min(facts.stage, 0x7FFF) << 1
        )
        words[_SINCE] = words[_EDGE] = now
        words[_PLACE] = int(WorkPhase.STARTING)
        self._token = facts.token & _HALF
        words[_RUN] = self._token << 32

    def shares_forward(self) -> None:
        self._words[_FACTS] |= 1

    def edge(self, phase: WorkPhase) -> None:
        now = time.monotonic_ns()
        before = self._phase
        if _COMPUTES[before]:
            self._computed += now - self._at
        elif before >= LONG:
            self.long_phases |= 1 << before
            self._left_out += now - self._at
            self._words[_SINCE] = now
        self._phase, self._at = phase, now
        if phase < LONG and before != _SAVING:
            self._count += 1
        words = self._words
        words[_EDGE] = now
        words[_PLACE] = self._iteration << 32 | (self._count & _EDGES) << 8 | phase

    def begin(self, step: int) -> None:
        if step != self._iteration:
            self._iteration, self._count = step & _HALF, 0
        self.edge(WorkPhase.DATA)
        if not self._done:
            self._began, self._left_out, self._computed = self._at, 0, 0

    def end(self, step: int) -> None:
        self.edge(WorkPhase.BETWEEN)
        words, now = self._words, self._at
        took = now - self._began - self._left_out
        if not self._done:
            words[_FIRST] = took
        else:
            if took > self._longest:
                self._longest = words[_LONGEST] = took
            micros, computed = took // 1000, self._computed // 1000
            if micros > _HALF:  # over an hour
                micros, computed = _HALF, computed * _HALF // micros
            words[_RING + (self._done - 1) % KEPT] = micros << 32 | computed
        self._began, self._left_out, self._computed = now, 0, 0
        words[_SINCE] = now
        self._done += 1
        words[_RUN] = self._token << 32 | (self._done & _HALF)

    def close(self) -> None:
        """The orderly end of training. Idempotent."""
        if not self._page.closed:
            self.edge(WorkPhase.ENDED)
            self._words.release()
            self._words = memoryview(bytearray(8 * WORDS)).cast("Q")  # edges may still come, and are lost
            self._page.close()


class NoProgress:
    """The progress of a rank without a segment, which is not read."""

    long_phases = 0

    def shares_forward(self) -> None:
        pass

    def edge(self, phase: WorkPhase) -> None:
        pass

    def begin(self, step: int) -> None:
        pass

    def end(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def read(rank: int, token: int, page: npt.NDArray[np.uint8]) -> RankProgress | None:
    """The words in the header page of a rank's segment; None unless they are of the incarnation with `token`."""
    words = page[PROGRESS : PROGRESS + 8 * WORDS].view(np.uint64).tolist()
    run, place, facts = words[_RUN], words[_PLACE], words[_FACTS]
    if not run or run >> 32 != token & _HALF:
        return None
    try:
        phase = WorkPhase(place & 0xFF)
    except ValueError:  # not written by this version
        return None
    done, limit = run & _HALF, words[_LIMIT]
    ring = words[_RING:]
    first = max(0, done - 1 - KEPT)
    ordered = [ring[number % KEPT] for number in range(first, max(0, done - 1))]
    return RankProgress(
        rank, place >> 32, place >> 8 & _EDGES, phase, words[_EDGE] / 1e9, words[_SINCE] / 1e9, done,
        None if limit == AUTOMATIC else limit / 1e9, facts >> 1 & 0x7FFF, facts >> 32, facts >> 16 & 0xFFFF,
        bool(facts & 1), words[_LONGEST] / 1e9, words[_FIRST] / 1e9, tuple((word >> 32) / 1e6 for word in ordered),
        tuple((word & _HALF) / 1e6 for word in ordered),
    )  # fmt: skip
