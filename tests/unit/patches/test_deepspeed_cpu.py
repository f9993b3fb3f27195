"""The flat buffer that DeepSpeed's ZeRO updates in place, and the Adam that it builds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ft_plugins.patches.deepspeed_cpu import detached, with_torch_adam


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


@pytest.mark.parametrize(
    ("name", "given", "offloaded", "built"),
    [
        ("adamw", None, False, {"torch_adam": True}),
        ("adam", {"lr": 0.1, "betas": [0.9, 0.95]}, False, {"lr": 0.1, "betas": [0.9, 0.95], "torch_adam": True}),
        ("adam", {"torch_adam": False}, False, {"torch_adam": False}),  # asked for
        ("adam", {"torch_adam": True}, False, {"torch_adam": True}),
        ("adam", {"bias_correction": False}, False, {"bias_correction": False}),  # unknown to torch's
        ("adamw", {"lr": 0.1}, True, {"lr": 0.1}),
        ("lamb", {"lr": 0.1}, False, {"lr": 0.1}),
    ],
)
def test_torchs_adam_is_built_where_it_can_be_and_a_line_names_its_arithmetic(
    name: str, given: Any, offloaded: bool, built: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SimpleNamespace(optimizer_params=given)
    engine = SimpleNamespace(
        _config=config, global_rank=0, optimizer_params=lambda: config.optimizer_params, optimizer_name=lambda: name,
        zero_use_cpu_optimizer=lambda: offloaded,
    )  # fmt: skip
    before = None if given is None else dict(given)
    assert with_torch_adam(lambda engine, parameters: engine.optimizer_params(), engine, []) == built
    assert given == before, "the script's own dictionary stays as it is"
    assert ("rounded differently" in capsys.readouterr().out) == (built != given)
