"""The facts about the protected job, as a trainer sends them to its node's SMP; they determine the exchange plan.

Invariant: plain values, bounded and checked. `job_file` writes them to the run directory: another SMP can continue.

In: plain values. Out: `Protection`, and plain values again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any

import xxhash
from pydantic import BeforeValidator, Field

from ...base.intake import Address, Count, Flag, Port, Seconds, Text, Unfit, typed
from ...errors import ProtocolError
from ...redundancy.exchange_plan import ExchangePlan, plan_exchange
from ...redundancy.neighbour import plan_copies_and_parity, plan_neighbours
from ...redundancy.sections import Extent
from ...snapshot.segment.shape import Shape
from ...snapshot.segment.slots import Version
from ...transport.protocol import maybe_version, packed, version_of
from .agreement import ExchangeEpoch

_OWN = ("lineage", "base", "position", "committed")  # fields that are not the same on all nodes and in all recoveries
Ranks = Annotated[tuple[Count, ...], Field(min_length=1)]
PackedVersion = Annotated[Version, BeforeValidator(version_of)]  # also in requests, replies and files
MaybeVersion = Annotated[Version | None, BeforeValidator(maybe_version)]


def _by_position(kind: type[Any]) -> BeforeValidator:
    """Reads a dataclass from the list of its values, as `block` writes it."""
    names = [each.name for each in fields(kind)]

    def named(values: Any) -> Any:
        if not isinstance(values, (list, tuple)) or len(values) != len(names):
            raise Unfit(f"expected {', '.join(names)}")
        return dict(zip(names, values, strict=True))

    return BeforeValidator(named)


_SHAPE = tuple(each.name for each in fields(Shape))
PackedShape = Annotated[Shape, _by_position(Shape)]
PackedExtent = Annotated[Extent, _by_position(Extent)]


@dataclass(frozen=True)
class Protection:
    """One incarnation of the job: the nodes, what each rank captures, what the last recovery restored."""

    lineage: Count
    base: MaybeVersion  # restored, or None after a start from the beginning
    nodes: tuple[Text, ...]  # of each rank
    groups: tuple[Ranks, ...]  # redundancy groups
    shapes: tuple[PackedShape, ...]  # of each rank's segment
    losses: Annotated[int, Field(strict=True, ge=0, le=2)]
    position: Count  # of this node
    endpoints: tuple[tuple[Address, Port], ...]  # by position
    interval: Annotated[Count, Field(ge=1)]  # minimum number of iterations between two exchanged versions
    exchange_mbps: Seconds  # maximum megabits per second that this node sends; 0: no limit
    detect_seconds: Seconds
    replicated: tuple[tuple[PackedExtent, ...], ...] = ()  # of each replica set whose ranks compute parity themselves
    stages: tuple[Ranks, ...] = ()  # pipelines, if the copy of each rank is on a neighbouring stage
    both: Flag = False  # parity in addition to copies
    measure: Flag = False  # measure the links that copies use
    audited: Flag = False  # a version is committed only if its replicas were compared and agree
    committed: MaybeVersion = None  # the newest version committed on any node: pinned on all until a newer one is
    domains: tuple[Text, ...] = ()  # failure domains by which groups were cut, by position; (): each node is its own

    def plan(self) -> ExchangePlan:
        """Who sends what to whom; computed once. Raises TopologyError."""
        return self._plan

    @cached_property
    def _plan(self) -> ExchangePlan:
        sizes = [shape.data_nbytes for shape in self.shapes]
        if self.stages and self.both:
            return plan_copies_and_parity(self.nodes, self.stages, self.groups, sizes, self.replicated)
        if self.stages:
            return plan_neighbours(self.nodes, self.stages, sizes).exchange()
        return plan_exchange(self.nodes, self.groups, sizes, self.losses, self.replicated)

    def epoch(self) -> ExchangeEpoch:
        """What the SMPs of this incarnation agree on."""
        return ExchangeEpoch(self.lineage, self.base, len(self.endpoints), self.interval)

    @cached_property
    def digest(self) -> int:
        """Equal for two incarnations if, and only if, the plan of one can decode parity of the other; node names may
        differ."""
        plan = self.plan()
        shapes = [(shape.nbytes, shape.buckets, shape.layout) for shape in self.shapes]
        facts: tuple[object, ...] = (plan.ranks, self.groups, shapes, self.losses, self.replicated, self.stages)
        facts += ("both",) if self.both else ()
        return xxhash.xxh3_64_intdigest(repr(facts).encode()) >> 1

    def block(self) -> dict[str, Any]:
        """As plain values."""
        own = {"lineage": self.lineage, "base": packed(self.base), "position": self.position}
        return {**self.job_block(), **own, "committed": packed(self.committed)}

    def job_block(self) -> dict[str, Any]:
        """What is the same on all nodes and in all recoveries of an incarnation, as plain values."""
        block = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _OWN}
        block["shapes"] = [[getattr(shape, name) for name in _SHAPE] for shape in self.shapes]
        block["replicated"] = [[[one.rank, one.offset, one.nbytes] for one in stream] for stream in self.replicated]
        return block

    @classmethod
    def read(cls, block: Mapping[str, Any]) -> Protection:
        """From plain values. Raises ProtocolError for anything else."""
        try:
            protection = typed(cls, block)
            protection._require_coherent()
        except Unfit as error:
            raise ProtocolError(f"the description of the job to be protected cannot be used: {error}") from error
        return protection

    def _require_coherent(self) -> None:
        """Raises Unfit if a rank, node or extent does not exist in the job."""
        count = len(self.nodes)
        named = {rank for ranks in (*self.groups, *self.stages) for rank in ranks}
        if not count or len(self.shapes) != count or not named <= set(range(count)):
            raise Unfit(f"{count} ranks, {len(self.shapes)} shapes, ranks in groups: {sorted(named)[:8]}")
        if len(self.endpoints) != len(set(self.nodes)) or self.position >= len(self.endpoints):
            raise Unfit(f"{len(set(self.nodes))} nodes, {len(self.endpoints)} endpoints, position {self.position}")
        if len(self.domains) not in (0, len(self.endpoints)):
            raise Unfit(f"{len(self.endpoints)} nodes, {len(self.domains)} failure domains")
        for shape in self.shapes:
            if shape.parity_nbytes > shape.nbytes:
                raise Unfit(f"{shape}: more parity than there are bytes")
        for extent in (extent for stream in self.replicated for extent in stream):
            if extent.rank >= count or extent.offset + extent.nbytes > self.shapes[extent.rank].data_nbytes:
                raise Unfit(f"{extent} is in no slot")
