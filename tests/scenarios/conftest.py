"""One fork server per framework for all scenarios, and a check that they leave nothing behind."""

import os

import pytest

from harness import deepspeed_runs, fsdp_runs, megatron_runs
from harness.forkserver import ForkServer
from harness.jobs import Goldens, Jobs

SERVERS = frozenset({"torch_server", "fsdp_server", "megatron_server", "deepspeed_server"})


@pytest.fixture(scope="session")
def torch_server():
    """Jobs of plain torch."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ForkServer(["harness.hangs", "ft_plugins.launcher.node_launch"]) as server:
        yield server


@pytest.fixture(scope="session")
def fsdp_server():
    """Jobs of the FSDP2 example."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ForkServer(fsdp_runs.PRELOAD) as server:
        yield server


@pytest.fixture(scope="session")
def megatron_server():
    """Jobs of the Megatron example."""
    with ForkServer(megatron_runs.PRELOAD) as server:
        yield server


@pytest.fixture(scope="session")
def deepspeed_server():
    """Jobs of the DeepSpeed example."""
    with ForkServer(deepspeed_runs.PRELOAD) as server:
        yield server


@pytest.fixture
def jobs(tmp_path, own_environment, request):
    """Makes and starts the jobs of this test, and ends them."""
    made = Jobs(tmp_path, own_environment, lambda framework: request.getfixturevalue(f"{framework}_server"))
    yield made
    made.end(request.getfixturevalue(name) for name in SERVERS.intersection(request.fixturenames))


@pytest.fixture(scope="session")
def made():
    """The golden runs so far."""
    return {}


@pytest.fixture
def golden(jobs, made, tmp_path_factory):
    """Makes unfailed runs, each once for all tests."""
    return Goldens(jobs, made, tmp_path_factory.mktemp)
