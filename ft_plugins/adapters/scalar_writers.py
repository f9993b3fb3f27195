"""The writers by which frameworks write their scalars, as functions for ours.

Invariant: nothing that a framework captures or compares changes: what it writes with is called, and no log that is
part of its training state. Our writes come by the clock, so numbers that a writer draws are given back.

In: Megatron's module of training, a DeepSpeed engine, a Trainer. Out: a `ScalarWriter`; None on a rank without one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ..model.host import ScalarWriter
from .rng import process_state, set_process_state


def of_megatron(module: ModuleType) -> ScalarWriter | None:
    """Those of Megatron-LM and Megatron-DeepSpeed, which the last rank has. By iteration."""
    return _of(*(getattr(module, f"get_{name}_writer", lambda: None)() for name in ("tensorboard", "wandb")))


def of_neox(arguments: Any) -> ScalarWriter | None:
    """That of gpt-neox for TensorBoard, which the first rank has. By iteration."""
    return _of(arguments.tensorboard_writer, None)


def _of(tensorboard: Any, wandb: Any) -> ScalarWriter | None:
    def write(scalars: Mapping[str, float], step: int) -> None:
        if tensorboard is not None:
            for tag, value in scalars.items():
                tensorboard.add_scalar(tag, value, step)
            tensorboard.flush()  # a rank that is killed may hold minutes of them otherwise
        if wandb is not None:
            wandb.log(dict(scalars), step)

    return None if tensorboard is None and wandb is None else _undrawn(write)


def of_engine(engine: Any) -> ScalarWriter | None:
    """A DeepSpeed engine's monitor, on the first rank. By samples, as DeepSpeed does: W&B drops a smaller step."""
    monitor = getattr(engine, "monitor", None)
    if monitor is None or not monitor.enabled or engine.global_rank:
        return None

    def write(scalars: Mapping[str, float], step: int) -> None:
        monitor.write_events([(tag, value, engine.global_samples) for tag, value in scalars.items()])

    return _undrawn(write)


def of_trainer(trainer: Any) -> ScalarWriter | None:
    """The callbacks of a Hugging Face Trainer that report to a program, on the first rank. Not `Trainer.log`: what it
    logs is part of the Trainer's state. They put `train/` before a tag."""
    kinds = tuple(sys.modules["transformers.integrations.integration_utils"].INTEGRATION_TO_CALLBACK.values())
    reporting = [
        one
        for one in trainer.callback_handler.callbacks
        if isinstance(one, kinds) and type(one).__name__ != "DVCLiveCallback"  # each log is one of its steps
    ]
    if not reporting or not trainer.is_world_process_zero():
        return None

    def write(scalars: Mapping[str, float], step: int) -> None:
        for one in reporting if trainer.is_in_train else ():  # behind it, a callback would begin another file
            one.on_log(trainer.args, trainer.state, trainer.control, logs=dict(scalars), model=trainer.model)

    return _undrawn(write)


def _undrawn(write: ScalarWriter) -> ScalarWriter:
    def writing(scalars: Mapping[str, float], step: int) -> None:
        drawn = process_state()
        try:
            write(scalars, step)
        finally:
            set_process_state(drawn)

    return writing
