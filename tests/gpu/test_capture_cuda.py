"""Capture from device memory: a side stream into pinned shared memory, complete and of the version point."""

import os

import pytest
import torch

from ft_plugins.config import Config, LaunchContext, run_directory
from ft_plugins.session import Session
from ft_plugins.smp.serve.client import Client, ensure
from harness.plain_host import PlainHost

pytestmark = pytest.mark.gpu


@pytest.fixture
def context(tmp_path):
    name = f"gpu{os.getpid()}"
    run_dir = run_directory(name, "node0", {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)})
    ensure(run_dir, name, "node0", 60)
    with Client(run_dir) as client:
        client.watch(os.getpid(), 600)
        config = Config.from_flags(["--reft"])[0]
        yield LaunchContext(config, run_dir, client.fence(), None, 0, 0, 1, 1, 0, 0)
        client.end()


def state(value):
    """Device tensors of several dtypes, one of them on the host, beyond one bucket."""
    return {
        "main": torch.full((9 << 20,), value, device="cuda"),
        "half": torch.full((3, 1001), value, device="cuda", dtype=torch.bfloat16),
        "transposed": torch.full((64, 32), value, device="cuda").t(),
        "host": torch.full((5,), value),
    }


def test_a_version_is_what_the_device_held_at_the_version_point_and_is_restored_to_it(context):
    assert context.config is not None
    tensors = state(0.0)
    session = Session(PlainHost(tensors), context.config, context)
    assert session.resume() == 0
    for step in range(1, 6):
        session.iteration_begin(step)
        matrix = torch.rand(2048, 2048, device="cuda")
        for _ in range(20):  # the device is busy when the next capture starts
            matrix = matrix @ matrix / 2048
        session.before_update(step)
        for tensor in tensors.values():
            tensor.fill_(step)
        session.iteration_end(step)
    session.shutdown()
    fresh = state(-1.0)
    again = Session(PlainHost(fresh), context.config, context)
    assert again.resume() == 5
    again.shutdown()
    for name, tensor in fresh.items():
        assert bool((tensor == 5).all()), name
