"""Groups of parameters with real DeepSpeed engines, which keep learning rates and steps by number."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from ft_plugins.adapters.deepspeed import prepare  # noqa: E402
from harness.gang import gang  # noqa: E402

SECONDS = 280
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


def _members(rank: int, world: int, *made: Any) -> Any:
    host = _host(rank, world, *made)
    host.inventory()
    members = host.small_state()["members"]
    moved = members.replace('"0.bias"', '"?"').replace('"1.weight"', '"0.bias"').replace('"?"', '"1.weight"')
    return json.loads(members), host.regrouped({"members": members}), host.regrouped({"members": moved})


@pytest.mark.parametrize("mode", MODES)
def test_the_parameters_of_each_group_are_compared_by_name_and_place(mode: str) -> None:
    """The same on all ranks, also where each has shards of other parameters."""
    order = [["1.weight", "1.bias"], ["0.bias", "0.weight"]]
    for members, same, moved in gang(_members, 2, *MODES[mode], order, seconds=SECONDS):
        assert members == {"group 0": order[0], "group 1": order[1]} and same == ""
        assert moved.startswith("parameter '1.weight' is in group 0 now, was in group 1 (1 more")
