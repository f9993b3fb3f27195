"""The flat buffer that DeepSpeed's ZeRO updates in place."""

from __future__ import annotations

import torch

from ft_plugins.patches.deepspeed_cpu import detached


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
