"""The emulated replica."""

from __future__ import annotations

import pytest
import torch

from workloads.emulated_rank import StageSpec
from workloads.sleeping_replica import RATE, EmulatedDevice, EmulatedSgd, SleepingModel


def test_an_emulated_update_is_one_update_also_in_a_process_that_has_another_optimizer() -> None:
    parameter, calls = torch.nn.Parameter(torch.ones(2)), []
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # wraps the step of its class
    optimizer = EmulatedSgd([parameter], EmulatedDevice(StageSpec(0.0, 0.0, 0), 0), 0.0)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    parameter.grad = torch.ones(2) / RATE
    optimizer.step()
    assert calls == ["before", "after"] and parameter.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_equal_layers_share_the_times_and_parameters_of_the_model() -> None:
    model = SleepingModel(layers=4, width=100, bucketed=2, compute=1.0)
    layered = model.layered
    assert layered.widths == (100,) * 4 and layered.bucket_bytes == 800 and len(layered) == 4
    assert abs(layered.compute - 1.0) < 1e-9 and layered.update == model.update
    assert layered.parameters == model.parameters and layered.sent(8) == model.sent(8) == 2 * 7 / 8 * 1600
