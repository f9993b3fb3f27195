"""Plan which bytes of the previous ranks' slots make up a rank's slot at the current data-parallel size. Pure; no I/O.

Invariant: every byte of the new slot comes from exactly one byte of a previous slot of the same version. Sharded state
is located by its elements in the whole, unpadded tensor, so padding, which depends on the size, is never copied. Only
the data-parallel size may differ: a rank restores from ranks at its own place in the model.

    replicated   the shares of all previous ranks at that place make up the whole
    sharded      the same, by `Item.piece`
    buffers      each rank has its own: the first previous rank's are used, as frameworks do in their checkpoints
    other state that each rank has of its own is refused, unless it is known whose this rank takes over

Under local SGD replicas differ, so several wholes have one name. `inherited` are the ranks of the replica whose own
state this rank takes over (`sync.rounds.inheritance`). What they have whole is taken from them alone; the rest, which
all replicas share out, from all ranks.

In: the manifests of the previous ranks at one place, the manifest of the current rank. Out: `Move`s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ...errors import ResumeError
from ...model.inventory import Role
from ...snapshot.capture.manifest import OWN, Manifest, TensorRange


@dataclass(frozen=True)
class Move:
    """`nbytes` at `source` of the previous slot of `rank` go to `target` of the new slot."""

    rank: int
    source: int
    target: int
    nbytes: int


_Part = tuple[int, TensorRange]  # a previous rank, and its part of a tensor


@dataclass(frozen=True)
class _Whole:
    """A tensor of the previous job and its parts, by ascending start."""

    dtype: str
    nbytes: int
    parts: tuple[_Part, ...]
    starts: tuple[int, ...]


def plan_moves(
    previous: Sequence[Manifest], now: Manifest, inherited: Collection[int] | None = None
) -> tuple[Move, ...]:
    """The moves that fill the slot of `now`, in the order of its bytes; adjacent ones are joined.

    `inherited`: the previous ranks whose own state is taken over; None if all ranks of the previous job are replicas or
    shards of one state. Raises ResumeError for a tensor that the previous job did not have, or had in another form.
    """
    tensors = _tensors(previous, inherited)
    moves: list[Move] = []
    for held in sorted(now.tensors, key=lambda one: one.offset):
        whole = tensors.get(held.name)
        if whole is None or (whole.dtype, whole.nbytes) != (held.dtype, held.whole):
            saved = f"has {whole.nbytes} bytes of {whole.dtype}" if whole else "has no tensor of that name"
            raise ResumeError(
                f"rank {now.rank}: '{held.name}' has {held.whole} bytes of {held.dtype}, but the state in memory "
                f"{saved}: it belongs to another model; start from the beginning with --ftp-resume fresh"
            )
        if inherited is None and held.role != Role.BUFFER.value and held.kind == OWN == whole.parts[0][1].kind:
            raise ResumeError(
                f"rank {now.rank}: '{held.name}' is each rank's own and cannot be restored at another data-parallel "
                "size; start with the previous number of ranks, or from the beginning with --ftp-resume fresh"
            )
        moves.extend(_moves(held, whole, now.rank))
    return tuple(_joined(moves))


def _tensors(previous: Sequence[Manifest], inherited: Collection[int] | None) -> dict[str, _Whole]:
    parts_by_name: dict[str, list[_Part]] = {}
    for manifest in sorted(previous, key=lambda one: one.rank):
        for held in manifest.tensors:
            parts_by_name.setdefault(held.name, []).append((manifest.rank, held))
    if inherited is not None:
        for name, parts in parts_by_name.items():
            own = [part for part in parts if part[0] in inherited]
            if own and (own[0][1].role == Role.BUFFER.value or _is_whole(own)):
                parts_by_name[name] = own
    return {name: _whole(name, parts) for name, parts in parts_by_name.items()}


def _is_whole(parts: Sequence[_Part]) -> bool:
    end = 0
    for _, held in sorted(parts, key=lambda part: part[1].start):
        if held.start != end:
            return False
        end = held.stop
    return end == parts[0][1].whole


def _whole(name: str, parts: list[_Part]) -> _Whole:
    first_rank, first = parts[0]
    if first.role == Role.BUFFER.value:
        parts = [part for part in parts if part[0] == first_rank]
    ordered = sorted(parts, key=lambda part: part[1].start)
    end = 0
    for rank, held in ordered:
        if (held.dtype, held.whole) != (first.dtype, first.whole) or held.start != end:
            raise ResumeError(
                f"'{name}': its parts on the ranks of the previous job do not make up a whole (rank {rank} has bytes "
                f"{held.start} to {held.stop} of {held.whole}, the ranks before it end at {end}): it cannot be "
                "restored at another data-parallel size; start with the previous number of nodes"
            )
        end = held.stop
    return _Whole(first.dtype, first.whole, tuple(ordered), tuple(held.start for _, held in ordered))


def _moves(held: TensorRange, whole: _Whole, rank: int) -> Iterable[Move]:
    at = held.start
    first = max(0, bisect_right(whole.starts, at) - 1)
    for previous_rank, part in whole.parts[first:]:
        stop = min(held.stop, part.stop)
        if at >= held.stop or not part.start <= at < stop:
            break
        yield Move(previous_rank, part.offset + at - part.start, held.offset + at - held.start, stop - at)
        at = stop
    if at < held.stop:
        raise ResumeError(
            f"rank {rank}: bytes {at} to {held.stop} of '{held.name}' are missing in the state in memory; start with "
            "the previous number of nodes"
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
