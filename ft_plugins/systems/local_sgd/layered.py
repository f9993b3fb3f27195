"""DreamDDP on one rank: in each local iteration some layers are averaged, behind the backward, by a schedule.

    average first   x <- mean(x) - lr g     a layer is exchanged once its backward has ended, and applied before the
                                            update; backward and forward have read it then, and no gradient changes
    update first    x <- mean(x - lr g)     a layer is updated once its backward has ended, then exchanged, and applied
                                            after the update of the others

With average first the edges of modules are hints: where one is missing, the layer is exchanged later, at the latest
before the update. With update first the host says which layers are updated.

Nothing is under way at a version point. Iterations after which all modules are synchronised (LocalSgdPolicy.due)
average none on their own.

Invariant: all ranks that exchange a layer do so in the same iteration and in the same order, because the schedule is
derived from what all of them know, and begins at an iteration that all of them know.

In: edges of modules, updates of modules. Out: changed parameters; state for snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from ...collective import Collective
from ...config import SyncConfig
from ...errors import ConfigError, UnsupportedError
from ...events import Events
from ...model.host import Host
from ...model.reduction import EarlyUpdates, ReductionControl
from ...sync.layers.layer_profile import read_profile
from ...sync.layers.layers_job import JobSchedule, equal_schedule, job_period, planned_schedule
from ...sync.layers.layers_measured import EdgeKind
from ...sync.rounds.local_policy import LocalSgdPolicy
from ...sync.rounds.modules import ModulePlan
from ...sync.rounds.synchronisation import Synchronisation
from .layers_planning import LayerMeasurement, LayerPlanning, Stopwatch
from .sync_groups import SyncGroups
from .under_way import SynchronisationUnderWay


class ModuleSignals:
    """The edges of modules (`model.reduction.ModuleEdges`), for measurement and for averaging."""

    def __init__(self, averaging: LayeredAveraging, measurement: LayerMeasurement) -> None:
        self._averaging, self._measurement = averaging, measurement

    def forward_begin(self, module: str) -> None:
        self._measurement.edge(EdgeKind.FORWARD_BEGIN, module)

    def forward_end(self, module: str) -> None:
        self._measurement.edge(EdgeKind.FORWARD_END, module)

    def backward_begin(self, module: str) -> None:
        self._measurement.edge(EdgeKind.BACKWARD_BEGIN, module)

    def backward_end(self, module: str) -> None:
        self._measurement.edge(EdgeKind.BACKWARD_END, module)
        self._averaging.backward_ended(module)


class LayeredAveraging:
    """Averages layers as the schedule says. Call `begin`, then the hooks."""

    def __init__(
        self, host: Host, control: ReductionControl, config: SyncConfig, policy: LocalSgdPolicy, groups: SyncGroups,
        modules: tuple[ModulePlan, ...], under_way: SynchronisationUnderWay, synchronisation: Synchronisation,
        events: Events, folder: Path | None,
    ) -> None:  # fmt: skip
        """Have the host report modules. Raises ConfigError for a profile that cannot be used or a period that is too
        long; UnsupportedError if layers cannot be followed, or not be updated on their own although `config` asks for
        that."""
        self._config, self._policy, self._under_way = config, policy, under_way
        self._layers, self._stage = groups.layers(), groups.stage
        self._nbytes = {module.name: module.nbytes for module in modules}  # of the layers that this rank holds
        self._first_schedule = self._before_measuring(len(groups.wait.sync))
        depends = self._layers, self._first_schedule, config.h, config.measures_layers, policy.warmup
        self._digest = xxhash.xxh3_64_hexdigest(repr(depends).encode())
        self._schedule, self._origin = self._first_schedule, policy.warmup
        self._turn: tuple[str, ...] = ()  # the layers of the present iteration
        self._updated: set[str] = set()  # those of them that are updated already
        self._measurement = LayerMeasurement(Stopwatch(groups.device), self._nbytes)
        self._planning: LayerPlanning | None = None
        if config.measures_layers and len(groups.wait.sync) > 1:
            self._planning = LayerPlanning(
                config, groups, self._layers, under_way, self._measurement, self._nbytes, events, folder
            )
        under_way.exchange = lambda name: self._measurement.averaging(name, synchronisation.exchange)
        self.updates_first, self.order_reason = self._order(host)
        control.follow_modules(ModuleSignals(self, self._measurement))
        if self.updates_first:
            assert isinstance(host, EarlyUpdates)
            host.update_modules_early(lambda: self._turn, self._module_updated)

    def _before_measuring(self, replicas: int) -> JobSchedule:
        period = job_period(self._layers, self._config.h)
        if self._config.profile is None or replicas < 2:
            return equal_schedule(self._layers, period)
        return planned_schedule(self._layers, read_profile(Path(self._config.profile)), period)

    def require_same(self, collective: Collective) -> None:
        """Raises ConfigError if ranks have different schedules, from different files. Every rank of the job calls."""
        digests = collective.gather(self._digest.encode())
        with collective.agreement():
            ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            if ranks:
                raise ConfigError(
                    f"--sync-profile {self._config.profile}: rank {ranks[0]} planned another schedule from it than "
                    "rank 0; give all nodes the same file"
                )

    def _order(self, host: Host) -> tuple[bool, str]:
        """Whether layers are updated before they are averaged, and why. Raises UnsupportedError."""
        wanted = self._config.order or "auto"
        refusal = f"{host.framework} updates all layers together, after the whole backward"
        if isinstance(host, EarlyUpdates):
            refusal = host.early_refusal()
        if wanted == "update_first" and refusal:
            raise UnsupportedError(f"--sync-order update_first: {refusal}; choose average_first")
        if wanted != "auto":
            return wanted == "update_first", "as asked for"
        if refusal:
            return False, refusal
        return False, (
            "the loop may clip or scale gradients between backward and update; if it does not, --sync-order "
            "update_first is possible"
        )

    def table(self) -> str:
        """A message on what is averaged when."""
        schedule = self._schedule
        held = schedule.most_bytes(self._stage, self._nbytes)
        how = "equal numbers of layers in each"
        if schedule.exposed is not None:
            how = f"planned from {self._config.profile}: {schedule.exposed:.3g} of {schedule.seconds:.3g} s exposed"
        elif self._planning is not None:
            how += " until this job is measured"
        return "\n  ".join(
            [
                f"{len(self._layers.names)} layers, each averaged once in {schedule.period} iterations, behind the "
                f"backward; {how}",
                f"{'update first' if self.updates_first else 'average first'}: {self.order_reason}",
                f"results are held from a layer's averaging to the update: at most {held} bytes",
            ]
        )

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """The schedule and where it began; `first`: by which a changed configuration or profile is known."""
        return {"origin": self._origin, "first": self._digest, **self._schedule.block()}

    def begin(self, completed: int, state: Mapping[str, Any] | None) -> None:
        """Continue after iteration `completed`."""
        if state is not None and state["first"] == self._digest:
            self._schedule, self._origin = JobSchedule.of(state), state["origin"]
        else:
            self._schedule, self._origin = self._first_schedule, max(completed, self._policy.warmup)
        if self._planning is not None:
            self._planning.begin(completed, self._origin, self._schedule)

    # ---- hooks ----

    def iteration_begin(self, step: int) -> None:
        """Find the layers of iteration `step`."""
        layered = step > self._policy.warmup and not self._policy.due(step)
        due = self._schedule.due(self._stage, step - self._origin - 1) if layered else ()
        self._turn = tuple(name for name in due if name in self._nbytes)
        self._updated.clear()
        self._under_way.start_some(step, self._turn, finishes=bool(due))
        if self._planning is not None:
            self._planning.iteration_begin(step, self._schedule.period)

    def backward_ended(self, name: str) -> None:
        """The backward of a module has ended, if only that of one microbatch: nothing changes it before the update."""
        if not self.updates_first:
            self._under_way.release(name)

    def _module_updated(self, name: str) -> None:
        """A module is updated: it is exchanged once those before it are updated too."""
        self._updated.add(name)
        for each in self._turn:
            if each not in self._updated:
                break
            self._under_way.release(each)

    def before_update(self, step: int) -> None:
        """Apply the layers of this iteration, unless they are updated first."""
        if not self.updates_first:
            self._apply()

    def after_update(self, step: int) -> None:
        """Apply the layers that were updated first; begin a new schedule if one is planned."""
        if self.updates_first:
            self._apply()
        if self._planning is not None:
            self._measurement.iteration_end()
            chosen = self._planning.iteration_end(step, self._schedule)
            if chosen is not None:
                self._schedule, self._origin = chosen, step

    def _apply(self) -> None:
        self._measurement.waiting(self._under_way.wait_all)
        self._under_way.apply_all()

    def shutdown(self) -> None:
        """The orderly end, without the layers of an iteration that has not been trained. Idempotent."""
        self._under_way.drop_unstarted()
        if self._planning is not None:
            self._planning.close()
