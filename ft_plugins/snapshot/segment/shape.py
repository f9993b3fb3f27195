"""The sizes of a segment and of the areas of its slots.

Invariant: every area is whole pages, so each can be claimed and freed separately. Slots hold captured bytes; the parity
that a rank computes has slots of its own, for as many versions as the node tier keeps, not one in every slot.

In: bytes that a rank captures. Out: `Shape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...base.intake import Count, Word
from .slots import SLOTS

PAGE = 4096
LEDGER_ROOM = 4 * PAGE  # what is known of the rank's last iterations: see `ledger`
PARITY_SLOTS = 2  # the committed version's parity, and that of the version which is exchanged next


@dataclass(frozen=True)
class Shape:
    """What a segment holds, in bytes per slot."""

    nbytes: Count  # captured tensors, then parity: the numbering of buckets and offsets goes through both
    small_nbytes: Count  # reserved for small state
    buckets: Count
    layout: Word  # digest of the layout: different layouts of the same size do not share a segment
    slots: Count = SLOTS
    parity_nbytes: Count = 0  # of `nbytes`, at the end
    checks: Count = 0  # digests of the parity's sources
    free: Count = SLOTS  # of the slots: never pinned
    first: Count = 0  # slots with memory from the start; 0: all

    @property
    def pinned(self) -> int:
        """How many slots hold versions that are pinned, one for each purpose."""
        return self.slots - self.free

    @cached_property
    def data_nbytes(self) -> int:
        return self.nbytes - self.parity_nbytes

    @cached_property
    def digests(self) -> int:
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
    def slots_start(self) -> int:
        return PAGE + self.ranges_room + LEDGER_ROOM

    @cached_property
    def slot_room(self) -> int:
        """Bytes of one slot: header, digest table, small state and data."""
        return PAGE + self.table_room + self.small_room + pages(self.data_nbytes)

    @cached_property
    def parity_indices(self) -> range:
        """The indices of the parity slots, after those of the slots. A segment of one slot, in which a lost rank of a
        previous size is rebuilt, protects no other rank and has none."""
        return range(self.slots, self.slots + (PARITY_SLOTS if self.parity_nbytes and self.slots > 1 else 0))

    @cached_property
    def parity_room(self) -> int:
        """Bytes of one parity slot: header, digest table and parity."""
        return PAGE + self.table_room + pages(self.parity_nbytes)

    @cached_property
    def total(self) -> int:
        """Bytes of the file, and of the memory that it takes once all slots are claimed."""
        return self.slots_start + self.slots * self.slot_room + len(self.parity_indices) * self.parity_room

    @cached_property
    def first_slots(self) -> int:
        return min(self.first, self.slots) or self.slots

    def bytes_with(self, slots: int) -> int:
        """Bytes of memory while `slots` slots have it; of the others only the header page is there."""
        return self.total - (self.slots - slots) * (self.slot_room - PAGE)

    @cached_property
    def first_total(self) -> int:
        return self.bytes_with(self.first_slots)


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
