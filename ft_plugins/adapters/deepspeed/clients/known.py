"""The clients that are followed, by the module that each is recognised by.

A client's file has `follow(module, clients)`: it is called right after the import of `module`, wraps the functions that
build the engine in `clients.setting_up`, and leaves a module alone that is not the client's.

In: nothing. Out: hooks that act when such a module is imported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from . import EngineClients

_FILES = (  # a file of this folder, and the module of a client
    ("megatron_deepspeed", "megatron.training"),
    ("gpt_neox", "megatron.training"),
    ("hf_trainer", "transformers.trainer"),
    ("accelerate_loop", "accelerate.accelerator"),
    ("lightning", "lightning.pytorch.trainer.trainer"),
    ("lightning", "pytorch_lightning.trainer.trainer"),
)
OnImport = Callable[[str, Callable[[ModuleType], None]], None]


def follow_known(clients: EngineClients, on_import: OnImport) -> None:
    """Hook each known client when its module is imported."""
    for file, name in _FILES:
        on_import(name, partial(_follow, file, clients))


def _follow(file: str, clients: EngineClients, module: ModuleType) -> None:
    client: Any = import_module(f"{__package__}.{file}")
    client.follow(module, clients)
