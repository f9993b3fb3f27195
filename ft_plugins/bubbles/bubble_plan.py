"""Plan how many bytes of its copy each rank sends in which bubble: BAFT's Algorithms 1 and 2. Pure.

    windows   times in which sender and receiver are both idle, less the reserve for regular communication  (windows.py)
    rates     each sender's part of the link between two nodes, in each window                                (share.py)
    filling   per window: bytes exactly (Algorithm 1), or the layers that fit best (Algorithm 2) (filling.py, layers.py)
    period    if one iteration's bubbles are not enough, the next one's too: a version every n iterations

If a node sends to several others, or receives from several, its link is divided among them by their bytes, so the rates
on a link never add up to more than its capacity.

Invariant: of a copy that is sent in bubbles, every byte is in exactly one grant of `iterations`; no grant extends
beyond a window, or carries more than the sender's rate times its length. Every iteration offers the grants in `every`,
so late bytes go out in later bubbles. A sender whose bubbles cannot carry its copy is paced by a rate instead, with the
reason; training never waits for it.

In: `Transfer`s, bubbles of each rank by one clock, bytes per second of each node. Out: `BubblePlan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from ..errors import ConfigError
from ..model.timeline import Bubble, Timeline, gc_paused
from .filling import Grant, Grants, Granularity, Transfer, offers
from .timeline.messages import Traffic
from .windows import Reserve

MOST_ITERATIONS = 100  # per version; a sender that needs more is treated as without bubbles
LARGEST_RATE_DUTY = 0.5  # largest part of the time in which a link carries copies outside bubbles
LEAST_PART = 0.1  # of the mean bytes of a node's ranks: the fewest bytes that `rate_duties` assumes for a rank
TABLE_SENDERS = 64


@dataclass(frozen=True)
class SenderPlan:
    """What one rank may send: `iterations[i]` are its grants in the i-th iteration of a period, `every` those that any
    iteration offers.

    `reason`: why it is sent at a rate instead of in bubbles, '' if in bubbles. `bytes_per_second`: that rate, which
    sends the copy in as many iterations as the slowest sender needs; 0 in bubbles.
    """

    transfer: Transfer
    iterations: tuple[Grants, ...]
    every: Grants
    idle_seconds: float  # per iteration, in bubbles
    shared_seconds: float  # of that, shared with the receiver
    reason: str = ""
    bytes_per_second: float = 0.0
    link_rate: float = 0.0  # bytes per second, its part of the link between the two nodes

    def grants_after(self, iteration: int, span: int) -> Grants:
        """The grants of the bubble after compute span `span`, in `iteration` of a period (from 0). Beyond the planned
        iterations: what the bubble offers, for late bytes."""
        planned = self._by_span[iteration] if iteration < len(self.iterations) else self._by_span[-1]
        return planned.get(span, ())

    @cached_property
    def _by_span(self) -> list[dict[int, Grants]]:
        by_iteration = []
        for grants in (*self.iterations, self.every):
            spans: dict[int, list[Grant]] = {}
            for grant in grants:
                spans.setdefault(grant.after, []).append(grant)
            by_iteration.append({span: tuple(those) for span, those in spans.items()})
        return by_iteration


@dataclass(frozen=True)
class BubblePlan:
    """The plans of all `senders`. A version takes `iterations` iterations of `seconds` each to send; see `slowed_to`
    for a job whose other senders need more.

    `fill_bytes`, `fill_layers`: share of the windows that is used, up to the last window needed, filled by bytes or by
    layers (of senders with known layers). None if nothing is sent in bubbles or, for `fill_layers`, if no sender's
    layers are known.
    """

    senders: tuple[SenderPlan, ...]
    iterations: int
    seconds: float
    granularity: Granularity
    fill_bytes: float | None
    fill_layers: float | None

    @property
    def paced_by_rate(self) -> tuple[SenderPlan, ...]:
        return tuple(sender for sender in self.senders if sender.reason)

    def slowed_to(self, iterations: int) -> BubblePlan:
        """This plan with `iterations` per version, at least as many as here, because other senders need them; rates are
        lowered accordingly."""
        senders = (
            replace(one, bytes_per_second=one.transfer.nbytes / (iterations * self.seconds)) if one.reason else one
            for one in self.senders
        )
        return replace(self, iterations=iterations, senders=tuple(senders))

    def table(self) -> str:
        """The plan as a table: a line for each of the first 64 senders, then those paced by a rate, and why."""
        by = "whole layers" if self.granularity is Granularity.LAYER else "bytes"
        fills = [
            f"{share:.1%} by {name}"
            for name, share in (("bytes", self.fill_bytes), ("layers", self.fill_layers))
            if share is not None
        ]
        lines = [
            f"a version every {self.iterations} iteration(s) of {self.seconds:.3f} s, bubbles filled by {by}"
            + (f" ({', '.join(fills)})" if fills else "")
        ]
        lines.append(f"{'rank':>6} {'to':>6} {'bytes':>14} {'idle':>6} {'shared':>6} {'bubbles':>8} {'n':>4}")
        for one in self.senders[:TABLE_SENDERS]:
            idle, both = (seconds / self.seconds for seconds in (one.idle_seconds, one.shared_seconds))
            bubbles = len({grant.bubble for grant in one.every})
            iterations = str(len(one.iterations)) if not one.reason else "-"
            lines.append(
                f"{one.transfer.sender:>6} {one.transfer.receiver:>6} {one.transfer.nbytes:>14} {idle:>6.1%} "
                f"{both:>6.1%} {bubbles:>8} {iterations:>4}"
            )
        if len(self.senders) > TABLE_SENDERS:
            lines.append(f"  ... and {len(self.senders) - TABLE_SENDERS} more senders")
        for one in self.paced_by_rate[:TABLE_SENDERS]:
            rate = f"{one.bytes_per_second:.0f} bytes/s"
            lines.append(f"  rank {one.transfer.sender} is paced by a rate, {rate}: {one.reason}")
        return "\n".join(lines)


@gc_paused()
def plan_bubbles(
    transfers: Sequence[Transfer], timelines: Mapping[int, Timeline], bubbles: Mapping[int, Sequence[Bubble]],
    bytes_per_second: float | Mapping[int, float], reserve: Reserve, granularity: Granularity = Granularity.BYTES,
    ready_seconds: float = 0.0, least_bytes: int = 0, most_iterations: int = MOST_ITERATIONS,
    messages: Mapping[int, Traffic] | None = None,
) -> BubblePlan:  # fmt: skip
    """The plan of a job, or of a set of nodes that share no links with others, from one iteration of each rank.

    `bytes_per_second`: of the link of each position's node, each way; or of every node. `ready_seconds`: time in the
    first iteration until the version to be sent is captured. `least_bytes`: windows that carry fewer bytes than this
    (or than the copy, if that is smaller) are not used, unless all are that small. `messages`: by rank, messages
    between stages; their time is reserved instead of `reserve` where it is longer. Times of the ranks of a pipeline
    have one origin: they begin an iteration together, because they meet before each update. Raises ConfigError for a
    rank without timeline or layers.
    """
    if not transfers:
        raise ConfigError("nothing to send: expected a transfer for each rank")
    for rank in (rank for one in transfers for rank in (one.sender, one.receiver)):
        if rank not in timelines or rank not in bubbles:
            raise ConfigError(f"rank {rank} has no timeline: expected one iteration of every sender and receiver")
    bare = [one.sender for one in transfers if one.nbytes and not one.layers]
    if granularity is Granularity.LAYER and bare:
        raise ConfigError(f"rank {bare[0]}: its layers are unknown; use granularity bytes, or give its layers")
    seconds = max(timeline.seconds for timeline in timelines.values())
    offered = offers(
        transfers, timelines, bubbles, bytes_per_second, reserve, ready_seconds, least_bytes, most_iterations,
        messages or {},
    )  # fmt: skip
    planned = [offer.plan(granularity) for offer in offered]
    rate_seconds = [one.link_seconds / LARGEST_RATE_DUTY for one, (_, why) in zip(offered, planned, strict=True) if why]
    iterations = max(1, *(len(grants) for grants, _ in planned), *(ceil(one / seconds) for one in rate_seconds))
    senders = []
    for offer, (grants, reason) in zip(offered, planned, strict=True):
        one = offer.transfer
        idle = sum(bubble.end - bubble.begin for bubble in offer.own)
        rate = one.nbytes / (iterations * seconds) if reason else 0.0
        every = () if reason or not one.nbytes else offer.offered(granularity)
        part = one.nbytes / offer.link_seconds if offer.link_seconds else 0.0
        senders.append(SenderPlan(one, grants, every, idle, offer.windows.seconds, reason, rate, part))
    in_bubbles = [
        offer for offer, (_, reason) in zip(offered, planned, strict=True) if not reason and offer.transfer.nbytes
    ]
    by_bytes = _share([offer.filled(offer.by_bytes) for offer in in_bubbles])
    by_layers = _share([offer.filled(offer.by_layers) for offer in in_bubbles if offer.transfer.layers])
    return BubblePlan(tuple(senders), iterations, seconds, granularity, by_bytes, by_layers)


def rate_duties(nbytes: Mapping[int, int]) -> dict[int, float]:
    """Part of the time for rate-limited sends, by rank of a node: LARGEST_RATE_DUTY, divided in proportion to `nbytes`,
    where each rank is assumed to send at least LEAST_PART of the mean: otherwise a rank with an empty slot could never
    send its small state."""
    least = max(1.0, LEAST_PART * sum(nbytes.values()) / len(nbytes))
    parts = {rank: max(least, sent) for rank, sent in nbytes.items()}
    whole = sum(parts.values())
    return {rank: LARGEST_RATE_DUTY * part / whole for rank, part in parts.items()}


def _share(filled: Sequence[tuple[int, int]]) -> float | None:
    """Bytes sent as a share of what the windows carry."""
    taken, offered = (sum(column) for column in zip(*filled, strict=True)) if filled else (0, 0)
    return taken / offered if offered else None
