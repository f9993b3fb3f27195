"""The header of one slot: its state, version and seal; cursor, pins and mark. Any process may die between two stores.

Invariant: the header is the truth about its slot. It says DIRTY before the first byte of the slot changes, and CLEAN
only after everything else is in place, with a seal over version, digests and small state written last. So a process
that dies at any instruction leaves the old version or none, never a torn one. A header that does not match its seal is
read as DIRTY, and as damaged where no writer can have left it so.

    words   state | lineage | iteration | token | small size | seal | cursor | pins | mark, 8 bytes each

State, cursor and pins carry a digest of their own value, and "never used" is one of the states, so zeros, as a lost
page reads, mean nothing. The seal of a DIRTY slot covers the version that is being written, that of a CLEAN slot all of
it. A mark belongs to one seal: it is not valid for any later version in the slot.

In: the words of a mapped slot. Out: `Slot`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from .header import believed, guarded
from .slots import Mark, Pin, Slot, SlotState, Version, check_transition

# Words of the header, each 8 bytes: a store of one is indivisible.
_WORDS = ("state", "lineage", "iteration", "token", "small", "seal", "cursor", "pins", "mark")
_STATE, _LINEAGE, _ITERATION, _TOKEN, _SMALL, _SEAL, _CURSOR, _PINS, _MARK = range(len(_WORDS))
_SEALED = slice(_STATE, _SEAL + 1)  # behind the state all zeros: never used
STATES = {guarded(state, _STATE): state for state in SlotState}
STATE_WORDS = {state: word for word, state in STATES.items()}
_NO_CURSOR = 2**32 - 1
HEADER_BYTES = 8 * len(_WORDS)

Words = npt.NDArray[np.uint64]


class SlotHeader:
    """The mapped header of a slot."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def read(self, index: int, digests: Words, small: npt.NDArray[np.uint8]) -> Slot:
        """The slot as its header describes it; DIRTY where the seal does not match. `small` is the room of the small
        state."""
        pins, record = self.pins, self._record()
        word, lineage, iteration, token, length, seal = record
        version = Version(lineage, iteration) if lineage or iteration else None
        match _state_of(record):
            case SlotState.EMPTY:
                return Slot(index, SlotState.EMPTY, None, 0, pins)
            case SlotState.CLEAN:
                held = small[: min(length, len(small))].tobytes()
                if seal == _seal_of_clean(record[1:-1], digests, held):
                    return Slot(index, SlotState.CLEAN, version, token, pins, self._mark())
        if word == STATE_WORDS[SlotState.DIRTY]:  # its writer may have died before it recorded the version
            fits = seal == _seal_of_dirty(lineage, iteration, token)
            return Slot(index, SlotState.DIRTY, version if fits else None, token, pins)
        begun = self._record()[0] == STATE_WORDS[SlotState.DIRTY]  # a writer began while the slot was read
        return Slot(index, SlotState.DIRTY, None, 0, pins, damaged=not begun)

    def _record(self) -> list[int]:
        """State, lineage, iteration, token, small size and seal."""
        return [int(word) for word in self._words[_SEALED]]

    def dirty(self, before: SlotState, version: Version | None, token: int) -> None:
        """Nothing in the slot can be restored from now on; `version` is about to be written, None for none."""
        check_transition(before, SlotState.DIRTY)
        words = self._words
        lineage, iteration = (version.lineage, version.iteration) if version else (0, 0)
        words[_STATE] = STATE_WORDS[SlotState.DIRTY]
        words[_SEAL] = 0
        words[_LINEAGE], words[_ITERATION], words[_TOKEN] = lineage, iteration, token
        words[_SEAL] = _seal_of_dirty(lineage, iteration, token)

    def seal(self, version: Version, token: int, small: bytes, digests: Words) -> None:
        """Everything of `version` is in place: the slot becomes CLEAN. The last store is the state.

        The seal covers what the writer knows, not what it reads back: whatever a superseded writer has put into header,
        small state or digest table meanwhile does not match it, and the slot is read as DIRTY.
        """
        check_transition(_state_of(self._record()), SlotState.CLEAN)
        known = [version.lineage, version.iteration, token, len(small)]
        self._words[_SEAL] = _seal_of_clean(known, digests, small)
        self._words[_STATE] = STATE_WORDS[SlotState.CLEAN]

    @property
    def small_bytes(self) -> int:
        """Bytes of the small state."""
        return int(self._words[_SMALL])

    @small_bytes.setter
    def small_bytes(self, value: int) -> None:
        self._words[_SMALL] = value

    @property
    def cursor(self) -> int | None:
        """The bucket that was being written at the last bucket edge; None for none."""
        value = believed(int(self._words[_CURSOR]), _CURSOR)
        return None if value == _NO_CURSOR else value

    @cursor.setter
    def cursor(self, bucket: int | None) -> None:
        self._words[_CURSOR] = guarded(_NO_CURSOR if bucket is None else bucket, _CURSOR)

    @property
    def pins(self) -> Pin:
        """What the slot is pinned for; nothing where the word does not match its digest: a node that relies on the slot
        checks whether it is still there."""
        return Pin(believed(int(self._words[_PINS]), _PINS) or 0)

    @pins.setter
    def pins(self, pins: Pin) -> None:
        self._words[_PINS] = guarded(int(pins) & 0xFF, _PINS)

    def _mark(self) -> Mark:
        """The mark that was set for what is sealed now; one of an earlier version does not match."""
        word, seal = int(self._words[_MARK]), int(self._words[_SEAL])
        return next((mark for mark in Mark if word and word == _marked(seal, mark)), Mark.NONE)

    def mark(self, mark: Mark) -> None:
        """Record `mark` for what is sealed now, in one store."""
        self._words[_MARK] = _marked(int(self._words[_SEAL]), mark)


def _state_of(record: Sequence[int]) -> SlotState:
    """The state that a record names; DIRTY where it names none, or an impossible one."""
    state = STATES.get(record[_STATE], SlotState.DIRTY)
    return SlotState.DIRTY if state is SlotState.EMPTY and any(record[1:]) else state


def _marked(seal: int, mark: Mark) -> int:
    """The word for `mark` of what has that seal; with any other seal, or a bit flipped, it is no mark."""
    return xxhash.xxh3_64_intdigest(seal.to_bytes(8, "little") + bytes([mark]))


def _seal_of_clean(known: Sequence[int], digests: Words, small: bytes) -> int:
    """Digest of `known` (lineage, iteration, token, small size), digest table and small state."""
    digest = xxhash.xxh3_64(np.array(known, dtype=np.uint64).tobytes())
    digest.update(digests.tobytes())
    digest.update(small)
    return digest.intdigest()


def _seal_of_dirty(lineage: int, iteration: int, token: int) -> int:
    """Digest of what a DIRTY slot is to hold; never equal to one of `_seal_of_clean`."""
    words = np.array([lineage, iteration, token], dtype=np.uint64)
    return xxhash.xxh3_64_intdigest(words.tobytes(), seed=SlotState.DIRTY)
