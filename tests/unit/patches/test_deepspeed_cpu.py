"""The flat buffer that DeepSpeed's ZeRO updates in place, and the optimizer whose kernel is not compiled."""

from __future__ import annotations

import pytest
import torch

from ft_plugins.errors import UnsupportedError
from ft_plugins.patches.deepspeed_cpu import TorchAdam, detached


def test_a_flat_buffer_is_the_same_memory_without_a_graph() -> None:
    made = []

    def flatten(tensors: list[torch.Tensor], alignment: int) -> torch.Tensor:
        made.append(torch.cat(tensors))
        return made[0]

    flat = detached(flatten, [torch.nn.Parameter(torch.ones(3))] * 2, alignment=2)
    assert made[0].requires_grad and not flat.requires_grad
    assert flat.data_ptr() == made[0].data_ptr() and torch.equal(flat, torch.ones(6))
    first, second = flat.split(3)
    first.copy_(torch.zeros(3))  # 'Output 0 of SplitBackward0 is a view ...' without the patch
    assert flat.tolist() == [0, 0, 0, 1, 1, 1]


def test_deepspeeds_fused_adam_is_torchs_own() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    decoupled = TorchAdam([weight], lr=0.5, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)
    assert type(decoupled) is torch.optim.AdamW
    group = decoupled.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.8, 0.9), 1e-3, 0.1)
    assert type(TorchAdam([weight], adam_w_mode=False)) is torch.optim.Adam
    with pytest.raises(UnsupportedError, match="drop them"):
        TorchAdam([weight], bias_correction=False)
