"""One synchronisation of local SGD while it is under way: which modules are exchanged, and which are applied.

It is of all modules, or of those of one iteration (`layered`). What is started runs on one thread, in the plan's order
on all ranks of a sync group, also where replicas visit their modules in different orders or leave some out: messages do
not say which module they are of. Modules that several pipeline stages hold (a tied embedding) come first: a stage that
waits for another one's forward would wait for ever if that one waited for its part of such a module.

Invariant: a module is applied once, after its exchange. An error is raised where the module is waited for. What follows
the last one (`finished`) is done by all ranks of a replica that have the same shards to gather, also by those without a
module of this synchronisation.

In: a `Synchronisation`, its groups. Out: changed tensors; at the end, what happened to modules and replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from ...sync.background import Background, BackgroundTask
from ...sync.rounds.local_policy import AppliedAt
from ...sync.rounds.modules import GroupPlan
from ...sync.rounds.penalty import Judgement
from ...sync.rounds.synchronisation import Synchronisation
from .sync_groups import PeerWait

T = TypeVar("T")


class SynchronisationUnderWay:
    """Carries out one synchronisation after the other on one rank; between them nothing is under way."""

    def __init__(
        self, synchronisation: Synchronisation, plan: GroupPlan, wait: PeerWait, apply: AppliedAt, prefetch: bool,
        device: torch.device, finished: Callable[[], None],
    ) -> None:  # fmt: skip
        """`prefetch`: start the exchange of the next module before one is waited for. `finished` is called when all
        modules are applied."""
        self._synchronisation, self._wait = synchronisation, wait
        self._all, self._spanning = plan.order, plan.spanning
        self.names: Sequence[str] = ()  # of the modules of this synchronisation
        self._apply_at, self._prefetch, self._finished = apply, prefetch, finished
        self._background: Background | None = Background(device)
        self._waiting: dict[str, BackgroundTask[float] | None] = {}  # to be applied; None: exchange not started
        self._unfinished = False  # whether `finished` is still to be called
        self.step = 0  # iteration of the last synchronisation
        self.waited = 0.0  # seconds, for it
        self.report: dict[str, Any] = {}  # fields of its event
        self.exchange: Callable[[str], float] = synchronisation.exchange  # on the thread
        self.apply: Callable[[str], Judgement | None] = synchronisation.apply

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def start(self, step: int, factors: Sequence[float] | None = None) -> None:
        """Start the synchronisation after iteration `step`. `factors`: a further factor of each replica's weight."""
        self._begin(step, self._all, factors, True)
        at_once = self._apply_at is not AppliedAt.FORWARD
        for place, name in enumerate(self.names):
            if at_once or name in self._spanning or (place == 0 and self._prefetch):
                self._exchange(name)

    def start_some(self, step: int, names: Sequence[str], finishes: bool) -> None:
        """Start a synchronisation of these modules alone, in iteration `step`. Each is exchanged once it, or one after
        it, is released, and at the latest when all are applied. `finishes`: whether `finished` is called then, although
        this rank may have none of what others of its replica synchronise."""
        self._begin(step, names, None, finishes)

    def release(self, name: str) -> None:
        """A module may be exchanged, and so may those before it."""
        if name in self._waiting:
            self._exchange(name)

    def _begin(self, step: int, order: Sequence[str], factors: Sequence[float] | None, finishes: bool) -> None:
        self.step, self.waited, self.names = step, 0.0, order
        self.report = {"left_out": {}, "rolled_back": [], "clipped": {}, "nonfinite": {}}
        self._synchronisation.begin(factors)
        self._waiting, self._unfinished = dict.fromkeys(order), finishes

    def run(self, what: str, work: Callable[[], T]) -> BackgroundTask[T]:
        """Do other work with the same ranks, after what was started before."""
        assert self._background is not None
        return self._background.start(partial(self._wait.within, self.step, what, work))

    def before_forward(self, name: str) -> None:
        if name in self._waiting and self._apply_at is AppliedAt.FORWARD:
            self._apply(name)

    def wait_all(self) -> None:
        """Wait for the exchanges of what is still to be applied."""
        for name in self._waiting:
            self._exchange(name)
        for exchange in self._waiting.values():
            assert exchange is not None
            exchange.wait()

    def drop_unstarted(self) -> None:
        """Forget the modules of a synchronisation of which none is exchanged yet."""
        if not any(self._waiting.values()):
            self._waiting, self._unfinished = {}, False

    def apply_all(self) -> None:
        for name in self.names if self._waiting else ():
            if name in self._waiting:
                self._apply(name)
        self._finish_if_applied()

    def close(self) -> None:
        if self._background is not None:
            self._background.close()
            self._background = None

    def _exchange(self, name: str) -> None:
        """Start the exchange of a module, and of those before it in the plan, unless they are started."""
        assert self._background is not None
        for each in self.names[: self.names.index(name) + 1]:
            if self._waiting.get(each, True) is None:
                exchange = partial(self.exchange, each)
                work = partial(self._wait.within, self.step, f"module '{each}'", exchange)
                self._waiting[each] = self._background.start(work)  # if it fails, so do those that follow

    def _apply(self, name: str) -> None:
        """Wait for a module's exchange, and apply it; with prefetch start that of the next one first."""
        self._exchange(name)
        if self._prefetch:
            following = self.names[self.names.index(name) + 1 :]
            if waiting := next((each for each in following if each in self._waiting), None):
                self._exchange(waiting)
        exchange = self._waiting.pop(name)
        assert exchange is not None
        factor = exchange.wait()
        self.waited += exchange.waited
        judgement = self.apply(name)
        if judgement is not None:
            self._report(name, judgement, factor)
        self._finish_if_applied()

    def _report(self, name: str, judgement: Judgement, factor: float) -> None:
        for key, those in (("left_out", judgement.anomalous), ("nonfinite", judgement.nonfinite)):
            if any(those):
                self.report[key][name] = [rank for rank, one in zip(self._wait.sync, those, strict=True) if one]
        if judgement.rollback:
            self.report["rolled_back"].append(name)
        if factor != 1.0:
            self.report["clipped"][name] = factor

    def _finish_if_applied(self) -> None:
        if self._unfinished and not self._waiting:
            self._unfinished = False
            self._finished()
