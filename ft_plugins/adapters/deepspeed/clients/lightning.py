"""PyTorch Lightning over DeepSpeed is refused by name: its loop counts epochs and batches itself, and restores them
only from its own checkpoints.

In: the module of Lightning's Trainer, right after its import. Out: UnsupportedError as soon as it builds an engine that
would be protected."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...rules import DEEPSPEED, refuse
from ...rules.deepspeed import LIGHTNING, OTHERWISE
from ...script.script_hooks import wrap
from . import EngineClient, EngineClients


def follow(module: ModuleType, clients: EngineClients) -> None:
    def fit(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with clients.setting_up(LightningClient()):
            return original(trainer, *args, **kwargs)

    wrap(module.Trainer, "fit", fit)  # type: ignore[attr-defined]


class LightningClient(EngineClient):
    """What cannot be followed."""

    name = LIGHTNING
    places_data = False

    def follow(self, engine: Any, begin: Callable[[], None]) -> None:
        refuse(DEEPSPEED, OTHERWISE, {"built": {"client": self.name}})
