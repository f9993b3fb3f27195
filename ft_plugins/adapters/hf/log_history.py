"""The log history of a Trainer as bytes, without encoding all of it again in every iteration.

Invariant: after `write(read())` the history is what it was, also if callbacks have trimmed or edited it. What is not
captured is named: values that cannot be encoded, and the oldest entries of one that outgrows its room. Times and rates,
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
_TIMES = ("_runtime", "_per_second", "_time")  # ends of the keys of times


class LogHistory:
    """The history of one Trainer, as far as it is encoded, within `room` bytes. `speaks`: whether this rank prints."""

    def __init__(self, room: int = 1 << 62, speaks: bool = True) -> None:
        self._room, self._speaks = room, speaks
        self._known: list[Mapping[str, Any]] = []  # copies of the entries that are encoded
        self._entries: list[bytes] = []
        self._times: list[bytes] = []
        self._named: set[str] = set()  # what is not captured

    def read(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The history as values for the codec."""
        first = _first_difference(self._known, history)
        for each in (self._known, self._entries, self._times):
            del each[first:]
        for entry in history[first:]:
            times = {key: value for key, value in entry.items() if key.endswith(_TIMES)}
            self._known.append(copy.deepcopy(dict(entry)))
            self._entries.append(self._packed({key: value for key, value in entry.items() if key not in times}))
            self._times.append(self._packed(times))
        oldest = self._oldest()
        return {"entries": b"".join(self._entries[oldest:]), WALL_TIMES: b"".join(self._times[oldest:])}

    def write(self, saved: Mapping[str, Any], history: list[dict[str, Any]]) -> None:
        """Make `history` the saved one, in place."""
        self._known.clear()  # what is equal may be encoded otherwise
        pairs = zip(_unpacked(saved["entries"]), _unpacked(saved[WALL_TIMES]), strict=True)
        history[:] = [{**entry, **times} for entry, times in pairs]

    def _oldest(self) -> int:
        """The first entry that the room is enough for."""
        nbytes, oldest = sum(map(len, self._entries)) + sum(map(len, self._times)), 0
        while nbytes > self._room:
            nbytes -= len(self._entries[oldest]) + len(self._times[oldest])
            oldest += 1
        if oldest:
            self._name("", f"log_history has outgrown the {self._room} bytes that are reserved: its oldest entries")
        return oldest

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

    def _name(self, key: str, what: str) -> None:
        if key not in self._named and self._speaks:
            say(f"{what} are not captured, and missing after a restart", alarm=True)
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
