"""The emulated replica."""

import dataclasses
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness.gang import gang
from workloads.emulated_rank import StageSpec
from workloads.local_blocks import PLAIN
from workloads.local_scenarios import DILOCO, EDIT, POST_LOCAL, SMOKE
from workloads.sleeping_replica import (
    RATE,
    EmulatedDevice,
    EmulatedSgd,
    SleepingModel,
    bytes_besides,
    live_tensors,
    preload,
    run_block,
    simultaneous,
)


def test_an_emulated_update_is_one_update_also_in_a_process_that_has_another_optimizer():
    parameter, calls = torch.nn.Parameter(torch.ones(2)), []
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # wraps the step of its class
    optimizer = EmulatedSgd([parameter], EmulatedDevice(StageSpec(0.0, 0.0, 0), 0), 0.0)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    parameter.grad = torch.ones(2) / RATE
    optimizer.step()
    assert calls == ["before", "after"] and parameter.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_equal_layers_share_the_times_and_parameters_of_the_model():
    model = SleepingModel(layers=4, width=100, bucketed=2, compute=1.0)
    layered = model.layered
    assert layered.widths == (100,) * 4 and layered.bucket_bytes == 800 and len(layered) == 4
    assert abs(layered.compute - 1.0) < 1e-9 and layered.update == model.update
    assert layered.parameters == model.parameters and layered.sent(8) == model.sent(8) == 2 * 7 / 8 * 1600


def test_tensors_that_share_memory_are_counted_once():
    others = live_tensors()
    kept = torch.zeros(1 << 20)
    views = [kept[:10], kept.view(1024, 1024)]
    assert bytes_besides(others) == 4 << 20 and not bytes_besides([*others, views[0]])


def _held(rank, world):
    torch.set_num_threads(1)
    scenario = dataclasses.replace(SMOKE[0], compute=0.01)
    blocks = [scenario.block(policy, 0.0, 1) for policy in (PLAIN, POST_LOCAL, DILOCO, EDIT)]
    return [run_block(rank, world, block).held / block.model.parameters for block in blocks]


def test_sessions_hold_the_last_synchronised_parameters_and_the_momentum():
    """4 bytes each; what else they hold is small."""
    preload()
    for held in gang(_held, 2, seconds=300):
        assert held == [pytest.approx(each, abs=0.1) for each in (0, 4, 8, 8)]


def _reduced(rank, world):
    """The gradients of the second iteration, without groups and with two, both of which are used."""
    found = []
    for count in (0, 2):
        torch.manual_seed(1)
        layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
        model = DistributedDataParallel(layers, bucket_cap_mb=1e-6)
        taken = cycle(groups := [dist.new_group() for _ in range(count)])
        if groups:
            model.register_comm_hook(taken, lambda state, bucket: simultaneous(next(state), bucket))
        for _ in range(2):  # buckets are as small as they are to be after the first
            model.zero_grad()
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
        if groups:
            assert next(taken) is groups[(1 + 6) % 2], "one bucket, then one for each parameter"
        found.append([each.grad.flatten().tolist() for each in layers.parameters()])
    return found


def test_reductions_of_several_buckets_at_a_time_give_the_same_gradients():
    first, *others = [each for one in gang(_reduced, 2, seconds=300) for each in one]
    assert others == [first] * 3
