"""Host memory for protection: three times the captured share, claimed at start and nothing later; with nodes that
protect each other as much as is printed, and as much more as capture needs."""

import os
import signal

import pytest

from ft_plugins.smp.serve.client import Client
from ft_plugins.snapshot.segment.paths import parity_path_of, path_of, segments_of
from harness.emulated_nodes import LOOPBACK
from harness.fills_runs import FillsRun
from harness.job_control import wait_for, wait_until_stopped
from harness.jobs import DETECT
from harness.multinode import MultiNodeJob

MIB = 256


def test_three_slots_are_claimed_before_step_0_and_the_kernel_agrees(jobs):
    run = FillsRun("fills", jobs.folder, 12, mib=MIB)
    job = jobs.start(run.armed("iteration.forward@iteration=1:stop;iteration.forward@iteration=9,restart=0:kill"))
    spec = job.spec
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
    wait_for(run.journal, lambda lines: len(lines) >= 2, 60)
    assert segment.stat().st_ino == inode and segment.stat().st_blocks * 512 == at_start, "a restart reuses the pages"
    assert job.wait(60)["status"] == "succeeded", job.tail()
    assert f"host memory for protection on node node0: {at_start} bytes" in job.log.read_text()


NODES, SHARE_MIB = 3, 32
PARITY = 2 / (NODES - 1)  # shares: two versions of it, by RAIM5


def start(jobs, iterations, *flags):
    """Start a rank on each of the nodes, which protect each other."""
    run = FillsRun("fills", jobs.folder, iterations, NODES, SHARE_MIB, 0.2)
    job = MultiNodeJob(jobs, run, NODES, LOOPBACK[:NODES], DETECT, "60", *flags)
    job.start_all()
    return [*job.nodes.values()]


def wait_for_commits(job, count):
    """Wait until so many versions have come to count."""
    events = job.spec.run_dir / "events.jsonl"
    wait_for(events, lambda lines: sum(e["name"] == "version.committed" for e in lines) >= count, 120)


@pytest.mark.parametrize("slots", [5, 3, 2])
def test_as_many_slots_as_are_asked_for_are_claimed_at_start_and_parity_of_two_versions(jobs, slots):
    """Over n nodes parity of a version is 1/(n-1) of a share, by the kernel's word. With any number of slots versions
    come to count, and no fence waits for that."""
    running = start(jobs, 8, "--reft-slots", str(slots))
    claimed = {}
    for job in running:
        wait_for_commits(job, 1)
        own, parity = (path.stat() for path in files(job.spec))
        assert own.st_blocks * 512 == own.st_size and parity.st_blocks * 512 == parity.st_size
        claimed[job.spec.node] = parity.st_size
        # digests, small state, copies of both and page ends are within 1% of a share of this size
        shares = (own.st_size + parity.st_size) / (SHARE_MIB << 20)
        assert slots + PARITY <= shares < slots + PARITY + 0.06
    for job in running:
        assert job.wait(120)["status"] == "succeeded", job.tail()
        assert job.events("slot.claimed") == []
    (told,) = [job.log.read_text() for job in running if "bytes claimed for" in job.log.read_text()]
    lines = [line for line in told.splitlines() if "bytes claimed for two versions of parity and copies" in line]
    for name, nbytes in claimed.items():
        assert any(name in line.split(":")[0] and f" {nbytes} bytes claimed" in line for line in lines), lines


def test_without_a_number_two_slots_are_claimed_at_start_and_more_once_sending_takes_several_iterations(jobs):
    """Sending a version takes some seven iterations here."""
    faults = "iteration.forward@iteration=1:stop"
    running = start(jobs, 60, "--reft-exchange-mbps", "200", "--ftp-faults", faults)
    for job in running:
        wait_for(job.spec.run_dir / "events.jsonl", lambda rows: any(e["name"] == "training.started" for e in rows), 60)
    for job in running:
        own, _ = (path.stat() for path in files(job.spec))
        (attached,) = job.events("rank.attached")
        assert own.st_blocks * 512 == attached.fields["budget_bytes"]
        assert 2.0 <= own.st_blocks * 512 / (SHARE_MIB << 20) < 2.03
        wait_until_stopped(attached.pid, 60)
        os.kill(attached.pid, signal.SIGCONT)
    for job in running:
        wait_for_commits(job, 3)
        own, _ = (path.stat() for path in files(job.spec))
        counts = [event.fields["count"] for event in job.events("slot.claimed")]
        assert counts == [3, 4, 5], counts
        assert job.events("slot.claimed")[-1].fields["bytes"] == own.st_blocks * 512 == own.st_size
    for job in running:
        assert job.wait(120)["status"] == "succeeded", job.tail()
        assert job.events("snapshot.skipped") == []
    (told,) = [job.log.read_text() for job in running if "host memory for protection on" in job.log.read_text()]
    assert "2 slots x" in told and "up to 5 slots" in told


def files(spec):
    """The segment and the parity of a node with one rank."""
    (segment,) = segments_of(spec.name, spec.node)
    return segment, parity_path_of(spec.name, spec.node)
