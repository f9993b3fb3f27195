"""What a rank does with what it receives in the tree of ranks: joins, passes on, finishes. Pure.

An operation goes up the tree, is joined at each rank, and its result goes down from the root to all. A word goes from
the rank that announces it to all others; each acknowledges it once all ranks behind it have.

Invariant: all ranks call the same operations in the same order; if one does not, that is an error that names both. A
rank acknowledges a word that it knows already at once: another rank has announced it as well, and waits for the rest.
A neighbour may end in order at any time. Only an operation that it has not taken part in fails then. No word waits for
it, or for the ranks behind it: its last iteration is over, so every rank has reached that one and begins no other.

The tree: the ranks of a node are below its first one, and the ranks below a rank follow it without a gap, so what they
send joins in rank order by concatenation. The depth grows with the logarithm of the number of nodes, and a rank has at
most ARITY connections to other nodes and one to each rank of its own.

In: calls of this rank, frames of its neighbours. Out: frames to send; results; words that all ranks know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgpack

from ..errors import ProtocolError, TopologyError

ARITY = 8  # nodes below a node: 4,096 nodes are four levels, and a node needs no more than 9 connections to others
SIZE = 8  # bytes of the length in front of a payload
_AHEAD = 16  # operations that a neighbour may be ahead of this rank; as many as a caller may have started
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class RankPlace:
    """The neighbours of `rank`. It and the ranks below it are `rank` to `stop` - 1; the root has no parent."""

    rank: int
    parent: int | None
    children: tuple[int, ...]
    stop: int


def place_of(rank: int, world_size: int, on_node: int) -> RankPlace:
    """The place of `rank`, if each node has `on_node` consecutive ranks, the last one maybe fewer.

    If nodes have other ranks than that, the tree is the same on all ranks, but longer ways lead through other nodes.
    Raises TopologyError.
    """
    if not (0 <= rank < world_size and on_node > 0):
        raise TopologyError(f"there is no rank {rank} in a job of {world_size} ranks, {on_node} on a node")
    first = rank // on_node * on_node
    if rank != first:
        return RankPlace(rank, first, (), rank + 1)
    nodes = -(-world_size // on_node)
    parent, below, stop = _node_place(rank // on_node, nodes)
    own = range(first + 1, min(first + on_node, world_size))
    children = (*own, *(node * on_node for node in below))
    return RankPlace(rank, None if parent is None else parent * on_node, children, min(stop * on_node, world_size))


def _node_place(node: int, nodes: int) -> tuple[int | None, tuple[int, ...], int]:
    """Parent, children and end of the part of the tree below `node`."""
    parent: int | None = None
    start, stop = 0, nodes
    while True:
        parts = _parts(start + 1, stop)
        if node == start:
            return parent, tuple(begin for begin, _ in parts), stop
        parent = start
        start, stop = next(part for part in parts if part[0] <= node < part[1])


def _parts(start: int, stop: int) -> list[tuple[int, int]]:
    """`start` to `stop` in at most ARITY consecutive parts, none empty, whose sizes differ by at most one."""
    count = min(ARITY, stop - start)
    if count <= 0:
        return []
    size, larger = divmod(stop - start, count)
    bounds = [start + size * number + min(number, larger) for number in range(count + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


class FrameKind(IntEnum):
    """What a frame is."""

    GATHER = 1  # every rank gets the payloads of all, by rank
    AGREE = 2  # every rank gets the first failure, b"" if there is none
    WORD = 3
    HEARD = 4  # of a word, by all ranks behind the sender
    LOST = 5  # the tree is broken; with the reason
    ENDED = 6  # the sender ends in order; its last frame


@dataclass(frozen=True)
class RankFrame:
    """A message between two neighbours. `number` counts the operations of a rank; 0 for what is none."""

    kind: FrameKind
    number: int = 0
    body: Buffer = b""


@dataclass(frozen=True)
class SendFrame:
    """Send `frame` to the neighbour `to`."""

    to: int
    frame: RankFrame


@dataclass(frozen=True)
class Finished:
    """Operation `number` has this result."""

    number: int
    result: Buffer


@dataclass(frozen=True)
class Known:
    """All ranks know `word`, which this rank has announced."""

    word: str


Action = SendFrame | Finished | Known


@dataclass
class _Joining:
    kind: FrameKind
    parts: dict[int, Buffer] = field(default_factory=dict)  # by rank: this one's and its children's


class Operations:
    """The operations and words of one rank."""

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._joining: dict[int, _Joining] = {}
        self._called = 0  # the number of this rank's last operation
        self._unheard: dict[
            str, tuple[int | None, set[int]]
        ] = {}  # by word: its sender, the neighbours that have yet to acknowledge
        self._finished = 0  # the number of the last operation with a result
        self._ended: set[int] = set()  # neighbours
        self.words: set[str] = set()

    def call(self, kind: FrameKind, body: Buffer) -> tuple[int, list[Action]]:
        """Take part in the next operation. Returns its number. Raises ProtocolError if a child called another one."""
        self._called += 1
        return self._called, self._join(self._place.rank, RankFrame(kind, self._called, body))

    def announce(self, word: str) -> list[Action]:
        """Send `word` to all ranks; `Known` follows."""
        return [Known(word)] if word in self.words else self._spread(word, None)

    def receive(self, sender: int, frame: RankFrame) -> list[Action]:
        """Take a frame of a neighbour. Raises ProtocolError for one that makes no sense."""
        match frame.kind:
            case FrameKind.WORD:
                word = bytes(frame.body).decode(errors="replace")
                known = SendFrame(sender, RankFrame(FrameKind.HEARD, body=frame.body))
                return [known] if word in self.words else self._spread(word, sender)
            case FrameKind.HEARD:
                return self._heard(sender, bytes(frame.body).decode(errors="replace"))
            case FrameKind.ENDED:
                return self._end(sender)
        if sender == self._place.parent:
            return self._finish(frame)
        if not self._called - _AHEAD <= frame.number <= self._called + _AHEAD:
            raise ProtocolError(
                f"rank {sender} is at operation {frame.number}, rank {self._place.rank} at {self._called}"
            )
        return self._join(sender, frame)

    def missing(self) -> list[int]:
        """The neighbours that the oldest unfinished operation waits for."""
        joining = dict(self._joining)  # another thread changes it
        if not joining:
            return [] if self._place.parent is None else [self._place.parent]
        parts = joining[min(joining)].parts
        return [child for child in self._place.children if child not in parts]

    def _join(self, rank: int, frame: RankFrame) -> list[Action]:
        joining = self._joining.setdefault(frame.number, _Joining(frame.kind))
        if joining.kind != frame.kind:
            there = min(joining.parts)
            raise ProtocolError(
                f"operation {frame.number} is {frame.kind.name.lower()} on rank {rank}, but "
                f"{joining.kind.name.lower()} on rank {there}: the ranks do not run the same program"
            )
        joining.parts[rank] = frame.body
        self._require_ranks(frame.number)
        if len(joining.parts) <= len(self._place.children):
            return []
        del self._joining[frame.number]
        ordered = [joining.parts[each] for each in sorted(joining.parts)]
        body = ordered[0] if len(ordered) == 1 else _JOIN[frame.kind](ordered)
        joined = RankFrame(frame.kind, frame.number, body)
        return self._finish(joined) if self._place.parent is None else [SendFrame(self._place.parent, joined)]

    def _require_ranks(self, number: int) -> None:
        """Raises ProtocolError if an operation waits for a neighbour that has ended."""
        parts = self._joining[number].parts
        for rank in sorted(self._ended):
            if rank == self._place.parent or rank not in parts:
                raise _ended_early(rank, number)

    def _end(self, sender: int) -> list[Action]:
        self._ended.add(sender)
        for number in sorted(self._joining):
            self._require_ranks(number)
        if sender == self._place.parent and self._finished < self._called:
            raise _ended_early(sender, self._finished + 1)
        return [action for word in sorted(self._unheard) for action in self._heard(sender, word)]

    def _finish(self, frame: RankFrame) -> list[Action]:
        self._finished = frame.number
        down: list[Action] = [SendFrame(child, frame) for child in self._place.children if child not in self._ended]
        return [*down, Finished(frame.number, frame.body)]

    def _spread(self, word: str, source: int | None) -> list[Action]:
        self.words.add(word)
        neighbours = {*self._place.children, *([] if self._place.parent is None else [self._place.parent])}
        neighbours -= self._ended
        self._unheard[word] = source, neighbours - {source}
        spread = [
            SendFrame(to, RankFrame(FrameKind.WORD, body=word.encode())) for to in sorted(neighbours) if to != source
        ]
        return [*spread, *self._heard(None, word)]

    def _heard(self, sender: int | None, word: str) -> list[Action]:
        if word not in self._unheard:
            return []
        source, waiting = self._unheard[word]
        waiting.discard(-1 if sender is None else sender)
        if waiting:
            return []
        del self._unheard[word]
        if source is None:
            return [Known(word)]
        return [] if source in self._ended else [SendFrame(source, RankFrame(FrameKind.HEARD, body=word.encode()))]


def _ended_early(rank: int, number: int) -> ProtocolError:
    return ProtocolError(
        f"rank {rank} has ended, but did not take part in operation {number} of all ranks: see its log for the reason"
    )


def framed(payload: Buffer) -> bytes:
    """A payload as part of a gather."""
    return b"".join((len(payload).to_bytes(SIZE, "little"), payload))


def payloads(joined: Buffer, count: int) -> list[bytes]:
    """The payloads in the result of a gather, by rank. Raises ProtocolError unless there are `count`."""
    view, at = memoryview(joined), 0
    found: list[bytes] = []
    while at + SIZE <= len(view) and len(found) < count:
        nbytes = int.from_bytes(view[at : at + SIZE], "little")
        found.append(bytes(view[at + SIZE : at + SIZE + nbytes]))
        at += SIZE + nbytes
    if at != len(view) or len(found) != count:
        raise ProtocolError(f"expected the payloads of {count} ranks, found {len(found)} in {len(view)} bytes")
    return found


def failure(rank: int, kind: str, text: str, echo: bool) -> bytes:
    """An error of `rank` as part of an agreement."""
    return bytes(msgpack.packb([echo, rank, kind, text]))


def failed(body: Buffer) -> tuple[int, str, str] | None:
    """Rank, kind and text of the error that an agreement found; None if there is none. Raises ProtocolError."""
    if not body:
        return None
    _, rank, kind, text = _entry(body)
    return rank, kind, text


def _entry(body: Buffer) -> tuple[bool, int, str, str]:
    try:
        echo, rank, kind, text = msgpack.unpackb(body)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"an error of another rank cannot be read ({error})") from error
    if not (type(echo) is bool and type(rank) is int and isinstance(kind, str) and isinstance(text, str)):
        raise ProtocolError("an error of another rank cannot be read")
    return echo, rank, kind, text


def _first_failure(parts: Sequence[Buffer]) -> Buffer:
    """The failure of the lowest rank that is not an echo, else of the lowest rank."""
    entries: list[Any] = [(_entry(part)[:2], part) for part in parts if part]
    return min(entries, key=lambda entry: entry[0])[1] if entries else b""


_JOIN: Mapping[FrameKind, Any] = {FrameKind.GATHER: b"".join, FrameKind.AGREE: _first_failure}
