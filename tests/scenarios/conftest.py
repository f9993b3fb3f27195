"""One fork server per framework for all scenarios, and a check that they leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import deepspeed_runs, fsdp_runs, megatron_runs
from harness.forkserver import ForkServer
from harness.jobs import Goldens, Jobs

SERVERS = frozenset({"torch_server", "fsdp_server", "megatron_server", "deepspeed_server"})


@pytest.fixture(scope="session")
def torch_server() -> Iterator[ForkServer]:
    """Jobs of plain torch."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ForkServer(["harness.hangs", "ft_plugins.launcher.node_launch"]) as server:
        yield server


@pytest.fixture(scope="session")
def fsdp_server() -> Iterator[ForkServer]:
    """Jobs of the FSDP2 example."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ForkServer(fsdp_runs.PRELOAD) as server:
        yield server


@pytest.fixture(scope="session")
def megatron_server() -> Iterator[ForkServer]:
    """Jobs of the Megatron example."""
    with ForkServer(megatron_runs.PRELOAD) as server:
        yield server


@pytest.fixture(scope="session")
def deepspeed_server() -> Iterator[ForkServer]:
    """Jobs of the DeepSpeed example."""
    with ForkServer(deepspeed_runs.PRELOAD) as server:
        yield server


@pytest.fixture
def jobs(tmp_path: Path, own_environment: Path, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Makes and starts the jobs of this test, and ends them."""
    made = Jobs(tmp_path, own_environment, lambda framework: request.getfixturevalue(f"{framework}_server"))
    yield made
    made.end(request.getfixturevalue(name) for name in SERVERS.intersection(request.fixturenames))


@pytest.fixture(scope="session")
def made() -> dict[str, Any]:
    """The golden runs so far."""
    return {}


@pytest.fixture
def golden(jobs: Jobs, made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Goldens:
    """Makes unfailed runs, each once for all tests."""
    return Goldens(jobs, made, tmp_path_factory.mktemp)
