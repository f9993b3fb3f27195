"""BAFT: send copies to the node of a neighbouring stage while the pipeline is idle.

    profile of all ranks -> bubbles -> plan of the nodes that share links (the same on each of their ranks)
        -> iterations per version, which all ranks agree on -> this rank's gate, opened and closed at spans

Placement is that of redundancy.neighbour; sending, commit and recovery are REFT's. This module decides only when to
send.

Until there is a plan no gate is opened and copies are rate-limited (bubbles.gate.gate), so the first or restored
version is protected early. While iterations are recorded for a profile, copies are held on all ranks, because they
would slow down the pipeline that is measured. That delays protection by the recorded iterations, `profile_iterations`,
and by three in which the ranks exchange the results.

Planning is in the step path. If the ranks of a stage fill whole nodes, two or three nodes share links, and a large job
is planned as fast as a small one; otherwise as many nodes as a stage has may be linked.

Invariant: in the step path there is no send, no lock and no process group: a count at each span, and at the ends of
bubbles a few stores into shared memory, or copies given to the device that make them. A plan changes only when bytes
are sent. While a plan no longer fits, the gate opens only at planned spans, for no longer than planned, and, opened by
the host, not at those that are further off than `gate.edge_tolerance`: fewer bytes go, or later, never more.

In: spans of this rank from the host, the job's profile, its copies, the speed of links. Out: openings of the gate; a
`bubbles.planned` event per plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..bubbles.bubble_plan import BubblePlan, SenderPlan, plan_bubbles
from ..bubbles.filling import Grant, Granularity, host_leaves_early, transfers_of
from ..bubbles.gate.gate import STEADY, Gate, Gatekeeper, StreamStores, Words, edge_tolerance
from ..bubbles.gate.pacing_limits import least_bytes
from ..bubbles.timeline.messages import Traffic, traffic
from ..bubbles.timeline.timeline_readers import TimelineReaders
from ..bubbles.windows import SHORTEST_SECONDS, Reserve
from ..config import BaftConfig
from ..errors import FtError
from ..events import Events, catalogue, say
from ..model.timeline import Kind, Profile, Timeline
from ..redundancy.neighbour import NeighbourCopy, NeighbourPlan

HOLD_SECONDS = 120.0  # after which a held gate is released if its trainer died; renewed at half of it
_BETWEEN_SECONDS = 1.0  # from a held iteration to the next one: a frame that begins there would be under way in that
USUAL_MBPS = 10_000.0  # assumed for a link that is neither configured nor measured
_ANY = 1 << 30  # not one of the iterations planned one by one: only SMPs know which version is being sent


class Baft:
    """BAFT on one rank. `begin` and `end` are `model.host.Edges`. `pipelines`: ranks in the order of their stages."""

    def __init__(
        self, rank: int, config: BaftConfig, events: Events, pipelines: Sequence[Sequence[int]] = (),
        clock_ns: Callable[[], int] = time.monotonic_ns, stores_in: Callable[[Words], StreamStores] | None = None,
    ) -> None:  # fmt: skip
        """`stores_in`: stores of the device in a gate's memory; None where the host computes."""
        self._rank = rank
        self._config = config
        self._events = events
        self._pipelines = pipelines
        self._clock_ns = clock_ns
        self._stores_in = stores_in
        self._stores: StreamStores | None = None  # of the device, if it opens the gate
        self._gate: Gate | None = None
        self.copies: NeighbourPlan | None = None  # of all ranks, while a gate is used
        self.readers: TimelineReaders | None = None  # of each rank's timeline, while a gate is used
        self._sharing: tuple[NeighbourCopy, ...] = ()  # the copies that share links with those of this rank
        self._planned: BubblePlan | None = None  # until all ranks agree on its iterations
        self._message_seconds = 0.0
        self._keeper: Gatekeeper | None = None
        self._links: dict[int, float] = {}
        self._held = False
        self._held_ns = 0  # when the gate was last held

    def use_gate(self, gate: Gate, copies: NeighbourPlan, links: Mapping[int, float] | None = None) -> None:
        """Send the copies of this rank by `gate` from now on. `links`: bytes per second by position, as measured; a
        configured speed takes precedence."""
        self.release_gate()
        self._gate, self.copies = gate, copies
        self.drop_plan()
        self._links = dict(links or {})
        self._sharing = copies.linked_copies(self._rank)
        self.readers = TimelineReaders(copies, self._pipelines)

    def release_gate(self) -> None:
        """Close the gate and use it no more: its memory may be unmapped."""
        self.drop_plan()
        if self._stores is not None:
            self._stores.close()
        self._stores = self._gate = self.copies = self.readers = None

    def drop_plan(self) -> None:
        """Close the gate; copies are rate-limited until there is another profile."""
        if self._gate is not None:
            self._gate.close()
            self._gate.plan(0, 0.0, 0.0)
        self._keeper = self._planned = None

    def gated(self, own: Timeline) -> Timeline:
        """This rank's timeline as its gate follows it: if the host leaves bubbles before its device is there, the
        device opens the gate from now on, and how far ahead the host is no longer counts."""
        gate = self._gate
        if gate is not None and not gate.by_device and self._stores_in is not None and host_leaves_early(own):
            try:
                self._stores = self._stores_in(gate.memory)
                gate.follow(self._stores)
            except FtError as error:
                say(f"rank {self._rank}: {error}; the host opens the gate")
        return replace(own, leads=()) if gate is not None and gate.by_device else own

    @property
    def moved(self) -> int:
        """A number that changes whenever bytes of this rank's copies are sent."""
        return self._gate.moved if self._gate is not None else 0

    def plan(self, profile: Profile) -> int:
        """Plan the copies of all ranks that share links with this one; each of them computes the same grants.

        The plan takes effect when all ranks agree: `adopt`. Returns the iterations per version; 0 without a gate. With
        granularity bytes, `fill_layers` is of this rank alone. Raises ConfigError for a rank without timeline."""
        if self._gate is None:
            return 0
        ranks = {copy.rank for copy in self._sharing if copy.rank < len(profile.timelines)}
        speeds, senders = self._link_speeds(), dict(enumerate(profile.senders))
        messages = traffic(profile.timelines, self._pipelines, ranks)
        self._message_seconds = messages.get(self._rank, Traffic()).seconds
        granularity = Granularity(self._config.granularity)
        transfers = transfers_of(self._sharing, senders)
        if granularity is Granularity.BYTES:  # the fill by layers is only informative, and most of the work
            transfers = tuple(each if each.sender == self._rank else replace(each, layers=()) for each in transfers)
        self._planned = plan_bubbles(
            transfers,
            {rank: profile.timelines[rank] for rank in ranks},
            {rank: profile.bubbles(rank) for rank in ranks},
            speeds,
            Reserve(self._config.reserve_ms / 1e3, self._config.reserve_ms / 1e3, SHORTEST_SECONDS),
            granularity,
            # a version is sent once all ranks have captured it
            ready_seconds=max((sender.ready_seconds for sender in profile.senders), default=0.0),
            least_bytes=least_bytes(speeds if isinstance(speeds, float) else min(speeds.values())),
            messages=messages,
        )
        return self._planned.iterations

    def adopt(self, iterations: int) -> BubblePlan | None:
        """Follow the last plan from now on, with `iterations` per version on all ranks. None if there is no plan."""
        if self._gate is None or self._planned is None:
            return None
        plan, self._planned = self._planned.slowed_to(iterations), None
        (own,) = (sender for sender in plan.senders if sender.transfer.sender == self._rank)
        by_rate, speeds = bool(own.reason), self._link_speeds()
        self._keeper = Gatekeeper(
            self._gate, _steady(own, plan.seconds) if by_rate else own, steady=by_rate,
            clock_ns=self._clock_ns, tolerance=math.inf if self._gate.by_device else edge_tolerance(plan.seconds),
        )  # fmt: skip
        self._gate.plan(plan.iterations, plan.seconds, own.link_rate)
        self._events.emit(
            catalogue.BUBBLES_PLANNED, iterations=plan.iterations, seconds=plan.seconds, bytes=own.transfer.nbytes,
            idle_seconds=own.idle_seconds, shared_seconds=own.shared_seconds, fill_bytes=plan.fill_bytes,
            fill_layers=plan.fill_layers, granularity=plan.granularity.value, reason=own.reason,
            message_seconds=self._message_seconds, by_device=self._gate.by_device,
            link_mbps=round(8e-6 * (speeds if isinstance(speeds, float) else speeds[own.transfer.source]), 1),
        )  # fmt: skip
        return plan

    @property
    def links_known(self) -> bool:
        """Whether the speed of links was configured or measured."""
        return self._config.link_mbps is not None or bool(self._links)

    def _link_speeds(self) -> float | dict[int, float]:
        """Bytes per second of links: as configured, else as measured, else a usual value."""
        if self._config.link_mbps is None and self.links_known:
            return self._links
        return (self._config.link_mbps or USUAL_MBPS) * 1e6 / 8

    # ---- hooks ----

    def iteration_begin(self, held: bool = False) -> None:
        """An iteration begins; `held`: send nothing in it."""
        was_held, self._held = self._held, held and self._gate is not None
        if was_held and self._gate is not None:
            self._gate.close()
        if self._held:
            self._hold()
        elif self._keeper is not None:
            self._keeper.iteration_begin(_ANY)

    def iteration_end(self) -> None:
        """The last bubble of the iteration is over."""
        if self._held and self._gate is not None:
            self._gate.hold(_BETWEEN_SECONDS, self._clock_ns())
        elif self._keeper is not None:
            self._keeper.iteration_end()

    def begin(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        if self._held:
            if self._clock_ns() - self._held_ns > HOLD_SECONDS / 2 * 1e9:
                self._hold()
        elif self._keeper is not None:
            self._keeper.begin(kind, microbatch, chunk)

    def end(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        if self._keeper is not None and not self._held:
            self._keeper.end(kind, microbatch, chunk)

    def _hold(self) -> None:
        if self._gate is not None:
            self._held_ns = self._clock_ns()
            self._gate.hold(HOLD_SECONDS, self._held_ns)


def _steady(sender: SenderPlan, seconds: float) -> SenderPlan:
    """The plan of a sender that no bubble carries: its rate over the whole of each iteration."""
    grant = Grant(STEADY, -1, 0.0, seconds, round(sender.bytes_per_second * seconds))
    return replace(sender, iterations=(), every=(grant,))
