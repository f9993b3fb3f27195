"""Host memory for protection is three times the captured share, claimed at start and nothing later."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from ft_plugins.rig.forkserver import ForkServer, JobSpec
from ft_plugins.rig.journal import wait_for, wait_until_stopped
from ft_plugins.smp.client import Client
from ft_plugins.snapshot.segment import path_of

MIB = 256


def test_three_slots_are_claimed_before_step_0_and_the_kernel_agrees(
    torch_server: ForkServer, jobs: Callable[..., JobSpec], tmp_path: Path
) -> None:
    argv = ("--iterations", "12", "--mib", str(MIB), "--journal", str(tmp_path / "journal"))
    faults = "iteration.forward@iteration=1:stop;iteration.forward@iteration=9,restart=0:kill"
    spec = jobs(entry="ft_plugins.rig.fills:main", argv=argv, flags=("--reft", "--ftp-faults", faults))
    job = torch_server.start(spec)
    segment = path_of(spec.name, spec.node, 0)
    wait_for(spec.run_dir / "events.jsonl", lambda lines: any(e["name"] == "restore.scratch" for e in lines), 60)
    at_start = segment.stat().st_blocks * 512
    (attached,) = job.events("rank.attach")
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
