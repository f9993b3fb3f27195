"""Carry out a recovery: agree on the version, verify digests, copy the bytes back into the live tensors.

Invariant: nothing is loaded before every rank has verified its share of the same version. A corrupt share is rebuilt
from other nodes, or all ranks try the next older version. Items that only this rank holds come from its own segment;
replicated ones are all-gathered from the shares, so that every share is read on its own node.

In: segment, layout, live tensors. Out: the plan, the restored tensors, the slot's small state.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter

from ..base import faults
from ..base.intake import RunIdentity, typed
from ..collective import Collective
from ..errors import CorruptHeaderError, CorruptSlotError, FtError, ProtocolError, SegmentError
from ..redundancy.node_kinds import runs, shortened
from ..snapshot.capture.copiers import flat_bytes
from ..snapshot.capture.layout import Layout, ReplicaStream
from ..snapshot.segment.header import COMPLETED
from ..snapshot.segment.segment import Segment
from ..snapshot.segment.slots import Mark, Slot, SlotState, Version
from .facts import RankFacts
from .nodes import SeenNodes
from .proof_plan import ProofPlan, plan_proof
from .recovery_plan import RecoveryPlan, Way, plan_recovery

_RUN: TypeAdapter[str] = TypeAdapter(RunIdentity)
_FACTS_BYTES = 1 << 16  # of a rank's report on its slots


def agree_on_version(
    segment: Segment, collective: Collective, report: Callable[[FtError], None], nodes: SeenNodes | None = None,
    before: int | None = None,
) -> RecoveryPlan:  # fmt: skip
    """Choose the newest version that all ranks can have, and have it verified in every rank's own segment.

    A corrupt slot is reported, then rebuilt from other nodes or its version skipped. So is a version that a rank could
    not rebuild in two attempts; what cannot be fetched in two is rebuilt. `nodes`: None for this rank's own node alone;
    `before`: only versions older than that iteration. Every rank of the job calls.
    """
    corrupt: set[tuple[int, Version]] = set()
    banned: set[Version] = set()
    rebuilt: set[tuple[int, Version]] = set()
    tried: set[tuple[int, Version]] = set()  # failed once: the same round may have found the corrupt slot that was read
    plans: dict[Version, RecoveryPlan] = {}  # by which each version was rebuilt
    for error in _damage(segment):
        report(error)
    while True:
        facts = [_read_facts(rank, payload) for rank, payload in enumerate(collective.gather(_facts(segment)))]
        if nodes is None:
            plan = plan_recovery(facts, corrupt, banned=banned, before=before)
        else:
            plan = plan_recovery(facts, corrupt, nodes.facts(), nodes.exchange, nodes.digest, banned, before)
        if plan.version is None:
            return plan
        version = plan.version
        results = collective.gather(_verify_or_rebuild(plan, segment, facts[collective.rank], nodes, report))
        if all(result == b"whole" for result in results):
            return replace(plans.get(version, plan), completed=plan.completed, lost=plan.lost)
        for rank, result in enumerate(results):
            match result:
                case b"rebuilt":
                    corrupt.discard((rank, version))
                    rebuilt.add((rank, version))
                    plans.setdefault(version, plan)
                case b"corrupt" if (rank, version) not in rebuilt:
                    corrupt.add((rank, version))
                case b"failed" if (rank, version) not in tried:
                    tried.add((rank, version))
                case b"failed" if plan.sources[rank].way is Way.FETCH and (rank, version) not in corrupt:
                    corrupt.add((rank, version))  # parity may have what that node cannot hand out whole
                case b"corrupt" | b"failed":
                    banned.add(version)


def _verify_or_rebuild(
    plan: RecoveryPlan, segment: Segment, facts: RankFacts, nodes: SeenNodes | None, report: Callable[[FtError], None]
) -> bytes:
    """Verify this rank's slot, or have it rebuilt. Returns whole, rebuilt, corrupt or failed."""
    assert plan.version is not None
    own = plan.sources[facts.rank].way is Way.OWN
    try:
        if own:
            segment.verify(facts.restorable()[plan.version])
            return b"whole"
        if nodes is not None:
            nodes.rebuild(plan)
            segment.mark(plan.version, plan.mark)  # maybe only the lost slot recorded it
            return b"rebuilt"
    except FtError as error:
        report(error)
    return b"corrupt" if own else b"failed"


def agree_on_proof(
    plan: RecoveryPlan, segment: Segment, collective: Collective, report: Callable[[FtError], None], refused: str = ""
) -> ProofPlan:
    """How the plan's version is proven, with what is loaded for that verified. `refused`: why the job does without, ''
    if it does not. Every rank of the job calls."""
    if refused or plan.version is None:
        return plan_proof(plan, (), refused)
    facts = [_read_facts(rank, payload) for rank, payload in enumerate(collective.gather(_facts(segment)))]
    proof = plan_proof(plan, facts)
    if proof.start is None:
        return proof
    whole = b"1"
    try:
        segment.verify(facts[collective.rank].restorable()[proof.start])
    except FtError as error:
        report(error)
        whole = b""
    corrupt = [rank for rank, result in enumerate(collective.gather(whole)) if not result]
    words = (
        f"iteration {proof.start.iteration} does not match its digests on ranks {', '.join(shortened(runs(corrupt)))}"
    )
    return ProofPlan(reason=words) if corrupt else proof


