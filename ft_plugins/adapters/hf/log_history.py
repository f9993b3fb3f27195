"""The log history of a Trainer as bytes, without encoding all of it again in every iteration.

Invariant: after `write(read())` the history is what it was, also if callbacks have trimmed or edited it. What is not
captured is named: values that cannot be encoded, and the oldest entries of one that outgrows its room; so is an entry
that was edited when many newer ones had come, which is captured some iterations later. Times and rates,
which differ from run to run, are kept apart from what must not.

In: `TrainerState.log_history`. Out: values for the codec, and back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgpack

from ...errors import InventoryError
from ...events import say
from ...model.digest import WALL_TIMES
from ...snapshot.capture import codec

_ENTRY, _EVALUATION = 256, 2048  # bytes of an entry, as expected; of one of an evaluation, with its metrics
_LEAST = 256 << 10  # bytes for entries that the script logs itself
_COMPARED = 1024  # of the newest entries, and of older ones in turn, in each iteration
_EDITED = f"log_history: entries that are edited when more than {_COMPARED} newer ones have come"
_TIMES = ("_runtime", "_per_second", "_time")  # ends of the keys of times


class LogHistory:
    """The history of one Trainer, as far as it is encoded, within `room` bytes. `speaks`: whether this rank prints."""

    def __init__(self, room: int = 1 << 62, speaks: bool = True) -> None:
        self._room, self._speaks = room, speaks
        self._objects: list[Mapping[str, Any]] = []  # the entries that are encoded
        self._known: list[Mapping[str, Any]] = []  # copies of them
        self._packed_entries: list[tuple[bytes, bytes]] = []  # each without its times, and these
        self._oldest, self._nbytes = 0, 0  # the first entry that the room is enough for, and the bytes from there on
        self._joined = (0, 0, b"", b"")  # from which entry to which one
        self._looked = 0  # the first of the older entries that are compared next
        self._named: set[str] = set()  # what is not captured

    def read(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The history as values for the codec."""
        self._forget(self._first_difference(history))
        for entry in history[len(self._known) :]:
            times = {key: value for key, value in entry.items() if key.endswith(_TIMES)}
            self._objects.append(entry)
            self._known.append(copy.deepcopy(dict(entry)))
            others = {key: value for key, value in entry.items() if key not in times}
            self._packed_entries.append((self._packed(others), self._packed(times)))
            self._nbytes += sum(map(len, self._packed_entries[-1]))
        self._leave_out()
        return dict(zip(("entries", WALL_TIMES), self._all(), strict=True))

    def _forget(self, first: int) -> None:
        """What is encoded from the entry `first` on."""
        if first < len(self._known):
            for each in (self._objects, self._known, self._packed_entries):
                del each[first:]  # type: ignore[attr-defined]
            self._oldest, self._nbytes = 0, sum(len(entry) + len(times) for entry, times in self._packed_entries)
            self._joined = (0, 0, b"", b"")

    def _first_difference(self, history: Sequence[Mapping[str, Any]]) -> int:
        """How many entries from the first on are as they were: the same objects, of which the newest, and some of the
        older ones in turn, are compared by what they hold."""
        known = len(self._known)
        if not _same(history[:known], self._objects):  # by identity, unless one is another object
            return _first_difference(self._known, history)
        newest = max(0, known - _COMPARED)
        first = self._looked if self._looked < newest else 0
        self._looked = min(first + _COMPARED, newest)
        for number in (*range(first, self._looked), *range(newest, known)):
            if not _same(self._known[number], history[number]):
                if number < newest:
                    self._name(_EDITED, _EDITED, "captured some iterations later")
                return number
        return known

    def write(self, saved: Mapping[str, Any], history: list[dict[str, Any]]) -> None:
        """Make `history` the saved one, in place."""
        self._forget(0)  # what is equal may be encoded otherwise
        pairs = zip(_unpacked(saved["entries"]), _unpacked(saved[WALL_TIMES]), strict=True)
        history[:] = [{**entry, **times} for entry, times in pairs]

    def _leave_out(self) -> None:
        """The oldest entries for which the room is not enough."""
        while self._nbytes > self._room:
            self._nbytes -= sum(map(len, self._packed_entries[self._oldest]))
            self._oldest += 1
        if self._oldest:
            self._name("", f"log_history has outgrown the {self._room} bytes that are reserved: its oldest entries")

    def _all(self) -> tuple[bytes, bytes]:
        first, end, entries, times = self._joined
        if first != self._oldest:
            end, entries, times = self._oldest, b"", b""
        if new := self._packed_entries[end:]:
            entries = b"".join((entries, *(entry for entry, _ in new)))
            times = b"".join((times, *(its for _, its in new)))
        self._joined = self._oldest, len(self._packed_entries), entries, times
        return entries, times

    def _packed(self, entry: Mapping[str, Any]) -> bytes:
        try:
            encoded = codec.encode(dict(entry))
        except InventoryError:
            encoded = codec.encode({key: one for key, one in entry.items() if self._is_plain(key, one)})
        return bytes(msgpack.packb(encoded))

    def _is_plain(self, key: str, value: Any) -> bool:
        try:
            codec.encode(value)
        except InventoryError as error:
            self._name(key, f"log_history: values of '{key}' ({error})")
            return False
        return True

    def _name(self, key: str, what: str, fate: str = "not captured, and missing after a restart") -> None:
        if key not in self._named and self._speaks:
            say(f"{what} are {fate}", alarm=True)
        self._named.add(key)


def expected_bytes(steps: int, logging_steps: float, eval_steps: float | None) -> int:
    """The bytes that the history of a whole run is expected to have."""
    evaluations = 0 if not eval_steps else int(steps / max(1.0, eval_steps))
    return _LEAST + int(steps / max(1.0, logging_steps)) * _ENTRY + evaluations * _EVALUATION


def _first_difference(known: list[Mapping[str, Any]], history: Sequence[Mapping[str, Any]]) -> int:
    """How many entries from the first on are as they were."""
    if _same(known, history[: len(known)]):
        return len(known)
    return next((n for n, pair in enumerate(zip(known, history, strict=False)) if not _same(*pair)), len(history))


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays and tensors
        return False


def _unpacked(packed: bytes) -> Iterator[dict[str, Any]]:
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(packed)
    for entry in unpacker:
        yield codec.decode(entry)
