"""PAFT: average replicas as often as noise requires, and compare them.

    after_update      start digests and averages, as the policy decides
    before_update     fence: verdict -> repair (sync.audit.verdicts); averages become live (sync.layers.turns)
    iteration_begin   fence of the verdict alone, with audit_at forward

What is started runs on one thread, in one order on all ranks, behind the next forward and backward; training waits only
at the fences.

Invariant: every rank of the job does the same at the same iteration: the policy is pure, and its input was gathered
over all ranks. An error here ends the rank: replicas that are treated differently are worse than none.

In: a host with `ReplicaOperations`. The running capture is sealed before each hook except iteration_begin, which gets a
function for that. Out: changed tensors; events; `state`, from which a resumed job continues exactly, an averaging in
flight included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from ..base.corruption import Corruption
from ..collective import Collective
from ..config import PaftConfig
from ..errors import ConfigError, ReplicaError, UnsupportedError
from ..events import Events, catalogue
from ..model.host import Host, ReplicaOperations
from ..model.inventory import Inventory, Item
from ..snapshot.segment.slots import Mark
from ..sync.audit.audit import OnCorruption, promise
from ..sync.audit.verdicts import Auditing, Verdicts
from ..sync.averaging.aggregate import Aggregate, describe_cost, require_enough
from ..sync.averaging.averager import Averaging
from ..sync.averaging.averaging_times import schedule_of
from ..sync.averaging.policy import PaftPolicy
from ..sync.background import Background
from ..sync.buckets import plan_buckets, require_replicas
from ..sync.layers.turns import SyncTurns
from ..sync.links import Links
from .synchronizer import Synchronizer


class Paft(Synchronizer):
    """PAFT on one rank. Call `connect`, then `begin`, then the hooks."""

    name = "paft"
    in_step = True  # gradients are reduced over all replicas

    def __init__(self, host: Host, config: PaftConfig, events: Events) -> None:
        """Plan, without communication. Raises ConfigError; UnsupportedError if PAFT is impossible or useless here."""
        if not isinstance(host, ReplicaOperations):
            raise UnsupportedError(
                f"{host.framework}: parameters cannot be changed between two updates here; drop --paft"
            )
        self.on_complete: Callable[[], None] = lambda: None  # never called: no version is deferred
        self.on_agreed: Callable[[int], None] = lambda step: None
        self._host: Host = host
        self._operations: ReplicaOperations = host
        self._config, self._events = config, events
        inventory, size = host.inventory(), config.bucket_mib << 20
        items = inventory.items + (self._operations.copies().items if config.audits_every else ())
        self._buckets = plan_buckets(Inventory.of(host.rank, items), size)
        averaging, replicas = config.mode != "audit", len(host.topology().replicas(host.rank))
        averaged = plan_buckets(inventory, size) if averaging else self._buckets  # copies are not averaged
        require_replicas(averaged, host.framework, replicas, averaging)
        for members in averaged.by_set if averaging else ():
            require_enough(Aggregate(config.aggregate), len(members), config.trim)
        self._policy = PaftPolicy(schedule_of(config), config.mode == "sync", config.audits_every)
        self._faults = FaultInjector(host, self._operations, events)
        self._turns: SyncTurns | None = None
        self._verdicts: Verdicts | None = None
        self._background: Background | None = None
        self._nonfinite_since: int | None = None  # the last iteration before some rank's parameters were non-finite
        if self._policy.schedule is not None:
            self._operations.learning_rate()  # raises if it is unknown

    @property
    def diverges(self) -> bool:
        """Whether replicas may diverge between two averagings: then a snapshot has to hold each of them whole."""
        return self._policy.schedule is not None

    def table(self) -> str:
        """A message on what is compared or averaged, and what that guarantees."""
        config, lines = self._config, [self._buckets.table()]
        if self._policy.schedule is not None:
            averaged = self._buckets.averaged(config.average_optimizer_state)
            lines.append(describe_cost(Aggregate(config.aggregate), averaged))
            if config.mode == "dyn" and not self._operations.recomputes:
                lines.append(
                    "averaging: a non-finite replica sends the job back to an earlier version: its gradients cannot be "
                    f"computed again: {self._operations.no_recompute_reason}"
                )
        if config.audits_every:
            lines.append(promise(
                config.audits_every, OnCorruption(config.on_corruption), config.audit_at == "forward",
                self._operations.recomputes, self._buckets.fewest_replicas, self._buckets.has_copies,
                len(self._buckets.unreplicated), self._operations.clips_together,
            ))  # fmt: skip
            if not self._operations.recomputes:
                lines += [f"gradients cannot be computed again: {self._operations.no_recompute_reason}"]
        return "\n  ".join(lines)

    def connect(self, collective: Collective) -> None:
        """Create process groups and claim memory. Every rank of the job calls, after all of them were constructed."""
        self._operations.keep_iterations(lambda: self._verdicts is not None and self._verdicts.differ())
        own = msgpack.packb([list(members) for members in self._buckets.by_set])
        named = {tuple(members) for part in collective.gather(own) for members in msgpack.unpackb(part)}
        groups = {members: dist.new_group(list(members)) for members in sorted(named)}
        live, copies = self._host.tensors, self._operations.copy_tensors
        device = next((tensor.device for tensor in live().values()), torch.device("cpu"))
        links = Links(self._host.rank, groups, dist.new_group(), device)
        background = self._background = Background(device)
        if self._policy.audit_interval:
            on_corruption = OnCorruption(self._config.on_corruption)
            auditing = Auditing(self._buckets, links, lambda: {**live(), **copies()}, on_corruption, self._operations)
            self._verdicts = Verdicts(
                self._host.rank, auditing, background, self._events,
                lambda step: self.on_agreed(step),  # which the session sets later
            )  # fmt: skip
        if self._policy.schedule is not None:
            config = self._config
            buckets = self._buckets.averaged(config.average_optimizer_state)
            by_tensor = config.mode == "dyn" and config.noise_of == "largest"
            averaging = Averaging(buckets, links, live, Aggregate(config.aggregate), config.trim, by_tensor)
            self._turns = SyncTurns(self._policy, self._policy.schedule, averaging, links, background, self._events)
            self._events.emit(catalogue.AVERAGING_PREPARED, nbytes=averaging.nbytes, buckets=len(buckets))

    # ---- state that a snapshot carries ----

    def captured(self, item: Item) -> Item:
        """If replicas may diverge, every item belongs to this rank alone."""
        return replace(item, replicas=(self._host.rank,)) if self.diverges else item

    def state(self) -> dict[str, Any]:
        """The state of this rank at a version point, as plain values."""
        return {
            "turns": None if self._turns is None else self._turns.state(),
            "offences": {} if self._verdicts is None else self._verdicts.state(),
        }

    def begin(self, completed: int, state: Mapping[str, Any] | None = None, last: int | None = None) -> int:
        """Continue after `completed` iterations from the `state` of that version; None if it carries none."""
        if self._verdicts is not None:
            self._verdicts.begin(completed, {} if state is None else state["offences"])
        if self._verdicts is not None and completed and self._policy.audits(completed):
            self._verdicts.start(completed)
        if self._turns is not None:
            self._turns.begin(completed, None if state is None else state["turns"])
        return completed

    def mark(self, step: int) -> Mark:
        """What is known now of the replicas of version `step`. Its snapshot holds each replica whole if they may
        diverge, else parts of each."""
        last, turns = None if self._verdicts is None else self._verdicts.last, self._turns
        compared = None if last is None or last.iteration != step else not last.state_agreed
        if self._policy.differ(step, turns.turn if turns else None, compared, turns is not None and turns.diverged):
            return Mark.DIVERGED if self.diverges else Mark.MISMATCHED
        return Mark.UNAUDITED if compared is None else Mark.CERTIFIED

    def tainted(self) -> int | None:
        """The iteration after which snapshots must not be restored, because some replica was wrong or non-finite; None
        if that was not found since the last call. The same on all ranks: the last audit in which the replicas agreed.

        If replicas may diverge, snapshots that hold each of them whole stay valid after a failed audit, unless
        `on_corruption` is rollback.
        """
        since = None if self._verdicts is None else self._verdicts.tainted()
        since = None if self.diverges and self._config.on_corruption != "rollback" else since
        nonfinite, self._nonfinite_since = self._nonfinite_since, None
        return min((iteration for iteration in (since, nonfinite) if iteration is not None), default=None)

    # ---- hooks ----

    @property
    def waits_at_begin(self) -> bool:
        """Whether `iteration_begin` has to wait for a verdict."""
        verdicts = self._verdicts if self._config.audit_at == "forward" else None
        return verdicts is not None and verdicts.under_way is not None

    def iteration_begin(self, step: int, wait_for_capture: Callable[[], None] = lambda: None) -> None:
        """The fence of the verdict, with audit_at forward. `wait_for_capture` seals the running capture; it is called
        before tensors are changed or snapshots become void."""
        if self.waits_at_begin:
            self._settle(step, recompute=False, wait_for_capture=wait_for_capture)

    def before_update(self, step: int) -> None:
        """The fence of everything that runs in the background."""
        self._settle(step, recompute=self._operations.recomputes)
        if self._turns is not None:
            finished = self._turns.before(step, self._operations.learning_rate())
            if finished.applied:  # the update derives copies too, but may be skipped
                self._operations.derive()
            if finished.nonfinite:
                self._recompute_or_raise(step, finished.nonfinite)
        self._faults.before_update(step)

    def after_update(self, step: int) -> None:
        """The parameters of this iteration are final: start to compare and average them."""
        audited = self._verdicts is not None and self._policy.audits(step)
        if audited or self._faults.alters_copies:
            self._operations.finish_copies()
        self._faults.after_update(step)
        turns = self._turns
        waits = turns is not None and self._policy.waits and self._policy.averages(step, turns.turn)
        if turns is not None and not waits:
            turns.measure(step)  # first: the version point waits for it, but not for an audit
        if self._verdicts is not None and audited:
            self._verdicts.start(step)
        if turns is None:
            return
        if waits:
            self._settle(step, recompute=False)
        if turns.after(step):
            self._operations.derive()

    def shutdown(self) -> None:
        """The orderly end: report the last verdict; change nothing. Idempotent."""
        if self._background is None:
            return
        if self._verdicts is not None:
            self._verdicts.close()
        self._background.close()
        self._background = None

    def _recompute_or_raise(self, step: int, nonfinite: tuple[int, ...]) -> None:
        """Recompute iteration `step`: its gradients came from non-finite parameters on the ranks `nonfinite`. Raises
        ReplicaError, on all ranks, if that is impossible: the update would spread them to all ranks."""
        if self._operations.recomputes:
            self._operations.recompute(step)
            return
        self._nonfinite_since = step - 2
        own, ranks = self._host.rank, ", ".join(map(str, nonfinite))
        raise ReplicaError(
            f"rank {own}: after iteration {step - 1} parameters of ranks {ranks} were non-finite, and the gradients "
            f"made from them cannot be computed again ({self._operations.no_recompute_reason}): the job goes back to "
            "an earlier version; if it repeats, look at these ranks' devices and at the loss",
            echo=own != nonfinite[0],
        )

    def _settle(self, step: int, recompute: bool, wait_for_capture: Callable[[], None] = lambda: None) -> None:
        """Wait for the verdict, if any, and repair replicas that differ; then `recompute` the iteration."""
        if self._verdicts is None or self._verdicts.under_way is None:
            return
        verdict = self._verdicts.await_()
        if not verdict.agreed:
            wait_for_capture()
            if self._turns is not None:
                self._turns.fence()
            self._verdicts.settle(verdict)
            self._operations.derive()
        if self._turns is not None:
            self._turns.replicas_agreed(changed=not verdict.state_agreed)
        if recompute and not verdict.agreed:
            self._operations.recompute(step)


_REDUCING = "reduce.gradients"
_GRADIENTS = "update.gradients"
_PARAMETERS = "update.parameters"
_COPIES = "update.copies"


class FaultInjector:
    """Injects faults that alter numbers (`corruption`) into one rank: gradients, state, copies. Off unless armed. An
    armed fault that could never take effect here is an error at start, by name."""

    def __init__(self, host: Host, operations: ReplicaOperations, events: Events) -> None:
        """Raises ConfigError for an action that alters no numbers, and for copies if there are none; UnsupportedError
        for a point that this host cannot reach."""
        self._host, self._operations, self._events = host, operations, events
        self._corruption = Corruption(host.rank)
        if self._corruption.armed(_COPIES) and not operations.copies().items:
            raise ConfigError(f"fault at {_COPIES}: {host.framework} computes with the parameters themselves here")
        if self._corruption.armed(_REDUCING):
            operations.before_reduction(lambda step, gradients: self._at(_REDUCING, step, gradients))

    @property
    def alters_copies(self) -> bool:
        return self._corruption.armed(_COPIES)

    def before_update(self, step: int) -> None:
        """Alter gradients after their reduction."""
        if self._corruption.armed(_GRADIENTS):
            self._at(_GRADIENTS, step, self._operations.gradients())

    def after_update(self, step: int) -> None:
        """Alter state and copies."""
        if self._corruption.armed(_PARAMETERS):
            self._at(_PARAMETERS, step, self._host.tensors())
        if self.alters_copies:
            self._at(_COPIES, step, self._operations.copy_tensors())

    def _at(self, point: str, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        strike = self._corruption.strike(point, step, tensors)
        if strike is not None:
            self._events.emit(catalogue.FAULT_INJECTED, iteration=step, **vars(strike))
