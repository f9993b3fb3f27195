"""Megatron's optimizers start torch's Adam with the 'step' that it expects beside the moments.

Upstream file: megatron/core/optimizer/optimizer.py. `init_state_fn` fills the moments before a checkpoint is loaded;
torch's Adam takes a state that is not empty for a complete one and fails at its first step without 'step'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .declared import Patch
from .megatron_distrib_optimizer import is_torch_adam, with_whole_state
from .versions import MEGATRON

MODULE = "megatron.core.optimizer.optimizer"


def with_step(original: Callable[..., None]) -> Callable[..., None]:
    """MegatronOptimizer.__init__ with an init_state_fn that also sets 'step' where the inner optimizer is torch's."""

    @functools.wraps(original)
    def begin(self: Any, optimizer: Any, config: Any, init_state_fn: Any = lambda x: None) -> None:
        original(self, optimizer, config, init_state_fn)
        if is_torch_adam(self) and init_state_fn is not None:

            def init_whole_state(inner: Any, config: Any = None) -> None:
                init_state_fn(inner, config)
                with_whole_state(inner)

            self.init_state_fn = init_whole_state

    return begin


def patches() -> tuple[Patch, ...]:
    """The patch of the base class of all Megatron optimizers."""
    return (
        Patch(
            *("megatron-core", MODULE, "MegatronOptimizer.__init__", MEGATRON),
            reason="init_state_fn leaves torch's Adam without 'step' when a checkpoint without one is loaded",
            replace=with_step,
            parameters=("self", "optimizer", "config", "init_state_fn"),
            contains=("self.init_state_fn = init_state_fn",),
        ),
    )
