"""Two emulated nodes, each sharding group spanning both: every share is read on its own node.

Two agents meet in one rendezvous; each has its own SMP, run directory and segments. The order tp-cp-ep-pp-dp puts the
two data-parallel replicas on different nodes. Parameters are replicated (no distributed optimizer), so restoring is an
all-gather between the nodes.
"""

import os
import signal
from pathlib import Path

import pytest

from ft_plugins.rehearse.driver import free_port
from ft_plugins.snapshot.segment.paths import path_of
from harness.golden import assert_identical
from harness.job_control import wait_for, wait_until_stopped
from harness.megatron_runs import RANKS, MegatronConfiguration, MegatronRun

BOUND = 240
ARGV = ("--order", "tp-cp-ep-pp-dp")


def mapped_segments(pid):
    """Names of the segments in a process's memory, by the kernel's word."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name for line in lines if "/dev/shm/ftp-" in line}


@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distopt"])
def test_each_share_is_read_on_its_own_node_and_the_run_ends_as_the_unfailed_one(jobs, golden, tmp_path, distributed):
    configuration = MegatronConfiguration(bf16=True, distributed_optimizer=distributed, interleaved=False)
    whole = golden(MegatronRun("golden", Path(), configuration, argv=ARGV))
    kills = "iteration.forward@iteration=5,rank=6,restart=0:kill;iteration.forward@iteration=7,restart=1,rank=1:stop"
    run = MegatronRun("two", tmp_path, configuration, protected=True, kills=kills, argv=ARGV)
    endpoint = f"localhost:{free_port()}"
    fields = {key: value for key, value in vars(run.spec()).items() if key not in ("name", "nproc", "flags")}
    running = []
    for node in ("node0", "node1"):
        flags = (*run.spec().flags, "--ftp-node-name", node, "--reft-redundancy", "none")
        spec = jobs(**{**fields, "node": node, "nnodes": 2, "endpoint": endpoint, "nproc": RANKS // 2, "flags": flags})
        running.append(jobs.server("megatron").start(spec))
        if node == "node0":  # agents are sorted by address and pid: the first one started takes ranks 0 to 3
            wait_for(spec.run_dir / "events.jsonl", lambda lines: any(e["name"] == "smp.started" for e in lines), BOUND)

    def stopped(lines):
        return max((int(str(line["iteration"])) for line in lines), default=0) >= 6 and any(
            line["restart"] for line in lines
        )

    wait_for(run.loss_log, stopped, BOUND)
    for job in running:  # the second incarnation, restored: each rank maps its own segment and no other
        newest = {event.rank: event.pid for event in job.events("rank.attached") if event.rank is not None}
        assert len(newest) == RANKS // 2
        for rank, pid in newest.items():
            assert mapped_segments(pid) == {path_of(job.spec.name, job.spec.node, rank).name}
    wait_until_stopped(newest_pid(running, 1), BOUND)
    os.kill(newest_pid(running, 1), signal.SIGCONT)
    for job in running:
        outcome = job.wait(BOUND)
        assert outcome["status"] == "succeeded", job.tail()
        restores = job.events("state.restored")
        assert len(restores) == RANKS // 2
        assert {event.fields["iteration"] for event in restores} <= {3, 4}
    assert_identical(run, whole, RANKS)


def newest_pid(running, rank):
    return [event.pid for job in running for event in job.events("rank.attached") if event.rank == rank][-1]
