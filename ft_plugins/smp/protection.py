"""What a trainer tells the SMP of its node about the job to be protected: facts, from which the exchange plan follows.

Invariant: plain values, bounded and checked; written to the run directory as they came, so that another SMP goes on.

In: a request, or the file. Out: `Protection`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from typing import Any

import xxhash
from pydantic import TypeAdapter, ValidationError

from ..errors import ProtocolError
from ..redundancy.neighbour import plan_both, plan_neighbours
from ..redundancy.plan import ExchangePlan, plan_exchange
from ..redundancy.sections import Extent
from ..snapshot.shape import Shape
from ..snapshot.slots import Version
from .pins import Epoch


@dataclass(frozen=True)
class Protection:
    """One incarnation of the job: who stands where, what each rank captures, what the last recovery restored."""

    lineage: int
    base: Version | None  # restored, or None after a start from the beginning
    nodes: tuple[str, ...]  # of each rank
    groups: tuple[tuple[int, ...], ...]  # sharding groups
    shapes: tuple[Shape, ...]  # of each rank's segment
    losses: int
    position: int  # of this node
    endpoints: tuple[tuple[str, int], ...]  # by position
    interval: int  # iterations between two versions that are exchanged
    exchange_mbps: float  # megabits per second that this node sends at most; 0: no limit
    detect_seconds: float
    replicated: tuple[tuple[Extent, ...], ...] = ()  # of each replica set whose ranks compute parity themselves
    stages: tuple[tuple[int, ...], ...] = ()  # pipelines, where each rank's copy is on that of a neighbouring stage
    both: bool = False  # parity as well, where there are copies
    measure: bool = False  # what the links carry by which copies go is wanted
    audited: bool = False  # a version counts only when its replicas were compared and agree
    counted: Version | None = None  # the newest that counts on any node: kept on all of them until a newer one does

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
            for name in ("base", "counted"):
                values[name] = Version(*values[name]) if values.get(name) else None
            values["shapes"] = tuple(Shape(*shape) for shape in values["shapes"])
            values["replicated"] = tuple(tuple(Extent(*e) for e in stream) for stream in values["replicated"])
            return _ADAPTER.validate_python(values)
        except (ValidationError, TypeError, KeyError) as error:
            raise ProtocolError(f"what protects the job cannot be read: {error}") from error


_ADAPTER = TypeAdapter(Protection)
