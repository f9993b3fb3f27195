"""One fork server per framework for all scenarios, and a check that they leave nothing behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ft_plugins.errors import FtError
from ft_plugins.smp.serve.client import Client
from ft_plugins.smp.watch import liveness
from harness import deepspeed_runs, fsdp_runs, megatron_runs
from harness.forkserver import ForkServer, JobSpec, RunningJob
from harness.multinode import DETECT, HANG, has_flag

_GONE_SECONDS = 10.0  # for an SMP to end on request or after a signal
SERVERS = frozenset({"torch_server", "fsdp_server", "megatron_server", "deepspeed_server"})
Start = Callable[..., RunningJob]


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


def _smps_of(jobs: set[str]) -> list[tuple[int, int]]:
    """Pids and start times of the SMPs of these jobs, starting ones included."""
    smps = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            words = entry.read_text(errors="replace").split("\0")
            if "--job" in words and words[words.index("--job") + 1] in jobs:
                smps.append((int(entry.parent.name), liveness.started(int(entry.parent.name))))
    return [(pid, began) for pid, began in smps if began]


@pytest.fixture
def jobs(tmp_path: Path, own_environment: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., JobSpec]]:
    """Makes specs of jobs of this test. Afterwards ends their agents and SMPs, and removes their segments."""
    specs: list[JobSpec] = []

    def spec(**fields: object) -> JobSpec:
        name = f"t{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**6}"
        own = {"name": name, "folder": str(tmp_path), **fields, "runtime": str(own_environment)}
        specs.append(JobSpec(**own))  # type: ignore[arg-type]
        flags = specs[-1].flags
        if any(":stop" in word for word in flags) and not has_flag(flags, DETECT):
            # A test inspects a stopped process for as long as it needs.
            specs[-1] = replace(specs[-1], flags=(*flags, DETECT, "600"))
            if not has_flag(flags, HANG):
                specs[-1] = replace(specs[-1], flags=(*specs[-1].flags, HANG, "0"))
        return specs[-1]

    yield spec
    for name in SERVERS.intersection(request.fixturenames):  # first the agents, which would replace ended SMPs
        request.getfixturevalue(name).end_jobs(_GONE_SECONDS)
    for made in specs:
        if liveness.held(made.run_dir / "smp.lock"):
            with suppress(FtError), Client(made.run_dir, timeout=5) as client:
                client.end()
    deadline = time.monotonic() + _GONE_SECONDS
    while any(liveness.held(made.run_dir / "smp.lock") for made in specs) and time.monotonic() < deadline:
        time.sleep(0.01)  # SMPs remove their segments
    while (others := _smps_of({made.name for made in specs})) and time.monotonic() < deadline + _GONE_SECONDS:
        liveness.kill_and_wait(others, _GONE_SECONDS)  # stopped, or starting for an agent that has ended
    left = [path for made in specs for path in Path("/dev/shm").glob(f"ftp-{made.name}@*")]
    for path in left:
        path.unlink(missing_ok=True)
    assert not left, f"segments were left behind: {left}"
