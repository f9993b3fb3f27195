"""Carries out a recovery: agrees on the version, verifies digests, puts the bytes back into the live tensors.

Invariant: nothing is loaded before every rank has verified its share of the same version; a version that one rank finds
corrupt is dropped by all, and the next older one is tried. Unique items come from the own segment, replicated ones are
all-gathered from the shares: every share is read on its own node.

In: segment, layout, live tensors. Out: the restored tensors, the slot's small state, the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from .. import faults
from ..errors import CorruptSlotError
from ..snapshot.copiers import flat_bytes
from ..snapshot.layout import Layout, ReplicaStream
from ..snapshot.segment import Segment
from ..snapshot.slots import Slot, SlotState, Version
from .collective import Collective
from .plan import RankFacts, RecoveryPlan, plan_recovery


@dataclass(frozen=True)
class Restored:
    """`plan` as carried out; `small` is the encoded small state of the restored version, None from the beginning."""

    plan: RecoveryPlan
    small: bytes | None


def agree_on_version(
    segment: Segment, collective: Collective, report: Callable[[CorruptSlotError], None]
) -> RecoveryPlan:
    """The newest version that all ranks hold and have verified. Corrupt ones are reported and passed over."""
    facts = [_read_facts(payload) for payload in collective.gather(_facts(segment))]
    corrupt: set[Version] = set()
    while True:
        plan = plan_recovery(facts, corrupt)
        if plan.version is None:
            return plan
        verdict = b"1"
        try:
            segment.verify(facts[collective.rank].holds()[plan.version])
        except CorruptSlotError as error:
            report(error)
            verdict = b"0"
        if all(found == b"1" for found in collective.gather(verdict)):
            return plan
        corrupt.add(plan.version)


def load_tensors(
    plan: RecoveryPlan, segment: Segment, layout: Layout, tensors: Mapping[str, torch.Tensor], collective: Collective
) -> Restored:
    """Copy the plan's version into `tensors`, in place. Every rank of the job calls together."""
    if plan.version is None:
        return Restored(plan, None)
    (index,) = [
        slot.index for slot in segment.slots() if slot.version == plan.version and slot.state is SlotState.CLEAN
    ]
    data = segment.data(index)
    collective.connect(stream.replicas for stream in layout.streams)
    for number, stream in enumerate(layout.streams):
        faults.reach("restore.tensors", iteration=plan.version.iteration, stream=number)
        own = stream.share_of(layout.rank)
        held = data[stream.slot_offset : stream.slot_offset + own.stop - own.start]
        flat = {item.name: flat_bytes(item.name, tensors[item.name]) for item in stream.items}
        ranges = [(share.start, share.stop) for share in stream.shares]
        for offset, arrived in collective.exchange_shares(stream.replicas, ranges, held):
            _scatter(stream, flat, offset, arrived)
    return Restored(plan, segment.small(index))


def _scatter(
    stream: ReplicaStream, flat: Mapping[str, torch.Tensor], offset: int, arrived: npt.NDArray[np.uint8]
) -> None:
    """Copy the stream's bytes `offset .. offset + len(arrived)` into the items that they belong to."""
    end = offset + len(arrived)
    first = max(0, int(np.searchsorted(stream.offsets, offset, side="right")) - 1)
    for item, start in zip(stream.items[first:], stream.offsets[first:], strict=True):
        if start >= end:
            return
        low, high = max(start, offset), min(start + item.nbytes, end)
        if low < high:
            flat[item.name][low - start : high - start].copy_(torch.from_numpy(arrived[low - offset : high - offset]))


def _facts(segment: Segment) -> bytes:
    slots = [
        [
            slot.index,
            int(slot.state),
            slot.version.lineage if slot.version else None,
            slot.version.iteration if slot.version else None,
        ]
        for slot in segment.slots()
    ]
    return bytes(msgpack.packb([segment.rank, slots, segment.lineage, segment.completed]))


def _read_facts(payload: bytes) -> RankFacts:
    rank, slots, lineage, completed = msgpack.unpackb(payload)
    return RankFacts(
        rank,
        tuple(Slot(i, SlotState(state), Version(v, k) if v is not None else None) for i, state, v, k in slots),
        lineage,
        completed,
    )
