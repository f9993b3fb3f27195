"""What `ft-plugins plan memory` prints is what a job of these sizes claims, by the kernel's figure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ft_plugins.config import Config
from ft_plugins.rehearse.ports import free_port
from ft_plugins.snapshot.segment.paths import parity_path_of, segments_of
from ft_plugins.snapshot.segment.shape import PAGE
from ft_plugins.systems.reft.dry_claim import DryJob, plan_claim
from harness.forkserver import ForkServer, JobSpec
from harness.job_control import wait_for
from harness.jobs import write_secret

NODES, RANKS, MIB, TENSORS = 2, 2, 8, 37


@pytest.mark.parametrize("replicated", [False, True], ids=["sharded", "replicated"])
def test_a_job_claims_what_was_planned(
    torch_server: ForkServer, jobs: Callable[..., JobSpec], tmp_path: Path, replicated: bool
) -> None:
    secret = write_secret(tmp_path)
    endpoint = f"127.0.0.1:{free_port()}"
    flags = ("--reft", "--reft-checkpoint-dir", str(tmp_path / "ck"), "--reft-checkpoint-interval", "0")
    running = []
    for index in range(NODES):
        name = f"n{index}"
        argv = ("--iterations", "30", "--seconds", "0.2", "--mib", str(MIB), "--journal", str(tmp_path / name))
        own = ("--ftp-node-name", name, "--ftp-secret-file", str(secret))
        spec = jobs(
            entry="harness.fills:main", argv=(*argv, *(["--replicated"] if replicated else [])),
            flags=(*flags, *own), node=name, nnodes=NODES, nproc=RANKS, endpoint=endpoint, rendezvous="ft_plugins",
            address="127.0.0.1",
        )  # fmt: skip
        running.append(torch_server.start(spec))
    # 37 tensors of uneven sizes, as `fills` makes them
    elements = sum((MIB << 20) // 4 // TENSORS + 13 * at - 6 * TENSORS for at in range(TENSORS))
    parameters = elements * (1 if replicated else NODES * RANKS)
    dry = DryJob(parameters, 4, 1, 1, NODES * RANKS, RANKS, sharded=not replicated)
    (planned,) = plan_claim(dry, Config.from_flags(list(flags))[0]).kinds
    for job in running:
        events = job.spec.run_dir / "events.jsonl"
        wait_for(events, lambda lines: any(e["name"] == "version.committed" for e in lines), 120)
        segments = segments_of(job.spec.name, job.spec.node)
        store = parity_path_of(job.spec.name, job.spec.node).stat().st_blocks * 512
        at_start = [event.fields["resident_bytes"] for event in job.events("rank.attached")]
        assert len(segments) == len(at_start) == RANKS
        # a tensor begins at a multiple of 64 bytes; the plan knows one tensor instead of 37: less than a page
        differs = PAGE * RANKS * (planned.slots + 4)
        assert 0 <= sum(at_start) + store - planned.total <= differs, (at_start, store, planned)
        most = sum(path.stat().st_size for path in segments) + store
        assert abs(most - planned.total - planned.more) <= differs + PAGE * RANKS * planned.most_slots
    for job in running:
        assert job.wait(120)["status"] == "succeeded", job.tail()
