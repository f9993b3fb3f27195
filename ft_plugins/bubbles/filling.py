"""What the windows of a sender carry, and what goes out in each: exactly by bytes, or by whole layers. Pure.

Invariant: what goes out in a window is at most what it carries; everything goes out once. Nothing is planned for a
sender whose bubbles do not carry all within `most` iterations.

In: `Transfer`s, bubbles, links. Out: an `WindowOffer` for each transfer, and by it `Grant`s.
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
from ..redundancy.neighbour import NeighbourCopy
from .layers import LayerPart, fill
from .messages import Traffic, without_messages
from .share import share
from .windows import Reserve, Windows, shared

_NOTHING_TOLD: Mapping[int, SenderFacts] = MappingProxyType({})


class Granularity(str, Enum):
    """What is sent at once."""

    BYTES = "bytes"
    LAYER = "layer"


@dataclass(frozen=True)
class Transfer:
    """`nbytes` of slot data of `sender` go to `receiver`; their nodes stand at positions `source` and `target`.

    `layers`: bytes of each layer, in the order in which they lie in the slot; empty where nobody asks for layers.
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
                f"rank {self.sender}: its layers have {sum(self.layers)} bytes, what it sends has {self.nbytes}"
            )


def transfers_of(
    copies: Sequence[NeighbourCopy], told: Mapping[int, SenderFacts] = _NOTHING_TOLD
) -> tuple[Transfer, ...]:
    """What goes out with each copy: its slot, and what is beside it (small state, digest table), like one layer more.

    `told`: what the ranks know of what they send; a rank of which nothing is known sends its slot alone, in one.
    """
    found = []
    for one in copies:
        facts = told.get(one.rank, SenderFacts())
        more, known = facts.extra_bytes, facts.layers
        whole = (*known, more) if more and (known or not one.nbytes) else known
        found.append(Transfer(one.rank, one.source, one.receiver, one.target, one.nbytes + more, whole))
    return tuple(found)


class Grant(NamedTuple):
    """`nbytes` may go from `begin` to `deadline` in a bubble: seconds since the host told of the end of span `after`.

    `after` is the compute span after whose end the bubble begins, of all spans of the timeline, -1 for the begin of the
    iteration: by counting spans a trainer knows it, also where a reduction lies between it and the bubble. `parts` are
    the layers, of a plan that goes by layers. `edge`: when the host tells of that end, in seconds since it told of the
    begin of the iteration.
    """

    bubble: int
    after: int
    begin: float
    deadline: float
    nbytes: int
    parts: tuple[LayerPart, ...] = ()
    edge: float = 0.0


Grants = tuple[Grant, ...]  # of one iteration, in the order of time


