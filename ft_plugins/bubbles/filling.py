"""Compute what the windows of a sender can carry, and fill them exactly by bytes or with whole layers. Pure.

Invariant: a window is never filled beyond its capacity; every byte is sent once. A sender whose bubbles cannot carry
all its bytes within `most` iterations gets no plan.

In: `Transfer`s, bubbles, links. Out: a `WindowOffer` for each transfer, which makes its `Grant`s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property
from types import MappingProxyType
from typing import NamedTuple

from ..errors import ConfigError
from ..model.timeline import Bubble, SenderFacts, Timeline
from ..model.timeline import bubbles as bubbles_of
from ..redundancy.neighbour import NeighbourCopy
from .layers import LayerPart, fill
from .share import share
from .timeline.messages import Traffic, without_messages
from .windows import Reserve, Windows, shared

_NO_FACTS: Mapping[int, SenderFacts] = MappingProxyType({})


class Granularity(str, Enum):
    """The unit in which windows are filled."""

    BYTES = "bytes"
    LAYER = "layer"


@dataclass(frozen=True)
class Transfer:
    """`nbytes` of slot data from rank `sender` to rank `receiver`, on the nodes at positions `source` and `target`.

    `layers`: bytes of each layer, in the order of the slot; empty if layers are not used.
    """

    sender: int
    source: int
    receiver: int
    target: int
    nbytes: int
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.layers and sum(self.layers) != self.nbytes:
            raise ConfigError(
                f"rank {self.sender}: its layers have {sum(self.layers)} bytes, but it sends {self.nbytes}"
            )


def transfers_of(copies: Sequence[NeighbourCopy], facts: Mapping[int, SenderFacts] = _NO_FACTS) -> tuple[Transfer, ...]:
    """The transfer of each copy: its slot, then small state and digest table as one more layer.

    `facts`: by rank, what it knows of its copy; without them a rank sends its slot alone, in one part.
    """
    transfers = []
    for copy in copies:
        known = facts.get(copy.rank, SenderFacts())
        extra, layers = known.extra_bytes, known.layers
        if extra and (layers or not copy.nbytes):
            layers = (*layers, extra)
        transfers.append(Transfer(copy.rank, copy.source, copy.receiver, copy.target, copy.nbytes + extra, layers))
    return tuple(transfers)


class Grant(NamedTuple):
    """`nbytes` may be sent from `begin` to `deadline` in a bubble: seconds since the host reported the end of `after`.

    `after`: index, among all spans of the timeline, of the compute span that the bubble follows; -1 for the begin of
    the iteration. A trainer finds it by counting spans, even if a reduction lies between it and the bubble. `parts`:
    the layers, in a plan by layers. `edge`: when the host reports that end, in seconds since it reported the begin of
    the iteration.
    """

    bubble: int
    after: int
    begin: float
    deadline: float
    nbytes: int
    parts: tuple[LayerPart, ...] = ()
    edge: float = 0.0


Grants = tuple[Grant, ...]  # of one iteration, in order of time


@dataclass(frozen=True, eq=False)
class WindowOffer:
    """The bytes that each window of a sender can carry, in the `first` iteration and in `every` later one.

    `own`: the sender's bubbles, while its host is in them; `used`: the part of each window in which the link is this
    sender's; `most`: iterations that it may take; `link_seconds`: time of all bytes between the two nodes on the link
    without a pause.
    """

    transfer: Transfer
    own: Sequence[Bubble]
    edges: Sequence[float]  # when the host reports the spans that they follow
    begin: float  # when it reports the begin of the iteration
    windows: Windows
    used: Windows
    first: list[int]
    every: list[int]
    most: int
    link_seconds: float

    def plan(self, granularity: Granularity) -> tuple[tuple[Grants, ...], str]:
        """The grants of each iteration; or none, and the reason."""
        need, carried = self.transfer.nbytes, sum(self.every)
        if not need:
            return (), ""
        if not self.own:
            return (), "its schedule has no bubbles"
        if not any(bubble.seconds for bubble in self.own):
            return (), "its host runs ahead of its device and has left each bubble before it begins"
        if not len(self.windows.begin):
            other = self.transfer.receiver
            return (), f"it shares no long enough idle time with rank {other}, apart from regular communication"
        if need > sum(self.first) + (self.most - 1) * carried:
            return (), f"its bubbles carry {carried} of {need} bytes per iteration, not all within {self.most}"
        if granularity is Granularity.LAYER:
            if sum(map(sum, self.by_layers)) < need:
                return (), f"its bubbles do not carry its layers within {self.most} iterations, but they do by bytes"
            turns = zip(self.by_layers, self._layers, strict=True)
            return tuple(self.grants(carried, parts) for carried, parts in turns), ""
        whole = self.grants(self.every)  # computed once
        return tuple(whole if turn is self.every else self.grants(turn) for turn in self.by_bytes), ""

    @cached_property
    def by_bytes(self) -> list[list[int]]:
        """Bytes by iteration and window: each window filled completely until all is sent (Algorithm 1)."""
        turns: list[list[int]] = []
        left = self.transfer.nbytes
        while left and len(turns) < self.most:
            room = self.every if turns else self.first
            turns.append(_up_to(room, left) if sum(room) > left else room)
            left -= sum(turns[-1])
        return turns

    @cached_property
    def by_layers(self) -> list[list[int]]:
        """Bytes by iteration and window, filled with whole layers (Algorithm 2)."""
        return [[sum(part.nbytes for part in parts) for parts in turn] for turn in self._layers]

    @cached_property
    def _layers(self) -> list[list[tuple[LayerPart, ...]]]:
        return fill(self.transfer.layers, self.first, self.every, self.most)

    def offered(self, granularity: Granularity) -> Grants:
        """The grants of any iteration: what each window carries; by layers, the most that it sends in an iteration."""
        if granularity is Granularity.BYTES:
            return self.grants(self.every)
        return self.grants([max(turn[place] for turn in self.by_layers) for place in range(len(self.every))])

    def filled(self, turns: Sequence[Sequence[int]]) -> tuple[int, int]:
        """(bytes sent, bytes that the windows carry up to the last one needed; of that one, the bytes sent)."""
        offered = 0
        for number, turn in enumerate(turns):
            room, last = self.every if number else self.first, number == len(turns) - 1
            used = max((place for place, nbytes in enumerate(turn) if nbytes), default=0) if last else len(room)
            offered += sum(room[:used]) + (turn[used] if last else 0)
        return sum(map(sum, turns)), offered

    def grants(self, carried: Sequence[int], parts: Sequence[tuple[LayerPart, ...]] | None = None) -> Grants:
        """The grants of an iteration in which window i sends `carried[i]` bytes."""
        begins, ends = self.used.begin.tolist(), self.used.end.tolist()
        grants = []
        for place, (number, nbytes) in enumerate(zip(self.windows.bubble.tolist(), carried, strict=True)):
            if nbytes:
                bubble, taken = self.own[number], parts[place] if parts is not None else ()
                begin, deadline = begins[place] - self.edges[number], ends[place] - self.edges[number]
                edge = self.edges[number] - self.begin
                grants.append(Grant(bubble.index, bubble.after, begin, deadline, nbytes, taken, edge))
        return tuple(grants)


def offers(
    transfers: Sequence[Transfer], timelines: Mapping[int, Timeline], bubbles: Mapping[int, Sequence[Bubble]],
    bytes_per_second: float | Mapping[int, float], reserve: Reserve, ready_seconds: float, least: int, most: int,
    messages: Mapping[int, Traffic],
) -> list[WindowOffer]:  # fmt: skip
    """The offer for each transfer, in order. Arguments as for `bubble_plan.plan_bubbles`."""
    pairs: dict[tuple[int, int], list[int]] = {}
    for place, one in enumerate(transfers):
        pairs.setdefault((one.source, one.target), []).append(place)
    links = _links(transfers, bytes_per_second)

    @cache
    def free(rank: int) -> Sequence[Bubble]:
        """The bubbles of `rank` without the time of messages between stages."""
        if rank not in messages:
            return bubbles[rank]
        return without_messages(bubbles[rank], timelines[rank], messages[rank], reserve)

    made: dict[int, WindowOffer] = {}
    for pair, members in pairs.items():
        owns = [_open(timelines[transfers[at].sender], bubbles[transfers[at].sender]) for at in members]
        ways = [(transfers[at].sender, transfers[at].receiver) for at in members]
        times = [shared(_open(timelines[ours], free(ours)), free(theirs), reserve) for ours, theirs in ways]
        needs = [transfers[at].nbytes for at in members]
        for at, own, windows, rates in zip(members, owns, times, share(times, needs, links[pair]), strict=True):
            room = rates.carried(len(windows.begin)).tolist()
            worth = min(least, transfers[at].nbytes)
            worth = worth if max(room, default=0) >= worth else 0  # if no window is worthwhile, use all
            every = _worth(room, worth)
            late = rates.carried(len(windows.begin), ready_seconds).tolist() if ready_seconds else every
            first = _worth(late, worth) if ready_seconds else every
            seconds = sum(needs) / links[pair]
            timeline = timelines[transfers[at].sender]
            edges = [timeline.opens_at(bubble.after) for bubble in own]
            used = rates.used(windows)
            made[at] = WindowOffer(
                transfers[at], own, edges, timeline.opens_at(-1), windows, used, first, every, most, seconds
            )
    return [made[at] for at in range(len(transfers))]


def host_leaves_early(timeline: Timeline) -> bool:
    """Whether a host that runs ahead of its device passes half of its bubbles' time or more before the device."""
    own = bubbles_of(timeline)
    idle = sum(one.seconds for one in own)
    return bool(timeline.leads) and idle > 0 and 2 * sum(one.seconds for one in _open(timeline, own)) <= idle


