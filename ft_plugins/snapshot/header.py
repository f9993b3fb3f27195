"""The header page of a segment, and the digest by which each group of its words is checked.

Invariant: a value that does not match its digest is not used, and damage to one group leaves the others valid. Any
process may die between two stores: a death at any instruction leaves the old values or the new ones.

    constants   sizes, rank, size of the job, fingerprint: one digest, written at creation. Damaged: the segment is lost
    word        one store: the value in its low half, a digest of it in its high half
    record      a few words that only the SMP writes: two copies, each with a number and a digest, written one after
                the other. A reader takes the newer copy that matches, so damage to one copy changes nothing
    ranges      the digest of the bucket ranges in the next pages, written after them
    gate        not covered: see `bubbles.gate`

In: a mapped page. Out: values, or None where they do not match their digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import CorruptHeaderError, SegmentError
from .shape import PAGE, Shape

MAGIC = int.from_bytes(b"FTPSEG05", "little")
GATE = 512  # offset in the page: closed as it is created, of zeros
_FINGERPRINT = 1024  # offset in the page: length, then JSON
FINGERPRINT_ROOM = PAGE - _FINGERPRINT - 8
_CONSTANTS = (  # the words behind the magic
    "nbytes", "small_nbytes", "buckets", "layout", "slots", "parity_nbytes", "checks", "rank", "world_size",
)  # fmt: skip
_SEAL = 1 + len(_CONSTANTS)
_COMPLETED, _RANGES = _SEAL + 1, _SEAL + 2
_RECORDS = _SEAL + 3
_LIMIT = 1 << 32  # of a value that shares a word with its digest
_READS = 8  # of a record: its writer was at one copy, then at the other

Words = npt.NDArray[np.uint64]


def guarded(value: int, seed: int) -> int:
    """A word that holds `value` and its digest; `seed` is that of its place. Raises SegmentError beyond 32 bits."""
    if not 0 <= value < _LIMIT:
        raise SegmentError(f"{value} does not fit into a word of a segment; expected less than {_LIMIT}")
    return value | xxhash.xxh32_intdigest(value.to_bytes(4, "little"), seed) << 32


def believed(word: int, seed: int) -> int | None:
    """The value of a word; None where it does not match its digest."""
    value = word & (_LIMIT - 1)
    return value if word == guarded(value, seed) else None


@dataclass(frozen=True)
class Constants:
    """The constants of a segment. `world_size` is 0 where the number of ranks does not matter."""

    shape: Shape
    rank: int
    world_size: int
    fingerprint: bytes  # JSON

    def write(self, page: Words) -> None:
        """Fill the page of a new segment."""
        known = {**vars(self.shape), "rank": self.rank, "world_size": self.world_size}
        page[0] = MAGIC
        page[1:_SEAL] = [known[name] for name in _CONSTANTS]
        text = len(self.fingerprint).to_bytes(8, "little") + self.fingerprint
        page.view(np.uint8)[_FINGERPRINT : _FINGERPRINT + len(text)] = np.frombuffer(text, dtype=np.uint8)
        page[_SEAL] = _digest_of(page)


def encoded(fingerprint: Mapping[str, Any], rank: int) -> bytes:
    """A fingerprint as it is stored in the page. Raises SegmentError when it is too long."""
    text = json.dumps(fingerprint, sort_keys=True).encode()
    if len(text) > FINGERPRINT_ROOM:
        raise SegmentError(f"rank {rank}: the job's fingerprint has {len(text)} bytes; at most {FINGERPRINT_ROOM} fit")
    return text


def constants_of(page: Words, path: object) -> Constants:
    """The constants of a page. Raises CorruptHeaderError where they do not match their digest, SegmentError for a page
    that is not of a segment of this version."""
    fits = int(page[_SEAL]) == _digest_of(page)
    if int(page[0]) != MAGIC and not fits:
        raise SegmentError(
            f"segment {path} was written by another version of ft_plugins or is damaged; 'ft-plugins sweep' removes it"
        )
    if int(page[0]) != MAGIC or not fits:
        raise CorruptHeaderError(f"segment {path}: its header does not match its digest; its content is lost")
    values = dict(zip(_CONSTANTS, page[1:_SEAL].tolist(), strict=True))
    rank, world_size = values.pop("rank"), values.pop("world_size")
    return Constants(Shape(**values), rank, world_size, _text(page)[8:])


def _text(page: Words) -> bytes:
    """Length and JSON of the fingerprint."""
    length = min(int(page[_FINGERPRINT // 8]), FINGERPRINT_ROOM)
    return page.view(np.uint8)[_FINGERPRINT : _FINGERPRINT + 8 + length].tobytes()


def _digest_of(page: Words) -> int:
    digest = xxhash.xxh3_64(page[1:_SEAL].tobytes(), seed=MAGIC)
    digest.update(_text(page))
    return digest.intdigest()


class MirroredRecord:
    """Words that one process writes and any reads: two copies, each of number, values, digest."""

    def __init__(self, page: Words, first: int, values: int) -> None:
        """`values` words from word `first` of the page on; `room` words are taken."""
        self._seed = first
        self._copies = [page[first : first + values + 2], page[first + values + 2 : first + 2 * (values + 2)]]

    @staticmethod
    def room(values: int) -> int:
        return 2 * (values + 2)

    def read(self) -> tuple[int, ...] | None:
        """The values; None where neither copy matches its digest."""
        newest = self._newest()
        return tuple(newest[1:-1]) if newest else None

    def write(self, values: Sequence[int]) -> None:
        """Replace the values, first in the copy that readers do not use, then in the other."""
        newest = self._newest()
        number = (newest[0] + 1 if newest else 1) % (1 << 64)
        words = np.array([number, *values], dtype=np.uint64)
        for copy in self._copies if newest is None or newest != self._fitting(0) else reversed(self._copies):
            copy[:-1] = words
            copy[-1] = self._seal(words)

    def _newest(self) -> list[int] | None:
        for _ in range(_READS):
            fitting = [copy for copy in map(self._fitting, (0, 1)) if copy is not None]
            if fitting:
                return max(fitting)
        return None

    def _fitting(self, place: int) -> list[int] | None:
        words = self._copies[place].copy()  # a writer may be at it
        return words.tolist() if int(words[-1]) == self._seal(words[:-1]) else None

    def _seal(self, words: Words) -> int:
        return xxhash.xxh3_64_intdigest(words.tobytes(), seed=self._seed)


@dataclass(frozen=True)
class Incarnation:
    """Which incarnation may write: its fencing token; pid and start time (clock ticks) of the trainer that attached
    last, 0 for none; whether a trainer of the running incarnation has attached, even if it has ended since."""

    token: int = 0
    owner_pid: int = 0
    owner_started: int = 0
    attached: int = 0


@dataclass(frozen=True)
class Opened:
    """The newest lineage that was opened, 0 before the first; the token under which it was; whether it began without a
    restored version. `lost`: no lineage was opened since this segment replaced a damaged one. `voiding`: older
    versions, which are void after such a beginning, may still be in their slots."""

    lineage: int = 0
    token: int = 0
    from_nothing: int = 0
    lost: int = 0
    voiding: int = 0


class Header:
    """The header page of a mapped segment."""

    def __init__(self, page: Words) -> None:
        self._page = page
        self._incarnation = MirroredRecord(page, _RECORDS, 4)
        self._opened = MirroredRecord(page, _RECORDS + MirroredRecord.room(4), 5)

    def begin(self, lost: bool) -> None:
        """Write the initial values of all that changes, into a page of zeros."""
        self.incarnation = Incarnation()
        self.opened = Opened(lost=int(lost))
        self.completed = 0

    @property
    def incarnation(self) -> Incarnation | None:
        values = self._incarnation.read()
        return None if values is None else Incarnation(*values)

    @incarnation.setter
    def incarnation(self, value: Incarnation) -> None:
        self._incarnation.write(tuple(vars(value).values()))

    @property
    def opened(self) -> Opened | None:
        values = self._opened.read()
        return None if values is None else Opened(*values)

    @opened.setter
    def opened(self, value: Opened) -> None:
        self._opened.write(tuple(vars(value).values()))

    @property
    def completed(self) -> int | None:
        return believed(int(self._page[_COMPLETED]), _COMPLETED)

    @completed.setter
    def completed(self, value: int) -> None:
        self._page[_COMPLETED] = guarded(value, _COMPLETED)

    @property
    def ranges(self) -> int:
        """The digest of the bucket ranges."""
        return int(self._page[_RANGES])

    @ranges.setter
    def ranges(self, value: int) -> None:
        self._page[_RANGES] = value
