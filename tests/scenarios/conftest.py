"""A fork server for all scenarios of one kind, and a look at what they leave behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ft_plugins.errors import FtError
from ft_plugins.smp import liveness
from ft_plugins.smp.client import Client
from ft_plugins.testing import deepspeed_runs, megatron_runs
from ft_plugins.testing.forkserver import ForkServer, JobSpec, RunningJob
from ft_plugins.testing.multinode import DETECT, has_flag

_GONE_SECONDS = 10.0  # an SMP that is told to end, or that is not to be reached any more
SERVERS = frozenset({"torch_server", "megatron_server", "deepspeed_server"})
Start = Callable[..., RunningJob]


@pytest.fixture(scope="session")
def torch_server() -> Iterator[ForkServer]:
    """Jobs of torch alone."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ForkServer(["ft_plugins.testing.fills", "ft_plugins.launcher.node_launch"]) as server:
        yield server


@pytest.fixture(scope="session")
def megatron_server() -> Iterator[ForkServer]:
    """Jobs of the GPT example."""
    with ForkServer(megatron_runs.PRELOAD) as server:
        yield server


@pytest.fixture(scope="session")
def deepspeed_server() -> Iterator[ForkServer]:
    """Jobs of the DeepSpeed example."""
    with ForkServer(deepspeed_runs.PRELOAD) as server:
        yield server


def _smps_of(jobs: set[str]) -> list[tuple[int, int]]:
    """Processes, with their start times, that are or become an SMP of one of these jobs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            words = entry.read_text(errors="replace").split("\0")
            if "--job" in words and words[words.index("--job") + 1] in jobs:
                found.append((int(entry.parent.name), liveness.started(int(entry.parent.name))))
    return [(pid, began) for pid, began in found if began]


@pytest.fixture
def jobs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., JobSpec]]:
    """Makes specs of jobs of this test; ends what they left: agents, SMPs, segments."""
    made: list[JobSpec] = []

    def spec(**fields: object) -> JobSpec:
        name = f"t{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**6}"
        made.append(JobSpec(**{"name": name, "folder": str(tmp_path), **fields, "runtime": str(tmp_path)}))  # type: ignore[arg-type]
        flags = made[-1].flags
        if any(":stop" in word for word in flags) and not has_flag(flags, DETECT):
            # a stop is where a test looks around, for as long as it takes
            made[-1] = replace(made[-1], flags=(*flags, DETECT, "600"))
        return made[-1]

    yield spec
    for name in SERVERS.intersection(request.fixturenames):  # else agents would replace the SMPs that are ended here
        request.getfixturevalue(name).end_jobs(_GONE_SECONDS)
    for found in made:
        if liveness.held(found.run_dir / "smp.lock"):
            with suppress(FtError), Client(found.run_dir, timeout=5) as client:
                client.end()
    deadline = time.monotonic() + _GONE_SECONDS
    while any(liveness.held(found.run_dir / "smp.lock") for found in made) and time.monotonic() < deadline:
        time.sleep(0.01)  # they remove their segments themselves
    while (others := _smps_of({found.name for found in made})) and time.monotonic() < deadline + _GONE_SECONDS:
        liveness.kill_and_wait(others, _GONE_SECONDS)  # stopped, or just being started for an agent that is gone
    left = [path for found in made for path in Path("/dev/shm").glob(f"ftp-{found.name}@*")]
    for path in left:
        path.unlink(missing_ok=True)
    assert not left, f"segments were left behind: {left}"
