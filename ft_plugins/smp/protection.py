"""The facts about the protected job, as a trainer sends them to its node's SMP; they determine the exchange plan.

Invariant: plain values, bounded and checked; written to the run directory as received, so that another SMP continues.

In: a request, or the file. Out: `Protection`; of the file, the failure domains alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import BeforeValidator, Field, TypeAdapter

from ..errors import ProtocolError
from ..intake import Address, Count, Flag, Port, Seconds, Text, Unfit, read_json, typed
from ..redundancy.exchange_plan import ExchangePlan, plan_exchange
from ..redundancy.neighbour import plan_copies_and_parity, plan_neighbours
from ..redundancy.sections import Extent
from ..snapshot.shape import Shape
from .agreement import ExchangeEpoch
from .protocol import MaybeVersion

PROTECTION_FILE = "protection.json"  # in the run directory

Ranks = Annotated[tuple[Count, ...], Field(min_length=1)]


def _by_position(kind: type[Any]) -> BeforeValidator:
    """Reads a dataclass from the list of its values, as `block` writes it."""
    names = [each.name for each in fields(kind)]

    def named(values: Any) -> Any:
        if not isinstance(values, (list, tuple)) or len(values) != len(names):
            raise Unfit(f"expected {', '.join(names)}")
        return dict(zip(names, values, strict=True))

    return BeforeValidator(named)


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
        """Who sends what to whom. Raises TopologyError."""
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
        """As plain values, for a message or a file."""
        block = asdict(self)
        block["shapes"] = [list(astuple(shape)) for shape in self.shapes]
        block["replicated"] = [[list(astuple(extent)) for extent in stream] for stream in self.replicated]
        block["base"] = list(astuple(self.base)) if self.base else None
        block["committed"] = list(astuple(self.committed)) if self.committed else None
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


@dataclass(frozen=True)
class RecordedDomains:
    """The part of the file that says by which failure domains the groups were cut; `nodes` of each rank."""

    lineage: Count
    nodes: tuple[Text, ...]
    domains: tuple[Text, ...] = ()


_FIELDS = TypeAdapter(dict[str, Any])


def read_domains(run_dir: Path) -> RecordedDomains | None:
    """The failure domains in the file; None if this node protects nothing, or the file cannot be read."""
    try:
        record = typed(RecordedDomains, read_json(run_dir / PROTECTION_FILE, _FIELDS))
    except (OSError, ValueError):
        return None
    return record if len(record.domains) in (0, len(set(record.nodes))) else None
