"""PAFT: replicas are averaged as often as noise asks for, and compared; as one rank composes it.

    before_update     the fence of what runs behind: verdict -> repair (sync.verdicts); averages -> live (sync.turns)
    after_update      what the policy asks for is started: digests, averages
    iteration_begin   the fence of the verdict alone, with audit_at forward

Everything that is started runs on one thread, in one order on all ranks, behind the next forward and backward; only the
fences have training wait.

Invariant: every rank of the job does the same at the same iteration: the policy is pure, and what it is told has been
gathered over all ranks. An error here ends the rank: replicas that are treated differently are worse than none.

In: a host with `Steps`; snapshots of its tensors have passed their fence before each hook but iteration_begin, which is
told how to have them pass it. Out: changed tensors; events; `state`, from which a resumed job goes on as if nothing had
happened, an averaging in flight included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from ..collective import Collective
from ..config import PaftConfig
from ..errors import DivergedError, UnsupportedError
from ..events import Events, catalogue
from ..model.host import Host, Steps
from ..model.inventory import Inventory
from ..snapshot.slots import Mark
from ..sync.aggregate import Aggregate, require_enough, told
from ..sync.audit import OnCorruption, promise
from ..sync.averager import Averaging
from ..sync.background import Background
from ..sync.buckets import plan_buckets, require_replicas
from ..sync.compare import Auditing
from ..sync.links import Links
from ..sync.policy import Label, PaftPolicy, Replicas
from ..sync.schedule import schedule_of
from ..sync.turns import SyncTurns
from ..sync.verdicts import Verdicts
from .strikes import Strikes


class Paft:
    """One rank's. After `connect` comes `begin`, then the hooks."""

    def __init__(self, host: Host, config: PaftConfig, events: Events) -> None:
        """Plan; no collective. Raises ConfigError, UnsupportedError where it would mean nothing here."""
        if not isinstance(host, Steps):
            raise UnsupportedError(
                f"{host.framework}: parameters cannot be changed between two updates here; drop --paft"
            )
        self._host: Host = host
        self._steps: Steps = host
        self._config, self._events = config, events
        inventory, size = host.inventory(), config.bucket_mib << 20
        held = inventory.items + (self._steps.copies().items if config.audits_every else ())
        self._buckets = plan_buckets(Inventory.of(host.rank, held), size)
        averaging, replicas = config.mode != "audit", len(host.topology().replicas(host.rank))
        own = plan_buckets(inventory, size) if averaging else self._buckets  # copies are none that could be averaged
        require_replicas(own, host.framework, replicas, averaging)
        for members in own.by_set if averaging else ():
            require_enough(Aggregate(config.aggregate), len(members), config.trim)
        self._policy = PaftPolicy(schedule_of(config), config.mode == "sync", config.audits_every)
        self._strikes = Strikes(host, self._steps, events)
        self._turns: SyncTurns | None = None
        self._verdicts: Verdicts | None = None
        self._background: Background | None = None
        self._spoilt: int | None = None  # the iteration after which some rank's parameters were no number
        if self._policy.schedule is not None:
            self._steps.learning_rate()  # raises where it cannot be had

    @property
    def drifts(self) -> bool:
        """Whether replicas are let drift between two turns: then a snapshot has to hold each of them."""
        return self._policy.schedule is not None

    def table(self) -> str:
        """For people, once: what is compared, and what that promises."""
        config, lines = self._config, [self._buckets.table()]
        if self._policy.schedule is not None:
            chosen = self._buckets.averaged(config.average_optimizer_state)
            lines.append(told(Aggregate(config.aggregate), chosen))
            if config.mode == "dyn" and not self._steps.recomputes:
                lines.append(
                    "averaging: a replica that is no number at a turn sends the job back: gradients that were made of "
                    f"it cannot be computed again: {self._steps.why_not}"
                )
        if config.audits_every:
            lines.append(promise(
                config.audits_every, OnCorruption(config.on_corruption), config.audit_at == "forward",
                self._steps.recomputes, self._buckets.fewest, self._buckets.copies, len(self._buckets.alone),
                self._steps.clips_together,
            ))  # fmt: skip
            lines += [] if self._steps.recomputes else [f"gradients cannot be computed again: {self._steps.why_not}"]
        return "\n  ".join(lines)

    def connect(self, collective: Collective) -> None:
        """Make groups and claim memory. All ranks of the job call together, none of them with an error."""
        self._steps.keep_iterations()
        own = msgpack.packb([list(members) for members in self._buckets.by_set])
        named = {tuple(members) for part in collective.gather(own) for members in msgpack.unpackb(part)}
        groups = {members: dist.new_group(list(members)) for members in sorted(named)}
        live, copied = self._host.tensors, self._steps.copied
        device = next((tensor.device for tensor in live().values()), torch.device("cpu"))
        links = Links(self._host.rank, groups, dist.new_group(), device)
        background = self._background = Background(device)
        if self._policy.audit_interval:
            compared, chosen = lambda: {**live(), **copied()}, OnCorruption(self._config.on_corruption)
            auditing = Auditing(self._buckets, links, compared, chosen, self._steps)
            self._verdicts = Verdicts(self._host.rank, auditing, background, self._events)
        if self._policy.schedule is not None:
            config = self._config
            taking = self._buckets.averaged(config.average_optimizer_state)
            averaging = Averaging(taking, links, live, Aggregate(config.aggregate), config.trim)
            self._turns = SyncTurns(self._policy, self._policy.schedule, averaging, links, background, self._events)
            self._events.emit(catalogue.AVERAGING_PREPARED, nbytes=averaging.nbytes, buckets=len(taking))

    # ---- what a resumed job goes on from ----

    def state(self) -> dict[str, Any]:
        """At a version point, of this rank: plain values."""
        return {
            "turns": None if self._turns is None else self._turns.state(),
            "offences": {} if self._verdicts is None else self._verdicts.state(),
        }

    def begin(self, completed: int, state: Mapping[str, Any] | None = None) -> None:
        """Go on after `completed` iterations, from the `state` of that version; None where there is none of PAFT."""
        if self._verdicts is not None:
            self._verdicts.begin(completed, {} if state is None else state["offences"])
        if self._verdicts is not None and completed and self._policy.doing(completed, None).audit:
            self._verdicts.start(completed)
        if self._turns is not None:
            self._turns.begin(completed, None if state is None else state["turns"])

    def label(self, step: int) -> Label:
        """What the replicas of version `step` are, as far as is known now."""
        found = None if self._verdicts is None else self._verdicts.last
        differs = None if found is None or found.iteration != step else not found.certain
        turns = self._turns
        return self._policy.label(step, turns.turn if turns else None, differs, turns is not None and turns.drifting)

    def mark(self, step: int) -> Mark:
        """The same in a snapshot's words. Where replicas may drift it holds each of them whole, else parts of each."""
        label = self.label(step)
        if label.certified:
            return Mark.CERTIFIED
        if label.replicas is Replicas.IDENTICAL:
            return Mark.UNAUDITED
        return Mark.DIVERGED if self.drifts else Mark.DIFFERING

    def tainted(self) -> int | None:
        """Where any rank's replica was found wrong since it was asked last: the iteration after which snapshots are
        worth nothing, on all ranks alike, that of the last audit in which the replicas agreed. Where they drift, those
        that hold each of them whole are gone on from as the job itself goes on, unless it is to go back, or one was no
        number."""
        since = None if self._verdicts is None else self._verdicts.tainted()
        since = None if self.drifts and self._config.on_corruption != "rollback" else since
        spoilt, self._spoilt = self._spoilt, None
        return min((each for each in (since, spoilt) if each is not None), default=None)

    # ---- hooks ----

    @property
    def early(self) -> bool:
        """Whether `iteration_begin` has something to wait for."""
        verdicts = self._verdicts if self._config.audit_at == "forward" else None
        return verdicts is not None and verdicts.under_way is not None

    def iteration_begin(self, step: int, rest: Callable[[], None] = lambda: None) -> None:
        """The fence of a verdict that is awaited here. `rest` is called before tensors are changed or snapshots void:
        snapshots have not passed their fence before this hook."""
        if self.early:
            self._settle(step, recompute=False, rest=rest)

    def before_update(self, step: int) -> None:
        """The fence of all that runs behind."""
        self._settle(step, recompute=self._steps.recomputes)
        if self._turns is not None:
            finished = self._turns.before(step, self._steps.learning_rate())
            if finished.applied:  # the update derives as well, but may be skipped
                self._steps.derive()
            if finished.spoilt:
                self._redo(step, finished.spoilt)
        self._strikes.before_update(step)

    def after_update(self, step: int) -> None:
        """The version is what it is: compare, average."""
        self._strikes.after_update(step)
        turns = self._turns
        waits = turns is not None and self._policy.doing(step, turns.turn).waits
        if turns is not None and not waits:
            turns.measure(step)  # first: the version point waits for it, and is not to wait for an audit
        if self._verdicts is not None and self._policy.doing(step, None).audit:
            self._verdicts.start(step)
        if turns is None:
            return
        if waits:
            self._settle(step, recompute=False)
        if turns.after(step):
            self._steps.derive()

    def shutdown(self) -> None:
        """The orderly end: what was found last is reported, and nothing more is changed. Idempotent."""
        if self._background is None:
            return
        if self._verdicts is not None:
            self._verdicts.close()
        self._background.close()
        self._background = None

    def _redo(self, step: int, spoilt: tuple[int, ...]) -> None:
        """Gradients of `step` once more, as those at hand were made of what was no number on the ranks `spoilt`. Raises
        DivergedError, on all ranks, where that cannot be done: the update would have it in all of them."""
        if self._steps.recomputes:
            self._steps.recompute(step)
            return
        self._spoilt = step - 2
        own, ranks = self._host.rank, ", ".join(map(str, spoilt))
        error = DivergedError(
            f"rank {own}: after iteration {step - 1} parameters of ranks {ranks} were infinite or no number, and the "
            f"gradients made of them cannot be computed again ({self._steps.why_not}): the job is to go back to a "
            "version before; where it comes back, look at these ranks' devices and at the loss"
        )
        error.echo = own != spoilt[0]
        raise error

    def _settle(self, step: int, recompute: bool, rest: Callable[[], None] = lambda: None) -> None:
        if self._verdicts is None or self._verdicts.under_way is None:
            return
        found = self._verdicts.await_()
        if not found.agreed:
            rest()
            if self._turns is not None:
                self._turns.fence()
            self._verdicts.settle(found)
            self._steps.derive()
        if self._turns is not None:
            self._turns.equal(changed=not found.certain)
        if recompute and not found.agreed:
            self._steps.recompute(step)
