"""Megatron's optimizers save, load and resume exactly over torch's own Adam.

With Transformer Engine or apex the inner optimizer is FusedAdam, which counts steps per group. Without them it is
torch's Adam, which counts them in a 'step' tensor per parameter; each patch is a place that overlooks this difference.

megatron/core/optimizer/distrib_optimizer.py: saving and loading the distributed optimizer.
megatron/core/optimizer/optimizer.py: `init_state_fn` fills the moments before a checkpoint is loaded. torch's Adam
takes any non-empty state for a complete one, and fails at its first step if 'step' is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .declared import Patch, around
from .versions import MEGATRON

BASE = "megatron.core.optimizer.optimizer"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"


def is_torch_adam(optimizer: Any) -> bool:
    """Whether the inner optimizer of a Megatron optimizer is torch's own."""
    return isinstance(getattr(optimizer, "optimizer", None), torch.optim.Adam | torch.optim.AdamW)


def with_whole_state(inner: torch.optim.Optimizer) -> None:
    """Give every parameter of torch's Adam the state of its first step, unless it has it."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in state:
                    state[moment] = torch.zeros_like(parameter.detach(), memory_format=torch.preserve_format)


def with_own_steps(inner: torch.optim.Optimizer) -> None:
    """Give every parameter a step tensor of its own: a shared one is incremented once per parameter."""
    for state in inner.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].detach().clone()


def before_first_step(original: Callable[..., Any], self: Any) -> Any:
    """state_dict, which takes the step from the state and asserts that there is exactly one."""
    if is_torch_adam(self):
        with_whole_state(self.optimizer)
    return original(self)


def unsharing_step(original: Callable[..., Any], self: Any, state_dict: Any) -> Any:
    """load_state_dict, which gives all parameters the same step tensor."""
    loaded = original(self, state_dict)
    if is_torch_adam(self):
        with_own_steps(self.optimizer)
    return loaded


@torch.no_grad()
def leaving_step(original: Callable[..., Any], self: Any, model_param: Any, tensors: Mapping[str, Any]) -> Any:
    """_set_main_param_and_optimizer_states, which copies 'step' from a source that may lack it or be stale, and writes
    into fp32 shards that are views of parameters with a gradient."""
    if not is_torch_adam(self):
        return original(self, model_param, tensors)
    group_index, group_order = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group_index]["params"][group_order]]
    return original(self, model_param, {**tensors, **{k: state[k] for k in ("step",) if k in state}})


def with_step(
    original: Callable[..., None], self: Any, optimizer: Any, config: Any, init_state_fn: Any = lambda x: None
) -> None:
    """MegatronOptimizer.__init__ whose init_state_fn also sets 'step' in torch's Adam."""
    original(self, optimizer, config, init_state_fn)
    if is_torch_adam(self) and init_state_fn is not None:

        def init_whole_state(inner: Any, config: Any = None) -> None:
            init_state_fn(inner, config)
            with_whole_state(inner)

        self.init_state_fn = init_whole_state


PATCHES = (
    Patch(
        *("megatron-core", BASE, "MegatronOptimizer.__init__", MEGATRON),
        reason="init_state_fn leaves torch's Adam without 'step' when a checkpoint without one is loaded",
        replace=around(with_step),
        parameters=("self", "optimizer", "config", "init_state_fn"),
        contains=("self.init_state_fn = init_state_fn",),
    ),
    Patch(
        *("megatron-core", DISTRIBUTED, "DistributedOptimizer.state_dict", MEGATRON),
        reason="'assert len(steps) == 1' fails before the first step, when torch_dist is loaded",
        replace=around(before_first_step),
        parameters=("self",),
        contains=("assert len(steps) == 1",),
    ),
    Patch(
        *("megatron-core", DISTRIBUTED, "DistributedOptimizer.load_state_dict", MEGATRON),
        reason="one shared step tensor is incremented once per parameter after a resume",
        replace=around(unsharing_step),
        parameters=("self", "state_dict"),
        contains=('s["step"] = step',),
    ),
    Patch(
        *("megatron-core", DISTRIBUTED, "DistributedOptimizer._set_main_param_and_optimizer_states", MEGATRON),
        reason="copies into views of parameters that require a gradient, and a 'step' that is missing or stale",
        replace=around(leaving_step),
        parameters=("self", "model_param", "tensors"),
        contains=("dst_tensors[key].copy_(tensors[key])",),
    ),
)
