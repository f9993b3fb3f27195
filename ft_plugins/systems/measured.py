"""Measure a host's iterations, and plan this rank's copies by them.

    spans of the host -> recorder -> profiler -> profile -> plan of BAFT -> agreed iterations -> gate

Invariant: an error in measuring or planning does not stop training: it becomes an event, an earlier plan is dropped,
and copies are rate-limited; all ranks stay in step (bubbles.profile).

In: a host's spans, begin and end of its iterations, facts about the copies that this rank sends. Out: `profile`; gates
opened by a plan; events `profile.completed`, `profile.lost`, `bubbles.planned`, `timeline.recorded`; a table of an
iteration's time, printed by rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ..bubbles.bubble_plan import BubblePlan
from ..bubbles.gate.cuda_stores import CudaStores
from ..bubbles.gate.gate import Gate
from ..bubbles.profile import Profiler, Profiling, ProfilingPhase
from ..bubbles.timeline.record import EdgeFanout, Recorder, clock_of
from ..bubbles.timeline.timeline_exchange import Gathers
from ..bubbles.timeline.timeline_values import shown
from ..config import BaftConfig
from ..events import Events, catalogue, say
from ..model.host import Edges, Host
from ..model.timeline import Profile, SenderFacts
from ..redundancy.neighbour import NeighbourPlan, pipelines
from .baft import USUAL_MBPS, Baft


class Measurement:
    """The measurement of one rank. The host calls `edges`."""

    def __init__(
        self, host: Host, config: BaftConfig | None, settings: Profiling, collective: Gathers, events: Events,
        sender: Callable[[], SenderFacts],
    ) -> None:  # fmt: skip
        """Measure by the clock of the parameters' device. `config`: None measures only. `sender`: what only this rank
        knows about its copies."""
        self._rank = host.rank
        self._events = events
        self._ended_iteration = 0
        device = next((tensor.device for tensor in host.tensors().values()), torch.device("cpu"))
        recorder = Recorder(host.rank, clock_of(device))
        stores = partial(CudaStores, device=device) if device.type == "cuda" else None
        self.baft = (
            Baft(host.rank, config, events, pipelines(host.topology()), stores_in=stores)
            if config is not None
            else None
        )
        self.edges: Edges = recorder if self.baft is None else EdgeFanout(self.baft, recorder)
        self._profiler = Profiler(
            host.rank, recorder, collective, settings, self._planned, self._agreed, self._ended, sender, self._traffic,
            lambda: self.baft.readers if self.baft is not None else None,
            lambda own: self.baft.gated(own) if self.baft is not None else own,
        )  # fmt: skip

    @property
    def profile(self) -> Profile | None:
        """The profile of all ranks, with BAFT only with the timelines that this rank's plan reads; None until it is
        complete, and if that failed."""
        return self._profiler.profile

    def use_gate(self, gate: Gate, copies: NeighbourPlan, links: Mapping[int, float]) -> None:
        if self.baft is not None:
            self.baft.use_gate(gate, copies, links)

    def release_gate(self) -> None:
        if self.baft is not None:
            self.baft.release_gate()

    # ---- hooks ----

    def iteration_begin(self, step: int) -> None:
        if self.baft is not None:
            self.baft.iteration_begin(held=self._profiler.phase is ProfilingPhase.RECORDING)
        self._profiler.iteration_begin(step)

    def bubbles_end(self) -> None:
        """The last bubble of an iteration is over: the time of protection at the version point is not a bubble."""
        if self.baft is not None:
            self.baft.iteration_end()

    def iteration_end(self, step: int) -> None:
        self._ended_iteration = step
        self._profiler.iteration_end(step)

    # ---- callbacks of the profiler ----

    def _traffic(self) -> int:
        return self.baft.moved if self.baft is not None else 0

    def _planned(self, profile: Profile) -> int:
        """Report the profile and plan. Returns the iterations per version by this rank's plan; 0 for no plan."""
        left_out = self._profiler.left_out
        own = profile.timelines[self._rank]
        idle = sum(bubble.seconds for bubble in profile.bubbles(self._rank))
        self._events.emit(
            catalogue.PROFILE_COMPLETED, seconds=own.seconds, spans=len(own.spans), idle_seconds=idle,
            waited_seconds=self._profiler.waited, left_out=list(left_out.get(self._rank, ())),
        )  # fmt: skip
        if self._rank == 0:
            say(f"where an iteration's time goes\n{profile.table()}")
            for rank, steps in left_out.items():
                say(
                    f"rank {rank}: iterations {list(steps)} are left out: they differed from the others, or copies "
                    "were sent in them"
                )
        return self._planning(lambda baft: baft.plan(profile))

    def _agreed(self, iterations: Sequence[int]) -> None:
        """All ranks have planned: follow the slowest. `iterations` per version, by rank."""

        def follow(baft: Baft) -> int:
            plan = baft.adopt(max(iterations))
            if plan is None or self.profile is None:
                return 0
            self._report(plan, self.profile, iterations, baft.links_known)
            return plan.iterations

        self._planning(follow)

    def _planning(self, call: Callable[[Baft], int]) -> int:
        """Call a step of planning. After an error training continues, and copies are rate-limited."""
        if self.baft is None:
            return 0
        try:
            return call(self.baft)
        except Exception as error:
            self.baft.drop_plan()
            self._lost(
                f"bubbles could not be planned: {type(error).__name__}: {error}; copies are rate-limited until "
                "the next profile"
            )
            return 0

    def _ended(self, reason: str) -> None:
        """There will be no more profiles: drop an earlier plan, because it would not be checked any more."""
        if self.baft is not None:
            self.baft.drop_plan()
            reason = (
                f"{reason}; copies are rate-limited from now on, up to half of the time and concurrently with "
                "training's messages; restart the job to use bubbles again"
            )
        self._lost(reason)

    def _report(self, plan: BubblePlan, profile: Profile, iterations: Sequence[int], links_known: bool) -> None:
        (own,) = (sender for sender in plan.senders if sender.transfer.sender == self._rank)
        self._events.emit(
            catalogue.TIMELINE_RECORDED, iteration=self._ended_iteration,
            **shown(profile.timelines[self._rank], profile.bubbles(self._rank), own),
        )  # fmt: skip
        if self._rank != 0:
            return
        say(plan.table())
        if not links_known:
            say(
                f"the links could not be measured: {USUAL_MBPS:.0f} megabits per second are assumed; if they are "
                "slower, give --baft-link-mbps"
            )
        slowest = max(iterations)
        others = len(iterations) - len(plan.senders)
        if others:
            say(
                f"{others} ranks share no links with these; see the event {catalogue.BUBBLES_PLANNED.name} of each for "
                f"its plan. The ranks that share links with rank {iterations.index(slowest)} need the most iterations, "
                f"{slowest}"
            )
        unplanned = [rank for rank, count in enumerate(iterations) if not count]
        if unplanned:
            self._lost(
                f"bubbles of {len(unplanned)} ranks could not be planned, their copies are rate-limited; see "
                f"the event {catalogue.PROFILE_LOST.name} of each for the reason, the first is rank {unplanned[0]}"
            )

    def _lost(self, reason: str) -> None:
        self._events.emit(catalogue.PROFILE_LOST, reason=reason)
