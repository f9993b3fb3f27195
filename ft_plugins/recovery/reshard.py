"""Which bytes of a job of one size become a rank's slot in a job of another one: the state re-partitioned. Pure.

Invariant: every byte of the new slot comes from exactly one byte of a former one, of the same version; what data
parallelism shards is followed by its elements in the whole, unpadded tensor, so padding that depends on the size never
travels. Only the data-parallel size may differ: a rank takes over from ranks of its own place in the model.

    replicated   the shares of all former ranks of the place make up the whole
    sharded      likewise, by `Item.piece`
    buffers      each rank's own: those of the first former rank, as frameworks keep them in their checkpoints
    other state that each rank has of its own is refused: nobody knows whose it should be at another size

In: the manifests of the former ranks of one place, the new rank's manifest. Out: `Move`s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import ResumeError
from ..model.inventory import Role
from ..snapshot.manifest import OWN, Manifest, TensorRange


@dataclass(frozen=True)
class Move:
    """`nbytes` at `source` of the former slot of `rank` come to lie at `target` of the new one."""

    rank: int
    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class _Whole:
    """A tensor of the former job: who holds which part of it, by ascending start."""

    dtype: str
    nbytes: int
    parts: tuple[tuple[int, TensorRange], ...]  # former rank, what it holds
    starts: tuple[int, ...]


def plan_moves(former: Sequence[Manifest], now: Manifest) -> tuple[Move, ...]:
    """What the slot of `now` is made of, in the order of its bytes, neighbours joined.

    Raises ResumeError where the former job did not have it, or had it otherwise.
    """
    tensors = _tensors(former)
    moves: list[Move] = []
    for held in sorted(now.held, key=lambda one: one.offset):
        whole = tensors.get(held.name)
        if whole is None or (whole.dtype, whole.nbytes) != (held.dtype, held.whole):
            found = f"{whole.nbytes} bytes of {whole.dtype}" if whole else "nothing of that name"
            raise ResumeError(
                f"rank {now.rank}: '{held.name}' has {held.whole} bytes of {held.dtype}, in the state in memory there "
                f"is {found}: it is not of this model; --ftp-resume fresh starts from the beginning"
            )
        if held.role != Role.BUFFER.value and held.kind == OWN == whole.parts[0][1].kind:
            raise ResumeError(
                f"rank {now.rank}: '{held.name}' is each rank's own, it cannot be taken over at another data-parallel "
                "size; start with the former number of ranks, or --ftp-resume fresh starts from the beginning"
            )
        moves.extend(_moves(held, whole, now.rank))
    return tuple(_joined(moves))


def _tensors(former: Sequence[Manifest]) -> dict[str, _Whole]:
    found: dict[str, list[tuple[int, TensorRange]]] = {}
    for manifest in sorted(former, key=lambda one: one.rank):
        for held in manifest.held:
            found.setdefault(held.name, []).append((manifest.rank, held))
    return {name: _whole(name, parts) for name, parts in found.items()}


def _whole(name: str, parts: list[tuple[int, TensorRange]]) -> _Whole:
    first_rank, first = parts[0]
    if first.role == Role.BUFFER.value:
        parts = [part for part in parts if part[0] == first_rank]
    ordered = sorted(parts, key=lambda part: part[1].start)
    end = 0
    for rank, held in ordered:
        if (held.dtype, held.whole) != (first.dtype, first.whole) or held.start != end:
            raise ResumeError(
                f"'{name}': what the ranks of the former job hold of it does not make up a whole (rank {rank} has "
                f"bytes {held.start} to {held.stop} of {held.whole}, {end} were found before): it cannot be taken over "
                "at another data-parallel size; start with the former number of nodes"
            )
        end = held.stop
    return _Whole(first.dtype, first.whole, tuple(ordered), tuple(held.start for _, held in ordered))


def _moves(held: TensorRange, whole: _Whole, rank: int) -> Iterable[Move]:
    at = held.start
    place = max(0, bisect_right(whole.starts, at) - 1)
    for former_rank, part in whole.parts[place:]:
        stop = min(held.stop, part.stop)
        if at >= held.stop or not part.start <= at < stop:
            break
        yield Move(former_rank, part.offset + at - part.start, held.offset + at - held.start, stop - at)
        at = stop
    if at < held.stop:
        raise ResumeError(
            f"rank {rank}: bytes {at} to {held.stop} of '{held.name}' are nowhere in the state in memory; "
            "start with the former number of nodes"
        )


def _joined(moves: Iterable[Move]) -> Iterable[Move]:
    last: Move | None = None
    for move in moves:
        if last and (move.rank, move.source, move.target) == (
            last.rank, last.source + last.nbytes, last.target + last.nbytes,
        ):  # fmt: skip
            last = Move(last.rank, last.source, last.target, last.nbytes + move.nbytes)
            continue
        if last:
            yield last
        last = move
    if last:
        yield last
