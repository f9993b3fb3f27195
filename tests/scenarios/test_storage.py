"""Checkpoints in storage: a job whose memory is gone starts from the newest one that is whole, or says why it cannot.

Every tensor is filled with its iteration number (`harness.fills`), so what is restored is one version or visibly torn.
Checkpoints are asked for while the ranks stand still at a known iteration: names are known, nothing depends on speed.
"""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ft_plugins.rehearse.driver import free_port
from ft_plugins.smp.serve.client import Client
from ft_plugins.smp.serve.status import common, newest_common
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.checkpoint import checkpoint
from harness.fills import main as fill
from harness.forkserver import JobSpec, RunningJob
from harness.job_control import (
    BOUND,
    captured,
    entries,
    lose_memory,
    stop_after,
    wait_for,
    wait_until,
    write_checkpoints,
)
from harness.jobs import write_secret

Spec = Callable[..., JobSpec]
MIB = 8


def fills(jobs, tmp_path, iterations, *flags, faults="", ranks=2, **fields):
    argv = ("--iterations", str(iterations), "--mib", str(MIB), "--journal", str(tmp_path / "journal"), "--replicated")
    given = ("--ftp-detect-seconds", "120")  # ranks that stand still are meant to
    given += ("--reft", "--reft-bucket-mib", "1", "--reft-checkpoint-dir", str(tmp_path / "ck"), *flags)
    given += ("--ftp-faults", faults) if faults else ()
    return jobs(**{"entry": "harness.fills:main", "argv": argv, "flags": given, "nproc": ranks, **fields})


ON_REQUEST = ("--reft-checkpoint-interval", "0")


def base(spec):
    return Path(spec.flags[spec.flags.index("--reft-checkpoint-dir") + 1]) / spec.name


def complete(spec):
    return sorted(each.name for each in checkpoint.listing(base(spec)) if each.complete)


def go_on(spec):
    """Let the ranks that stand still go on."""
    for line in events(spec, "rank.attached")[-spec.nproc :]:
        os.kill(line["pid"], signal.SIGCONT)


def resumed(server, spec, tier="storage"):
    """The iteration from which all ranks go on, from `tier`, whole; the job must end in order."""
    before = len(entries(journal(spec)))
    events = len(list(entries(spec.run_dir / "events.jsonl")))
    job = server.start(spec)
    assert job.wait(BOUND)["status"] == "succeeded", job.tail()
    found = entries(journal(spec))[before:]
    assert all(entry["torn"] == [] for entry in found)
    (iteration,) = {entry["restored"] for entry in found if entry.get("restart") == 0}
    assert all(entry["counter"] == entry["restored"] for entry in found if "restored" in entry)
    told = [line for line in entries(spec.run_dir / "events.jsonl")[events:] if line["name"] == "state.restored"]
    assert {(line["tier"], line["iteration"]) for line in told if line["lineage"]} >= {(tier, iteration)}
    return int(iteration)


def journal(spec):
    return Path(spec.argv[spec.argv.index("--journal") + 1])


def refused(job):
    """The one line with which a job was refused, without a restart."""
    outcome = job.wait(BOUND)
    assert (outcome["status"], outcome["restarts"]) == ("refused", 0), (outcome, job.tail())
    assert "\n" not in outcome["reason"]
    return str(outcome["reason"])


def events(spec, name):
    return [line for line in entries(spec.run_dir / "events.jsonl") if line["name"] == name]


# ---- memory is gone ----


def test_when_memory_is_gone_the_newest_checkpoint_is_resumed_from(torch_server, jobs, tmp_path):
    spec = fills(jobs, tmp_path, 12, *ON_REQUEST)
    write_checkpoints(torch_server, spec, 4, 8)
    assert complete(spec) == ["v1-4", "v2-8"]
    lose_memory(spec)
    assert resumed(torch_server, spec) == 8
    lineages = {line["lineage"] for line in events(spec, "snapshot.sealed") if line["iteration"] > 8}
    assert lineages == {3}, "newer than any in storage, although memory knew of none"


