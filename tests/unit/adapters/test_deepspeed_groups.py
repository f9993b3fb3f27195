"""Groups of parameters with real DeepSpeed engines, which keep learning rates and steps by number."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from ft_plugins.adapters.deepspeed import prepare  # noqa: E402

Ranks = Callable[..., list[Any]]
MODES = {"zero0": (0, False), "zero1": (1, False), "zero3": (3, False), "bf16": (0, True), "bf16-zero2": (2, True)}


def _host(rank: int, world: int, stage: int, bf16: bool, order: list[list[str]]) -> Any:
    """A host whose groups have the parameters of these names."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    prepare()
    import deepspeed

    from ft_plugins.adapters.deepspeed.core import DeepSpeedHost

    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in own], "lr": 0.1 * (1 + place)} for place, own in enumerate(order)]
    config = {
        "train_micro_batch_size_per_gpu": 3, "bf16": {"enabled": bf16}, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}, "steps_per_print": 1000,
    }  # fmt: skip
    return DeepSpeedHost(deepspeed.initialize(model=model, model_parameters=groups, config=config)[0])


def _small(rank: int, world: int, *made: Any) -> Any:
    host = _host(rank, world, *made)
    host.inventory()
    return host.small_state()["members"]


def _said(rank: int, world: int, captured: list[str], *made: Any) -> str:
    said: str = _host(rank, world, *made).regrouped({"members": captured[rank]})
    return said


FIRST, SECOND = ["0.weight", "0.bias"], ["1.weight", "1.bias"]


@pytest.mark.parametrize("mode", MODES)
def test_groups_that_changed_are_named(ranks: Ranks, mode: str) -> None:
    captured = ranks(_small, 2, *MODES[mode], [FIRST, SECOND])
    assert captured[0] == captured[1], "also where ranks have shards of other parameters"
    assert ranks(_said, 2, captured, *MODES[mode], [FIRST, SECOND]) == ["", ""]
    for said in ranks(_said, 2, captured, *MODES[mode], [SECOND, FIRST]):
        assert said.startswith("parameter '1.weight' is in group 0 now, was in group 1 (3 more")
    for said in ranks(_said, 2, captured, *MODES[mode], [FIRST, SECOND[::-1]]):
        assert said.startswith("parameter '1.bias' is number 0 of group 1 now, where '1.weight' was")
