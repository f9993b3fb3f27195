"""Host memory for protection: three times the captured share, claimed at start and nothing later; with nodes that
protect each other as much as is printed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ft_plugins.smp.client import Client
from ft_plugins.snapshot.paths import parity_path_of, path_of, segments_of
from ft_plugins.testing.forkserver import ForkServer, JobSpec
from ft_plugins.testing.job_control import wait_for, wait_until_stopped
from ft_plugins.testing.ports import free_port

MIB = 256


def test_three_slots_are_claimed_before_step_0_and_the_kernel_agrees(
    torch_server: ForkServer, jobs: Callable[..., JobSpec], tmp_path: Path
) -> None:
    argv = ("--iterations", "12", "--mib", str(MIB), "--journal", str(tmp_path / "journal"))
    faults = "iteration.forward@iteration=1:stop;iteration.forward@iteration=9,restart=0:kill"
    spec = jobs(entry="ft_plugins.testing.fills:main", argv=argv, flags=("--reft", "--ftp-faults", faults))
    job = torch_server.start(spec)
    segment = path_of(spec.name, spec.node, 0)
    wait_for(spec.run_dir / "events.jsonl", lambda lines: any(e["name"] == "training.started" for e in lines), 60)
    at_start = segment.stat().st_blocks * 512
    (attached,) = job.events("rank.attached")
    with Client(spec.run_dir) as client:
        (shown,) = client.status()["segments"]
    captured = MIB << 20
    assert at_start == attached.fields["budget_bytes"] == shown["bytes"] == segment.stat().st_size
    # digests, small state and page ends are within 0.1% of a share of this size
    assert 3.0 <= at_start / captured < 3.003
    wait_until_stopped(attached.pid, 60)
    os.kill(attached.pid, signal.SIGCONT)
    inode = segment.stat().st_ino
    wait_for(tmp_path / "journal", lambda lines: len(lines) >= 2, 60)
    assert segment.stat().st_ino == inode and segment.stat().st_blocks * 512 == at_start, "a restart reuses the pages"
    assert job.wait(60)["status"] == "succeeded", job.tail()
    assert f"host memory for protection on node node0: {at_start} bytes" in job.log.read_text()


@pytest.mark.parametrize("slots", [5, 3, 2])
def test_nodes_that_protect_each_other_claim_two_slots_more_and_parity_of_two_versions(
    torch_server: ForkServer, jobs: Callable[..., JobSpec], tmp_path: Path, slots: int
) -> None:
    """Over n nodes parity of a version is 1/(n-1) of a share: 5 + 2/(n-1) shares on each node, by the kernel's word; by
    --reft-slots fewer, with which versions come to count and no fence waits for that."""
    nodes, mib = 3, 32
    secret = tmp_path / "secret"
    secret.write_text("what the nodes of this job know")
    secret.chmod(0o600)
    endpoint = f"127.0.0.1:{free_port()}"
    running = []
    for index in range(nodes):
        name = f"n{index}"
        argv = ("--iterations", "8", "--seconds", "0.2", "--mib", str(mib), "--journal", str(tmp_path / name))
        flags = ("--reft", "--ftp-node-name", name, "--ftp-secret-file", str(secret))
        flags += () if slots == 5 else ("--reft-slots", str(slots))
        spec = jobs(
            entry="ft_plugins.testing.fills:main", argv=argv, flags=flags, node=name, nnodes=nodes, endpoint=endpoint,
            rendezvous="ft_plugins", address="127.0.0.1",
        )  # fmt: skip
        running.append(torch_server.start(spec))
    claimed = {}
    for job in running:
        events = job.spec.run_dir / "events.jsonl"
        wait_for(events, lambda lines: any(e["name"] == "version.committed" for e in lines), 120)
        own, parity = (path.stat() for path in files(job.spec))
        assert own.st_blocks * 512 == own.st_size and parity.st_blocks * 512 == parity.st_size
        claimed[job.spec.node] = parity.st_size
        # digests, small state, copies of both and page ends are within 1% of a share of this size
        shares = (own.st_size + parity.st_size) / (mib << 20)
        assert slots + 2 / (nodes - 1) <= shares < slots + 2 / (nodes - 1) + 0.06
    for job in running:
        assert job.wait(120)["status"] == "succeeded", job.tail()
    (told,) = [job.log.read_text() for job in running if "bytes claimed for" in job.log.read_text()]
    lines = [line for line in told.splitlines() if "bytes claimed for two versions of parity and copies" in line]
    for name, nbytes in claimed.items():
        assert any(name in line.split(":")[0] and f" {nbytes} bytes claimed" in line for line in lines), lines


def files(spec: JobSpec) -> tuple[Path, Path]:
    """The segment and the parity of a node with one rank."""
    (segment,) = segments_of(spec.name, spec.node)
    return segment, parity_path_of(spec.name, spec.node)
