"""Hugging Face's Trainer as a host. Call `install()`; it acts when the script imports transformers' Trainer.

With DeepSpeed a Trainer is a client of its engine: `adapters/deepspeed/clients/hf_trainer.py`.

In: the process. Out: Trainers over plain torch that are protected as ft-run is configured."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ...config import launch_context
from ...events import say
from ..script.script_hooks import on_import, wrap
from ..script.undeclared_search import has_hosts
from .own_checkpoint import own_checkpoint
from .refusals import refuse_built
from .trainer_run import TrainerProtection, TrainerRun

TRAINER = "transformers.trainer"
_FIRST = "first-training"  # a folder in the Trainer's output_dir
_UNPROTECTED = (
    "this loop over accelerate is not protected, and begins at its start after a failure: give ft_plugins.TorchHost "
    "its model, optimizer, scheduler and a DataLoader that accelerate has not prepared (docs/hugging_face.md)"
)


def install() -> Callable[[], None]:
    """Protect Trainers that train without DeepSpeed. Returns a function to call at the script's orderly end."""
    protections: list[Any] = []

    def protection() -> TrainerProtection:
        from .torch_trainer import TorchTrainer  # imports torch

        if not protections:
            context = launch_context()  # of this rank, which may have been forked since
            assert context.config is not None
            protections.append(TorchTrainer(context.config, context))
        return protections[0]  # type: ignore[no-any-return]

    def finish() -> None:
        for one in protections:
            one.shutdown()

    on_import("accelerate.accelerator", _report_unprotected)
    on_import(TRAINER, lambda module: follow(module, lambda trainer: not trainer.is_deepspeed_enabled, protection))
    return finish


def _report_unprotected(module: ModuleType) -> None:
    """Say at its first backward that a loop over accelerate has no host."""
    first = True

    def backward(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if first and accelerator.is_main_process and not has_hosts():
            say(_UNPROTECTED, alarm=True)
        first = False
        return original(accelerator, *args, **kwargs)

    wrap(module.Accelerator, "backward", backward)  # type: ignore[attr-defined]


def follow(module: ModuleType, applies: Callable[[Any], bool], protection: Callable[[], TrainerProtection]) -> None:
    """Hook `Trainer.train` of transformers.trainer, for Trainers to which this kind of protection applies."""
    followed: list[Any] = []
    version = str(getattr(sys.modules["transformers"], "__version__", "unknown"))

    def train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not applies(trainer):
            return original(trainer, *args, **kwargs)
        if followed:
            refuse_built({"trained": True}, more=f"; what the first has trained {_saved(followed[0])}")
        followed.append(trainer)
        given = inspect.signature(original).bind(trainer, *args, **kwargs)
        own = own_checkpoint(
            given.arguments.get("resume_from_checkpoint"), lambda: module.get_last_checkpoint(trainer.args.output_dir)
        )
        TrainerRun(trainer, module, protection(), version, given.arguments.get("trial"), own.incomplete)
        given.arguments["resume_from_checkpoint"] = own.load
        return original(*given.args, **given.kwargs)

    wrap(module.Trainer, "train", train)  # type: ignore[attr-defined]


def _saved(trainer: Any) -> str:
    """Save what a Trainer has trained, which the error that follows would lose. Returns what became of
    it. A collective."""
    folder = str(Path(trainer.args.output_dir) / _FIRST)
    try:
        trainer.save_model(folder)
    except Exception as error:  # of the file system, or of the script's own save_model
        return f"could not be saved in {folder} ({error})"
    return f"is saved in {folder}"
