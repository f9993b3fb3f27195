"""How many bytes of its copy a rank may send in which bubble: BAFT's Algorithms 1 and 2. Pure.

    windows   the times in which sender and receiver are idle, without what regular communication needs    (windows)
    rates     what of the link between two nodes each of its senders has in each window                     (share)
    filling   window by window: bytes exactly (Algorithm 1), or the layers that fit best (Algorithm 2; layers)
    period    if the bubbles of one iteration are not enough, those of the next: a checkpoint every n iterations

Where a node sends to several others, or receives from several, its link is divided among them by what they carry; so
the rates of all senders at a link never add up to more than it.

Invariant: every byte of every copy is in one grant; no grant reaches out of a window, or carries more than the sender's
rate times its length. Every iteration offers the same grants (`every`), so that what was late goes out in the bubbles
that follow. A sender without shared bubbles is told so and paced by a rate: nothing is stalled for it.

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
from .messages import Traffic
from .windows import Reserve

MOST_ITERATIONS = 100  # of one checkpoint; a sender that needs more is as good as without bubbles
BY_RATE = 0.5  # of the time, at most, a link carries copies in no bubble: the rest of it is training's
LEAST_PART = 0.1  # of an equal part of that: what a rank has of it that sends next to nothing
TABLE_SENDERS = 64


@dataclass(frozen=True)
class SenderPlan:
    """What one rank may send: `iterations[i]` are its grants in the i-th iteration of a period, `every` what any
    iteration offers.

    `reason` says why it is not paced by bubbles; '' where it is. `bytes_per_second` is the rate by which it keeps up
    with the others then.
    """

    transfer: Transfer
    iterations: tuple[Grants, ...]
    every: Grants
    idle_seconds: float  # of an iteration: in bubbles
    shared_seconds: float  # that the receiver shares
    reason: str = ""
    bytes_per_second: float = 0.0

    def after(self, iteration: int, span: int) -> Grants:
        """The grants of the bubble that begins after compute span `span`, in an iteration of a period, from 0; once
        all that was planned is through, what the bubble offers: for what was late."""
        planned = self._by_span[iteration] if iteration < len(self.iterations) else self._by_span[-1]
        return planned.get(span, ())

    @cached_property
    def _by_span(self) -> list[dict[int, Grants]]:
        found = []
        for grants in (*self.iterations, self.every):
            spans: dict[int, list[Grant]] = {}
            for grant in grants:
                spans.setdefault(grant.after, []).append(grant)
            found.append({span: tuple(those) for span, those in spans.items()})
        return found


@dataclass(frozen=True)
class BubblePlan:
    """Who of the `senders` may send what when. `iterations`: how many of them one checkpoint takes, of these senders or
    `in_step` with others; each has `seconds`.

    `fill_bytes`, `fill_layers`: how full the windows are up to the last that is needed, filled exactly, or by layers,
    of the senders whose layers are given; None where there are none, or nothing is sent in bubbles.
    """

    senders: tuple[SenderPlan, ...]
    iterations: int
    seconds: float
    granularity: Granularity
    fill_bytes: float | None
    fill_layers: float | None

    @property
    def paced_by_rate(self) -> tuple[SenderPlan, ...]:
        """The senders that no bubbles carry."""
        return tuple(sender for sender in self.senders if sender.reason)

    def in_step(self, iterations: int) -> BubblePlan:
        """The same in a job where a checkpoint takes so many iterations, as many as here or more, because others need
        them: what goes by a rate takes its time."""
        senders = (
            replace(one, bytes_per_second=one.transfer.nbytes / (iterations * self.seconds)) if one.reason else one
            for one in self.senders
        )
        return replace(self, iterations=iterations, senders=tuple(senders))

    def table(self) -> str:
        """The plan for people: a line for each sender, the first 64; then who goes without bubbles, and why."""
        by = "whole layers" if self.granularity is Granularity.LAYER else "bytes"
        fills = [
            f"{share:.1%} by {name}"
            for name, share in (("bytes", self.fill_bytes), ("layers", self.fill_layers))
            if share is not None
        ]
        lines = [
            f"a checkpoint every {self.iterations} iteration(s) of {self.seconds:.3f} s, bubbles filled by {by}"
            + (f" ({', '.join(fills)})" if fills else "")
        ]
        lines.append(f"{'rank':>6} {'to':>6} {'bytes':>14} {'idle':>6} {'shared':>6} {'bubbles':>8} {'n':>4}")
        for one in self.senders[:TABLE_SENDERS]:
            idle, both = (seconds / self.seconds for seconds in (one.idle_seconds, one.shared_seconds))
            bubbles = len({grant.bubble for grant in one.every})
            turns = str(len(one.iterations)) if not one.reason else "-"
            lines.append(
                f"{one.transfer.sender:>6} {one.transfer.receiver:>6} {one.transfer.nbytes:>14} {idle:>6.1%} "
                f"{both:>6.1%} {bubbles:>8} {turns:>4}"
            )
        if len(self.senders) > TABLE_SENDERS:
            lines.append(f"  ... and {len(self.senders) - TABLE_SENDERS} more senders")
        for one in self.paced_by_rate[:TABLE_SENDERS]:
            rate = f"{one.bytes_per_second:.0f} bytes/s"
            lines.append(f"  rank {one.transfer.sender} is paced by a rate, {rate}: {one.reason}")
        return "\n".join(lines)


@gc_paused()
def plan_bubbles(
    transfers: Sequence[Transfer],
    timelines: Mapping[int, Timeline],
    bubbles: Mapping[int, Sequence[Bubble]],
    bytes_per_second: float | Mapping[int, float],
    reserve: Reserve,
    granularity: Granularity = Granularity.BYTES,
    ready_seconds: float = 0.0,
    least_bytes: int = 0,
    most_iterations: int = MOST_ITERATIONS,
    messages: Mapping[int, Traffic] | None = None,
) -> BubblePlan:
    """The plan of a job, or of those of its nodes that share links with no others, from one iteration of each rank.

    `bytes_per_second`: of the link of each position's node, each way; or of every node. `ready_seconds`: into the first
    iteration, until the version that is to be sent has been captured. `least_bytes`: a window that
    carries less, and not all there is, is left alone, unless all of them are such. `messages`: of each rank what is
    sent between stages, and is reserved where it takes longer than `reserve`. Times of all ranks count from one moment:
    they begin an iteration together, as far as they meet before each update. Raises
    ConfigError for a rank without timeline or layers.
    """
    if not transfers:
        raise ConfigError("there is nothing to send: expected a transfer for each rank")
    for rank in (rank for one in transfers for rank in (one.sender, one.receiver)):
        if rank not in timelines or rank not in bubbles:
            raise ConfigError(f"rank {rank} has no timeline: expected one iteration of every sender and receiver")
    bare = [one.sender for one in transfers if one.nbytes and not one.layers]
    if granularity is Granularity.LAYER and bare:
        raise ConfigError(f"rank {bare[0]}: its layers are not known; choose granularity: bytes, or name them")
    seconds = max(timeline.seconds for timeline in timelines.values())
    found = offers(
        transfers, timelines, bubbles, bytes_per_second, reserve, ready_seconds, least_bytes, most_iterations,
        messages or {},
    )
    planned = [offer.plan(granularity) for offer in found]
    rates = [offer.link_seconds / BY_RATE for offer, (_, reason) in zip(found, planned, strict=True) if reason]
    slowest = max(1, *(len(grants) for grants, _ in planned), *(ceil(one / seconds) for one in rates))
    senders = []
    for offer, (grants, reason) in zip(found, planned, strict=True):
        one = offer.transfer
        idle = sum(bubble.end - bubble.begin for bubble in offer.own)
        rate = one.nbytes / (slowest * seconds) if reason else 0.0
        every = () if reason or not one.nbytes else offer.offered(granularity)
        senders.append(SenderPlan(one, grants, every, idle, offer.windows.seconds, reason, rate))
    carried = [offer for offer, (_, reason) in zip(found, planned, strict=True) if not reason and offer.transfer.nbytes]
    by_bytes = _share([offer.filled(offer.by_bytes) for offer in carried])
    by_layers = _share([offer.filled(offer.by_layers) for offer in carried if offer.transfer.layers])
    return BubblePlan(tuple(senders), slowest, seconds, granularity, by_bytes, by_layers)


def by_rate_shares(nbytes: Mapping[int, int]) -> dict[int, float]:
    """Of a node's time, what each of its ranks may send in that goes by a rate: BY_RATE, divided by what they send; to
    each at least LEAST_PART of an equal part, or what goes beside a slot, however small, would never be through."""
    least = max(1.0, LEAST_PART * sum(nbytes.values()) / len(nbytes))
    parts = {rank: max(least, sent) for rank, sent in nbytes.items()}
    whole = sum(parts.values())
    return {rank: BY_RATE * part / whole for rank, part in parts.items()}


def _share(filled: Sequence[tuple[int, int]]) -> float | None:
    """What goes out, of what the windows carry."""
    taken, offered = (sum(column) for column in zip(*filled, strict=True)) if filled else (0, 0)
    return taken / offered if offered else None
