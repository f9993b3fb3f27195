"""A-EDiT on FSDP2, two replicas of two shards: both ranks of a replica join at the same of its own iterations."""

import time

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ft_plugins.adapters.host_parts import local_part
from ft_plugins.adapters.torch.fsdp import FsdpHost
from ft_plugins.config import Config
from ft_plugins.session import attach
from harness.gang import gang
from tests.unit.adapters import test_fsdp_local_sgd as fsdp

LAST = 20
PACE = (0.0, 0.1)  # seconds of an iteration, by replica
SYNC = {"policy": "a_edit", "seconds": 0.4, "penalty": False, "apply": "forward"}
CASE = fsdp.Case(fsdp.DILOCO, "forward", tied=False)


def trained(rank, world):
    """The rank's shards in each iteration and at the end, the events of its synchronisations."""
    mesh = init_device_mesh("cpu", CASE.mesh, mesh_dim_names=("sync", "shard"))
    model = fsdp.Net(CASE.tied)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = fsdp.optimizer_of(model, CASE.optimizer)
    events = []
    session = attach(
        FsdpHost(model, optimizer, mesh=mesh),
        Config.from_json({"sync": {**SYNC, "shard_ranks": CASE.mesh[1]}}),
        fsdp.context(rank, world),
    )
    session._events.subscribe(events.append)
    used = []
    for step in session.iterations(LAST):
        time.sleep(PACE[rank // CASE.mesh[1]])
        fsdp.backward(model, CASE, rank, step)
        used.append(fsdp.shards_of(model))
        optimizer.step()
        optimizer.zero_grad()
    used.append(fsdp.shards_of(model))
    fields = [event.fields for event in events if event.name == "replicas.synchronised"]
    return {"used": used, "periods": [one["iterations"] for one in fields], "at": [one["iteration"] for one in fields]}


def simulated(rank, world, periods):
    """By replica, its parameters in each iteration and at the end, with the numbers of iterations of `periods`."""
    models = [fsdp.Net(CASE.tied) for _ in range(CASE.mesh[0])]
    optimizers = [fsdp.optimizer_of(model, CASE.optimizer) for model in models]
    names = [name for name, _ in models[0].named_parameters()]
    anchors = {name: torch.nn.Parameter(one.detach().clone()) for name, one in models[0].named_parameters()}
    outer = torch.optim.SGD(anchors.values(), lr=0.8, momentum=0.85, nesterov=True)  # EDiT's defaults
    used = [[] for _ in models]
    done = [0] * len(models)
    for period in periods:
        for place, model in enumerate(models):
            for _ in range(period[place]):
                done[place] += 1
                model.zero_grad()
                for shard in range(CASE.mesh[1]):
                    fsdp.backward(model, CASE, place * CASE.mesh[1] + shard, done[place])
                for one in model.parameters():
                    one.grad /= CASE.mesh[1]
                used[place].append(_arrays(model))
                optimizers[place].step()
        for name in names:
            values = np.stack([_arrays(model)[name] for model in models]).astype(np.float64)
            mean = torch.from_numpy(values.mean(0).astype(np.float32))
            anchors[name].grad = anchors[name].data - mean
        outer.step()
        for model in models:
            for name, one in model.named_parameters():
                one.data.copy_(anchors[name].data)
    for place, model in enumerate(models):
        used[place].append(_arrays(model))
    return used


def _arrays(model):
    return {name: local_part(one).detach().numpy().copy() for name, one in model.named_parameters()}


def test_replicas_of_different_speed_equal_their_simulation_bit_for_bit():
    found = gang(trained, fsdp.WORLD, seconds=fsdp.SECONDS)
    periods = found[0]["periods"]
    assert all(one["periods"] == periods for one in found), "all ranks of the job count the same"
    assert found[0]["at"] == found[1]["at"] and found[2]["at"] == found[3]["at"], "ranks of a replica join together"
    fast, slow = (sum(period[place] for period in periods) for place in range(2))
    assert fast + slow >= 2 * LAST and fast > slow, "each at its own pace"
    (expected,) = gang(simulated, 1, periods, seconds=fsdp.SECONDS)
    for rank, one in enumerate(found):
        place, index = divmod(rank, CASE.mesh[1])
        assert len(one["used"]) == len(expected[place]) == (fast, slow)[place] + 1
        for step, (ours, whole) in enumerate(zip(one["used"], expected[place], strict=True), 1):
            theirs = fsdp.shard(whole, index, CASE.mesh[1])
            for name in ours:
                assert np.array_equal(ours[name], theirs[name]), f"rank {rank}, iteration {step}, {name}"
