"""The log history of a Trainer as bytes, without encoding all of it again in every iteration.

Invariant: entries are only appended; what is encoded is not looked at again. Times and rates, which differ from run to
run, are kept apart from what must not.

In: `TrainerState.log_history`. Out: values for the codec, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgpack

from ...model.digest import WALL_TIMES
from ...snapshot.capture import codec

_ENTRY, _EVALUATION = 256, 2048  # bytes of an entry, at most; of one of an evaluation, with its metrics
_TIMES = ("_runtime", "_per_second", "_time")  # ends of the keys of times


class LogHistory:
    """The history of one Trainer, as far as it is encoded."""

    def __init__(self) -> None:
        self._known = 0  # entries
        self._entries, self._times = bytearray(), bytearray()

    def read(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The history as values for the codec. Raises InventoryError for an entry that it cannot encode."""
        if len(history) < self._known:
            self.__init__()  # type: ignore[misc]
        for entry in history[self._known :]:
            times = {key: value for key, value in entry.items() if key.endswith(_TIMES)}
            self._entries += _packed({key: value for key, value in entry.items() if key not in times})
            self._times += _packed(times)
        self._known = len(history)
        return {"entries": bytes(self._entries), WALL_TIMES: bytes(self._times)}

    def write(self, saved: Mapping[str, Any], history: list[dict[str, Any]]) -> None:
        """Make `history` the saved one, in place."""
        self.__init__()  # type: ignore[misc]
        pairs = zip(_unpacked(saved["entries"]), _unpacked(saved[WALL_TIMES]), strict=True)
        history[:] = [{**entry, **times} for entry, times in pairs]


def expected_bytes(steps: int, logging_steps: float, eval_steps: float | None) -> int:
    """The bytes that the history of a whole run may have."""
    evaluations = 0 if not eval_steps else int(steps / max(1.0, eval_steps))
    return int(steps / max(1.0, logging_steps)) * _ENTRY + evaluations * _EVALUATION


def _packed(entry: Mapping[str, Any]) -> bytes:
    return bytes(msgpack.packb(codec.encode(dict(entry))))


def _unpacked(packed: bytes) -> Iterator[dict[str, Any]]:
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(packed)
    for entry in unpacker:
        yield codec.decode(entry)
