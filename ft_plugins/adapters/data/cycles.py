"""Go on with the passes over a loader after a restore, and draw what the run that was not restored draws.

Megatron's `--dataloader-type cyclic` begins a pass when its first batch is read, in the middle of training. torch then
draws a number from the process's generator for the seeds of workers: in each pass, or where workers persist in the
first one. A loader that was read before the restore goes on without, in the middle of a pass or where workers persist.

In: the function that repeats a loader, the loader. Out: its batches; which loaders have been read, as plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..rng import process_state, set_process_state

Cycle = Callable[[Any], Iterator[Any]]
_MOST = 16  # loaders, each with a place of its own: a version's room for them does not grow
ALL_READ = _MOST * b"\1"


class Cycles:
    """The repeated loaders of a process, which makes them in the same order in each start."""

    def __init__(self) -> None:
        self._made, self._restored = 0, False
        self._read = bytearray(_MOST)  # by number: since the last start that was not restored

    def read(self) -> bytes:
        """Which have been read, for a version."""
        return bytes(self._read)

    def write(self, read: bytes) -> None:
        """A version was restored; before its loaders are made."""
        self._read[:], self._restored = read, True

    def passes(self, cycle: Cycle, loader: Any) -> Iterator[Any]:
        """`cycle(loader)`, as it goes on. Nothing is looked at before the first batch is read."""
        number, self._made = min(self._made, _MOST - 1), self._made + 1
        return self._passes(number, cycle, loader)

    def _passes(self, number: int, cycle: Cycle, loader: Any) -> Iterator[Any]:
        goes_on = self._restored and self._read[number] and _has_drawn(loader)
        self._read[number] = True
        yield from _without_first_draw(cycle, loader) if goes_on else cycle(loader)


def _has_drawn(loader: Any) -> bool:
    """Of one that was read before: whether its next batch comes without a draw."""
    if getattr(loader, "persistent_workers", False):
        return True
    sampler = getattr(loader, "batch_sampler", None)
    whole = getattr(sampler, "total_samples", 0) - getattr(sampler, "last_batch_size", 0)
    return whole > 0 and getattr(sampler, "consumed_samples", 0) % whole > 0


def _without_first_draw(cycle: Cycle, loader: Any) -> Iterator[Any]:
    before = process_state()
    first = iter(loader)
    set_process_state(before)
    yield from first
    yield from cycle(loader)