def test_a_trainer_killed_while_it_reads_resumes_from_the_same_checkpoint(torch_server, jobs, tmp_path):
    spec = fills(jobs, tmp_path, 9, *ON_REQUEST)
    write_checkpoints(torch_server, spec, 4)
    lose_memory(spec)
    points = ["restore.storage@rank=0,bucket=0", "restore.storage@rank=1,bucket=3", "restore.tensors@rank=0"]
    points += ["restore.opened@rank=1"]
    faults = ";".join(f"{point},restart={number}:kill" for number, point in enumerate(points))
    job = torch_server.start(dataclasses.replace(spec, flags=(*spec.flags, "--ftp-faults", faults)))
    outcome = job.wait(BOUND)
    assert (outcome["status"], outcome["restarts"]) == ("succeeded", len(points)), job.tail()
    found = [entry for entry in entries(journal(spec)) if entry.get("restart") == len(points)]
    assert [(entry["restored"], entry["torn"]) for entry in found] == [(4, []), (4, [])]


def test_memory_of_an_earlier_life_gives_way_to_what_the_job_has_written_since(torch_server, jobs, tmp_path):
    """The job was killed, went on from storage on another machine, and comes back to the first one."""
    spec = fills(jobs, tmp_path, 14, *ON_REQUEST)
    write_checkpoints(torch_server, spec, 4)
    elsewhere = jobs(**{**vars(spec), "node": "node1"})
    write_checkpoints(torch_server, elsewhere, 9)
    assert complete(spec) == ["v1-4", "v2-9"]
    assert resumed(torch_server, spec) == 9


# ---- what is in storage cannot be used ----

DAMAGES = ["truncated", "flipped", "missing", "record", "manifest"]


def damage(folder, what, rank):
    path = folder / checkpoint.data_file(rank)
    match what:
        case "truncated":
            os.truncate(path, path.stat().st_size - 1)
        case "flipped":
            with open(path, "r+b") as file:
                file.seek(2_000_000)
                byte = file.read(1)
                file.seek(2_000_000)
                file.write(bytes([byte[0] ^ 1]))
        case "missing":
            path.unlink()
        case "record":
            record = folder / checkpoint.record_file(rank)
            record.write_text(record.read_text().replace('"iteration": 8', '"iteration": 9'))
        case "manifest":
            manifest = folder / "manifest.json"
            manifest.write_text(manifest.read_text()[:-9])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", DAMAGES)
def test_a_checkpoint_that_one_rank_cannot_read_is_passed_over_by_all(torch_server, jobs, tmp_path, what, rank):
    spec = fills(jobs, tmp_path, 10, *ON_REQUEST)
    write_checkpoints(torch_server, spec, 4, 8)
    lose_memory(spec)
    damage(base(spec) / "v2-8", what, rank)
    assert resumed(torch_server, spec) == 4
    told = events(spec, "checkpoint.corrupted")
    assert [line["rank"] for line in told] == [0 if what == "manifest" else rank]
    assert "v2-8" in told[0]["reason"]


def test_when_every_checkpoint_is_damaged_the_job_is_refused_until_fresh_is_said(torch_server, jobs, tmp_path):
    spec = fills(jobs, tmp_path, 6, *ON_REQUEST)
    write_checkpoints(torch_server, spec, 4)
    lose_memory(spec)
    damage(base(spec) / "v1-4", "flipped", 1)
    line = refused(torch_server.start(spec))
    assert str(base(spec)) in line and "v1-4" in line and "--ftp-resume fresh" in line
    job = torch_server.start(dataclasses.replace(spec, flags=(*spec.flags, "--ftp-resume", "fresh")))
    assert job.wait(BOUND)["status"] == "succeeded", job.tail()
    assert entries(journal(spec))[-1]["ended"] == 6


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("argv", ("--tensors", "5")), ("tensors: 37 -> 5", "--ftp-job")),
        (("flags", ("--reft-bucket-mib", "2")), ("has another layout", "bucket size")),
    ],
    ids=["another model", "another layout"],
)
def test_the_checkpoint_of_another_job_or_layout_is_refused_by_name(torch_server, jobs, tmp_path, changed, words):
    spec = fills(jobs, tmp_path, 6, *ON_REQUEST)
    write_checkpoints(torch_server, spec, 4)
    lose_memory(spec)
    field, more = changed
    kept = [word for word in getattr(spec, field) if field != "flags" or word not in ("--reft-bucket-mib", "1")]
    line = refused(torch_server.start(dataclasses.replace(spec, **{field: (*kept, *more)})))
    assert all(word in line for word in (*words, "--ftp-resume fresh", str(base(spec)))), line
    assert resumed(torch_server, spec) == 4, "nothing was lost by it"


