"""apex's own optimizers on a CPU: those of a checkout without a build, which APEX_PATH names, over the arithmetic of
its kernels (`amp_C`) in torch.

`optimizers()` imports them. `deepspeed_example` and `megatron_example` are one rank of the examples, whose optimizer is
the apex's that `--apex` names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

Lists = list[list[torch.Tensor]]
CHECKOUT = os.environ.get("APEX_PATH", "")
KINDS: dict[str, dict[str, Any]] = {  # settings with which each keeps as much as it can
    "FusedAdam": {"weight_decay": 0.1},
    "FusedLAMB": {"weight_decay": 0.1, "max_grad_norm": 0.5},
    "FusedSGD": {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
    "FusedNovoGrad": {"weight_decay": 0.1},
}


def available() -> bool:
    """Whether a checkout is named."""
    return bool(CHECKOUT) and Path(CHECKOUT, "apex", "optimizers").is_dir()


def optimizers() -> ModuleType:
    """`apex.optimizers`."""
    if "amp_C" not in sys.modules:
        kernels = ModuleType("amp_C")
        vars(kernels).update({each.__name__: torch.no_grad()(each) for each in _KERNELS})
        for name in ("multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master"):
            setattr(kernels, name, None)
        sys.modules["amp_C"] = kernels
        sys.path.append(CHECKOUT)
        for name in ("fused_adam", "fused_novograd"):
            vars(import_module(f"apex.optimizers.{name}"))["torch"] = _OnCpu()
    return import_module("apex.optimizers")


class _OnCpu:
    """torch, as modules see it that make tensors on a GPU."""

    cuda = SimpleNamespace(FloatTensor=lambda values, device: torch.tensor(values, dtype=torch.float32))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, values: Any, device: Any = None, **settings: Any) -> torch.Tensor:
        return torch.tensor(values, **settings)


# ---- kernels ----


def multi_tensor_l2norm(
    chunk: int, overflow: torch.Tensor, lists: Lists, per_tensor: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    norms = torch.stack([one.float().norm() for one in lists[0]])
    return norms.norm().view(1), norms


def multi_tensor_adam(
    chunk: int, overflow: torch.Tensor, lists: Lists, rate: float, beta1: float, beta2: float, eps: float, step: int,
    decoupled: int, corrects: int, decay: float,
) -> None:  # fmt: skip
    for gradient, parameter, first, second in zip(*lists, strict=True):
        update = adam(
            gradient, parameter, first, second, beta1, beta2, 1 - beta1, eps, step, decoupled, corrects, decay
        )
        parameter.sub_(rate * update)


def multi_tensor_lamb(
    chunk: int, overflow: torch.Tensor, lists: Lists, rate: float, beta1: float, beta2: float, eps: float, step: int,
    corrects: int, decay: float, averages: int, decoupled: int, norm: torch.Tensor, most: float, always: bool,
) -> None:  # fmt: skip
    clip = norm / most if most > 0 and norm > most else 1.0
    for gradient, parameter, first, second in zip(*lists, strict=True):
        share = 1 - beta1 if averages else 1.0
        clipped = gradient / clip
        update = adam(clipped, parameter, first, second, beta1, beta2, share, eps, step, decoupled, corrects, decay)
        norms = parameter.norm(), update.norm()
        ratio = norms[0] / norms[1] if (always or decay) and all(norms) else 1.0
        parameter.sub_(rate * ratio * update)


def adam(
    gradient: torch.Tensor, parameter: torch.Tensor, first: torch.Tensor, second: torch.Tensor, beta1: float,
    beta2: float, share: float, eps: float, step: int, decoupled: int, corrects: int, decay: float,
) -> torch.Tensor:  # fmt: skip
    """Moves the moments. Returns the update."""
    scaled = gradient if decoupled else gradient + decay * parameter
    first.mul_(beta1).add_(scaled, alpha=share)
    second.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
    sizes = (1 - beta1**step, 1 - beta2**step) if corrects else (1.0, 1.0)
    update = (first / sizes[0]) / ((second / sizes[1]).sqrt() + eps)
    return update + decay * parameter if decoupled else update


def multi_tensor_sgd(
    chunk: int, overflow: torch.Tensor, lists: Lists, decay: float, momentum: float, dampening: float, rate: float,
    nesterov: bool, is_first: bool, decays_late: bool, scale: float,
) -> None:  # fmt: skip
    for gradient, parameter, buffer in zip(*lists, strict=True):
        update = gradient * scale
        if decay and not decays_late:
            update = update + decay * parameter
        if momentum:
            buffer.copy_(update if is_first else momentum * buffer + (1 - dampening) * update)
            update = update + momentum * buffer if nesterov else buffer
        if decay and decays_late:
            update = update + decay * parameter
        parameter.sub_(rate * update)


def multi_tensor_novograd(
    chunk: int, overflow: torch.Tensor, lists: Lists, norms: torch.Tensor, rate: float, beta1: float, beta2: float,
    eps: float, step: int, corrects: int, decay: float, averages: int, outside: int, norm_type: int,
) -> None:  # fmt: skip
    share = 1 - beta1 if averages else 1.0
    sizes = (1 - beta1**step, (1 - beta2**step) ** 0.5) if corrects else (1.0, 1.0)
    for place, (gradient, parameter, first) in enumerate(zip(*lists, strict=True)):
        norms[place] = (beta2 * norms[place] ** 2 + (1 - beta2) * gradient.norm() ** 2).sqrt()
        size = norms[place] / sizes[1] + eps
        first.mul_(beta1).add_(gradient if outside else gradient / size + decay * parameter, alpha=share)
        update = first / sizes[0]
        parameter.sub_(rate * (update / size + decay * parameter if outside else update))


_KERNELS: tuple[Callable[..., Any], ...] = (
    *(multi_tensor_l2norm, multi_tensor_adam, multi_tensor_lamb, multi_tensor_sgd, multi_tensor_novograd),
)


# ---- jobs ----


def _split(argv: Sequence[str]) -> tuple[Any, dict[str, Any], list[str]]:
    """The class after --apex, its settings, and the other arguments."""
    at = list(argv).index("--apex")
    kind = argv[at + 1]
    return getattr(optimizers(), kind), KINDS[kind], [*argv[:at], *argv[at + 2 :]]


def deepspeed_example(argv: Sequence[str]) -> None:
    """One rank of the DeepSpeed example, which gives its engine the optimizer."""
    kind, settings, words = _split(argv)
    example = import_module("deepspeed_gpt")
    initialize = example.deepspeed.initialize

    def given(model_parameters: Any, **arguments: Any) -> Any:
        optimizer = kind(list(model_parameters), lr=1e-3, **settings)
        return initialize(optimizer=optimizer, **arguments)

    example.deepspeed.initialize = given
    example.main(words)


def megatron_example(argv: Sequence[str]) -> None:
    """One rank of the Megatron example, whose optimizer has the place that apex's have in Megatron."""
    kind, settings, words = _split(argv)
    in_megatron = import_module("megatron.core.optimizer")

    def sgd(groups: Any, lr: float, weight_decay: float, momentum: float) -> Any:
        return kind(groups, lr=lr, **settings)

    vars(in_megatron)["SGD"] = sgd
    if kind.__name__ == "FusedAdam":
        vars(in_megatron).update({"Adam": kind, "USING_PYTORCH_OPTIMIZER": False})
    import_module("megatron_gpt").main(words)
