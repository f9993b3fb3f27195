"""PyTorch Lightning over DeepSpeed is refused by name: its loop counts epochs and batches itself, and restores them
only from its own checkpoints.

In: the module of Lightning's Trainer, right after its import. Out: UnsupportedError as soon as it builds an engine that
would be protected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ....errors import UnsupportedError
from ...script.script_hooks import wrap
from . import EngineClients


def follow(module: ModuleType, clients: EngineClients) -> None:
    def fit(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with clients.setting_up(LightningClient()):
            return original(trainer, *args, **kwargs)

    wrap(module.Trainer, "fit", fit)  # type: ignore[attr-defined]


class LightningClient:
    """What cannot be followed."""

    name = "PyTorch Lightning"
    places_data = False

    def follow(self, engine: Any, begin: Callable[[], None]) -> None:
        raise UnsupportedError(
            "cannot protect this job: PyTorch Lightning's Trainer counts epochs and batches itself, so a restart would "
            "not continue where the engine is restored. Call deepspeed.initialize in a loop of your own that begins at "
            "engine.global_steps, use Hugging Face's Trainer, or remove the block ft_plugins from the configuration"
        )

    def iteration(self) -> int | None:
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing is captured."""