@dataclass(frozen=True, eq=False)
class WindowOffer:
    """What the windows of a sender carry, in bytes: in the first iteration, and in every one after it.

    `own` are the bubbles of the sender, as long as its host is in them, `used` is what of each window the link is this
    sender's, `most` the iterations that it may take, `link_seconds` what everything between the two nodes takes on the
    link without a pause.
    """

    transfer: Transfer
    own: Sequence[Bubble]
    edges: Sequence[float]  # when the host tells of the spans after which they begin
    told: float  # when it tells of the begin of the iteration
    windows: Windows
    used: Windows
    first: list[int]
    every: list[int]
    most: int
    link_seconds: float

    def plan(self, granularity: Granularity) -> tuple[tuple[Grants, ...], str]:
        """The grants of each iteration; or none, and why."""
        need, carried = self.transfer.nbytes, sum(self.every)
        if not need:
            return (), ""
        if not self.own:
            return (), "its schedule has no bubbles"
        if not any(bubble.seconds for bubble in self.own):
            return (), "its host runs ahead of its device, and is through with each bubble before that begins"
        if not len(self.windows.begin):
            other = self.transfer.receiver
            beyond = "that is long enough, beyond what regular communication needs"
            return (), f"it shares no idle time with rank {other} {beyond}"
        if need > sum(self.first) + (self.most - 1) * carried:
            return (), f"its bubbles carry {carried} of {need} bytes an iteration, not all within {self.most}"
        if granularity is Granularity.LAYER:
            if sum(map(sum, self.by_layers)) < need:
                return (), f"its bubbles do not carry its layers within {self.most} iterations; by bytes they do"
            turns = zip(self.by_layers, self._layers, strict=True)
            return tuple(self.grants(carried, parts) for carried, parts in turns), ""
        whole = self.grants(self.every)  # made once
        return tuple(whole if turn is self.every else self.grants(turn) for turn in self.by_bytes), ""

    @cached_property
    def by_bytes(self) -> list[list[int]]:
        """By iteration and window, bytes: each window as full as it can be, until all is through (Algorithm 1)."""
        turns: list[list[int]] = []
        left = self.transfer.nbytes
        while left and len(turns) < self.most:
            room = self.every if turns else self.first
            turns.append(_up_to(room, left) if sum(room) > left else room)
            left -= sum(turns[-1])
        return turns

    @cached_property
    def by_layers(self) -> list[list[int]]:
        """The same, by layers (Algorithm 2)."""
        return [[sum(part.nbytes for part in parts) for parts in turn] for turn in self._layers]

    @cached_property
    def _layers(self) -> list[list[tuple[LayerPart, ...]]]:
        return fill(self.transfer.layers, self.first, self.every, self.most)

    def offered(self, granularity: Granularity) -> Grants:
        """What any iteration offers: what its windows carry, by layers the most that one of a period sends in each."""
        if granularity is Granularity.BYTES:
            return self.grants(self.every)
        return self.grants([max(turn[place] for turn in self.by_layers) for place in range(len(self.every))])

    def filled(self, turns: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Bytes that go out, and bytes that the windows carry up to the last that is needed; of that, what goes out."""
        offered = 0
        for number, turn in enumerate(turns):
            room, last = self.every if number else self.first, number == len(turns) - 1
            used = max((place for place, nbytes in enumerate(turn) if nbytes), default=0) if last else len(room)
            offered += sum(room[:used]) + (turn[used] if last else 0)
        return sum(map(sum, turns)), offered

    def grants(self, carried: Sequence[int], parts: Sequence[tuple[LayerPart, ...]] | None = None) -> Grants:
        """The grants of an iteration in which each window carries so many bytes."""
        begins, ends = self.used.begin.tolist(), self.used.end.tolist()
        found = []
        for place, (number, nbytes) in enumerate(zip(self.windows.bubble.tolist(), carried, strict=True)):
            if nbytes:
                bubble, taken = self.own[number], parts[place] if parts is not None else ()
                begin, deadline = begins[place] - self.edges[number], ends[place] - self.edges[number]
                edge = self.edges[number] - self.told
                found.append(Grant(bubble.index, bubble.after, begin, deadline, nbytes, taken, edge))
        return tuple(found)


def offers(
    transfers: Sequence[Transfer],
    timelines: Mapping[int, Timeline],
    bubbles: Mapping[int, Sequence[Bubble]],
    bytes_per_second: float | Mapping[int, float],
    reserve: Reserve,
    ready_seconds: float,
    least: int,
    most: int,
    messages: Mapping[int, Traffic],
) -> list[WindowOffer]:
    """What the windows of each transfer carry, in the order of `transfers`. The arguments are those of the plan."""
    pairs: dict[tuple[int, int], list[int]] = {}
    for place, one in enumerate(transfers):
        pairs.setdefault((one.source, one.target), []).append(place)
    links = _links(transfers, bytes_per_second)

    @cache
    def free(rank: int) -> Sequence[Bubble]:
        """Its bubbles without what is under way between stages."""
        return without_messages(bubbles[rank], timelines[rank], messages[rank], reserve) if rank in messages else bubbles[rank]

    found: dict[int, WindowOffer] = {}
    for pair, members in pairs.items():
        owns = [_open(timelines[transfers[at].sender], bubbles[transfers[at].sender]) for at in members]
        ways = [(transfers[at].sender, transfers[at].receiver) for at in members]
        times = [shared(_open(timelines[ours], free(ours)), free(theirs), reserve) for ours, theirs in ways]
        needs = [transfers[at].nbytes for at in members]
        for at, own, windows, rates in zip(members, owns, times, share(times, needs, links[pair]), strict=True):
            room = rates.carried(len(windows.begin)).tolist()
            worth = min(least, transfers[at].nbytes)
            worth = worth if max(room, default=0) >= worth else 0  # where none is, all of them: bubbles all the same
            every = _worth(room, worth)
            late = rates.carried(len(windows.begin), ready_seconds).tolist() if ready_seconds else every
            first = _worth(late, worth) if ready_seconds else every
            seconds = sum(needs) / links[pair]
            timeline = timelines[transfers[at].sender]
            edges = [timeline.opens_at(bubble.after) for bubble in own]
            used = rates.used(windows)
            found[at] = WindowOffer(
                transfers[at], own, edges, timeline.opens_at(-1), windows, used, first, every, most, seconds
            )
    return [found[at] for at in range(len(transfers))]


def _open(timeline: Timeline, own: Sequence[Bubble]) -> Sequence[Bubble]:
    """The bubbles of a sender, each no longer than until its host tells of what comes next: then its gate is closed."""
    if not timeline.leads:
        return own
    return [replace(one, end=max(one.begin, min(one.end, timeline.closes_at(one.after)))) for one in own]


def _links(
    transfers: Sequence[Transfer], bytes_per_second: float | Mapping[int, float]
) -> dict[tuple[int, int], float]:
    """Bytes per second between two nodes: of the link of each, the part that goes to the pair by what it carries."""
    between: dict[tuple[int, int], int] = {}
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for one in transfers:
        between[one.source, one.target] = between.get((one.source, one.target), 0) + one.nbytes
        sent[one.source] = sent.get(one.source, 0) + one.nbytes
        received[one.target] = received.get(one.target, 0) + one.nbytes
    found = {}
    for (source, target), nbytes in between.items():
        out, into = (
            float(bytes_per_second) if isinstance(bytes_per_second, (int, float)) else bytes_per_second[at]
            for at in (source, target)
        )
        if min(out, into) <= 0:
            raise ConfigError(f"the link from position {source} to {target} has no bandwidth: expected more than 0")
        part = min(out * nbytes / max(1, sent[source]), into * nbytes / max(1, received[target]))
        found[source, target] = part or min(out, into)
    return found


def _worth(carried: Sequence[int], least: int) -> list[int]:
    """Without windows that carry less than is worth a frame."""
    return [nbytes if nbytes >= least else 0 for nbytes in carried]


def _up_to(room: Sequence[int], nbytes: int) -> list[int]:
    """Of each window what is needed, until it is `nbytes`."""
    found = []
    for one in room:
        found.append(min(one, nbytes))
        nbytes -= found[-1]
    return found
