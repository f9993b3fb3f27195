"""A script's own loop over an engine that accelerate's `Accelerator.prepare` has built.

Invariant: its loaders, which read one batch ahead, and the schedulers that the engine does not know are captured. Where
its loop begins is the script's matter: it must read one of the engine's counters, as any loop of its own.

    for epoch in range(model.global_steps // updates_per_epoch, epochs):
        for batch in loader: ...            # begins behind the batches of the restored epoch

In: accelerate.accelerator, right after its import. Out: a client for each engine that it builds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ....errors import ResumeError
from ...hf.batches_ahead import AHEAD, BatchesAhead
from ...hf.refusals import refuse_built
from ...schedulers import SchedulerRestore
from ...script.script_hooks import replace
from ...script.undeclared_search import ignore_alone
from . import EngineClient, EngineClients


def follow(module: ModuleType, clients: EngineClients) -> None:
    def preparing(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        with clients.setting_up(AccelerateClient(accelerator)):
            return original(accelerator, *args, **kwargs)

    replace(module.Accelerator, "_prepare_deepspeed", preparing, framework="accelerate", tested="1.15.0")  # type: ignore[attr-defined]
    for importing in (module, sys.modules["accelerate.data_loader"]):
        replace(importing, "skip_first_batches", skipping, framework="accelerate", tested="1.15.0")


def skipping(original: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
    """accelerate.skip_first_batches. A loader whose position was restored begins behind those batches by itself.
    Raises UnsupportedError for another whose position is captured."""
    followed = vars(dataloader).get(AHEAD)
    if followed is None:
        return original(dataloader, num_batches)
    if not followed.is_pending:
        refuse_built({"skipped": num_batches})
    return dataloader


class AccelerateClient(EngineClient):
    """The loop over one engine. It does not count: what it reads of the engine's counters shows that it continues."""

    name = "a script over accelerate"
    places_data = True

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._engine: Any = None
        self._begin: Callable[[], None] = lambda: None
        self._positions: dict[int, BatchesAhead] = {}
        self._restored: list[Mapping[str, Any]] | None = None  # states of schedulers
        self._known = False  # whether the schedulers are

    def follow(self, engine: Any, begin: Callable[[], None]) -> None:
        self._engine, self._begin = engine, begin

    def state(self) -> dict[str, Any]:
        reserve = {} if self._engine is not None else {"reserve": bytes(256 << 10)}  # asked for its size
        return {
            "positions": [one.read() for one in self._loaders()],
            "schedulers": [one.state_dict() for one in self._schedulers()],
            **reserve,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        loaders = self._loaders()
        if len(loaders) != len(state["positions"]):
            raise ResumeError(
                f"{len(loaders)} loaders were given to Accelerator.prepare when the engine was built, but "
                f"{len(state['positions'])} in the captured job: prepare all loaders in one call with the model"
            )
        for one, position in zip(loaders, state["positions"], strict=True):
            one.write(position)
        self._restored = list(state["schedulers"])

    def _loaders(self) -> list[BatchesAhead]:
        for loader in self._accelerator._dataloaders:
            if id(loader) not in self._positions:
                self._positions[id(loader)] = ahead = BatchesAhead(loader)
                ahead.count(self._before)
        return [self._positions[id(loader)] for loader in self._accelerator._dataloaders]

    def _before(self) -> None:
        """Before a batch is read: in training it begins the iteration, unless that has begun."""
        if self._engine is not None and self._engine.module.training:
            self._begin()
            if not self._known:
                self._know_schedulers()

    def _know_schedulers(self) -> None:
        """Training begins: all schedulers are there, also those that were prepared after the engine."""
        self._known, schedulers, restored = True, self._schedulers(), self._restored
        ignore_alone(self._accelerator, *schedulers)
        if restored is None:
            return
        if len(schedulers) != len(restored):
            raise ResumeError(
                f"{len(schedulers)} schedulers were given to Accelerator.prepare, but {len(restored)} in the captured "
                "job: resume with the captured job's script, or start with --ftp-resume fresh"
            )
        for scheduler, state in zip(schedulers, restored, strict=True):
            SchedulerRestore(scheduler).load(state, int(self._accelerator.process_index))

    def _schedulers(self) -> list[Any]:
        """The schedulers that the script steps; the engine's own is captured with it."""
        of_engine = getattr(self._engine, "lr_scheduler", None)
        inside = [getattr(one, "scheduler", one) for one in self._accelerator._schedulers]
        return [one for one in inside if one is not of_engine and hasattr(one, "state_dict")]
