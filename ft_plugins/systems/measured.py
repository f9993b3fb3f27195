"""A host whose iterations are measured, and the copies that are planned by it, as one rank composes it:

    edges told by the host -> recorder -> profiler -> profile -> BAFT, which plans -> iterations, agreed on -> its gate

Invariant: nothing here harms training. What goes wrong in measuring or planning becomes an event, a plan made before
holds no longer, and copies go by a rate; all ranks stay in step (bubbles.profile).

In: a host's edges, begin and end of its iterations, what this rank knows of the copies that it sends. Out: `profile`;
gates that are opened by a plan; events `profile.completed`, `profile.lost`, `bubbles.planned`, `timeline.recorded`;
and where an iteration's time goes, printed by rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ..bubbles.clock import clock_of
from ..bubbles.gate import Gate
from ..bubbles.plan import BubblePlan
from ..bubbles.profile import Gathers, Phase, Profiler, Profiling
from ..bubbles.record import Recorder, Several
from ..bubbles.shown import shown
from ..config import BaftConfig
from ..events import Events, catalogue, say
from ..model.host import Edges, Host
from ..model.timeline import Profile, SenderFacts
from ..redundancy.neighbour import NeighbourPlan, pipelines
from .baft import USUAL_MBPS, Baft


class Measured:
    """One rank's. `edges` are to be called by the host."""

    def __init__(
        self,
        host: Host,
        config: BaftConfig | None,
        settings: Profiling,
        collective: Gathers,
        events: Events,
        sender: Callable[[], SenderFacts],
    ) -> None:
        """By the clock of the device that holds the parameters. `config`: None measures only. `sender`: what this rank
        alone knows of its copies, but for its device."""
        self._rank = host.rank
        self._events = events
        self._sender = sender
        self._device = next((tensor.device for tensor in host.tensors().values()), torch.device("cpu"))
        recorder = Recorder(host.rank, clock_of(self._device))
        self.baft = Baft(host.rank, config, events, pipelines(host.topology())) if config is not None else None
        self.edges: Edges = recorder if self.baft is None else Several(self.baft, recorder)
        self._profiler = Profiler(
            host.rank, recorder, collective, settings, self._planned, self._agreed, self._ended, self._facts,
            self._traffic,
        )  # fmt: skip

    @property
    def profile(self) -> Profile | None:
        """Of all ranks; None until it is made, and where it could not be."""
        return self._profiler.profile

    def guard(self, gate: Gate, copies: NeighbourPlan, links: Mapping[int, float]) -> None:
        """`Baft.guard`, where there is any."""
        if self.baft is not None:
            self.baft.guard(gate, copies, links)

    def let_go(self) -> None:
        """Likewise: the gate's memory may be gone after that."""
        if self.baft is not None:
            self.baft.let_go()

    # ---- hooks ----

    def iteration_begin(self, step: int) -> None:
        """In iterations that are recorded nothing goes."""
        if self.baft is not None:
            self.baft.iteration_begin(held=self._profiler.phase is Phase.RECORDING)
        self._profiler.iteration_begin(step)

    def bubbles_end(self) -> None:
        """The last bubble of an iteration is over: what protection takes at the version point is none."""
        if self.baft is not None:
            self.baft.iteration_end()

    def iteration_end(self, step: int) -> None:
        """All of the iteration is over."""
        self._profiler.iteration_end(step)

    # ---- what the profiler asks and tells ----

    def _traffic(self) -> int:
        return self.baft.moved if self.baft is not None else 0

    def _facts(self) -> SenderFacts:
        cuda = self._device.type == "cuda"
        memory = torch.cuda.get_device_properties(self._device).total_memory if cuda else 0
        return replace(self._sender(), device_bytes=memory)

    def _planned(self, profile: Profile) -> int:
        """Iterations of a checkpoint by what this rank plans with it; 0 where it plans nothing."""
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
                why = "were unlike the others, or copies went in them"
                say(f"rank {rank}: iterations {list(steps)} {why}: left out")
        return self._planning(lambda baft: baft.plan(profile))

    def _agreed(self, told: Sequence[int]) -> None:
        """All ranks have planned: what they have found."""

        def follow(baft: Baft) -> int:
            plan = baft.agreed(max(told))
            if plan is None or self.profile is None:
                return 0
            self._report(plan, self.profile, told, baft.links_known)
            return plan.iterations

        self._planning(follow)

    def _planning(self, call: Callable[[Baft], int]) -> int:
        """At the end of an iteration: whatever goes wrong, training goes on, and copies go by a rate."""
        if self.baft is None:
            return 0
        try:
            return call(self.baft)
        except Exception as error:
            self.baft.give_up()
            self._lost(
                f"bubbles could not be planned: {type(error).__name__}: {error}; copies go by a rate until there is "
                "another profile"
            )
            return 0

    def _ended(self, reason: str) -> None:
        """There is no profile, and will be none: nobody would notice when a plan by one before fits no more."""
        if self.baft is not None:
            self.baft.give_up()
            reason = (
                f"{reason}; copies go by a rate from now on, up to half of the time and beside training's messages, "
                "and in bubbles again when the job is started anew"
            )
        self._lost(reason)

    def _report(self, plan: BubblePlan, profile: Profile, told: Sequence[int], links_known: bool) -> None:
        (own,) = (sender for sender in plan.senders if sender.transfer.sender == self._rank)
        self._events.emit(
            catalogue.TIMELINE_RECORDED, **shown(profile.timelines[self._rank], profile.bubbles(self._rank), own)
        )
        if self._rank != 0:
            return
        say(plan.table())
        if not links_known:
            say(
                f"what links carry could not be measured: {USUAL_MBPS:.0f} megabits per second are assumed; where they "
                "carry less, name it by --baft-link-mbps"
            )
        others = len(told) - len(plan.senders)
        if others:
            say(
                f"{others} ranks share no links with these; the event {catalogue.BUBBLES_PLANNED.name} of each "
                f"tells its plan. Most iterations, {max(told)}, need those that share links with rank "
                f"{told.index(max(told))}"
            )
        unplanned = [rank for rank, iterations in enumerate(told) if not iterations]
        if unplanned:
            self._lost(
                f"bubbles of {len(unplanned)} ranks could not be planned, their copies go by rate; why, says the event "
                f"{catalogue.PROFILE_LOST.name} of each, the first is rank {unplanned[0]}"
            )

    def _lost(self, reason: str) -> None:
        self._events.emit(catalogue.PROFILE_LOST, reason=reason)
