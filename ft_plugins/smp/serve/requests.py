"""Requests to an SMP as types: the one place that parses their messages.

Invariant: a request returned by `local` or `peer` is complete, every field of its type and within its range. Anything
else is a ProtocolError that names the request and the field.

In: messages of `protocol`, maps of plain values. Out: frozen dataclasses; times in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from ...base.intake import Address, Count, Flag, Port, RunIdentity, Seconds, Text, Unfit, parsed, require_shallow, shown
from ...errors import ProtocolError
from ...snapshot.capture.retention import Storage
from ...snapshot.segment.shape import Shape
from ...transport.frame_codec import PAYLOAD_LIMIT
from ..tree.protection import MaybeVersion, PackedVersion
from .job_file import JobDigest, ProtectionReference

_SHAPE_FIELDS = {each.name for each in fields(Shape)}


def _exact(shape: Any) -> Any:
    """A shape names all of its fields and no others."""
    if not isinstance(shape, dict) or set(shape) != _SHAPE_FIELDS:
        raise Unfit(f"expected {', '.join(sorted(_SHAPE_FIELDS))}")
    return shape


def _coherent(shape: Shape) -> Shape:
    if shape.parity_nbytes > shape.nbytes:
        raise Unfit(f"{shape.parity_nbytes} bytes of parity in {shape.nbytes}")
    return shape


def _plain(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint as a segment's header returns it. Raises ValueError unless it consists of plain values."""
    require_shallow(fingerprint)
    try:
        return dict(json.loads(json.dumps(fingerprint)))
    except TypeError as error:
        raise Unfit(str(error)) from error


HostPort = tuple[Address, Port]
Key = tuple[Count, Count, Count]  # of a parity block: section, stripe, 0 for P or 1 for Q
Rank = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]
Token = Annotated[int, Field(strict=True)]
Exponent = Annotated[int, Field(strict=True, ge=0, lt=255)]
FrameBytes = Annotated[int, Field(strict=True, ge=0, le=PAYLOAD_LIMIT)]
ShapeField = Annotated[Shape, BeforeValidator(_exact), AfterValidator(_coherent)]
Fingerprint = Annotated[dict[str, Any], AfterValidator(_plain)]


# ---- from this node's trainers, ft-run and command line ----


@dataclass(frozen=True)
class WithoutFields:
    """`status`, `fence`, `end`, `inventory` and `previous_sizes`."""


@dataclass(frozen=True)
class WatchProcess:
    """The SMP is not orphaned while `pid` lives. A trainer that is stopped for `detect_seconds` is lost. `metrics`:
    where to serve them."""

    pid: Count
    detect_seconds: Seconds
    orphan_seconds: Seconds | None = None  # None: unchanged
    metrics: HostPort | None = None


@dataclass(frozen=True)
class Hold:
    """Ranks of this node wait, or no longer, at the next version that is exchanged, or end: see `Header.held`."""

    value: Count


@dataclass(frozen=True)
class OfRank:
    """A request from one rank of the incarnation with `token`."""

    rank: Rank
    token: Token


@dataclass(frozen=True)
class Attach(OfRank):
    """Create or find this rank's segment. `fresh`: drop the state of another job."""

    shape: ShapeField
    fingerprint: Fingerprint
    pid: Count
    fresh: Flag
    world_size: Rank = 0
    storage: Storage | None = None


@dataclass(frozen=True)
class Restore(OfRank):
    """Open a lineage of `run`, growing from `base`, for this rank's segment; without a base, from the framework's own
    checkpoint of iteration `loaded` (0: from the beginning)."""

    lineage: Count
    base: MaybeVersion = None
    loaded: Count = 0
    run: RunIdentity = ""


@dataclass(frozen=True)
class Shutdown(OfRank):
    """This rank has ended in order."""


@dataclass(frozen=True)
class Listen:
    """Listen for other nodes' SMPs."""

    address: Address
    secret_file: Text
    encrypt: Flag


@dataclass(frozen=True)
class Protect(OfRank):
    """Protect the job from now on; `claim`: only prepare for that."""

    protection: ProtectionReference


@dataclass(frozen=True)
class RebuildSlot(OfRank):
    """Rebuild this rank's slot of `version`: from the node at `source`, or, if that is None, from parity.

    `holders` are (position, address, port) of the nodes of its sections that can be read, `lost` those that cannot.
    `previous`: the slot becomes one of the job at the size that `protection` describes, with that job's `fingerprint`.
    """

    version: PackedVersion
    protection: ProtectionReference
    holders: tuple[tuple[Count, Address, Port], ...]
    lost: tuple[Count, ...]
    source: HostPort | None = None
    previous: Flag = False
    fingerprint: Fingerprint = field(default_factory=dict)


@dataclass(frozen=True)
class Resize(OfRank):
    """The job has `world_size` ranks now."""

    world_size: Rank


