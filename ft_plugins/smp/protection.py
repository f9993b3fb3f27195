"""What a trainer tells the SMP of its node about the job to be protected: facts, from which the exchange plan follows.

Invariant: plain values, bounded and checked; written to the run directory as they came, so that another SMP goes on.

In: a request, or the file. Out: `Protection`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from functools import cached_property
from typing import Annotated, Any

import xxhash
from pydantic import BeforeValidator, Field, TypeAdapter

from ..errors import ProtocolError
from ..intake import Address, Count, Port, Seconds, Text, Unfit, typed
from ..redundancy.neighbour import plan_both, plan_neighbours
from ..redundancy.plan import ExchangePlan, plan_exchange
from ..redundancy.sections import Extent
from ..snapshot.shape import Shape
from ..snapshot.slots import Version
from .agreement import Epoch
from .readers import read_maybe

Maybe = Annotated[Version | None, BeforeValidator(read_maybe)]
Ranks = Annotated[tuple[Count, ...], Field(min_length=1)]
Switch = Annotated[bool, Field(strict=True)]


@dataclass(frozen=True)
class Protection:
    """One incarnation of the job: who stands where, what each rank captures, what the last recovery restored."""

    lineage: Count
    base: Maybe  # restored, or None after a start from the beginning
    nodes: tuple[Text, ...]  # of each rank
    groups: tuple[Ranks, ...]  # sharding groups
    shapes: tuple[Shape, ...]  # of each rank's segment
    losses: Annotated[int, Field(strict=True, ge=0, le=2)]
    position: Count  # of this node
    endpoints: tuple[tuple[Address, Port], ...]  # by position
    interval: Annotated[Count, Field(ge=1)]  # iterations between two versions that are exchanged
    exchange_mbps: Seconds  # megabits per second that this node sends at most; 0: no limit
    detect_seconds: Seconds
    replicated: tuple[tuple[Extent, ...], ...] = ()  # of each replica set whose ranks compute parity themselves
    stages: tuple[Ranks, ...] = ()  # pipelines, where each rank's copy is on that of a neighbouring stage
    both: Switch = False  # parity as well, where there are copies
    measure: Switch = False  # what the links carry by which copies go is wanted
    audited: Switch = False  # a version counts only when its replicas were compared and agree
    counted: Maybe = None  # the newest that counts on any node: kept on all of them until a newer one does

    def plan(self) -> ExchangePlan:
        """Who sends what to whom. Raises TopologyError."""
        sizes = [shape.data_nbytes for shape in self.shapes]
        if self.stages and self.both:
            return plan_both(self.nodes, self.stages, self.groups, sizes, self.replicated)
        if self.stages:
            return plan_neighbours(self.nodes, self.stages, sizes).exchange()
        return plan_exchange(self.nodes, self.groups, sizes, self.losses, self.replicated)

    def epoch(self) -> Epoch:
        """What the agreement of the SMPs is about."""
        return Epoch(self.lineage, self.base, len(self.endpoints), self.interval)

    @cached_property
    def digest(self) -> int:
        """Equal for two incarnations exactly when parity of the one can be decoded by the plan of the other: the names
        of nodes may differ."""
        plan = self.plan()
        shapes = [(shape.nbytes, shape.buckets, shape.layout) for shape in self.shapes]
        facts: tuple[object, ...] = (plan.ranks, self.groups, shapes, self.losses, self.replicated, self.stages)
        facts += ("both",) if self.both else ()
        return xxhash.xxh3_64_intdigest(repr(facts).encode()) >> 1

    def block(self) -> dict[str, Any]:
        """As plain values, for a message or a file."""
        found = asdict(self)
        found["shapes"] = [list(astuple(shape)) for shape in self.shapes]
        found["replicated"] = [[list(astuple(extent)) for extent in stream] for stream in self.replicated]
        found["base"] = list(astuple(self.base)) if self.base else None
        found["counted"] = list(astuple(self.counted)) if self.counted else None
        return found

    @classmethod
    def read(cls, block: Mapping[str, Any]) -> Protection:
        """From plain values. Raises ProtocolError for anything else."""
        try:
            values = dict(block)
            values["shapes"] = [dict(zip(_SHAPE, shape, strict=True)) for shape in values["shapes"]]
            values["replicated"] = [[dict(zip(_EXTENT, e, strict=True)) for e in s] for s in values["replicated"]]
            found = typed(_ADAPTER, values)
            found._require_coherent()
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"what protects the job cannot be read: {error}") from error
        return found

    def _require_coherent(self) -> None:
        """Raises Unfit where ranks or nodes are named that the job does not have."""
        count = len(self.nodes)
        named = {rank for ranks in (*self.groups, *self.stages) for rank in ranks}
        if not count or len(self.shapes) != count or not named <= set(range(count)):
            raise Unfit(f"{count} ranks, {len(self.shapes)} shapes, ranks in groups: {sorted(named)[:8]}")
        if len(self.endpoints) != len(set(self.nodes)) or self.position >= len(self.endpoints):
            raise Unfit(f"{len(set(self.nodes))} nodes, {len(self.endpoints)} endpoints, position {self.position}")
        for shape in self.shapes:
            if shape.parity_nbytes > shape.nbytes:
                raise Unfit(f"{shape}: more parity than there are bytes")
        for extent in (extent for stream in self.replicated for extent in stream):
            if extent.rank >= count or extent.offset + extent.nbytes > self.shapes[extent.rank].data_nbytes:
                raise Unfit(f"{extent} is in no slot")


_ADAPTER = TypeAdapter(Protection)
_SHAPE, _EXTENT = (tuple(field.name for field in fields(kind)) for kind in (Shape, Extent))