def test_a_folder_that_cannot_be_used_is_refused_at_the_start_and_not_missed_later(torch_server, jobs, tmp_path):
    spec = fills(jobs, tmp_path, 9, *ON_REQUEST)
    (tmp_path / "ck").write_text("")
    line = refused(torch_server.start(spec))
    assert "--reft-checkpoint-dir" in line and str(tmp_path / "ck") in line
    (tmp_path / "ck").unlink()

    faults = "iteration.forward@iteration=5,rank=1,restart=0:kill;update.begin@iteration=3,rank=0,restart=0:stop"
    job = torch_server.start(dataclasses.replace(spec, flags=(*spec.flags, "--ftp-faults", faults)))
    wait_for(spec.run_dir / "events.jsonl", lambda found: captured(found, 2, 2), BOUND)
    os.rename(tmp_path / "ck", tmp_path / "gone")  # with what is in it
    (tmp_path / "ck").write_text("")
    go_on(spec)
    outcome = job.wait(BOUND)
    assert (outcome["status"], outcome["restarts"]) == ("succeeded", 1), job.tail()
    assert {line["tier"] for line in events(spec, "state.restored")} == {"process"}
    assert [line["rank"] for line in events(spec, "storage.failed")] == [0]


# ---- while it is written ----

SMP_POINTS = ["persist.rank.before@rank=1", "persist.file@rank=0", "persist.file@rank=1", "persist.rename@rank=0"]
SMP_POINTS += ["persist.manifest.before", "persist.manifest.after"]


@pytest.mark.parametrize("point", SMP_POINTS)
def test_an_smp_and_then_a_trainer_killed_while_a_checkpoint_is_written_lose_no_complete_one(
    torch_server, jobs, tmp_path, point
):
    spec = fills(jobs, tmp_path, 12, *ON_REQUEST)
    write_checkpoints(torch_server, spec, 4)
    lose_memory(spec)
    kills = f"{point}{',' if '@' in point else '@'}adopted=0:kill;iteration.forward@iteration=11,rank=0,restart=0:kill"
    stop = "update.begin@iteration=9,restart=0:stop"
    flags = (*spec.flags, "--ftp-faults", f"{kills};{stop}")
    job = torch_server.start(dataclasses.replace(spec, flags=flags))
    wait_for(spec.run_dir / "events.jsonl", lambda found: captured(found, 8, 2), BOUND)
    with Client(spec.run_dir) as client:
        found = client.checkpoint("request", BOUND)  # asked again of the successor when the first one dies over it
    assert (found["state"], found["iteration"]) == ("done", 8), found
    assert len(events(spec, "smp.lost")) == 1
    assert complete(spec) == ["v1-4", "v2-8"]
    go_on(spec)
    outcome = job.wait(BOUND)
    assert (outcome["status"], outcome["restarts"]) == ("succeeded", 1), job.tail()
    assert resumed(torch_server, spec) == 8


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(torch_server, jobs, tmp_path):
    spec = fills(jobs, tmp_path, 12, *ON_REQUEST)
    write_checkpoints(torch_server, spec, 4)
    full = "persist.write@rank=1,hit=7:enospc;update.begin@iteration=9:stop"
    job = torch_server.start(dataclasses.replace(spec, flags=(*spec.flags, "--ftp-faults", full)))
    wait_for(spec.run_dir / "events.jsonl", lambda found: captured(found, 8, 2), BOUND)
    end_smp_started_without_faults(spec)
    with Client(spec.run_dir) as client:
        found = client.checkpoint("request", BOUND)
        assert found["state"] == "failed" and "No space left on device" in found["reason"]
        assert client.status()["storage"]["failed"] == found["reason"]
        assert sorted(os.listdir(base(spec))) == ["lease-2.json", "v1-4"]
        assert client.checkpoint("request", BOUND)["state"] == "done", "there is room again"
    (failed,) = events(spec, "checkpoint.failed")
    assert failed["newest_complete"] == str(base(spec) / "v1-4") and failed["iteration"] == 8
    go_on(spec)
    assert job.wait(BOUND)["status"] == "succeeded", job.tail()
    assert complete(spec) == ["v1-4", "v2-8"]


