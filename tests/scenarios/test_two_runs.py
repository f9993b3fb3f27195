"""Two jobs of one name and one folder of checkpoints: the second is refused, or takes over from one that is silent.

Every tensor is filled with its iteration number (`harness.fills`). Jobs are held still at a known iteration.
"""

import os
import shutil
import signal
from collections.abc import Callable

from ft_plugins.rehearse.driver import free_port
from ft_plugins.smp.serve.client import Client
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.checkpoint import checkpoint, lease
from ft_plugins.snapshot.segment.slots import Version
from harness.emulated_nodes import freeze
from harness.forkserver import JobSpec, RunningJob
from harness.job_control import (
    BOUND,
    captured,
    lose_memory,
    stop_after,
    wait_for,
    wait_until,
    wait_until_stopped,
    write_checkpoints,
)
from harness.jobs import write_secret

from .test_storage import ON_REQUEST, base, complete, events, fills, go_on, refused, resumed

Spec = Callable[..., JobSpec]


def run_of(spec, name):
    """The run that the last event of that name on a node tells."""
    return str(events(spec, name)[-1]["run"])


def two_nodes(server, jobs, folder, names, interval="0", faults=""):
    """A job of two nodes with a rank each."""
    secret, port, running = write_secret(folder), free_port(), list[RunningJob]()
    for node in names:
        more = ("--reft-checkpoint-interval", interval, "--ftp-node-name", node, "--ftp-secret-file", str(secret))
        spec = fills(jobs, folder, 12, *more, ranks=1, node=node, nnodes=2, endpoint=f"localhost:{port}", faults=faults)
        running.append(server.start(spec))
    return running


def test_a_second_job_of_that_name_on_other_nodes_is_refused_by_name_and_changes_nothing(torch_server, jobs, tmp_path):
    first = two_nodes(torch_server, jobs, tmp_path, ("a", "b"), faults="update.begin@iteration=5:stop")
    for job in first:
        wait_for(job.spec.run_dir / "events.jsonl", lambda found: captured(found, 4, 1), BOUND)
    held = lease.newest(base(first[0].spec))
    assert held is not None and held.nodes == ("a", "b") and not held.alone
    assert {run_of(job.spec, "training.started") for job in first} == {held.run}, "agreed on by all"
    second = two_nodes(torch_server, jobs, tmp_path, ("c", "d"))
    for job in second:
        reason = refused(job)
        assert f"{base(first[0].spec)} is in use by run {held.run[:8]} on a, b, since " in reason
        assert "this start, on c, d at " in reason and f"'ft-plugins stop --job {job.spec.name}'" in reason
    for job in first:
        go_on(job.spec)
    for job in first:
        assert job.wait(BOUND)["status"] == "succeeded", job.tail()
        assert not events(job.spec, "lease.lost")
    after = lease.newest(base(first[0].spec))
    assert after is not None and after.released and (after.run, after.lineage) == (held.run, held.lineage)


