"""The header page of a segment, with a digest for each group of its words.

Invariant: a value that does not match its digest is not used, and damage to one group leaves the others valid. Any
process may die between two stores; that leaves the old values or the new ones.

    constants   sizes, rank, size of the job, fingerprint: one digest, written at creation. Damaged: the segment is lost
    word        one store: the value in its low half, a digest of it in its high half
    record      a few words that only the SMP writes: two copies, each with a number and a digest, written one after
                the other. A reader takes the newest copy that matches, so damage to one copy does no harm
    ranges      the digest of the bucket ranges in the next pages, written after them
    chosen      a record too, but written by the trainer
    short, held not covered: one store of zero or one, or of END; anything but zero makes readers more careful
    gate        not covered: see `bubbles.gate.gate`
    progress    not covered: see `progress_words`

In: a mapped page. Out: values, or None if they do not match their digests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from ...errors import CorruptHeaderError, SegmentError
from ..schedule import PACKED, ChosenSchedule
from .shape import PAGE, Shape
from .slots import Version

MAGIC = int.from_bytes(b"FTPSEG09", "little")
GATE = 512  # offset in the page; zeros, as at creation, mean closed
PROGRESS = 784  # offset in the page, after the gate and before the fingerprint; zeros, as at creation, mean no words
_FINGERPRINT = 1024  # offset in the page: length, then JSON
FINGERPRINT_ROOM = PAGE - _FINGERPRINT - 8
_CONSTANTS = (  # the words after the magic
    "nbytes", "small_nbytes", "buckets", "layout", "slots", "parity_nbytes", "checks", "free", "first", "rank",
    "world_size",
)  # fmt: skip
_SEAL = 1 + len(_CONSTANTS)
_COMPLETED, _RANGES, _AWAITED, _SHORT = _SEAL + 1, _SEAL + 2, _SEAL + 3, _SEAL + 4
_RECORDS = _SEAL + 5
# zeros: none
_HELD_AT, _HELD, _AGREED, _DOUBTED_FIRST, _DOUBTED_LAST = (GATE // 8 - place for place in (5, 4, 3, 2, 1))
_ENDING, _EXCHANGED_MS, _STORED_MS = (GATE // 8 - place for place in (8, 7, 6))
_ENDED, _PROVING, _VARIES = (_FINGERPRINT // 8 - place for place in (3, 2, 1))
_LIMIT = 1 << 32  # values that share a word with their digest are smaller
_READS = 8  # attempts: a reader may catch the writer first in one copy, then in the other

Words = npt.NDArray[np.uint64]

# values of `Header.ending`: nothing says at which iteration training ends; it is not there; it is there
UNKNOWN, EARLY, AT_END = 0, 1, 2
END = int.from_bytes(b"FTPENDED", "little")  # a value of `Header.held`
OWNER, COMPLETED = "owner", "completed iteration"  # names in `Header.damaged`


def guarded_word(value: int, seed: int) -> int:
    """A word of `value` and its digest; `seed` identifies the word's place. Raises SegmentError beyond 32 bits."""
    if not 0 <= value < _LIMIT:
        raise SegmentError(f"{value} does not fit into a word of a segment; expected less than {_LIMIT}")
    return value | xxhash.xxh32_intdigest(value.to_bytes(4, "little"), seed) << 32


def checked_value(word: int, seed: int) -> int | None:
    """The value of a word; None if it does not match its digest."""
    value = word & (_LIMIT - 1)
    return value if word == guarded_word(value, seed) else None


@dataclass(frozen=True)
class Constants:
    """The constants of a segment. `world_size` is 0 if the number of ranks does not matter."""

    shape: Shape
    rank: int
    world_size: int
    fingerprint: bytes  # JSON

    def write(self, page: Words) -> None:
        values = {**vars(self.shape), "rank": self.rank, "world_size": self.world_size}
        page[0] = MAGIC
        page[1:_SEAL] = [values[name] for name in _CONSTANTS]
        text = len(self.fingerprint).to_bytes(8, "little") + self.fingerprint
        page.view(np.uint8)[_FINGERPRINT : _FINGERPRINT + len(text)] = np.frombuffer(text, dtype=np.uint8)
        page[_SEAL] = _digest_of(page)


def encoded(fingerprint: Mapping[str, Any], rank: int) -> bytes:
    """Encode a fingerprint for the page. Raises SegmentError if it is too long."""
    text = json.dumps(fingerprint, sort_keys=True).encode()
    if len(text) > FINGERPRINT_ROOM:
        raise SegmentError(f"rank {rank}: the job's fingerprint has {len(text)} bytes; at most {FINGERPRINT_ROOM} fit")
    return text


