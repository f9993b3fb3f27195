"""Megatron-DeepSpeed's `pretrain`: its loop continues from its arguments, its samplers from consumed samples.

    args.iteration, consumed_*_samples     set after setup_model_and_optimizer; the data loaders are built later
    args.curriculum_scheduler              the difficulty that it holds; embeddings of a shorter sequence are made
                                           again by the loop's first iteration
    --dataloader-type cyclic               draws when a pass begins: see `data.cycles`
    opt_param_scheduler                    DeepSpeed's own scheduler, captured with the engine
    random number trackers                 Megatron's and DeepSpeed's, captured with the engine

In: its megatron/training.py. Out: a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ....model.host import ScalarWriter
from ....patches import MegatronPackage, package_in
from ...data.cycles import ALL_READ, Cycles
from ...rules.megatron_forks import MEGATRON_DEEPSPEED
from ...scalar_writers import of_megatron
from ...schedulers import DIFFICULTY
from ...script.script_hooks import replace_in_deepspeed
from . import EngineClients
from .megatron_loop import ForkLoop, follow_setup


class MegatronDeepSpeed(ForkLoop):
    """The loop of `megatron.training.train`."""

    name = MegatronPackage.MEGATRON_DEEPSPEED.value
    rules = MEGATRON_DEEPSPEED
    counted = ("iteration", "consumed_train_samples", "consumed_valid_samples", "consumed_train_tokens")

    def __init__(self, module: ModuleType, arguments: Any) -> None:
        super().__init__(module, arguments)
        self._cycles = Cycles()

    @property
    def write_scalars(self) -> ScalarWriter | None:
        return of_megatron(self._module)

    def follow(self, engine: Any, begin: Callable[[], None]) -> None:
        super().follow(engine, begin)
        replace_in_deepspeed(self._module, "cyclic_iter", self._cycles.passes)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "cycles": self._cycles.read(), "curriculum": self._curriculum.get(DIFFICULTY)}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._cycles.write(state.get("cycles", ALL_READ))  # none in a version of an earlier build
        if state["curriculum"] is not None:
            self._curriculum[DIFFICULTY] = state["curriculum"]
            self.arguments.curriculum_seqlen = None  # unlike any: the loop's first iteration then sets it

    @property
    def _curriculum(self) -> dict[str, Any]:
        scheduler = getattr(self.arguments, "curriculum_scheduler", None)
        return {} if scheduler is None else scheduler.state


def follow(module: ModuleType, clients: EngineClients) -> None:
    """Follow the loop, if the module is Megatron-DeepSpeed's."""
    if package_in([Path(str(module.__file__)).parent]) is MegatronPackage.MEGATRON_DEEPSPEED:
        follow_setup(module, clients, lambda *_, **__: MegatronDeepSpeed(module, module.get_args()))