@dataclass(frozen=True)
class AskSpare(OfRank):
    """Query the spare `node` at `where` for its state of previous sizes of the job."""

    world_size: Rank
    node: Text
    where: HostPort
    seconds: Seconds


@dataclass(frozen=True)
class Settle(OfRank):
    """Drop all state of previous sizes but `version` of `world_size` ranks."""

    world_size: Rank
    version: MaybeVersion = None


@dataclass(frozen=True)
class WriteCheckpoint:
    """Write the newest version to storage, or only what is due anyway. `keep`: retention never removes it."""

    reason: Text
    seconds: Seconds
    only_due: Flag
    keep: Flag = False


@dataclass(frozen=True)
class OtherNodes:
    """What is known of the job on its other nodes, from the answer `first` on. See `Node.other_nodes`."""

    first: Count
    each: Seconds
    every: Seconds


LOCAL: Mapping[str, type[Any]] = {
    "status": WithoutFields, "watch": WatchProcess, "fence": WithoutFields, "attach": Attach, "restore": Restore,
    "shutdown": Shutdown, "end": WithoutFields, "endpoint": Listen, "claim": Protect, "protect": Protect,
    "inventory": WithoutFields, "rebuild": RebuildSlot, "resize": Resize, "previous_sizes": WithoutFields,
    "spare": AskSpare, "settle": Settle, "checkpoint": WriteCheckpoint, "hold": Hold, "nodes": OtherNodes,
}  # fmt: skip


def local(message: Mapping[str, Any]) -> Any:
    """Parse a request of this node's own processes. Raises ProtocolError."""
    return _read(message, "do", LOCAL, "request")


# ---- from other nodes' SMPs ----


@dataclass(frozen=True)
class Probe:
    """Measures the rate at which its payload arrives."""


@dataclass(frozen=True)
class NodeStatus:
    """Report what is known of the job on this node, for people: `other_nodes.OtherNode`."""


@dataclass(frozen=True)
class SpareState:
    """Report the state of previous sizes that the spare `node` holds; the job has `world_size` ranks now."""

    node: Text
    world_size: Count


@dataclass(frozen=True)
class OfEpoch:
    """A request within the exchange of one lineage."""

    epoch: Count


@dataclass(frozen=True)
class Join(OfEpoch):
    """The node at `position` reports to this one from now on, on this connection (`tree_messages`)."""

    position: Count


@dataclass(frozen=True)
class BeginLane(OfEpoch):
    """Report how much the receiver has: of each (section, node of the section), and which ranks' copies."""

    version: PackedVersion
    nodes: tuple[tuple[Count, Count], ...]
    ranks: tuple[Count, ...]


@dataclass(frozen=True)
class TakeFrame(OfEpoch):
    """A frame of a node's data for a parity block."""

    version: PackedVersion
    key: Key
    node: Count
    at: Count
    exponent: Exponent


@dataclass(frozen=True)
class TakeCopy(OfEpoch):
    """A part of a rank's copy."""

    version: PackedVersion
    rank: Count
    at: Count
    total: Count


@dataclass(frozen=True)
class CompareReplicas(OfEpoch):
    """Compare replicas with the digests in the payload."""

    version: PackedVersion


@dataclass(frozen=True)
class ReadData:
    """Bytes of the data in a rank's slot."""

    version: PackedVersion
    rank: Count
    at: Count
    nbytes: FrameBytes


@dataclass(frozen=True)
class ReadParity:
    """Bytes of a parity block."""

    version: PackedVersion
    key: Key
    at: Count
    nbytes: FrameBytes


@dataclass(frozen=True)
class ReadCopy:
    """The copy of a rank that this node stores, from `offset` on."""

    version: PackedVersion
    rank: Count
    offset: Count


@dataclass(frozen=True)
class ReadSlot:
    """Small state and digests of a rank's slot, from `offset` on."""

    version: PackedVersion
    rank: Count
    offset: Count


@dataclass(frozen=True)
class ReadJob:
    """The job file with that digest, from `offset` on."""

    job: JobDigest
    offset: Count


_PEER: Mapping[str, type[Any]] = {
    "probe": Probe, "status": NodeStatus, "spare": SpareState, "join": Join,
    "begin": BeginLane, "take": TakeFrame, "copy": TakeCopy, "check": CompareReplicas,
}  # fmt: skip
_READ: Mapping[str, type[Any]] = {
    "data": ReadData,
    "parity": ReadParity,
    "copy": ReadCopy,
    "slot": ReadSlot,
    "job": ReadJob,
}


def peer(message: Mapping[str, Any]) -> Any:
    """Parse a request of another node's SMP. Raises ProtocolError."""
    if message.get("do") == "read":
        return _read(message, "what", _READ, "read")
    return _read(message, "do", _PEER, "request between SMPs")


def _read(message: Mapping[str, Any], key: str, kinds: Mapping[str, type[Any]], what: str) -> Any:
    name = message.get(key)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"unknown {what}: {shown(name)}; known are {sorted(kinds)}")
    return parsed(kind, message, str(name))