def constants_of(page: Words, path: object) -> Constants:
    """The constants of a page. Raises CorruptHeaderError if they do not match their digest, SegmentError if the page is
    not of a segment of this version."""
    matches = int(page[_SEAL]) == _digest_of(page)
    if int(page[0]) != MAGIC and not matches:
        raise SegmentError(
            f"segment {path} was written by another version of ft_plugins or is damaged; 'ft-plugins sweep' removes it"
        )
    if int(page[0]) != MAGIC or not matches:
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
    """Words that one process writes and any process reads: two copies, each of number, values, digest."""

    def __init__(self, page: Words, first: int, values: int) -> None:
        """A record of `values` values at word `first` of the page; it takes `room(values)` words."""
        self._seed = first
        self._copies = [page[first : first + values + 2], page[first + values + 2 : first + 2 * (values + 2)]]

    @staticmethod
    def room(values: int) -> int:
        return 2 * (values + 2)

    def read(self) -> tuple[int, ...] | None:
        """The values; None if neither copy matches its digest."""
        newest = self._newest()
        return tuple(newest[1:-1]) if newest else None

    def write(self, values: Sequence[int]) -> None:
        """Replace the values, first in the copy that readers do not use, then in the other one."""
        newest = self._newest()
        number = (newest[0] + 1 if newest else 1) % (1 << 64)
        words = np.array([number, *values], dtype=np.uint64)
        for copy in self._copies if newest is None or newest != self._matching(0) else reversed(self._copies):
            copy[:-1] = words
            copy[-1] = self._seal(words)

    def _newest(self) -> list[int] | None:
        for _ in range(_READS):
            matching = [copy for copy in map(self._matching, (0, 1)) if copy is not None]
            if matching:
                return max(matching)
        return None

    def _matching(self, place: int) -> list[int] | None:
        words = self._copies[place].copy()  # a writer may be changing it
        return words.tolist() if int(words[-1]) == self._seal(words[:-1]) else None

    def _seal(self, words: Words) -> int:
        return xxhash.xxh3_64_intdigest(words.tobytes(), seed=self._seed)


@dataclass(frozen=True)
class Incarnation:
    """The incarnation that may write: its fencing token; pid and start time (clock ticks) of the trainer that attached
    last, 0 for none; whether a trainer of the incarnation has attached, even if it has ended since."""

    token: int = 0
    owner_pid: int = 0
    owner_started: int = 0
    attached: int = 0


@dataclass(frozen=True)
class OpenedLineage:
    """The newest lineage that was opened, 0 before the first; the token that opened it; whether it began without a
    restored version (`from_nothing`), which voids all older versions. `voiding`: void versions may still be in their
    slots. `lost`: this segment replaced a damaged one, and no lineage was opened since. `run`: the identity of the run,
    32 hexadecimal digits; '' if unknown."""

    lineage: int = 0
    token: int = 0
    from_nothing: bool = False
    lost: bool = False
    voiding: bool = False
    run: str = ""


T = TypeVar("T")


class HeaderWord(Generic[T]):
    """A word of the page as an attribute of `Header`, with a digest unless it is `bare`. `unknown`: its value if it
    does not match; `kind`: of its values; `least`: a smaller value becomes that, and one too large the largest."""

    def __init__(self, at: int, unknown: T, kind: Callable[[int], T], least: int | None = None, bare: bool = False):
        self._at, self._unknown, self._kind, self._least, self._bare = at, unknown, kind, least, bare

    def __get__(self, header: Header, owner: type[Header]) -> T:
        word = int(header._page[self._at])
        value = word if self._bare else checked_value(word, self._at)
        return self._unknown if value is None else self._kind(value)

    def __set__(self, header: Header, value: T) -> None:
        number = int(value)  # type: ignore[call-overload]
        number = number if self._least is None else min(max(number, self._least), _LIMIT - 1)
        header._page[self._at] = number if self._bare else guarded_word(number, self._at)