def end_smp_started_without_faults(spec):
    """The SMP that was left by the ft-run before is replaced by one of this ft-run, with its faults."""
    with Client(spec.run_dir) as client:
        pid = client.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    started = len(events(spec, "smp.started"))
    wait_for(
        spec.run_dir / "events.jsonl",
        lambda found: len([line for line in found if line["name"] == "smp.started"]) > started,
        BOUND,
    )


# ---- the end of protection ----


def test_told_to_end_ft_run_leaves_the_newest_snapshot_in_storage_and_says_where(torch_server, jobs, tmp_path):
    spec = fills(jobs, tmp_path, 1_000_000, *ON_REQUEST)
    job = torch_server.start(spec)
    wait_for(spec.run_dir / "events.jsonl", lambda found: captured(found, 20, 2), BOUND)
    job.kill(signal.SIGTERM)
    assert "got signal: 15" in job.wait(BOUND)["reason"]
    with Client(spec.run_dir) as client:
        newest = newest_common(client.status())
    written = sorted(int(name.removeprefix("v1-")) for name in complete(spec))
    # A second one only if the ranks completed a newer version between the signal to ft-run and theirs.
    assert newest is not None and written[-1] == newest.iteration and len(written) <= 2, "when ft-run has ended"
    for iteration in written:
        assert f"ft-run: iteration {iteration} is in {base(spec) / f'v1-{iteration}'}" in job.log.read_text()
    lose_memory(spec)
    words = tuple(str(newest.iteration + 3) if word == "1000000" else word for word in spec.argv)
    assert resumed(torch_server, dataclasses.replace(spec, argv=words)) == newest.iteration


