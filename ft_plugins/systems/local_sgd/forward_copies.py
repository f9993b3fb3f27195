"""EDiT where forwards read copies of what is synchronised: of a module, masters first, then its copies, gathered alone.

    masters, whole on each rank       the copies are cast from them
    shards of masters, of parameters  each rank of a shard group casts its own pieces of the module; all gather them

So the outer step of a module follows its exchange in the background, and then the gather, while the forward of the
module before runs. Live tensors, masters too, are written right before the module's forward, on the training thread: a
checkpoint that the script writes in between has no synchronised module.

Invariant: a copy has the bits that the framework's own cast and gather give it (`ReplicaOperations.derive`). All ranks
of a shard group gather the same modules in the same order, also one that holds no piece of a module.

In: modules, a `Synchronisation`, live copies by parameter. Out: changed masters and copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgpack
import torch

from ...errors import UnsupportedError
from ...model.reduction import ComputesWithCopies, ReductionControl
from ...sync.links import Links, Ranks
from ...sync.rounds.modules import ModulePlan
from ...sync.rounds.penalty import Judgement
from ...sync.rounds.synchronisation import Synchronisation


@dataclass(frozen=True)
class CopyPiece:
    """Elements of a flattened parameter that one rank derives."""

    parameter: str
    start: int
    stop: int


def pieces_of(module: ModulePlan, copies: Mapping[str, torch.Tensor]) -> list[CopyPiece]:
    """What this rank derives of the copies of a module, in the order of its buckets. An item is named as its parameter,
    with ':main' if it is a master or a shard of one; items that forwards read themselves have no copy."""
    first = {item.name: item.piece[0] if item.piece else 0 for item in module.items}
    return [
        CopyPiece(piece.item.removesuffix(":main"), first[piece.item] + piece.start, first[piece.item] + piece.stop)
        for bucket in module.buckets
        for piece in bucket.pieces
        if piece.item.removesuffix(":main") in copies
    ]


def announced(host: ReductionControl, masters: bool, call: Callable[[str], None]) -> tuple[bool, str]:
    """Have the host announce the forward of each module. Whether it does, else why. `masters`: whether some are
    synchronised."""
    if masters and not isinstance(host, ComputesWithCopies):
        return False, "forwards read copies of fp32 master parameters"
    try:
        host.before_modules(call)
    except UnsupportedError as error:
        return False, str(error)
    return True, ""


def gathering(modules: Sequence[ModulePlan], shard: Ranks, rank: int) -> Ranks:
    """The ranks that gather copies together: those of `shard`, or `rank` alone if its items are whole."""
    sharded = any(item.piece is not None for module in modules for item in module.items)
    return shard if sharded else (rank,)


class ForwardCopies:
    """The copies of one rank's modules. `exchange` runs in the background, `apply` on the training thread."""

    def __init__(
        self, modules: Sequence[ModulePlan], synchronisation: Synchronisation, shard: Ranks, links: Links,
        copies: Callable[[], Mapping[str, torch.Tensor]], rank: int,
    ) -> None:  # fmt: skip
        """A collective of the ranks `shard`, which hold pieces of the same parameters. Raises UnsupportedError."""
        self._synchronisation, self._shard, self._links, self._copies = synchronisation, shard, links, copies
        live = copies()
        for name, copy in live.items():
            if not copy.is_contiguous():
                raise UnsupportedError(
                    f"rank {rank}: --sync-apply forward: parameter '{name}' is not contiguous, so that its pieces "
                    "cannot be gathered; choose update or wait"
                )
        own = {module.name: pieces_of(module, live) for module in modules}
        self._held = frozenset(own)
        packed = msgpack.packb({name: [[p.parameter, p.start, p.stop] for p in those] for name, those in own.items()})
        self._pieces = [  # of each rank, by module
            {name: [CopyPiece(*one) for one in those] for name, those in msgpack.unpackb(part).items()}
            for part in links.gather_bytes(shard, packed)
        ]
        self._rows: dict[str, torch.Tensor] = {}  # by module: of each rank, its pieces as bytes

    def exchange(self, name: str) -> float:
        """Synchronise a module up to its live tensors, and gather its copies. Returns `Synchronisation.exchange`'s
        factor; 1.0 if this rank holds nothing of the module."""
        factor, results = 1.0, []
        if name in self._held:
            factor = self._synchronisation.exchange(name)
            results = self._synchronisation.step(name)
        self._rows[name] = self._links.all_gather(self._shard, self._row(name, results))
        return factor

    def _row(self, name: str, results: Sequence[tuple[str, torch.Tensor]]) -> torch.Tensor:
        """This rank's pieces of a module, padded to the longest row of the shard group. `results`: by item, in the
        order of the buckets."""
        live = self._copies()
        width = max(sum(_nbytes(piece, live) for piece in pieces.get(name, ())) for pieces in self._pieces)
        row = torch.zeros(width, dtype=torch.uint8, device=self._links.device)
        at = 0
        for item, value in results:
            copy = live.get(item.removesuffix(":main"))
            if copy is not None:
                part = value.to(copy.dtype).view(torch.uint8)
                row[at : at + len(part)] = part
                at += len(part)
        return row

    @torch.no_grad()
    def apply(self, name: str) -> Judgement | None:
        """Make a module live, masters and copies. Returns its judgement, None if this rank holds nothing of it."""
        judgement = self._synchronisation.apply(name) if name in self._held else None
        live, rows = self._copies(), self._rows.pop(name)
        if rows.is_cuda:  # allocated on the background stream
            rows.record_stream(torch.cuda.current_stream(rows.device))
        for row, pieces in zip(rows, self._pieces, strict=True):
            at = 0
            for piece in pieces.get(name, ()):
                copy, nbytes = live[piece.parameter], _nbytes(piece, live)
                # cloned: a piece of another dtype before it may leave this one unaligned
                copy.view(-1)[piece.start : piece.stop].copy_(row[at : at + nbytes].clone().view(copy.dtype))
                at += nbytes
        return judgement


def _nbytes(piece: CopyPiece, copies: Mapping[str, torch.Tensor]) -> int:
    return (piece.stop - piece.start) * copies[piece.parameter].element_size()
