"""The header of one slot: state, version, seal, cursor, pins and mark. Any process may die between two stores.

Invariant: the header becomes DIRTY before the first byte of the slot changes, and CLEAN only after everything else is
in place; the seal covers version, digests and small state. So a process that dies at any instruction leaves the old
version or none, never a torn one. A header that does not match its seal is read as DIRTY, and as damaged if no writer
can have left it so.

    words   state | lineage | iteration | token | small size | seal | cursor | pins | mark, 8 bytes each

State, cursor and pins carry a digest of their own value, and EMPTY is not zero, so a lost page, which reads as zeros,
is never taken for a slot. The seal of a DIRTY slot covers the version that is being written, the seal of a CLEAN slot
everything. A mark belongs to one seal and is not valid for a later version in the slot.

In: the words of a mapped slot. Out: `Slot`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from .header import checked_value, guarded_word
from .slots import Mark, Pin, Slot, SlotState, Version, check_transition

# The words of the header, 8 bytes each: storing one is atomic.
_WORDS = ("state", "lineage", "iteration", "token", "small", "seal", "cursor", "pins", "mark")
_STATE, _LINEAGE, _ITERATION, _TOKEN, _SMALL, _SEAL, _CURSOR, _PINS, _MARK = range(len(_WORDS))
_RECORD = slice(_STATE, _SEAL + 1)  # all zeros after the state if the slot was never used
STATES = {guarded_word(state, _STATE): state for state in SlotState}
STATE_WORDS = {state: word for word, state in STATES.items()}
_UNUSED = (SlotState.EMPTY, SlotState.UNCLAIMED)
_NO_CURSOR = 2**32 - 1
HEADER_BYTES = 8 * len(_WORDS)

Words = npt.NDArray[np.uint64]


class SlotHeader:
    """The mapped header of a slot."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def read(self, index: int, digests: Words, small: npt.NDArray[np.uint8]) -> Slot:
        """The slot as its header describes it; DIRTY if the seal does not match. `small` is the area of its small
        state."""
        pins, record = self.pins, self._record()
        word, lineage, iteration, token, length, seal = record
        version = Version(lineage, iteration) if lineage or iteration else None
        match _state_of(record):
            case SlotState.EMPTY | SlotState.UNCLAIMED as unused:
                return Slot(index, unused, None, 0, pins)
            case SlotState.CLEAN:
                state = small[: min(length, len(small))].tobytes()
                if seal == _seal_of_clean(record[1:-1], digests, state):
                    return Slot(index, SlotState.CLEAN, version, token, pins, self._mark())
        if word == STATE_WORDS[SlotState.DIRTY]:  # its writer may have died before recording the version
            fits = seal == _seal_of_dirty(lineage, iteration, token)
            return Slot(index, SlotState.DIRTY, version if fits else None, token, pins)
        being_written = self._record()[0] == STATE_WORDS[SlotState.DIRTY]  # since the slot was read
        return Slot(index, SlotState.DIRTY, None, 0, pins, damaged=not being_written)

    def _record(self) -> list[int]:
        """State, lineage, iteration, token, small size and seal."""
        return [int(word) for word in self._words[_RECORD]]

    @property
    def unclaimed(self) -> bool:
        """Whether the slot has no memory but this header."""
        return _state_of(self._record()) is SlotState.UNCLAIMED

    def claim(self) -> None:
        """The slot has memory now."""
        check_transition(_state_of(self._record()), SlotState.EMPTY)
        self._words[_STATE] = STATE_WORDS[SlotState.EMPTY]

    def dirty(self, before: SlotState, version: Version | None, token: int) -> None:
        """Make the slot DIRTY: nothing in it can be restored. `version` is about to be written, None for none."""
        check_transition(before, SlotState.DIRTY)
        words = self._words
        lineage, iteration = (version.lineage, version.iteration) if version else (0, 0)
        words[_STATE] = STATE_WORDS[SlotState.DIRTY]
        words[_SEAL] = 0
        words[_LINEAGE], words[_ITERATION], words[_TOKEN] = lineage, iteration, token
        words[_SEAL] = _seal_of_dirty(lineage, iteration, token)

    def seal(self, version: Version, token: int, small: bytes, digests: Words) -> None:
        """Make the slot CLEAN: everything of `version` is in place. The last store is the state.

        The seal covers the values that the writer knows, not what it reads back. If a superseded writer has changed
        header, small state or digest table meanwhile, the seal does not match and the slot is read as DIRTY.
        """
        check_transition(_state_of(self._record()), SlotState.CLEAN)
        known = [version.lineage, version.iteration, token, len(small)]
        self._words[_SEAL] = _seal_of_clean(known, digests, small)
        self._words[_STATE] = STATE_WORDS[SlotState.CLEAN]

    @property
    def small_bytes(self) -> int:
        return int(self._words[_SMALL])

    @small_bytes.setter
    def small_bytes(self, value: int) -> None:
        self._words[_SMALL] = value

    @property
    def cursor(self) -> int | None:
        """The bucket being written; None for none."""
        value = checked_value(int(self._words[_CURSOR]), _CURSOR)
        return None if value == _NO_CURSOR else value

    @cursor.setter
    def cursor(self, bucket: int | None) -> None:
        self._words[_CURSOR] = guarded_word(_NO_CURSOR if bucket is None else bucket, _CURSOR)

    @property
    def pins(self) -> Pin:
        """What the slot is pinned for; nothing if the word does not match its digest, since a node that relies on the
        slot checks that it is still there."""
        return Pin(checked_value(int(self._words[_PINS]), _PINS) or 0)

    @pins.setter
    def pins(self, pins: Pin) -> None:
        self._words[_PINS] = guarded_word(int(pins) & 0xFF, _PINS)

    def _mark(self) -> Mark:
        """The mark of the sealed version; a mark of an earlier version does not match."""
        word, seal = int(self._words[_MARK]), int(self._words[_SEAL])
        return next((mark for mark in Mark if word and word == _marked(seal, mark)), Mark.NONE)

    def mark(self, mark: Mark) -> None:
        """Record `mark` for the sealed version, in one store."""
        self._words[_MARK] = _marked(int(self._words[_SEAL]), mark)


def _state_of(record: Sequence[int]) -> SlotState:
    """The state in a record; DIRTY if it holds none, or an impossible one."""
    state = STATES.get(record[_STATE], SlotState.DIRTY)
    return SlotState.DIRTY if state in _UNUSED and any(record[1:]) else state


def _marked(seal: int, mark: Mark) -> int:
    """The word for `mark` of the version with that seal. With another seal, or a flipped bit, it matches no mark."""
    return xxhash.xxh3_64_intdigest(seal.to_bytes(8, "little") + bytes([mark]))


def _seal_of_clean(known: Sequence[int], digests: Words, small: bytes) -> int:
    """Digest of `known` (lineage, iteration, token, small size), digest table and small state."""
    digest = xxhash.xxh3_64(np.array(known, dtype=np.uint64).tobytes())
    digest.update(digests.tobytes())
    digest.update(small)
    return digest.intdigest()


def _seal_of_dirty(lineage: int, iteration: int, token: int) -> int:
    """Digest of the version that a DIRTY slot will hold; never equal to a digest of `_seal_of_clean`."""
    words = np.array([lineage, iteration, token], dtype=np.uint64)
    return xxhash.xxh3_64_intdigest(words.tobytes(), seed=SlotState.DIRTY)
