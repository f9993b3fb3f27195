"""The ledger of a rank: what each of its iterations read and computed, in its segment, so that it outlives training.

After a restore, iterations that are computed again are compared with what is recorded of them (`judge` in
`recovery.recomputed`). An entry is 18 words in a ring of the last iterations; the first iterations have entries that
are never reused, because a loop that does not continue begins with them.

    0            iteration
    1 ..         one word per digest (`LedgerPart`), then two per number: the low and the high half of a float64

Each word is one store: 32 bits of value in its low half, a digest of them in its high half, which includes the word's
place and the iteration. A word that does not match is not known. So a process may die at any instruction, and an
iteration that is computed again replaces the words one by one, with the same values.

In: words of shared memory. Out: `LedgerEntry`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import xxhash

from .header import checked_value, guarded_word
from .shape import LEDGER_ROOM

_WORDS = 18  # of an entry
FIRST_KEPT = 16  # iterations from the job's first whose entries are never reused
KEPT = LEDGER_ROOM // 8 // _WORDS - FIRST_KEPT - 1  # of the others, the newest; the last entry is no iteration's
_CONDEMNED = (FIRST_KEPT + KEPT) * _WORDS  # a word: the last incarnation ended, because its loop did not continue
_HALF = (1 << 32) - 1


class LedgerPart(IntEnum):
    """What is recorded of an iteration: digests, then numbers."""

    FIRST_READ = 1  # the input of its first forward
    INPUT = 2  # that of all its forwards
    COUNTERS = 3  # the host's counters at the version point
    GROUPS = 4  # the optimizer's parameter groups, with their learning rates
    GENERATORS = 5  # torch's generators at the version point
    OWN = 6  # what the script itself adds to the state
    STATE = 7  # the bytes that this rank captured
    DRAWN = 8  # torch's generator at the fence, after everything that the iteration drew
    SCHEDULE = 9  # schedulers, loss scalers and numbers of the optimizer at the version point
    LIBRARY = 10  # the generators of Python and NumPy at the version point, of which a logger may draw
    GRADIENTS = 11  # a sample of those that the update used, in loops whose loss is not known
    RATE = 12  # the learning rate of the iteration's update
    LOSS = 14
    NORM = 16  # of the gradients

    @property
    def is_number(self) -> bool:
        return self >= LedgerPart.RATE

    @property
    def words(self) -> str:
        """The part's name in messages."""
        return _NAMES[self]


_NAMES = {
    LedgerPart.FIRST_READ: "first batch",
    LedgerPart.INPUT: "batch",
    LedgerPart.COUNTERS: "counters",
    LedgerPart.SCHEDULE: "schedules",
    LedgerPart.GROUPS: "parameter groups",
    LedgerPart.GENERATORS: "random number generators",
    LedgerPart.OWN: "the script's own state",
    LedgerPart.STATE: "captured state",
    LedgerPart.DRAWN: "random numbers drawn",
    LedgerPart.GRADIENTS: "gradients",
    LedgerPart.LIBRARY: "random numbers of Python or NumPy",
    LedgerPart.RATE: "learning rate",
    LedgerPart.LOSS: "loss",
    LedgerPart.NORM: "gradient norm",
}


@dataclass(frozen=True)
class LedgerEntry:
    """What is known of one iteration: digests of 32 bits, and numbers bit for bit."""

    iteration: int
    digests: Mapping[LedgerPart, int] = field(default_factory=dict)
    numbers: Mapping[LedgerPart, float] = field(default_factory=dict)

    def differing(self, other: LedgerEntry) -> tuple[LedgerPart, ...]:
        """The parts that both know and that differ, in the order of `LedgerPart`."""
        ours, theirs = self._comparable, other._comparable
        return tuple(sorted(part for part in ours.keys() & theirs.keys() if ours[part] != theirs[part]))

    @property
    def _comparable(self) -> dict[LedgerPart, object]:
        """A NaN equals the same NaN."""
        return {**self.digests, **{part: _bits(number) for part, number in self.numbers.items()}}


class Ledger:
    """The entries in a mapped segment. One process writes, the rank's trainer."""

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        self._words = words

    def record(self, iteration: int, part: LedgerPart, value: int | float) -> None:
        """Record one part: a digest, of which the low 32 bits are kept, or a number."""
        place = self._place(iteration)
        if self._iteration_at(place) != iteration:
            self._words[place : place + _WORDS] = 0  # parts of the iteration that had this entry
            self._words[place] = guarded_word(iteration & _HALF, place)
        low, high = _bits(float(value)) if part.is_number else (int(value) & _HALF, 0)
        self._words[place + part] = guarded_word(low, _seed(place + part, iteration))
        if part.is_number:
            self._words[place + part + 1] = guarded_word(high, _seed(place + part + 1, iteration))

    def entries(self) -> dict[int, LedgerEntry]:
        return {entry.iteration: entry for entry in self._read()}

    @property
    def condemned(self) -> bool:
        """Whether this rank ended the last incarnation, because its loop did not continue."""
        return bool(checked_value(int(self._words[_CONDEMNED]), _CONDEMNED))

    @condemned.setter
    def condemned(self, value: bool) -> None:
        self._words[_CONDEMNED] = guarded_word(int(value), _CONDEMNED)

    def forget(self, after: int) -> None:
        for place in range(0, _CONDEMNED, _WORDS):
            if (self._iteration_at(place) or 0) > after:
                self._words[place : place + _WORDS] = 0

    def clear(self) -> None:
        """Forget everything: what was recorded is not computed again."""
        self._words[:] = 0

    def _read(self) -> Iterator[LedgerEntry]:
        for place in range(0, _CONDEMNED, _WORDS):
            if self._iteration_at(place) is not None:
                yield self._read_at(place)

    def _read_at(self, place: int) -> LedgerEntry:
        iteration = self._iteration_at(place) or 0
        words = {part: self._value(place + part, iteration) for part in LedgerPart}
        high = {part: self._value(place + part + 1, iteration) for part in LedgerPart if part.is_number}
        digests = {part: word for part, word in words.items() if word is not None and not part.is_number}
        numbers = {
            part: _number(low, upper)
            for part, upper in high.items()
            if upper is not None and (low := words[part]) is not None
        }
        return LedgerEntry(iteration, digests, numbers)

    def _place(self, iteration: int) -> int:
        index = iteration - 1 if iteration <= FIRST_KEPT else FIRST_KEPT + (iteration - 1 - FIRST_KEPT) % KEPT
        return index * _WORDS

    def _iteration_at(self, place: int) -> int | None:
        iteration = checked_value(int(self._words[place]), place)
        return iteration if iteration and self._place(iteration) == place else None

    def _value(self, word: int, iteration: int) -> int | None:
        return checked_value(int(self._words[word]), _seed(word, iteration))


def _seed(word: int, iteration: int) -> int:
    """The seed of a word's digest: a word that an earlier iteration left in the same place is not known."""
    return (word + (iteration << 12)) & _HALF


def _bits(number: float) -> tuple[int, int]:
    low, high = struct.unpack("<II", struct.pack("<d", number))
    return low, high


def _number(low: int, high: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<II", low, high))[0]
    return number


def digest_of(content: bytes | memoryview, seed: int = 0) -> int:
    """A digest of 64 bits."""
    return xxhash.xxh3_64_intdigest(content, seed=seed)
