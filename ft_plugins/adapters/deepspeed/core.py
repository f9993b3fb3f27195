"""A DeepSpeed engine as a host: PipelineEngine with ZeRO-0 and ZeRO-1, DeepSpeedEngine with ZeRO-0 to ZeRO-3.

Invariant: building a host changes nothing, and installing it changes no number: what the optimizer keeps is known
before its first update makes it (`planned_state`), and methods are wrapped on this one engine. `restore` leaves the
engine as DeepSpeed's own load would (param groups, scheduler, loss scaler, counters), with derived parameters rebuilt
by DeepSpeed's own copy and gather; `restore_position` sets the data position, then the RNG, which DeepSpeed's
checkpoints lack.

In: the engine that `deepspeed.initialize` returned. Out: a `model.host.Host`. `training.DeepSpeedLoop` calls the hooks
at the begin and end of an iteration; `before_update` and `after_update` are called here. Fault points:

    iteration.forward   first forward of an iteration     update.middle   inner optimizer stepped, nothing copied yet
    update.begin        past the fence                    update.end      all done"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import deepspeed
import xxhash

from ...base import faults
from ...errors import ResumeError
from ...model.host import Edges, Hooks, ScalarWriter
from ...model.observation import Observer
from ...model.progress import ProgressReceiver
from ...snapshot.capture import codec
from ..begun_again import BegunAgain
from ..data.observed_inputs import ObservedForwards, digest_of_inputs, plain_number
from ..forward_edges import Saving, follow_forwards
from ..host_parts import groups, reach_fault_points, restore_groups
from ..module_modes import ModuleNumbers, read_modes, require_encodable_modes, write_modes
from ..observed import module_roots
from ..parameter_groups import numbered, packed, regrouped
from ..schedulers import (
    SchedulerRestore,
    own_schedulers,
    require_encodable_scheduler,
    restore_own,
    restore_schedules,
    schedules,
)
from ..script.script_hooks import wrap
from ..script.undeclared import Undeclared
from ..script.undeclared_search import Given, UndeclaredSearch, ignored
from . import naming, state
from .clients import EngineClient
from .position import Positions
from .read_ahead import ReadPace, unproven
from .reducing import SHARDED
from .replay import restore_rng, rng_state
from .shard_groups import ShardGroups
from .stepping import DeepSpeedStepping

_STAGE3 = 3  # ZeRO stage
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_SETTINGS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "zero_optimization_stage")


class DeepSpeedHost(DeepSpeedStepping):
    """One rank of a DeepSpeed job. Raises UnsupportedError, TopologyError or InventoryError for what is not supported.

    Without `positions` the caller restores the data position. `shards`: the groups that the engine was built over;
    None: those that the engine remembers. `client`: the program whose own state is captured with the engine's.
    """

    fault_points = dict.fromkeys(("iteration.forward", "update.begin", "update.middle", "update.end"), ())
    _trains = False  # whether an update was made
    _members = ""
    write_scalars: ScalarWriter | None = None  # set by the loop
    _own: dict[str, Any] | None = None  # the script's schedulers; None: not searched yet
    _client: EngineClient | None = None

    def __init__(
        self, engine: Any, positions: Positions | None = None, shards: ShardGroups | None = None,
        client: EngineClient | None = None,
    ) -> None:  # fmt: skip
        super().__init__(engine, shards)
        self.framework = f"DeepSpeed {deepspeed.__version__}"
        self._client = client
        self.checkpoint_lacks = getattr(client, "checkpoint_lacks", "")
        self.placed: Callable[[], object] = getattr(client, "placed", bool)
        self._positions = None if client is not None and client.places_data else positions
        self._unsettled: Mapping[str, Any] | None = None  # small state that is restored, but not the client's part
        self.schedule = SchedulerRestore(engine.lr_scheduler)
        self.restored = False  # whether the engine holds a restored version, whose data position comes next
        self._undeclared = UndeclaredSearch(self._given, lines_to_add, f"rank {self.rank}")
        self.silent = False  # whether iterations have updates without a forward in training mode
        self.pace: ReadPace | None = None  # of the last iteration, if its reads are followed
        require_encodable_scheduler(engine.lr_scheduler, self.rank)
        require_encodable_modes(engine.module, self.rank)
        self._numbers = ModuleNumbers(engine.module)
        self.observed = BegunAgain(
            lambda: module_roots("model", engine.module, state.updating(engine.optimizer)),
            lambda: (*self.tensors().values(), *engine.module.parameters()),
            lambda: [*ignored(), *(self._positions.restored_by_themselves() if self._positions is not None else ())],
        )
        own = state.grouped(engine.optimizer)  # by name now: a script may wrap layers later, as for random-LTD
        self._members = packed(numbered([self._names.get(one, "unknown") for one in parameters] for parameters in own))

    # facts

    def find_tensors(self, loaded: bool = True) -> None:
        """Find the tensors again after DeepSpeed has loaded a checkpoint, which replaces those of the optimizer, or has
        found none."""
        if loaded:
            state.count_from_loaded(self.engine.optimizer)
        self.__dict__.pop("_state_items", None)
        self.restored = False
        self._unsettled = None

    def names(self) -> Mapping[str, Any]:
        """The files of DeepSpeed's own checkpoints, or why they cannot be described."""
        return naming.described(self.engine, self._state_items, self._topology.replicas(self.rank))

    def fingerprint(self) -> Mapping[str, Any]:
        engine, topology = self.engine, self._topology
        model, accumulated = engine.get_data_types()
        sharded = {} if self._shards is None else {"shard_ranks": len(self._shards.inner)}
        return {
            "framework": "deepspeed",
            "architecture": _architecture(engine.module),
            "precision": [_dtype_name(model), _dtype_name(accumulated)],
            "parallel": {axis: getattr(topology, axis) for axis in ("tp", "pp", "dp", "order")} | sharded,
            "optimizer": sorted({type(one).__name__ for one in (engine.optimizer, *state.updating(engine.optimizer))}),
            "settings": {name: getattr(engine, name)() for name in _SETTINGS},
        }

    def regrouped(self, small: Mapping[str, Any]) -> str:
        return regrouped(small.get("members"), self._members)

    def small_state(self) -> dict[str, Any]:
        """All state that is not a tensor, at the version point. Raises StateChangedError."""
        if self._trains:
            self._undeclared.check(self.engine.global_steps)
        optimizer, scheduler = self.engine.optimizer, self.engine.lr_scheduler
        return {
            "groups": groups(state.all_groups(optimizer)),
            "members": self._members,
            "scalars": state.scalars(optimizer),
            "counts_from": state.counts_from(optimizer),
            "scaler": state.scaler(optimizer),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "own_schedulers": {name: one.state_dict() for name, one in self._own_schedulers().items()},
            "counters": {name: getattr(self.engine, name) for name in _COUNTERS},
            "schedules": schedules(self.engine),
            "position": {} if self._positions is None else self._positions.read(),
            "rng": rng_state(),
            "silent": self.silent,
            "numbers": self._numbers.captured(),
            "modes": read_modes(self._numbers.parts.modules),
            "client": None if self._client is None else {"name": self._client.name, "state": self._client.state()},
            "pace": None if self.pace is None else vars(self.pace),
        }

    def _given(self) -> Given:
        """What the engine consists of. Modules of other stages are left in a pipeline's list of layers."""
        module = self.engine.module
        own = tuple(self._own_schedulers().values())
        objects = self.engine, vars(self.engine), module, getattr(module, "_layer_specs", None), own
        trained = [one for one in module.parameters() if one.requires_grad]
        optimizer = self.engine.optimizer
        return Given((*objects, optimizer, *state.updating(optimizer)), (*self.tensors().values(),), tuple(trained))

    def _own_schedulers(self) -> dict[str, Any]:
        """Those that the script steps itself, searched once after its first update; until then, the restored ones."""
        if self.engine.lr_scheduler is not None:
            return {}
        if self._own is None:
            if not self._trains:
                return {}
            self._own = own_schedulers(state.inner(self.engine.optimizer), self.rank)
        return self._own

    def scalars(self) -> bytes:
        """Scalar state of optimizer, loss scaler and scheduler, and the number of skipped updates; no other counters.
        b'' if masters are sharded: then there is no replica to copy from."""
        if type(self.engine.optimizer).__name__ in SHARDED:
            return b""
        small = self.small_state()
        values = {key: small[key] for key in ("groups", "scalars", "scaler", "scheduler")}
        return codec.encode({**values, "skipped_steps": self.engine.skipped_steps})

    def restore_scalars(self, encoded: bytes) -> None:
        if encoded:
            values = codec.decode(encoded)
            self._restore_optimizer(values)
            self.engine.skipped_steps = values["skipped_steps"]

    def merged(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The small state of the first replica: optimizer scalars are equal on all, generators differ. Raises
        ResumeError where groups are not: an optimizer keeps numbers of its shard in them."""
        if any(codec.encode(part["groups"]) != codec.encode(parts[0]["groups"]) for part in parts):
            kind = type(state.inner(self.engine.optimizer)).__name__
            raise ResumeError(
                f"rank {self.rank}: {kind} keeps other values in the groups of each rank, so they cannot be divided "
                "over another number of ranks: resume with the captured job's, or start with --ftp-resume fresh"
            )
        return dict(parts[0])

    def admits(self, replicas: int) -> bool:
        """Whether the global batch can stay, and the ranks make up whole replicas of local SGD: the configuration must
        let DeepSpeed choose the accumulation steps. Not with MoE, whose expert groups would be others."""
        if getattr(self.engine, "has_moe_layers", False):
            return False
        if self._shards is not None and replicas % len(self._shards.inner):
            return False
        settings = self.engine._config._param_dict
        micro = self.engine.train_micro_batch_size_per_gpu()
        divides = self.engine.train_batch_size() % (micro * replicas) == 0
        return divides and "train_batch_size" in settings and "gradient_accumulation_steps" not in settings

    # restore

    def restore(self, small: Mapping[str, Any]) -> None:
        """Restore all but the item tensors, which are restored already; rebuild derived parameters. A collective."""
        engine, optimizer, self.restored = self.engine, self.engine.optimizer, True
        self._require_same_client(small)
        pace = small.get("pace")  # of an earlier version of ft_plugins with more
        self.pace = None if pace is None else ReadPace(pace["read"], pace["computed"], pace["proven"])
        problem = None if self.pace is None else unproven(self.pace)
        if problem is not None:
            raise ResumeError(
                f"rank {self.rank}: iteration {small['counters']['global_steps']} cannot be restored: {problem}"
            )
        if (small["scheduler"] is None) != (engine.lr_scheduler is None):
            raise ResumeError(
                f"rank {self.rank}: only one of this job and the captured job has a learning rate scheduler: resume "
                "with the captured job's settings, or start with --ftp-resume fresh"
            )
        self.silent = small.get("silent", False)
        self._restore_counters(small)
        self._restore_optimizer(small)
        state.rebuild_derived(optimizer)
        self._unsettled = small

    def settle(self) -> None:
        """The client has built its engine, and loaded what it loads: set it to where the restored engine is."""
        small, self._unsettled = self._unsettled, None
        if small is not None and self._client is not None:
            self._restore_counters(small)
            self._restore_optimizer(small)  # the client may have loaded its scheduler from an older checkpoint
            self._client.restore(small["client"]["state"])

    def _restore_counters(self, small: Mapping[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self.engine, name, small["counters"][name])
        restore_schedules(self.engine, small["schedules"])

    def _require_same_client(self, small: Mapping[str, Any]) -> None:
        captured = (small.get("client") or {}).get("name")
        present = None if self._client is None else self._client.name
        if captured != present:
            raise ResumeError(
                f"rank {self.rank}: the captured job's loop was that of {captured or 'its own script'}, this one's is "
                f"that of {present or 'its own script'}: resume with the captured job's script, or start with "
                "--ftp-resume fresh"
            )

    def _restore_optimizer(self, small: Mapping[str, Any]) -> None:
        optimizer = self.engine.optimizer
        if self.engine.lr_scheduler is not None:
            self.schedule.load(small["scheduler"], self.rank)
        restore_groups(state.all_groups(optimizer), small["groups"], dict(state.updated_tensors(optimizer)))
        state.restore_scalars(optimizer, small["scalars"], small.get("counts_from", 1))
        state.restore_scaler(optimizer, small["scaler"])

    def restore_position(self, small: Mapping[str, Any]) -> None:
        if self._positions is not None:
            self._positions.write(small["position"])
        if self.checkpoint_lacks:  # its loop has called functions of the script since
            self._restore_optimizer(small)
        self._numbers.restore(small["numbers"])
        write_modes(self.engine.module, small["modes"], training=not self.silent)
        if small["own_schedulers"]:  # which have set the rates, too, when they were made
            self._own = restore_own(state.inner(self.engine.optimizer), small["own_schedulers"], self.rank)
            optimizer = self.engine.optimizer
            restore_groups(state.all_groups(optimizer), small["groups"], dict(state.updated_tensors(optimizer)))
        restore_rng(small["rng"])
        if self._positions is not None:
            self._positions.restart_unplaced()

    # hooks

    def install_edges(self, edges: Edges) -> None:
        from .spans import follow  # only if spans are needed

        follow(self.engine, edges, state.inner(self.engine.optimizer))

    def install_progress(self, progress: ProgressReceiver, spans: bool) -> None:
        """Report forwards, unless they are spans, evaluations, and what DeepSpeed saves."""
        follow_forwards([self.engine.module], progress, evaluations_only=spans)
        if self.engine.zero_optimization_stage() == _STAGE3:
            progress.shares_forward()
        Saving(progress).follow(self.engine, ("save_checkpoint", "save_16bit_model"))

    def install_observer(self, observer: Observer) -> None:
        """Report what stages with data read, or forwards; the norm of the gradients, and a pipeline's loss."""
        engine = self.engine

        def observe(name: str, report: Callable[[Any], None]) -> None:
            def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                outcome = original(*args, **kwargs)
                report(outcome)
                return outcome

            wrap(engine, name, call)

        def read(batch: Any) -> None:
            digest = digest_of_inputs(batch) if engine.module.training else None
            if digest is not None:
                observer.read(digest)

        def updated(outcome: Any) -> None:
            skipped = bool(getattr(engine.optimizer, "overflow", False))
            observer.computed(norm=math.inf if skipped else plain_number(engine.get_global_grad_norm()))

        observe("_take_model_step", updated)
        if hasattr(engine, "train_batch"):
            observe("_next_batch", read)
            observe("train_batch", lambda loss: observer.computed(loss=plain_number(loss)))
        else:
            ObservedForwards([engine.module], observer)

    def loop_begins(self) -> None:
        self._undeclared.begin()

    def install(self, hooks: Hooks) -> None:

        def take_model_step(original: Any, *args: Any, **kwargs: Any) -> Any:
            iteration = self.engine.global_steps + 1
            self.complete_reduction()
            hooks.before_update(iteration)
            faults.reach("update.begin", iteration=iteration)
            outcome = original(*args, **kwargs)
            if not self._trains:
                self._trains, self._own = True, None
            faults.reach("update.end", iteration=iteration)
            hooks.after_update(iteration)
            return outcome

        wrap(self.engine, "_take_model_step", take_model_step)
        updating = state.updating(self.engine.optimizer)
        reach_fault_points([self.engine.module], updating, lambda: self.engine.global_steps + 1)


def lines_to_add(lost: Sequence[Undeclared]) -> str:
    """What to do in a DeepSpeed script about `lost` state; about any, if it is empty."""
    ignored = ", ".join(one.expression for one in lost) or "..."
    return (
        "make modules a part of the model, as submodules whose parameters require no gradients, before "
        "deepspeed.initialize; what the script restores itself, or a restart need not restore, name by "
        f"`import ft_plugins.deepspeed; ft_plugins.deepspeed.ignore({ignored})`"
    )


def _architecture(module: Any) -> Any:
    """The model, equal on all ranks: a digest of the types of a pipeline's layers, or of names and shapes."""
    specs = getattr(module, "_layer_specs", None)
    if specs is not None:
        parts = [getattr(getattr(spec, "typename", spec), "__name__", type(spec).__name__) for spec in specs]
    else:
        parts = [(name, tuple(getattr(one, "ds_shape", one.shape))) for name, one in module.named_parameters()]
    return [type(module).__name__, len(parts), xxhash.xxh3_64_hexdigest(repr(parts).encode())]


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
