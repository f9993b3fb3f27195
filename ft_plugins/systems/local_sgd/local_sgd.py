"""Local SGD: replicas train on their own and are synchronised every tau iterations.

    after_update       at a synchronisation: judge and exchange, in the background (sync.rounds.synchronisation)
                       apply WAIT: wait for all modules, and apply them
                       by the clock (A-EDiT): all replicas have agreed that it is due (clocked)
    module forward     apply FORWARD: wait for this module and apply it, while the next one is exchanged (EDiT, 3.1);
                       with it the copies that the forward reads of masters and shards (forward_copies)
    before_update      apply UPDATE: apply all modules

Invariant: every rank does the same at the same iteration, because the policy is pure; by the clock, every rank of a
replica does, and all ranks do at the same synchronisation. An error here ends the rank:
replicas that are treated differently are worse than none. Anchors and the outer momentum are equal on all replicas at
every version point; parameters at those of `LocalSgdPolicy.identical`.

In: a host with `ReplicaOperations` and `ReductionControl`. Out: changed tensors; events; state for snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...collective import Collective
from ...config import SyncConfig
from ...errors import ResumeError, UnsupportedError
from ...events import Events, catalogue, say
from ...model.host import Host, ReplicaOperations
from ...model.inventory import Item, Role
from ...model.reduction import ComputesWithCopies, ReductionControl
from ...snapshot.segment.slots import Mark
from ...sync.background import Background
from ...sync.rounds import inheritance
from ...sync.rounds.local_policy import AppliedAt, LocalSgdPolicy, chosen_apply, policy_of, wants_modules
from ...sync.rounds.modules import plan_modules, require_replicas, require_shard_ranks, sync_group, synchronised
from ...sync.rounds.own_pace import Timekeeper
from ...sync.rounds.penalty import NormStatistics
from ...sync.rounds.synchronisation import Synchronisation, SynchronisationRules
from ..synchronizer import Synchronizer
from .clocked import ClockedReplica, GatheredReadiness
from .forward_copies import ForwardCopies, announced, gathering
from .layered import LayeredAveraging
from .sync_groups import OuterItems, SyncGroups, connect_groups
from .under_way import SynchronisationUnderWay

_BUCKET_BYTES = 16 << 20  # of parameters exchanged at once; temporary memory is about 8 times that


class LocalSgd(Synchronizer):
    """Local SGD on one rank. Call `connect`, then `begin`, then the hooks."""

    name = "local_sgd"

    def __init__(self, host: Host, config: SyncConfig, events: Events, every: bool, folder: Path | None = None) -> None:
        """Plan, without communication. `every`: versions are also taken between synchronisations; `folder`: of files
        about this run. Raises ConfigError; UnsupportedError if local SGD is impossible here."""
        self.on_complete: Callable[[], None] = lambda: None
        self.on_agreed: Callable[[int], None] = lambda step: None  # never called: replicas may differ
        if not (isinstance(host, ReplicaOperations) and isinstance(host, ReductionControl)):
            raise UnsupportedError(
                f"{host.framework}: the reduction of gradients cannot be controlled here; drop --sync"
            )
        self._host: Host = host
        self._operations: ReplicaOperations = host
        self._control: ReductionControl = host
        self._events, self._config, self._every, self._folder = events, config, every, folder
        self.in_step = every  # by a gather before each update (`before_update`)
        inventory = host.inventory()
        items = synchronised(inventory)
        self._members = sync_group(items, host.rank, host.framework)
        self._place = inheritance.ReplicaPlace(self._members.index(host.rank), len(self._members))
        self._modules = plan_modules(inventory, host.modules(), _BUCKET_BYTES)
        masters = any(item.role is Role.MAIN_PARAMETER for item in items)
        follows, reason = False, ""
        if wants_modules(config, masters):
            follows, reason = announced(host, masters, lambda name: self._under_way.before_forward(name))
        apply = chosen_apply(config, follows, masters, reason)
        self._policy: LocalSgdPolicy = policy_of(config, apply)
        self._copies = host if apply is AppliedAt.FORWARD and masters and isinstance(host, ComputesWithCopies) else None
        self._number = 0  # of synchronisations
        self._updated = 0  # the last iteration with an update
        self._iterations: list[int] | None = None  # of each replica before the last synchronisation by the clock
        self._clocked: ClockedReplica | None = None
        self._readiness: Background | None = None
        self._layered: LayeredAveraging | None = None

    def table(self) -> str:
        """A message on what is synchronised when, and what it costs."""
        policy, nbytes = self._policy, sum(module.nbytes for module in self._modules)
        ends = {
            AppliedAt.WAIT: "training waits for it",
            AppliedAt.FORWARD: "each module just before its next forward",
            AppliedAt.UPDATE: "applied before the next update, behind a whole iteration",
        }
        lines = [
            f"local SGD ({policy.name}): {len(self._members)} replicas, synchronised every "
            + (f"{policy.tau} iterations" if policy.seconds is None else f"{policy.seconds:g} s, each at its own pace")
            + (f" after {policy.warmup} of warm-up" if policy.warmup else "")
            + f"; {ends[policy.apply]}",
            f"{len(self._modules)} modules of {nbytes} bytes on rank {self._host.rank}; "
            f"{self._synchronisation.nbytes} bytes are held for the last synchronised parameters and outer momentum"
            + (", in host memory" if self._config.offload else "")
            + (
                f"; {nbytes} bytes more hold its result from a synchronisation to the next update"
                if policy.apply is AppliedAt.UPDATE
                else ""
            ),
        ]
        return "\n  ".join(lines if self._layered is None else [lines[0], self._layered.table()])

    def connect(self, collective: Collective) -> None:
        """Create process groups, claim memory, take control of the reduction. Every rank of the job calls."""
        with collective.agreement():
            self._control.prepare_reduction()
            require_shard_ranks(self._host.rank, self._control.shard_group(), self._config.shard_ranks)
            if self._policy.seconds is not None:
                self._control.require_own_pace()
        names = [module.name for module in self._modules]
        computed = self._copies.forward_order() if self._copies else names
        own = (self._host.rank,)
        shard = gathering(self._modules, self._control.shard_group(), self._host.rank) if self._copies else own
        groups = connect_groups(self._host, self._members, names, collective, self._config.timeout, computed, shard)
        self._wait, self._peers = groups.wait, groups.peers
        rules = SynchronisationRules(self._policy.outer, self._policy.penalty, self._policy.anchored)
        self._synchronisation = Synchronisation(
            self._modules, groups.plan, groups.peers, groups.replica, self._host.tensors, rules, self._config.offload
        )
        self._under_way = SynchronisationUnderWay(
            self._synchronisation, groups.plan, groups.wait, self._policy.apply, self._config.prefetch, groups.device,
            self._finish,
        )  # fmt: skip
        if self._copies:
            with collective.agreement():
                copies = ForwardCopies(
                    self._modules, self._synchronisation, shard, groups.replica, self._operations.copy_tensors,
                    self._host.rank,
                )  # fmt: skip
            self._under_way.exchange, self._under_way.apply = copies.exchange, copies.apply
        captures_anchors = self._every or self._policy.apply is AppliedAt.UPDATE  # those of the one before
        self._outer_items = OuterItems(self._modules, self._synchronisation.states, captures_anchors)
        if self._policy.seconds is not None:
            self._connect_clocked(groups, self._policy.seconds)
        if self._config.is_layered:
            with collective.agreement():
                self._layered = LayeredAveraging(
                    self._host, self._control, self._config, self._policy, groups, self._modules, self._under_way,
                    self._synchronisation, self._events, self._folder,
                )  # fmt: skip
            self._layered.require_same(collective)

    def _connect_clocked(self, groups: SyncGroups, period: float) -> None:
        """Create the groups by which replicas agree when to synchronise: on processors, so that no device waits."""
        # a replica that was ready at once may wait for a whole period, which is lawful
        readiness = replace(groups.wait, seconds=groups.wait.seconds + period)
        keeper, first_ranks = None, groups.between_first_ranks(readiness.seconds)
        if first_ranks is not None:
            self._readiness = Background(torch.device("cpu"))
            keeper = Timekeeper(GatheredReadiness(first_ranks, self._readiness))
        replica = groups.within_replica()
        self._clocked = ClockedReplica(self._policy, groups.plan.position, self._peers, replica, keeper, readiness)

    # ---- state that a snapshot carries ----

    def captured(self, item: Item) -> Item:
        """Parameters have their replicas only if versions are taken where these are identical; other tensors that
        updates change belong to one replica."""
        if not item.changed_by or len(item.replicas) == 1:
            return item
        parameter = item.role in (Role.PARAMETER, Role.MAIN_PARAMETER)
        if parameter and not self._every and self._policy.apply is not AppliedAt.UPDATE:
            return item
        own = set(self._control.shard_group()) & set(item.replicas)
        return replace(item, replicas=tuple(sorted(own | {self._host.rank})))

    def items(self) -> Sequence[Item]:
        return self._outer_items.items

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._outer_items.tensors()

    def state(self) -> dict[str, Any]:
        """Statistics of norms, the number of synchronisations that they and the tensors contain now, which replica this
        is, and whether its parameters are those of all replicas."""
        states = self._synchronisation.states
        statistics = {name: [one.values() for one in state.statistics] for name, state in states.items()}
        return {
            "number": self._number - 1 if self._under_way else self._number,
            "in_flight": bool(self._under_way),
            "statistics": statistics,
            "clocked": None if self._clocked is None else self._clocked.state(),
            "layers": None if self._layered is None else self._layered.state(),
            inheritance.PLACE: self._place.values(),
            "identical": self._identical(self._updated),
        }

    def inherited(self, previous: Sequence[Mapping[str, Any] | None]) -> Sequence[int] | None:
        return inheritance.inherited(self._place, previous)

    def continued(self, taken_over: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        return inheritance.continued(self._place, [carried for carried in taken_over if carried is not None])

    def begin(self, completed: int, state: Mapping[str, Any] | None = None, last: int | None = None) -> int:
        if last is not None:
            self._policy.require_synchronisation(last)
            if self._host.rank == 0 and (message := self._policy.end_warning(last)):
                say(message)
        states, self._updated = self._synchronisation.states, completed
        if state is None:
            require_replicas(self._members, self._host.rank, self._host.framework)
            if completed > self._policy.warmup:
                lost = inheritance.restarted(self._place.count, completed)
                self._events.emit(catalogue.REPLICAS_RESTARTED, iteration=completed, reason=lost)
        else:
            self._number = state["number"]
            for name in states.keys() & state["statistics"].keys():
                states[name].statistics = [NormStatistics.from_values(one) for one in state["statistics"][name]]
            self._describe(inheritance.ReplicaPlace.of(state))
        if state is None or not self._outer_items.has_anchors:
            self._synchronisation.remember()
        before = None if state is None else state.get("clocked")
        if self._clocked is not None:
            completed = self._clocked.begin(completed, before, last, len(self._members))
        elif before is not None:
            raise ResumeError(
                f"rank {self._host.rank}: the snapshot is of a job with --sync-policy a_edit, whose replicas are in "
                f"different iterations: resume with a_edit, not {self._policy.name}, or start with --ftp-resume fresh"
            )
        if self._layered is not None:
            self._layered.begin(completed, None if state is None else state.get("layers"))
        self._control.reduce_over(self._policy.reduced_over(completed + 1))
        if state is not None and state.get("in_flight", self._policy.in_flight(completed)):
            self._start(completed)
            if self._policy.apply is AppliedAt.WAIT:
                self._under_way.apply_all()
        return completed

    def continues(self, step: int, last: int) -> bool:
        return step < last if self._clocked is None else self._clocked.continues(step)

    def version(self, step: int) -> int:
        return step if self._clocked is None else self._clocked.version(step)

    def _describe(self, before: inheritance.ReplicaPlace) -> None:
        has_momentum = any(state.momentum for state in self._synchronisation.states.values())
        if self._host.rank == 0 and (message := inheritance.described(self._place, before, has_momentum)):
            say(message)

    def defers(self, step: int) -> bool:
        return bool(self._under_way) and self._policy.apply is AppliedAt.FORWARD and self._under_way.step == step

    def mark(self, step: int) -> Mark:
        return Mark.UNAUDITED if self._identical(step) else Mark.DIVERGED

    def _identical(self, step: int) -> bool:
        """Whether replicas have equal parameters at the version point of iteration `step`, if a version is taken there:
        by the clock it is taken at synchronisations alone."""
        return self._policy.identical(step) or self._clocked is not None

    # ---- hooks ----

    @property
    def waits_at_begin(self) -> bool:
        return self._layered is not None

    def iteration_begin(self, step: int, wait_for_capture: Callable[[], None]) -> None:
        """Choose the layers that this iteration averages."""
        if self._layered is not None:
            self._layered.iteration_begin(step)

    def complete(self, step: int) -> None:
        """Apply the modules whose forward has not come, so that a deferred version can be captured."""
        if self._policy.apply is AppliedAt.FORWARD:
            self._under_way.apply_all()

    def before_update(self, step: int) -> None:
        """Apply a synchronisation that ran behind the whole iteration; wait for the other replicas where a version
        depends on it (`LocalSgdPolicy.waits_for_all`)."""
        if self._policy.apply is AppliedAt.UPDATE:
            self._under_way.apply_all()
        if self._layered is not None:
            self._layered.before_update(step)
        if self._policy.waits_for_all(step, self._every):
            self._wait.within(step, "the update", lambda: self._peers.gather_job([float(step)]))

    def after_update(self, step: int) -> None:
        """Start a synchronisation if one is due; choose over which replicas the next iteration reduces."""
        self._updated = step
        if self._layered is not None:
            self._layered.after_update(step)
        if self._policy.anchors(step):
            self._synchronisation.remember()
            if self._clocked is not None:
                self._clocked.warmed_up(step)
        elif self._due(step):
            self._start(step)
            if self._policy.apply is AppliedAt.WAIT:
                self._under_way.apply_all()
        self._control.reduce_over(self._policy.reduced_over(step + 1))

    def _due(self, step: int) -> bool:
        """Whether replicas are synchronised after the update of iteration `step`."""
        if self._clocked is None or step <= self._policy.warmup:
            return self._policy.due(step)
        return self._wait.within(step, "the agreement on a synchronisation", partial(self._clocked.joins, step))

    def shutdown(self) -> None:
        """The orderly end: apply what is under way. Idempotent."""
        if self._layered is not None:
            self._layered.shutdown()
        self._under_way.apply_all()
        self._under_way.close()
        if self._readiness is not None:
            self._readiness.close()

    # ---- one synchronisation ----

    def _start(self, step: int) -> None:
        factors, self._iterations = None, None
        if self._clocked is not None:
            factors = self._wait.within(step, "the count of iterations", partial(self._clocked.join, step))
            self._iterations = list(self._clocked.done)
        self._number += 1
        if self._copies:  # no gather of the framework's may be on its way when a module's copies are written
            self._operations.finish_copies()
        self._under_way.start(step, factors)

    def _finish(self) -> None:
        if not self._copies:
            self._operations.derive()
        step, report = self._under_way.step, self._under_way.report
        if self._layered is None or self._policy.due(step):
            self._events.emit(
                catalogue.REPLICAS_SYNCHRONISED, iteration=step, number=self._number, policy=self._policy.name,
                waited_seconds=self._under_way.waited, iterations=self._iterations, **report,
            )  # fmt: skip
        elif self._under_way.names:
            self._events.emit(
                catalogue.LAYERS_AVERAGED, iteration=step, layers=list(self._under_way.names),
                waited_seconds=self._under_way.waited, divergence=sum(self._synchronisation.divergences.values()),
            )  # fmt: skip
        if nonfinite := report["nonfinite"]:
            ranks = ", ".join(map(str, sorted({rank for those in nonfinite.values() for rank in those})))
            reason = f"non-finite parameters on ranks {ranks} after iteration {step}, in {', '.join(nonfinite)}"
            self._events.emit(catalogue.NONFINITE_DETECTED, iteration=step, ranks=ranks, reason=reason)
        self.on_complete()
