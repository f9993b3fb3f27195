"""The arithmetic of fused optimizers' GPU kernels in torch, for jobs on a CPU.

`for_deepspeed` puts them where DeepSpeed loads its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

Lists = list[list[torch.Tensor]]


@torch.no_grad()
def lamb(
    parameter: torch.Tensor, copied: torch.Tensor, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor,
    rate: float, beta1: float, beta2: float, most: float, least: float, eps: float, scale: float, step: int,
    eps_mode: int, corrects: int, decay: float,
) -> torch.Tensor:  # fmt: skip
    """One update of FusedLamb. Returns the coefficient of the trust region."""
    scaled = gradient.to(parameter.dtype) / scale
    first.mul_(beta1).add_(scaled, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
    rate = rate * (1 - beta2**step) ** 0.5 / (1 - beta1**step) if corrects else rate
    size = (second + eps).sqrt() if eps_mode == 0 else second.sqrt() + eps
    update = first / size + decay * parameter
    norms = parameter.norm(), update.norm()
    coefficient = (norms[0] / norms[1]).clamp(least, most) if all(norms) else torch.ones(())
    parameter.sub_(update * (rate * coefficient))
    if copied.numel():
        copied.copy_(parameter)
    return coefficient


@torch.no_grad()
def multi_tensor_lion(
    chunk: int, overflow: torch.Tensor, lists: Lists, rate: float, beta1: float, beta2: float, step: int, decay: float
) -> None:
    """One update of FusedLion."""
    for gradient, parameter, momentum in zip(*lists, strict=True):
        update = momentum.lerp(gradient, 1 - beta1).sign() + decay * parameter
        parameter.sub_(update, alpha=rate)
        momentum.lerp_(gradient, 1 - beta2)


def _rows(indices: torch.Tensor, of: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """Indices of tokens, for gather and scatter."""
    chosen = indices.long() if batch_first else indices.long().t()
    return chosen[:, :, None].expand(-1, -1, of.shape[-1])


class TokenKernels:
    """Those of random-LTD."""

    @staticmethod
    def token_sort_(indices: torch.Tensor, length: int) -> torch.Tensor:
        return indices.sort(-1).values

    @staticmethod
    def token_gather(of: torch.Tensor, indices: torch.Tensor, batch_first: bool) -> torch.Tensor:
        return of.gather(1 if batch_first else 0, _rows(indices, of, batch_first))

    @staticmethod
    def token_scatter_(of: torch.Tensor, part: torch.Tensor, indices: torch.Tensor, batch_first: bool) -> torch.Tensor:
        return of.scatter_(1 if batch_first else 0, _rows(indices, of, batch_first), part)


def for_deepspeed() -> None:
    """DeepSpeed's FusedLamb and FusedLion update on a CPU, and random-LTD routes."""
    from deepspeed.ops.lamb import fused_lamb
    from deepspeed.ops.lion import fused_lion
    from deepspeed.ops.random_ltd import dropping_utils

    dropping_utils.random_ltd_module = TokenKernels
    loaded = SimpleNamespace(load=lambda: SimpleNamespace(lamb=lamb, multi_tensor_lion=multi_tensor_lion))
    fused_lamb.FusedLambBuilder = fused_lion.FusedLionBuilder = lambda: loaded


def compile_own(optimizer: str) -> None:
    """Have DeepSpeed compile, once for all jobs, the kernel of its own optimizer for state in host memory: minutes."""
    builder = f"CPU{optimizer.removesuffix('W')}Builder"
    code = f"from deepspeed.ops.op_builder.cpu import {builder}; {builder}().load()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1800, stdout=subprocess.DEVNULL)


def deepspeed_example(argv: Sequence[str]) -> Any:
    """One rank of the DeepSpeed example, with these kernels."""
    main = import_module("deepspeed_gpt").main
    for_deepspeed()
    return main(argv)


if __name__ == "__main__":
    deepspeed_example(sys.argv[1:])
