"""Protect a Hugging Face Trainer over plain torch: one process's model, DistributedDataParallel, or FSDP2.

Invariant: the host is that of a loop of plain torch; only who calls the session's hooks differs. Protection lasts until
the script's orderly end, so what follows training (an evaluation, a last save) is not trained again if it fails.

In: `TrainerRun`, the configuration of ft-run. Out: a session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...config import Config, LaunchContext
from ...session import Session, attach
from ..host_parts import local_part
from ..scalar_writers import of_trainer
from ..script.undeclared import Undeclared
from ..torch.fsdp import FsdpHost
from ..torch.torch_loop import TorchHost
from .own_checkpoint import LACKING
from .trainer_run import TrainerRun


class TorchTrainer:
    """The protection of one Trainer; at most one in a process."""

    def __init__(self, config: Config, context: LaunchContext) -> None:
        self._config, self._context = config, context
        self._session: Session | None = None
        self._run: TrainerRun | None = None
        self._host: TorchHost | None = None
        self._begun = 0  # the iteration that has begun last
        self._completed = 0

    @contextmanager
    def building(self, run: TrainerRun) -> Iterator[None]:
        self._run = run
        run.require_followed(self._config.systems)
        yield
        run.protected()
        self._protect(run)

    def _protect(self, run: TrainerRun) -> None:
        trainer, args = run.trainer, run.trainer.args
        settings = (args.seed, args.data_seed, args.train_batch_size, args.gradient_accumulation_steps)
        model, optimizer = trainer.model_wrapped, inner(trainer.optimizer)
        scheduler = inner(trainer.lr_scheduler, "scheduler")
        sharded = next((one for one in model.parameters() if local_part(one) is not one), None)
        mesh: Any = None if sharded is None else {"mesh": sharded.device_mesh}  # type: ignore[attr-defined]
        host = (TorchHost if sharded is None else FsdpHost)(
            model, optimizer, scheduler, get_state=self._state, set_state=self._restore,
            fingerprint={"trainer": settings}, ignored=[trainer.optimizer, trainer.lr_scheduler, run.loader],
            **(mesh or {}),
        )  # fmt: skip
        host.of_a_library(LACKING, remedy)
        host.placed = run.place
        host.write_scalars = of_trainer(trainer)
        self._host = host
        self._session = attach(host, self._config, self._context)
        self._begun = self._completed = self._session.resume(run.iteration)
        self._session.last = run.last

    def _state(self) -> dict[str, Any]:
        assert self._run is not None
        scaler = getattr(self._run.trainer.accelerator, "scaler", None)
        return {"trainer": self._run.state(), "scaler": None if scaler is None else scaler.state_dict()}

    def _restore(self, saved: dict[str, Any]) -> None:
        assert self._run is not None
        scaler = getattr(self._run.trainer.accelerator, "scaler", None)
        if scaler is not None and saved["scaler"] is not None:
            scaler.load_state_dict(saved["scaler"])
        self._run.restore(saved["trainer"])

    def tensors(self) -> list[torch.Tensor]:
        assert self._host is not None and self._run is not None
        sharded = [one for one in self._run.trainer.model.parameters() if local_part(one) is not one]
        return [*sharded, *self._host.tensors().values()]  # each counts changes of its own

    def begin(self) -> None:
        assert self._session is not None and self._run is not None
        step = self._run.iteration + 1
        if step != self._begun:
            self._complete()
            self._begun = step
            self._session.iteration_begin(step)

    def end(self) -> None:
        assert self._session is not None
        self._complete(ends=True)
        self._session.restore_position()
        self._session.wait_for_capture()  # what follows training, as loading the best model, may change tensors

    def _complete(self, ends: bool = False) -> None:
        assert self._session is not None
        if self._completed != self._begun:
            self._completed = self._begun
            self._session.complete(self._begun, ends)

    def shutdown(self) -> None:
        """The script's orderly end."""
        if self._session is not None:
            self._session.shutdown()


def remedy(lost: Sequence[Undeclared]) -> str:
    """What to do in a script with a Trainer about `lost` state; about any, if it is empty."""
    ignored = ", ".join(one.expression for one in lost) or "..."
    return (
        "make it a part of the model, as a submodule whose parameters require no gradients, before the Trainer is "
        f"built; what a restart need not restore, name by `import ft_plugins; ft_plugins.ignore({ignored})`"
    )


def inner(wrapper: Any, name: str = "optimizer") -> Any:
    """What accelerate's wrappers wrap."""
    while wrapper is not None and type(wrapper).__module__.startswith("accelerate.") and hasattr(wrapper, name):
        wrapper = getattr(wrapper, name)
    return wrapper