def _open(timeline: Timeline, own: Sequence[Bubble]) -> Sequence[Bubble]:
    """The bubbles of a sender, each cut when its host reports the next compute span, which closes the gate."""
    if not timeline.leads:
        return own
    return [replace(one, end=max(one.begin, min(one.end, timeline.closes_at(one.after)))) for one in own]


def _links(
    transfers: Sequence[Transfer], bytes_per_second: float | Mapping[int, float]
) -> dict[tuple[int, int], float]:
    """Bytes per second for each pair of nodes: each node's link is divided among its pairs by their bytes."""
    between: dict[tuple[int, int], int] = {}
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for one in transfers:
        between[one.source, one.target] = between.get((one.source, one.target), 0) + one.nbytes
        sent[one.source] = sent.get(one.source, 0) + one.nbytes
        received[one.target] = received.get(one.target, 0) + one.nbytes
    links = {}
    for (source, target), nbytes in between.items():
        out, into = (
            float(bytes_per_second) if isinstance(bytes_per_second, (int, float)) else bytes_per_second[at]
            for at in (source, target)
        )
        if min(out, into) <= 0:
            raise ConfigError(f"the link from position {source} to {target} has no bandwidth: expected more than 0")
        part = min(out * nbytes / max(1, sent[source]), into * nbytes / max(1, received[target]))
        links[source, target] = part or min(out, into)
    return links


def _worth(carried: Sequence[int], least: int) -> list[int]:
    """`carried`, with 0 for windows of less than `least` bytes."""
    return [nbytes if nbytes >= least else 0 for nbytes in carried]


def _up_to(room: Sequence[int], nbytes: int) -> list[int]:
    """The first `nbytes` of the windows' room."""
    taken = []
    for one in room:
        taken.append(min(one, nbytes))
        nbytes -= taken[-1]
    return taken
