"""Carries out a recovery: agrees on the version, verifies digests, puts the bytes back into the live tensors.

Invariant: nothing is loaded before every rank has verified its share of the same version; where one finds it corrupt
it is put back together from other nodes, or all drop it and try the next older one. Unique items come from the own
segment, replicated ones are all-gathered from the shares: every share is read on its own node.

In: segment, layout, live tensors. Out: the restored tensors, the slot's small state, the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from .. import faults
from ..errors import FtError
from ..redundancy.plan import ExchangePlan
from ..snapshot.copiers import flat_bytes
from ..snapshot.layout import Layout, ReplicaStream
from ..snapshot.segment import Segment
from ..snapshot.slots import Mark, Slot, SlotState, Version
from .collective import Collective
from .plan import NodeFacts, RankFacts, RecoveryPlan, Way, plan_recovery


@dataclass(frozen=True)
class Restored:
    """`plan` as carried out; `small` is the encoded small state of the restored version, None from the beginning."""

    plan: RecoveryPlan
    small: bytes | None


class Nodes(Protocol):
    """The node tier as recovery needs it; absent where a lost node cannot be survived."""

    exchange: ExchangePlan | None  # None: state that is elsewhere is seen, but not fetched
    digest: int  # of `exchange`

    def facts(self) -> Sequence[NodeFacts]:
        """What every node's SMP can hand out now. Every rank of the job calls."""
        ...

    def rebuild(self, plan: RecoveryPlan) -> None:
        """Have this rank's slot put back together, as the plan says. Raises an FtError where that fails."""
        ...


def agree_on_version(
    segment: Segment, collective: Collective, report: Callable[[FtError], None], nodes: Nodes | None = None
) -> RecoveryPlan:
    """The newest version that all ranks can have and have verified, in their own segments when this returns.

    A slot that is corrupt is reported, and put back together from other nodes or passed over; a version that cannot be
    put together is passed over. Every rank of the job calls.
    """
    corrupt: set[tuple[int, Version]] = set()
    banned: set[Version] = set()
    rebuilt: set[tuple[int, Version]] = set()
    ways: dict[Version, RecoveryPlan] = {}  # by which a version was put back together
    while True:
        facts = [_read_facts(payload) for payload in collective.gather(_facts(segment))]
        if nodes is None:
            plan = plan_recovery(facts, corrupt, banned=banned)
        else:
            plan = plan_recovery(facts, corrupt, nodes.facts(), nodes.exchange, nodes.digest, banned)
        if plan.version is None:
            return plan
        version = plan.version
        verdicts = collective.gather(_try(plan, segment, facts[collective.rank], nodes, report))
        if all(found == b"whole" for found in verdicts):
            return replace(ways.get(version, plan), completed=plan.completed, lost=plan.lost)
        for rank, found in enumerate(verdicts):
            match found:
                case b"rebuilt":
                    corrupt.discard((rank, version))
                    rebuilt.add((rank, version))
                    ways.setdefault(version, plan)
                case b"corrupt" if (rank, version) not in rebuilt:
                    corrupt.add((rank, version))
                case b"corrupt" | b"failed":
                    banned.add(version)


def _try(
    plan: RecoveryPlan, segment: Segment, facts: RankFacts, nodes: Nodes | None, report: Callable[[FtError], None]
) -> bytes:
    """Verify this rank's slot, or have it put back together: whole, rebuilt, corrupt or failed."""
    assert plan.version is not None
    own = plan.sources[facts.rank].way is Way.OWN
    try:
        if own:
            segment.verify(facts.holds()[plan.version])
            return b"whole"
        if nodes is not None:
            nodes.rebuild(plan)
            segment.mark(plan.version, plan.mark)  # what it took the place of may have been alone to say so
            return b"rebuilt"
    except FtError as error:
        report(error)
    return b"corrupt" if own else b"failed"


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
            int(slot.mark),
        ]
        for slot in segment.slots()
    ]
    # a version that was taken over from another size of the job is of a lineage that nobody has opened here
    lineage = max([segment.lineage, *(slot[2] or 0 for slot in slots)])
    return bytes(msgpack.packb([segment.rank, slots, lineage, segment.completed, segment.from_nothing]))


def _read_facts(payload: bytes) -> RankFacts:
    rank, slots, lineage, completed, from_nothing = msgpack.unpackb(payload)
    return RankFacts(
        rank,
        tuple(
            Slot(index, SlotState(state), None if of is None else Version(of, iteration), mark=Mark(mark))
            for index, state, of, iteration, mark in slots
        ),
        lineage,
        completed,
        from_nothing,
    )
