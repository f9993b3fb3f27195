"""Hugging Face's Trainer over a DeepSpeed engine.

Invariant: as in `adapters/hf/trainer_run.py`. The scheduler is the Trainer's own, unless it is the engine's.

In: transformers.trainer, right after its import. Out: a client for each call of `Trainer.train` with DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ....config import launch_context
from ....config.deepspeed_json import BLOCK
from ....model.host import ScalarWriter
from ...hf import follow as follow_trainers
from ...hf.own_checkpoint import LACKING
from ...hf.trainer_run import TrainerRun
from ...scalar_writers import of_trainer
from ...schedulers import SchedulerRestore
from ...script.script_state import optimizer_tensors
from .. import state
from . import EngineClients


def follow(module: ModuleType, clients: EngineClients) -> None:
    """Trainers whose job asks for nothing are left alone: their own resume must stay as it is."""
    follow_trainers(module, _is_protected, lambda: TrainerClient(clients))


def _is_protected(trainer: Any) -> bool:
    """Whether ft-run, or the block in the DeepSpeed configuration, switches a system on."""
    if not trainer.is_deepspeed_enabled:
        return False
    config = launch_context().config
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    settings = getattr(getattr(plugin, "hf_ds_config", None), "config", None)
    return (config is not None and bool(config.systems)) or (isinstance(settings, Mapping) and BLOCK in settings)


class TrainerClient:
    """The Trainer as a client of its engine."""

    name = "Hugging Face's Trainer"
    places_data = True
    checkpoint_lacks = LACKING

    def __init__(self, clients: EngineClients) -> None:
        self._clients = clients
        self._run: TrainerRun | None = None
        self._begin: Callable[[], None] | None = None
        self._engine: Any = None
        self._followed = False
        self._restored: Any = None  # the scheduler's state, until the first iteration

    # ---- of a Trainer ----

    @contextmanager
    def building(self, run: TrainerRun) -> Iterator[None]:
        self._run, self.last, self.placed = run, run.last, run.place
        with self._clients.setting_up(self):
            yield

    def begin(self) -> None:
        if self._begin is not None:
            self._begin()
        self._place()

    def tensors(self) -> list[Any]:
        """What the ranks hold of parameters, and the optimizer's tensors."""
        held = [getattr(one, "ds_tensor", one) for one in self._engine.module.parameters()]
        updating = state.updating(self._engine.optimizer)
        given = (one for each in updating for group in each.param_groups for one in group["params"])
        return [*held, *given, *(one for each in updating for one in optimizer_tensors(each))]

    def end(self) -> None:
        self._clients.trained(self)
        self._place()

    def _place(self) -> None:
        """Callbacks may have changed the scheduler since it was restored."""
        saved, self._restored = self._restored, None
        self._load_scheduler(saved)

    # ---- of an engine ----

    @property
    def write_scalars(self) -> ScalarWriter | None:
        return None if self._run is None else of_trainer(self._run.trainer)

    def follow(self, engine: Any, begin: Callable[[], None]) -> None:
        self._engine, self._begin = engine, begin

    def iteration(self) -> int | None:
        return None if self._run is None else self._run.iteration

    def state(self) -> dict[str, Any]:
        assert self._run is not None
        if not self._followed:  # an engine is protected, and asks for the size
            self._followed = True
            self._run.require_followed()
            self._run.protected()
        scheduler = self._scheduler()
        own = None if scheduler is None else scheduler.state_dict()
        return {"trainer": self._run.state(), "scheduler": own}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert self._run is not None
        self._run.restore(state["trainer"])
        self._restored = state["scheduler"]
        self._load_scheduler(self._restored)

    def _load_scheduler(self, saved: Any) -> None:
        scheduler = self._scheduler()
        if scheduler is not None and saved is not None and self._run is not None:
            SchedulerRestore(scheduler).load(saved, int(self._run.trainer.args.process_index))

    def _scheduler(self) -> Any:
        """The scheduler that the Trainer steps itself; None if the engine does."""
        assert self._run is not None
        engine = self._run.trainer.model_wrapped if self._engine is None else self._engine
        scheduler = self._run.trainer.lr_scheduler
        if getattr(engine, "lr_scheduler", None) is not None or not hasattr(scheduler, "state_dict"):
            return None
        return scheduler
