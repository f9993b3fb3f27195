"""The sizes of the parts of a segment, from which its file is allocated and each part of a slot is found.

Invariant: every part is whole pages, so that each can be mapped, freed and moved separately.

In: what a rank captures, in bytes. Out: `Shape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..intake import Count, Word
from .slots import SLOTS

PAGE = 4096


@dataclass(frozen=True)
class Shape:
    """What a segment has to hold, in bytes per slot."""

    nbytes: Count  # captured tensors, and the parity behind them
    small_nbytes: Count  # reserved for small state
    buckets: Count
    layout: Word  # digest of the layout: different layouts of one size do not share a segment
    slots: Count = SLOTS
    parity_nbytes: Count = 0  # of `nbytes`, at the end
    checks: Count = 0  # digests of the parity's sources

    @cached_property
    def data_nbytes(self) -> int:
        """Bytes of captured tensors."""
        return self.nbytes - self.parity_nbytes

    @cached_property
    def digests(self) -> int:
        """Entries of the digest table."""
        return self.buckets + self.checks

    @cached_property
    def table_room(self) -> int:
        return pages(8 * self.digests)

    @cached_property
    def small_room(self) -> int:
        return pages(self.small_nbytes)

    @cached_property
    def ranges_room(self) -> int:
        return pages(16 * self.buckets)

    @cached_property
    def slot_room(self) -> int:
        """Bytes of one slot: what is captured, its digests and small state, and the slot's header, in whole pages."""
        return PAGE + self.table_room + self.small_room + pages(self.nbytes)

    @cached_property
    def total(self) -> int:
        """Bytes of the file."""
        return PAGE + self.ranges_room + self.slots * self.slot_room


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