def test_while_an_smp_stands_still_no_checkpoint_is_put_together_of_two_jobs_of_one_name(torch_server, jobs, tmp_path):
    """Given a job of two nodes, one of which has written its part of version 4 while the SMP of the other is stopped. A
    second one is refused; and if the other part of such a job is there all the same, it does not count."""
    (tmp_path / "elsewhere").mkdir()
    stop = "update.begin@iteration=6:stop"  # until then version 4 is one of the two newest, and may be written
    strangers = two_nodes(torch_server, jobs, tmp_path / "elsewhere", ("e", "f"), "4", stop)
    strange = checkpoint.folder_of(base(strangers[0].spec), Version(1, 4))
    wait_until(strange.exists, BOUND, lambda: strangers[0].tail())
    for job in strangers:
        job.kill()
        assert job.wait(BOUND) == {"status": "killed"}

    first = two_nodes(torch_server, jobs, tmp_path, ("a", "b"), "4", f"update.begin@iteration=3:stop;{stop}")
    for job in first:
        wait_for(job.spec.run_dir / "events.jsonl", lambda found: captured(found, 2, 1), BOUND)
        wait_until_stopped(events(job.spec, "rank.attached")[-1]["pid"], BOUND)
    folder = base(first[0].spec)
    (slow,) = (job for job in first if events(job.spec, "rank.attached")[-1]["rank"] == 1)
    with Client(slow.spec.run_dir) as client:
        smp = client.status()["pid"]
    os.kill(smp, signal.SIGSTOP)
    for job in first:
        go_on(job.spec)
    building = checkpoint.partial_of(folder, Version(1, 4))
    wait_until((building / checkpoint.record_file(0)).exists, BOUND, lambda: str(os.listdir(folder)))
    for name in (checkpoint.data_file(1), checkpoint.record_file(1)):
        shutil.copy2(strange / name, building / name)

    for job in two_nodes(torch_server, jobs, tmp_path, ("c", "d"), "4"):
        assert "is in use by run " in refused(job)
    assert complete(first[0].spec) == [], "the SMP of rank 0, which completes it, has renewed the lease meanwhile"
    os.kill(smp, signal.SIGCONT)
    wait_until(lambda: events(slow.spec, "checkpoint.failed") != [], BOUND, slow.tail)
    assert "is of another run of this job's name" in events(slow.spec, "checkpoint.failed")[0]["reason"]
    for job in first:
        wait_until_stopped(events(job.spec, "rank.attached")[-1]["pid"], BOUND)
        go_on(job.spec)
    for job in first:
        assert job.wait(BOUND)["status"] == "succeeded", job.tail()
    assert "v1-12" in complete(first[0].spec) and "v1-4" not in complete(first[0].spec)
    for name in complete(first[0].spec):
        runs = {checkpoint.read_record(folder / name, rank).run for rank in (0, 1)}
        assert runs == {run_of(first[0].spec, "training.started")}


def test_a_node_that_was_silent_is_replaced_with_its_identity_and_writes_no_more_when_it_is_back(
    torch_server, jobs, tmp_path
):
    spec = fills(jobs, tmp_path, 12, "--reft-checkpoint-interval", "4")
    old = stop_after(torch_server, spec, 4)
    wait_until(lambda: complete(spec) == ["v1-4"], BOUND, lambda: str(complete(spec)))
    run = run_of(spec, "training.started")
    with Client(spec.run_dir) as client:
        smp = client.status()["pid"]
    freeze(old)
    elsewhere = jobs(**{**vars(spec), "node": "node1"})
    assert resumed(torch_server, elsewhere) == 4
    assert run_of(elsewhere, "state.restored") == run == checkpoint.read_manifest(base(spec) / "v2-12").run
    for pid in (smp, old.pid):
        os.kill(pid, signal.SIGCONT)
    path = spec.run_dir / "events.jsonl"
    wait_for(path, lambda found: any(each["name"] == "lease.lost" for each in found), BOUND)
    written = complete(spec)
    go_on(spec)
    assert old.wait(BOUND)["status"] == "succeeded", "training goes on: " + old.tail()
    assert complete(spec) == written and all(name.startswith("v2-") for name in written if name != "v1-4")
    assert len(events(spec, "lease.lost")) == 1
    assert all("on node1" in each["reason"] for each in events(spec, "checkpoint.failed"))
    assert events(spec, "checkpoint.failed"), "what was due is missed by name"


def test_after_a_total_loss_the_same_command_goes_on_at_once_as_the_same_run(torch_server, jobs, tmp_path):
    spec = fills(jobs, tmp_path, 9, *ON_REQUEST)
    write_checkpoints(torch_server, spec, 4)
    run = run_of(spec, "training.started")
    with Client(spec.run_dir) as client:
        holder = client.status()["pid"]
    lose_memory(spec)
    assert liveness.started(holder) == 0
    before = events(spec, "state.restored")
    assert before == []
    assert resumed(torch_server, spec) == 4
    assert run_of(spec, "state.restored") == run
    found = lease.newest(base(spec))
    assert found is not None and (found.run, found.lineage, found.released) == (run, 2, True)