class Header:
    """The header page of a mapped segment. What does not match its digest has the value of a new segment, and is in
    `damaged`.

    Written by the SMP:

    held            not 0: this rank waits at the next version that is exchanged, since its node is to leave the job
                    there. END: instead, all ranks of the job end in order after the iteration that this one begins next
    exchanged_ms    milliseconds that the last committed version took from its begin to its commit; 0 if unknown
    stored_ms       milliseconds that the last complete checkpoint took; 0 if unknown
    ranges          the digest of the bucket ranges

    Written by the trainer:

    held_at     the iteration after which this rank waits, because it is held; 0 if it does not wait
    ending      whether training is at its own end, as this rank knew at its last version point: UNKNOWN, EARLY, AT_END
    completed   the last iteration that this rank has completed, in any incarnation; 0 if unknown
    ended       the iteration after which training ended in order last; 0 if it has not
    proving     the iteration of the restored version, if it was to be computed again to prove that the loop goes on
                from it, and was not yet found equal; else 0
    varies      whether an iteration that was computed again has shown that kernels vary: then no restore is proven
    agreed      the last iteration after which the replicas of the job were found to agree; None if that is not known,
                or replicas are not compared
    short       whether memory for another slot was lacking when capture needed it: anything but zero, as at creation
    """

    held = HeaderWord(_HELD, 0, int, bare=True)
    exchanged_ms, stored_ms = HeaderWord(_EXCHANGED_MS, 0, int, least=1), HeaderWord(_STORED_MS, 0, int, least=1)
    ranges = HeaderWord(_RANGES, 0, int, bare=True)
    held_at, ending = HeaderWord(_HELD_AT, 0, int), HeaderWord(_ENDING, UNKNOWN, int)
    completed, ended = HeaderWord(_COMPLETED, 0, int), HeaderWord(_ENDED, 0, int)
    proving, varies = HeaderWord(_PROVING, 0, int), HeaderWord(_VARIES, False, bool)
    agreed = HeaderWord[int | None](_AGREED, None, int)
    short = HeaderWord(_SHORT, False, bool, bare=True)

    def __init__(self, page: Words) -> None:
        self._page = page
        self._incarnation = MirroredRecord(page, _RECORDS, 4)
        self._opened = MirroredRecord(page, _RECORDS + MirroredRecord.room(4), 5)
        self._chosen = MirroredRecord(page, _RECORDS + MirroredRecord.room(4) + MirroredRecord.room(5), PACKED // 8)

    def begin(self, lost: bool) -> None:
        """Write the initial values of everything that changes, into a page of zeros."""
        self._write_incarnation(Incarnation())
        self.opened = OpenedLineage(lost=lost)
        self.completed = 0

    @property
    def damaged(self) -> tuple[str, ...]:
        """The parts that do not match their digests, by name."""
        parts = {OWNER: self._incarnation.read(), "lineage": self._opened.read(), COMPLETED: self._value(_COMPLETED)}
        return tuple(name for name, value in parts.items() if value is None)

    def _value(self, word: int) -> int | None:
        return checked_value(int(self._page[word]), word)

    # ---- the incarnation, written by the SMP ----

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(*(self._incarnation.read() or ()))

    def _write_incarnation(self, value: Incarnation) -> None:
        self._incarnation.write(tuple(vars(value).values()))

    @property
    def token(self) -> int:
        """The fencing token of the incarnation that may write; 0 if unknown."""
        return self.incarnation.token

    @token.setter
    def token(self, value: int) -> None:
        self._write_incarnation(replace(self.incarnation, token=value))

    @property
    def attached(self) -> bool:
        """Whether a trainer of this incarnation has attached, even if it has ended since."""
        return bool(self.incarnation.attached)

    @attached.setter
    def attached(self, value: bool) -> None:
        self._write_incarnation(replace(self.incarnation, attached=int(value)))

    @property
    def owner(self) -> tuple[int, int]:
        """(pid, start time in clock ticks) of the trainer that attached last; (0, 0) for none."""
        incarnation = self.incarnation
        return incarnation.owner_pid, incarnation.owner_started

    @owner.setter
    def owner(self, value: tuple[int, int]) -> None:
        pid, started = value
        self._write_incarnation(replace(self.incarnation, owner_pid=pid, owner_started=started))

    @property
    def opened(self) -> OpenedLineage:
        lineage, token, flags, high, low = self._opened.read() or (0, 0, 0, 0, 0)
        run = f"{high << 64 | low:032x}" if high or low else ""
        return OpenedLineage(lineage, token, bool(flags & 1), bool(flags & 2), bool(flags & 4), run)

    @opened.setter
    def opened(self, value: OpenedLineage) -> None:
        flags, run = value.from_nothing | value.lost << 1 | value.voiding << 2, int(value.run or "0", 16)
        self._opened.write([value.lineage, value.token, flags, run >> 64, run % (1 << 64)])

    def await_version(self, version: Version) -> None:
        """Record, in one store, the version that is exchanged next, whose parity the rank is to compute. Called by the
        SMP alone, once the pins of this segment are as the decision that names it has them. The lineage is part of the
        digest."""
        self._page[_AWAITED] = guarded_word(version.iteration, _seed_of(version.lineage))

    def is_awaited(self, version: Version) -> bool:
        """Whether `version` is exchanged next, as far as this node knows."""
        return int(self._page[_AWAITED]) == guarded_word(version.iteration, _seed_of(version.lineage))

    # ---- words of the rank, written by its trainer ----

    @property
    def chosen(self) -> ChosenSchedule | None:
        """The intervals that the job chose; None if it does not, or if that is not known."""
        words = self._chosen.read()
        return ChosenSchedule.unpack(np.array(words, dtype=np.uint64).tobytes()) if words else None

    @chosen.setter
    def chosen(self, value: ChosenSchedule | None) -> None:
        packed = value.pack() if value else bytes(PACKED)
        self._chosen.write(np.frombuffer(packed, dtype=np.uint64).tolist())

    @property
    def doubted(self) -> tuple[int, int] | None:
        """The first and the last of the iterations after which replicas may have differed; None if there are none."""
        first, last = self._value(_DOUBTED_FIRST), self._value(_DOUBTED_LAST)
        return None if first is None or last is None else (first, last)

    def doubt(self, first: int, last: int) -> None:
        """Add the iterations `first` to `last` to those, and what lies between."""
        known = self.doubted or (first, last)
        for at, one in ((_DOUBTED_FIRST, min(first, known[0])), (_DOUBTED_LAST, max(last, known[1]))):
            self._page[at] = guarded_word(one, at)


def _seed_of(lineage: int) -> int:
    """The seed of the word that names a version of that lineage."""
    return (_AWAITED + len(_CONSTANTS) * lineage) % _LIMIT