def small_state_of(version: Version, segment: Segment) -> bytes:
    """Its encoded small state. Raises CorruptSlotError."""
    return segment.small(_slot_of(version, segment))


def _slot_of(version: Version, segment: Segment) -> int:
    index = segment.sealed_in(version)
    if index is None:
        raise CorruptSlotError(f"rank {segment.rank}: version {version} is no longer in memory; restart the job")
    return index


def load_tensors(
    version: Version, segment: Segment, layout: Layout, tensors: Mapping[str, torch.Tensor], collective: Collective
) -> None:
    """Copy `version` into `tensors`, in place. Every rank of the job calls. Raises CorruptSlotError."""
    data = segment.data(_slot_of(version, segment))
    with collective.transfers() as transfers:
        for number, stream in enumerate(layout.streams):
            faults.reach("restore.tensors", iteration=version.iteration, stream=number)
            own = stream.share_of(layout.rank)
            share = data[stream.slot_offset : stream.slot_offset + own.stop - own.start]
            flat = {item.name: flat_bytes(item.name, tensors[item.name]) for item in stream.items}
            ranges = [(share.start, share.stop) for share in stream.shares]
            for offset, arrived in transfers.exchange_shares(stream.replicas, ranges, share):
                _scatter(stream, flat, offset, arrived)


def _scatter(
    stream: ReplicaStream, flat: Mapping[str, torch.Tensor], offset: int, arrived: npt.NDArray[np.uint8]
) -> None:
    """Copy the stream's bytes `offset .. offset + len(arrived)` into their items."""
    end = offset + len(arrived)
    first = max(0, int(np.searchsorted(stream.offsets, offset, side="right")) - 1)
    for item, start in zip(stream.items[first:], stream.offsets[first:], strict=True):
        if start >= end:
            return
        low, high = max(start, offset), min(start + item.nbytes, end)
        if low < high:
            flat[item.name][low - start : high - start].copy_(torch.from_numpy(arrived[low - offset : high - offset]))


def _damage(segment: Segment) -> list[FtError]:
    """The parts of this rank's segment that failed their digests."""
    damaged = [slot.index for slot in segment.slots() if slot.damaged]
    errors: list[FtError] = [
        CorruptSlotError(
            f"rank {segment.rank}: slot {index} is not used: its header, digest table or small state does not match "
            "its digest"
        )
        for index in damaged
    ]
    errors += [
        CorruptHeaderError(f"rank {segment.rank}: the segment's {name} is not used: it does not match its digest")
        for name in segment.damaged
    ]
    return errors


def _facts(segment: Segment) -> bytes:
    header = segment.header
    opened = header.opened
    slots = [
        [
            slot.index,
            int(slot.state),
            slot.version.lineage if slot.version else None,
            slot.version.iteration if slot.version else None,
            int(slot.mark),
            slot.damaged and not opened.voiding,  # else it would block a fresh start that was interrupted
        ]
        for slot in segment.slots()
    ]
    completed = None if COMPLETED in segment.damaged else header.completed
    facts = [segment.rank, slots, opened.lineage, completed, opened.from_nothing, segment.damaged, opened.lost]
    facts += [header.agreed, header.doubted, opened.run, secrets.token_hex(16), header.proving, header.varies]
    facts += [segment.ledger.condemned, header.ended]
    return bytes(msgpack.packb(facts))


def _read_facts(rank: int, payload: bytes) -> RankFacts:
    """Decode the report of `rank`. Raises ProtocolError; SegmentError if its segment is another rank's."""
    try:
        if len(payload) > _FACTS_BYTES:
            raise ValueError(f"{len(payload)} bytes; expected at most {_FACTS_BYTES}")
        owner, slots, lineage, completed, from_nothing, damaged, lost, agreed, doubted, *more = msgpack.unpackb(payload)
        *runs, proving, varies, condemned, ended = more
        run, drawn = (typed(_RUN, run) for run in runs)
        first, last = (None, None) if doubted is None else map(_number, doubted)
        facts = RankFacts(
            _number(owner), tuple(_read_slot(*slot) for slot in slots), _number(lineage),
            None if completed is None else _number(completed), bool(from_nothing), tuple(map(str, damaged)), bool(lost),
            None if agreed is None else _number(agreed), None if first is None or last is None else (first, last),
            run, drawn, _number(proving), bool(varies), bool(condemned),
            _number(ended),
        )  # fmt: skip
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"rank {rank}: its report on its segment cannot be read ({error})") from error
    if facts.rank != rank:
        raise SegmentError(
            f"rank {rank} has mapped the segment of rank {facts.rank}; use 'ft-plugins end' or --ftp-resume fresh"
        )
    return facts


def _read_slot(index: Any, state: Any, lineage: Any, iteration: Any, mark: Any, damaged: Any) -> Slot:
    version = None if lineage is None else Version(_number(lineage), _number(iteration))
    return Slot(_number(index), SlotState(state), version, mark=Mark(mark), damaged=bool(damaged))


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a number, found {value!r}")
    return value
