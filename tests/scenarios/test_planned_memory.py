"""What `ft-plugins plan memory` prints is what a job of these sizes claims, by the kernel's figure."""

import pytest

from ft_plugins.config import Config
from ft_plugins.snapshot.segment.paths import parity_path_of, segments_of
from ft_plugins.snapshot.segment.shape import PAGE
from ft_plugins.systems.reft.dry_claim import DryJob, plan_claim
from harness.emulated_nodes import LOOPBACK
from harness.fills_runs import FillsRun
from harness.job_control import wait_for
from harness.jobs import DETECT
from harness.multinode import MultiNodeJob

NODES, RANKS, MIB, TENSORS = 2, 2, 8, 37


@pytest.mark.parametrize("replicated", [False, True], ids=["sharded", "replicated"])
def test_a_job_claims_what_was_planned(jobs, replicated):
    flags = ("--reft", "--reft-checkpoint-dir", str(jobs.folder / "ck"), "--reft-checkpoint-interval", "0")
    run = FillsRun("fills", jobs.folder, 30, NODES * RANKS, MIB, 0.2, replicated, flags)
    nodes = MultiNodeJob(jobs, run, NODES, LOOPBACK[:NODES], DETECT, "60")
    nodes.start_all()
    # 37 tensors of uneven sizes, as `fills` makes them
    elements = sum((MIB << 20) // 4 // TENSORS + 13 * at - 6 * TENSORS for at in range(TENSORS))
    parameters = elements * (1 if replicated else NODES * RANKS)
    dry = DryJob(parameters, 4, 1, 1, NODES * RANKS, RANKS, sharded=not replicated)
    (planned,) = plan_claim(dry, Config.from_flags(list(flags))[0]).kinds
    for job in nodes.nodes.values():
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
    nodes.wait()
