"""What the loops of Megatron-DeepSpeed and gpt-neox have in common.

Both count in their arguments (`iteration`), which their `setup_model_and_optimizer` sets from a checkpoint's client
state, or to 0; the loop and its data loaders begin there. Their `train_step` is one iteration.

Invariant: such a loop continues from the arguments named here, and the difficulty of a curriculum, alone. What it
logs as a mean over several iterations begins again.

In: the module megatron.training. Out: a client's state in its arguments, captured and set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from ...rules import Rule, refuse
from ...rules.megatron_forks import OTHERWISE
from ...script.script_hooks import replace_in_deepspeed, wrap
from . import EngineClients


class ForkLoop:
    """The part of a client that is its arguments. `counted`: the names of those that training changes; `rules`: what of
    them is refused."""

    name: str
    rules: Sequence[Rule] = ()
    places_data = True
    counted: Sequence[str] = ("iteration",)

    def __init__(self, module: ModuleType, arguments: Any) -> None:
        self._module, self.arguments = module, arguments
        self.restored, self.last = False, getattr(arguments, "train_iters", None)

    def follow(self, engine: Any, begin: Callable[[], None]) -> None:
        """Begin each iteration right before `train_step`. Raises UnsupportedError."""
        refuse(self.rules, OTHERWISE, self.arguments)

        def train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            begin()
            return original(*args, **kwargs)

        wrap(self._module, "train_step", train_step)

    def iteration(self) -> int:
        return int(self.arguments.iteration)

    def state(self) -> dict[str, Any]:
        return {name: getattr(self.arguments, name, 0) for name in self.counted}  # not set until the engine is built

    def restore(self, state: Mapping[str, Any]) -> None:
        self.restored = True
        for name in self.counted:
            setattr(self.arguments, name, state[name])


def follow_setup(module: ModuleType, clients: EngineClients, client_of: Callable[..., Any]) -> None:
    """From now on `setup_model_and_optimizer` builds the engine of the client `client_of(*its arguments)`."""

    def setup(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with clients.setting_up(client_of(*args, **kwargs)):
            return original(*args, **kwargs)

    replace_in_deepspeed(module, "setup_model_and_optimizer", setup)
