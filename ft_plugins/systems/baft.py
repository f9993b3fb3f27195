"""BAFT: copies on the node of a neighbouring stage, sent while the pipeline is idle; as one rank composes it.

    profile of all ranks -> bubbles -> plan of the nodes that share links (the same grants on each of their ranks)
        -> iterations of a checkpoint, which all ranks agree on -> this rank's gate, opened and closed at edges

Where what lives, how it is sent, counts and comes back is REFT's machinery with another placement
(redundancy.neighbour); this decides only when.

Until there is a plan no gate is opened, and copies go by rate (bubbles.gate): what was restored, or captured first, is
protected as soon as can be. Only while iterations are recorded for a profile, the first or another one, copies are
held, on all ranks at once: what they do to the link and to the processor is not to be taken for the pipeline's own. So
protection is late by the iterations that are recorded, `profile_iterations`, and by three in which the ranks tell each
other.

Planning is in the step path. Where the ranks of a stage fill whole nodes, nodes share links in pairs or in threes, and
a large job is planned as fast as a small one; else as many nodes as a stage has may be chained by them.

Invariant: in the step path there is no send, no lock and no process group: a count at each edge, and at the edges of
bubbles a few stores into shared memory. A plan changes nothing but when bytes go. While a plan no longer fits, the gate
is open when the host is at the edges that were planned, for no longer than was planned, and not at those that are
further off than `gate.edge_tolerance`: less goes, or later, never more.

In: the spans of this rank as the host tells them, the job's profile, its copies, what links carry. Out: openings of the
gate; a `bubbles.planned` event for each plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..bubbles.bubble_plan import BubblePlan, SenderPlan, plan_bubbles
from ..bubbles.filling import Grant, Granularity, transfers_of
from ..bubbles.gate import STEADY, Gate, Gatekeeper, edge_tolerance
from ..bubbles.messages import Traffic, traffic
from ..bubbles.pacing import least_bytes
from ..bubbles.windows import SHORTEST_SECONDS, Reserve
from ..config import BaftConfig
from ..events import Events, catalogue
from ..model.timeline import Kind, Profile
from ..redundancy.neighbour import NeighbourCopy, NeighbourPlan

HOLD_SECONDS = 120.0  # a trainer that dies meanwhile leaves its gate held for so long; half way it is held anew
USUAL_MBPS = 10_000.0  # of a link that was neither named nor could be measured
_ANY = 1 << 30  # an iteration beyond those that are planned one by one: which version is under way, only SMPs know


class Baft:
    """One rank's. `begin` and `end` are `model.host.Edges`. `pipelines`: ranks in the order of their stages."""

    def __init__(
        self,
        rank: int,
        config: BaftConfig,
        events: Events,
        pipelines: Sequence[Sequence[int]] = (),
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._rank = rank
        self._config = config
        self._events = events
        self._pipelines = pipelines
        self._clock_ns = clock_ns
        self._gate: Gate | None = None
        self.copies: NeighbourPlan | None = None  # of all ranks, while they are guarded
        self._together: tuple[NeighbourCopy, ...] = ()  # the copies that share links with those of this rank
        self._found: BubblePlan | None = None  # until all agree on its iterations
        self._message_seconds = 0.0
        self._keeper: Gatekeeper | None = None
        self._links: dict[int, float] = {}
        self._held = False
        self._held_ns = 0  # since when

    def guard(self, gate: Gate, copies: NeighbourPlan, links: Mapping[int, float] | None = None) -> None:
        """From now on the copies of this rank go when `gate` says so. `links`: bytes per second by position, as they
        were measured; what is configured goes before it."""
        self._gate, self.copies = gate, copies
        self.give_up()
        self._links = dict(links or {})
        self._together = copies.linked_copies(self._rank)

    def let_go(self) -> None:
        """No more: the gate is closed, and copies go by rate, if any do."""
        self.give_up()
        self._gate = self.copies = None

    def give_up(self) -> None:
        """There is no plan: the gate is closed, and copies go by rate, until there is another profile to plan with."""
        if self._gate is not None:
            self._gate.close()
            self._gate.plan(0, 0.0)
        self._keeper = self._found = None

    @property
    def moved(self) -> int:
        """Another number when copies of this rank went since it was asked last."""
        return self._gate.moved if self._gate is not None else 0

    def plan(self, profile: Profile) -> int:
        """Plan anew what those send that share links with this rank, all of whom find the same grants; it holds once
        all ranks have `agreed`. By bytes, `fill_layers` is this rank's own. Iterations of a checkpoint; 0 while nothing
        is guarded. Raises ConfigError for a rank without timeline."""
        if self._gate is None:
            return 0
        ranks = {copy.rank for copy in self._together if copy.rank < len(profile.timelines)}
        carried, senders = self._carried(), dict(enumerate(profile.senders))
        messages = traffic(profile.timelines, self._pipelines, ranks)
        self._message_seconds = messages.get(self._rank, Traffic()).seconds
        granularity = Granularity(self._config.granularity)
        transfers = transfers_of(self._together, senders)
        if granularity is Granularity.BYTES:  # how full layers would fill is a figure beside it, and takes most time
            transfers = tuple(one if one.sender == self._rank else replace(one, layers=()) for one in transfers)
        self._found = plan_bubbles(
            transfers,
            {rank: profile.timelines[rank] for rank in ranks},
            {rank: profile.bubbles(rank) for rank in ranks},
            carried,
            Reserve(self._config.reserve_ms / 1e3, self._config.reserve_ms / 1e3, SHORTEST_SECONDS),
            granularity,
            # a version goes out when all ranks have captured it
            ready_seconds=max((one.ready_seconds for one in profile.senders), default=0.0),
            least_bytes=least_bytes(carried if isinstance(carried, float) else min(carried.values())),
            messages=messages,
        )
        return self._found.iterations

    def agreed(self, iterations: int) -> BubblePlan | None:
        """A checkpoint takes so many of the job's iterations: what was planned holds from now on. None where nothing
        was."""
        if self._gate is None or self._found is None:
            return None
        found, self._found = self._found.in_step(iterations), None
        (own,) = (sender for sender in found.senders if sender.transfer.sender == self._rank)
        by_rate, carried = bool(own.reason), self._carried()
        self._keeper = Gatekeeper(
            self._gate, _steady(own, found.seconds) if by_rate else own, steady=by_rate,
            clock_ns=self._clock_ns, tolerance=edge_tolerance(found.seconds),
        )  # fmt: skip
        self._gate.plan(found.iterations, found.seconds)
        self._events.emit(
            catalogue.BUBBLES_PLANNED, iterations=found.iterations, seconds=found.seconds, bytes=own.transfer.nbytes,
            idle_seconds=own.idle_seconds, shared_seconds=own.shared_seconds, fill_bytes=found.fill_bytes,
            fill_layers=found.fill_layers, granularity=found.granularity.value, reason=own.reason,
            message_seconds=self._message_seconds,
            link_mbps=round(8e-6 * (carried if isinstance(carried, float) else carried[own.transfer.source]), 1),
        )  # fmt: skip
        return found

    @property
    def links_known(self) -> bool:
        """Whether what links carry was configured, or measured."""
        return self._config.link_mbps is not None or bool(self._links)

    def _carried(self) -> float | dict[int, float]:
        """Bytes per second of links: as configured, else as measured, else a usual one."""
        if self._config.link_mbps is None and self.links_known:
            return self._links
        return (self._config.link_mbps or USUAL_MBPS) * 1e6 / 8

    # ---- what the host tells ----

    def iteration_begin(self, held: bool = False) -> None:
        """An iteration begins; `held`: nothing is to go in it."""
        self._held = held and self._gate is not None
        if self._held:
            self._hold()
        elif self._keeper is not None:
            self._keeper.iteration_begin(_ANY)

    def iteration_end(self) -> None:
        """Its last bubble is over."""
        if self._held and self._gate is not None:
            self._gate.close()
        elif self._keeper is not None:
            self._keeper.iteration_end()

    def begin(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        """A span begins."""
        if self._held:
            if self._clock_ns() - self._held_ns > HOLD_SECONDS / 2 * 1e9:
                self._hold()
        elif self._keeper is not None:
            self._keeper.begin(kind, microbatch, chunk)

    def end(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        """The span that has begun last ends."""
        if self._keeper is not None and not self._held:
            self._keeper.end(kind, microbatch, chunk)

    def _hold(self) -> None:
        if self._gate is not None:
            self._held_ns = self._clock_ns()
            self._gate.hold(HOLD_SECONDS, self._held_ns)


def _steady(sender: SenderPlan, seconds: float) -> SenderPlan:
    """A plan for one that no bubble carries: its rate, over the whole of each iteration."""
    grant = Grant(STEADY, -1, 0.0, seconds, round(sender.bytes_per_second * seconds))
    return replace(sender, iterations=(), every=(grant,))
