"""Groups of parameters with real DeepSpeed engines, which keep learning rates and steps by number."""

import json

import pytest
from torch import nn

pytest.importorskip("deepspeed")

from harness.gang import gang  # noqa: E402
from tests.unit.adapters import deepspeed_engines as engines  # noqa: E402

SECONDS = 280
MODES = {"zero0": (0, False), "zero1": (1, False), "zero3": (3, False), "bf16": (0, True), "bf16-zero2": (2, True)}


def _members(rank, world, stage, bf16, order):
    """Of a host whose groups have the parameters of these names."""
    deepspeed = engines.start(rank, world)
    from ft_plugins.adapters.deepspeed.core import DeepSpeedHost

    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in own], "lr": 0.1 * (1 + place)} for place, own in enumerate(order)]
    config = engines.settings(stage, bf16)
    host = DeepSpeedHost(deepspeed.initialize(model=model, model_parameters=groups, config=config)[0])
    host.inventory()
    members = host.small_state()["members"]
    moved = members.replace('"0.bias"', '"?"').replace('"1.weight"', '"0.bias"').replace('"?"', '"1.weight"')
    return json.loads(members), host.regrouped({"members": members}), host.regrouped({"members": moved})


@pytest.mark.parametrize("mode", MODES)
def test_the_parameters_of_each_group_are_compared_by_name_and_place(mode):
    """The same on all ranks, also where each has shards of other parameters."""
    order = [["1.weight", "1.bias"], ["0.bias", "0.weight"]]
    for members, same, moved in gang(_members, 2, *MODES[mode], order, seconds=SECONDS):
        assert members == {"group 0": order[0], "group 1": order[1]} and same == ""
        assert moved.startswith("parameter '1.weight' is in group 0 now, was in group 1 (1 more")