def hold_the_signal(argv):
    """Entry of ranks that train on after SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fill(argv)


HOLD = {"entry": f"{__file__}:hold_the_signal"}


def require_written_while_ranks_train(jobs):
    """Send SIGTERM to all nodes, and wait for the first checkpoint, and for newer versions of ranks that still train.
    Then kill them, and wait for the end. Returns the iteration of the first checkpoint."""
    for job in jobs:
        job.kill(signal.SIGTERM)
    spec = jobs[0].spec
    wait_for(
        spec.run_dir / "events.jsonl", lambda found: any("checkpoint.completed" in e["name"] for e in found), BOUND
    )
    (first,) = [line["iteration"] for line in events(spec, "checkpoint.completed")]
    ranks = [line["pid"] for job in jobs for line in events(job.spec, "rank.attached")]
    assert all(liveness.started(pid) for pid in ranks), "the ranks are not waited for"

    def newest():
        with Client(spec.run_dir) as client:
            version = newest_common(client.status())
        return version.iteration if version else 0

    wait_until(lambda: newest() > first + 5, BOUND, lambda: f"iteration {newest()}, the checkpoint has {first}")
    for pid in ranks:
        with suppress(ProcessLookupError):  # it failed because of another one
            os.kill(pid, signal.SIGKILL)
    for job in jobs:
        assert "got signal: 15" in job.wait(BOUND)["reason"]
    return int(first)


@pytest.mark.parametrize("smp_too", [False, True], ids=["ft-run", "all-processes"])
def test_ranks_that_hold_the_signal_are_not_waited_for_and_what_they_seal_meanwhile_is_left_in_storage(
    torch_server, jobs, tmp_path, smp_too
):
    """Batch systems send it to all processes of the job."""
    spec = fills(jobs, tmp_path, 1_000_000, *ON_REQUEST, "--ftp-grace-seconds", "600", **HOLD)
    job = torch_server.start(spec)
    wait_for(spec.run_dir / "events.jsonl", lambda found: captured(found, 20, 2), BOUND)
    if smp_too:
        with Client(spec.run_dir) as client:
            os.kill(client.status()["pid"], signal.SIGTERM)
    first = require_written_while_ranks_train([job])
    with Client(spec.run_dir) as client:
        newest = newest_common(client.status())
    assert newest is not None and complete(spec) == sorted([f"v1-{first}", f"v1-{newest.iteration}"])
    for iteration in (first, newest.iteration):
        assert f"ft-run: iteration {iteration} is in {base(spec) / f'v1-{iteration}'}" in job.log.read_text()


def test_a_notice_of_preemption_writes_a_checkpoint_says_where_and_training_goes_on(torch_server, jobs, tmp_path):
    """Batch systems send it to all processes of the job."""
    spec = fills(jobs, tmp_path, 12, *ON_REQUEST)
    job = stop_after(torch_server, spec, 5)
    with Client(spec.run_dir) as client:
        smp = client.status()["pid"]
    for pid in (smp, *(line["pid"] for line in events(spec, "rank.attached"))):
        os.kill(pid, signal.SIGUSR1)
    job.kill(signal.SIGUSR1)
    line = f"ft-run: SIGUSR1 on node {spec.node}: iteration 5 is in {base(spec) / 'v1-5'}"
    wait_until(lambda: line in job.log.read_text(), BOUND, job.tail)
    go_on(spec)
    words = "the job succeeded: training ended after iteration 12; exit status 0"
    assert job.wait(BOUND) == {"status": "succeeded", "reason": words, "restarts": 0}, job.tail()
    assert complete(spec) == ["v1-5"] and not events(spec, "smp.lost")


def test_protection_that_is_lost_leaves_the_last_version_that_all_ranks_hold_in_storage(torch_server, jobs, tmp_path):
    faults = "capture.seal.before@iteration=7,rank=1:raise"
    spec = fills(jobs, tmp_path, 12, *ON_REQUEST, faults=faults)
    job = torch_server.start(spec)
    assert job.wait(BOUND)["status"] == "succeeded", job.tail()
    assert {line["name"] for line in events(spec, "protection.lost")} == {"protection.lost"}
    assert {line["reason"] for line in events(spec, "checkpoint.started")} == {"protection lost"}
    assert complete(spec) == ["v1-6"]
    without = dataclasses.replace(spec, flags=spec.flags[: spec.flags.index("--ftp-faults")])
    assert resumed(torch_server, without) == 6


def test_a_person_asks_for_a_checkpoint_and_is_told_where_it_is(torch_server, jobs, tmp_path):
    spec = fills(jobs, tmp_path, 12, *ON_REQUEST)
    job = stop_after(torch_server, spec, 5)
    program = "from ft_plugins.cli import main; main()"
    command = [sys.executable, "-c", program, "checkpoint", "now", "--keep", "--job", spec.name]
    environment = {**os.environ, "XDG_RUNTIME_DIR": spec.runtime}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND)
    assert (found.returncode, found.stdout) == (0, f"{base(spec) / 'v1-5'}\n"), found.stderr
    assert complete(spec) == ["v1-5"] and (base(spec) / "v1-5" / "keep").exists()
    command = [sys.executable, "-c", program, "status", "--job", spec.name]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND).stdout
    assert "kept: iteration 5" in " ".join(shown.split()), shown
    go_on(spec)
    assert job.wait(BOUND)["status"] == "succeeded", job.tail()


# ---- several nodes ----


@pytest.mark.parametrize("before", ["none", "raim5"])
@pytest.mark.parametrize("after", ["none", "raim5"])
def test_two_nodes_told_to_end_write_one_checkpoint_and_start_from_it_together(
    torch_server, jobs, tmp_path, before, after
):
    """Parity of the replicas that both hold is not in storage: each makes it anew, and what was stored counts then."""
    secret = write_secret(tmp_path)

    def start(iterations, redundancy):
        running = []
        for node in ("node0", "node1"):
            more = ("--reft-redundancy", redundancy, "--ftp-node-name", node)
            more += ("--ftp-secret-file", str(secret)) if redundancy != "none" else ()
            spec = fills(
                jobs, tmp_path, iterations, *ON_REQUEST, *more, ranks=1,
                node=node, nnodes=2, endpoint=f"localhost:{port}",
            )  # fmt: skip
            running.append(torch_server.start(spec))
            path = spec.run_dir / "events.jsonl"
            count = len(events(spec, "job.started"))
            if node == "node0":  # agents are sorted by address and pid: the first one takes rank 0
                wait_for(
                    path, lambda found, n=count: len([e for e in found if e["name"] == "job.started"]) > n - 1, BOUND
                )
        return running

    port = free_port()
    running = start(1_000_000, before)
    for job in running:
        wait_for(job.spec.run_dir / "events.jsonl", lambda found: captured(found, 20, 1), BOUND)
    for job in running:
        job.kill(signal.SIGTERM)
    for job in running:
        assert "got signal: 15" in job.wait(BOUND)["reason"]
    spec = running[0].spec
    (written,) = complete(spec)
    left = [name for name in os.listdir(base(spec)) if not name.startswith("lease-")]
    if before != "none":  # nodes that see each other end may offer once more when the checkpoint is complete already
        left = [name for name in left if not name.startswith("offer-")]
    assert left == [written], "no notice, no unfinished one"
    iteration = int(written.removeprefix("v1-"))
    for job in running:
        lose_memory(job.spec)
    port = free_port()
    for job in (again := start(1_000_000 if after == "raim5" else iteration + 3, after)):
        if after == "raim5":
            wait_for(job.spec.run_dir / "events.jsonl", counts_again, BOUND)
    for job in again:
        if after == "raim5":
            job.kill()
            job.wait(BOUND)
        else:
            assert job.wait(BOUND)["status"] == "succeeded", job.tail()
        assert not job.events("slot.corrupted") and not job.events("replica.mismatched")
        assert [event.fields["tier"] for event in job.events("state.restored")] == ["storage"]
    found = [entry for entry in entries(tmp_path / "journal") if entry.get("restored")]
    assert [(entry["restored"], entry["torn"]) for entry in found] == [(iteration, []), (iteration, [])]


def test_two_nodes_whose_ranks_hold_the_signal_write_the_same_versions_meanwhile_and_in_the_end(
    torch_server, jobs, tmp_path
):
    secret, port, running = write_secret(tmp_path), free_port(), list[RunningJob]()
    for node in ("node0", "node1"):
        more = ("--ftp-node-name", node, "--ftp-secret-file", str(secret), "--ftp-grace-seconds", "600")
        spec = fills(
            jobs, tmp_path, 1_000_000, *ON_REQUEST, *more, ranks=1, node=node, nnodes=2, endpoint=f"localhost:{port}",
            **HOLD,
        )  # fmt: skip
        running.append(torch_server.start(spec))
    for job in running:
        wait_for(job.spec.run_dir / "events.jsonl", lambda found: captured(found, 20, 1), BOUND)
    first = require_written_while_ranks_train(running)
    held = []
    for job in running:
        with Client(job.spec.run_dir) as client:
            held.append({version.iteration for version in common(client.status())})
    assert complete(running[0].spec) == sorted([f"v1-{first}", f"v1-{max(set.intersection(*held))}"])


def counts_again(found):
    """Whether what was restored counts for the node tier."""
    names = [event["name"] for event in found]
    since = found[names.index("state.restored") :] if "state.restored" in names else []
    return any(event["name"] == "version.committed" and event["lineage"] == 1 for event in since)
