"""Bad input gets one clear line that names the remedy, and loses nothing."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ft_plugins.snapshot.segment.paths import path_of
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.slots import SlotState
from harness.forkserver import JobSpec
from harness.job_control import entries, wait_for, wait_until_stopped
from harness.megatron_runs import EXAMPLE

Spec = Callable[..., JobSpec]
BOUND = 280


def fills(jobs, tmp_path, *words, flags=("--reft",), mib=8):
    argv = ("--mib", str(mib), "--journal", str(tmp_path / "journal"), *words)
    return jobs(entry="harness.fills:main", argv=argv, flags=flags)


def left_behind(server, jobs, tmp_path):
    """A job of six iterations, whose agent was killed in the fifth: four versions were sealed."""
    spec = fills(jobs, tmp_path, "--iterations", "6", flags=("--reft", "--ftp-faults", "update.begin@iteration=5:stop"))
    job = server.start(spec)
    wait_for(spec.run_dir / "events.jsonl", lambda found: any(sealed(entry, 4) for entry in found), BOUND)
    job.kill()
    assert job.wait(BOUND) == {"status": "killed"}
    return dataclasses.replace(spec, flags=("--reft",))


def sealed(entry, iteration):
    return entry["name"] == "snapshot.sealed" and entry["iteration"] == iteration


def refused(job):
    """The one line with which a job was refused, without a restart."""
    outcome = job.wait(BOUND)
    assert (outcome["status"], outcome["restarts"]) == ("refused", 0), (outcome, job.tail())
    assert "\n" not in outcome["reason"]
    # torch prints one of its own where the worker ends between our look at it and torch's
    ours = [line for line in job.tail().splitlines() if "torch/distributed/elastic" not in line]
    assert not any("Traceback" in line for line in ours), job.tail()
    return str(outcome["reason"])


def resumed(server, spec):
    """The iteration that the job restores; it must end in order."""
    before = len(entries(Path(spec.argv[3])))
    job = server.start(spec)
    assert job.wait(BOUND)["status"] == "succeeded", job.tail()
    found = entries(Path(spec.argv[3]))[before:]
    assert all(entry["torn"] == [] for entry in found)
    (restored,) = job.events("state.restored")[-1:]
    return int(restored.fields["iteration"])


def test_too_little_shared_memory_is_refused_before_the_first_step_with_mount_and_bytes(torch_server, jobs, tmp_path):
    free = os.statvfs("/dev/shm")
    mib = free.f_bavail * free.f_frsize // 3 // (1 << 20) + 256
    spec = fills(jobs, tmp_path, "--iterations", "6", mib=mib)
    line = refused(torch_server.start(spec))
    assert "/dev/shm" in line and "ft-plugins sweep" in line and "--shm-size" in line
    assert not path_of(spec.name, spec.node, 0).exists()


@pytest.mark.parametrize("what", ["another model", "another topology"])
def test_state_of_another_job_is_refused_by_name_and_kept(torch_server, jobs, tmp_path, what):
    spec = left_behind(torch_server, jobs, tmp_path)
    if what == "another model":
        other = dataclasses.replace(spec, argv=(*spec.argv, "--tensors", "5"))
    else:
        other = dataclasses.replace(spec, nproc=2)
    line = refused(torch_server.start(other))
    assert ("tensors: 37 -> 5" if what == "another model" else "'layer000' is each rank's own") in line
    assert "--ftp-resume fresh" in line
    assert resumed(torch_server, spec) == 4, "nothing was lost by it"


def test_fresh_answers_it_and_counts_for_the_first_incarnation_only(torch_server, jobs, tmp_path):
    spec = left_behind(torch_server, jobs, tmp_path)
    faults = "update.begin@iteration=3,restart=0:kill"
    fresh = dataclasses.replace(spec, flags=("--reft", "--ftp-resume", "fresh", "--ftp-faults", faults))
    job = torch_server.start(fresh)
    assert job.wait(BOUND)["status"] == "succeeded", job.tail()
    assert [entry["restored"] for entry in entries(tmp_path / "journal") if "restored" in entry] == [0, 0, 2]


@pytest.mark.parametrize("part", ["data", "seal"])
def test_a_flipped_byte_in_the_newest_slot_makes_the_older_version_the_newest(torch_server, jobs, tmp_path, part):
    spec = left_behind(torch_server, jobs, tmp_path)
    segment = Segment(path_of(spec.name, spec.node, 0))
    newest = max((slot for slot in segment.slots() if slot.state is SlotState.CLEAN), key=lambda slot: slot.version)
    if part == "data":
        segment.data(newest.index)[12345] ^= 1
    else:
        segment.digests(newest.index)[0] ^= 1
    segment.close()
    assert resumed(torch_server, spec) == 3
    corrupt = [line for line in entries(spec.run_dir / "events.jsonl") if line["name"] == "slot.corrupted"]
    assert len(corrupt) == 1


def test_a_flipped_bit_in_the_lineage_of_the_oldest_slot_of_one_rank_does_not_restart_the_job(
    torch_server, jobs, tmp_path
):
    """Given two ranks with their versions, and the same command given again."""
    words, stop = ("--iterations", "6", "--replicated"), "update.begin@iteration=5:stop"
    spec = dataclasses.replace(fills(jobs, tmp_path, *words, flags=("--reft", "--ftp-faults", stop)), nproc=2)
    job = torch_server.start(spec)
    wait_for(spec.run_dir / "events.jsonl", lambda found: sum(sealed(entry, 4) for entry in found) == 2, BOUND)
    job.kill()
    assert job.wait(BOUND) == {"status": "killed"}
    spec = dataclasses.replace(spec, flags=("--reft",))
    segment = Segment(path_of(spec.name, spec.node, 1))
    oldest = min((slot for slot in segment.slots() if slot.state is SlotState.CLEAN), key=lambda slot: slot.version)
    assert oldest.version is not None and oldest.version.iteration < 4
    segment._slots[oldest.index]._words[1] ^= 2
    segment.close()
    assert resumed(torch_server, spec) == 4
    (corrupt,) = [line for line in entries(spec.run_dir / "events.jsonl") if line["name"] == "slot.corrupted"]
    assert corrupt["rank"] == 1 and f"slot {oldest.index} is not used" in corrupt["reason"]


@pytest.mark.parametrize(("nbytes", "said"), [(8, "its segment was damaged"), (256, "cannot be used as its segment")])
def test_a_damaged_or_foreign_segment_is_refused_by_name_and_fresh_replaces_it(
    torch_server, jobs, tmp_path, nbytes, said
):
    spec = left_behind(torch_server, jobs, tmp_path)
    with open(path_of(spec.name, spec.node, 0), "r+b") as segment:
        segment.write(b"GARBAGE!" * (nbytes // 8))
    end_smp(spec)
    for _ in range(2):
        line = refused(torch_server.start(spec))
        assert said in line and "--ftp-resume fresh" in line
    assert resumed(torch_server, dataclasses.replace(spec, flags=("--reft", "--ftp-resume", "fresh"))) == 0


def end_smp(spec):
    """Kill this job's SMP, so that the next one has to adopt what lies there."""
    pid = [line["pid"] for line in entries(spec.run_dir / "events.jsonl") if line["name"] == "incarnation.fenced"][-1]
    os.kill(pid, 9)


def test_a_second_job_of_the_same_name_is_refused_and_the_first_one_ends_undisturbed(torch_server, jobs, tmp_path):
    stop = "iteration.forward@iteration=100:stop"
    spec = fills(jobs, tmp_path, "--iterations", "200", flags=("--reft", "--ftp-faults", stop))
    first = torch_server.start(spec)
    wait_for(tmp_path / "journal", lambda found: len(found) == 1, BOUND)
    (attached,) = first.events("rank.attached")
    wait_until_stopped(attached.pid, BOUND)
    second = torch_server.start(spec)
    reason = second.wait(BOUND)["reason"]
    assert "BusyError" in reason and "--ftp-job" in reason and str(first.pid) in reason
    os.kill(attached.pid, signal.SIGCONT)
    assert first.wait(BOUND)["status"] == "succeeded", first.tail()
    assert entries(tmp_path / "journal")[-1]["ended"] == 200


def test_without_an_smp_required_protection_is_refused_and_a_job_without_it_trains_on():
    program = (
        f"import sys, torch; sys.path.insert(0, {str(Path(__file__).parents[1])!r});"
        "from ft_plugins import session; from ft_plugins.config import Config;"
        "from harness.plain_host import PlainHost; host = PlainHost({'a': torch.zeros(4)});"
        "protection = session.attach(host, Config.from_flags(sys.argv[1:])[0]); print(protection.resume());"
        "[protection.iteration_end(step) for step in (1, 2)]; protection.shutdown()"
    )
    run = [sys.executable, "-c", program, "--reft"]
    required = subprocess.run([*run, "--ftp-require-protection"], capture_output=True, text=True, timeout=BOUND)
    assert required.returncode != 0
    assert required.stderr.strip().splitlines()[-1].startswith("ft_plugins.errors.ProtectionError: ")
    assert "start the job with ft-run" in required.stderr
    assert "ft-run did not see this configuration: give --reft as well" in required.stderr
    without = subprocess.run(run, capture_output=True, text=True, timeout=BOUND)
    assert without.returncode == 0, without.stderr
    assert "protection.lost" in without.stderr, "the alarm"


def test_other_data_under_the_same_name_is_refused_and_the_same_data_resumes(megatron_server, jobs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")  # a long path would be shortened in the message
    first, other = folder / "a.txt", folder / "b.txt"
    first.write_text("To be, or not to be, that is the question. " * 1000)
    other.write_text("Whether 'tis nobler in the mind to suffer... " * 1000)
    small = ("--layers", "2", "--hidden", "16", "--heads", "2", "--sequence", "32", "--global-batch", "4")
    size = ("--tp", "1", "--pp", "1", "--iterations", "6", *small)
    flags = ("--reft", "--ftp-faults", "update.begin@iteration=5:stop")
    spec = jobs(entry=f"{EXAMPLE}:main", argv=("--data", str(first), *size), flags=flags)
    job = megatron_server.start(spec)
    wait_for(spec.run_dir / "events.jsonl", lambda found: any(sealed(entry, 4) for entry in found), BOUND)
    job.kill()
    assert job.wait(BOUND) == {"status": "killed"}

    again = dataclasses.replace(spec, flags=("--reft",))
    line = refused(megatron_server.start(dataclasses.replace(again, argv=("--data", str(other), *size))))
    assert "now: data: " in line and str(first) in line and str(other) in line and "--ftp-resume fresh" in line
    assert "architecture" not in line, "nothing else differs"

    last = megatron_server.start(again)
    assert last.wait(BOUND)["status"] == "succeeded", last.tail()
    assert [event.fields["iteration"] for event in last.events("state.restored")] == [4], "nothing was lost by it"
