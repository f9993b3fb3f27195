"""Old or new, never torn: wherever a trainer is killed, what is restored is one complete version.

Every tensor of the job is filled with its iteration number (`harness.fills`), 256 MiB of them; each incarnation writes
what it has restored, which tensors are not filled with that number, and in which states it found the slots.
"""

import json
import os
import random
import signal
from collections.abc import Callable

import pytest

from ft_plugins.smp.serve.client import Client
from harness.forkserver import JobSpec
from harness.job_control import entries, wait_for

ENTRY = "harness.fills:main"
MANY = 10_000  # restarts: here a version may be restored often on purpose

Spec = Callable[..., JobSpec]


def fills(jobs, journal, iterations, faults="", mib=256, ranks=1):
    """Several ranks hold the same tensors, and each captures its share of them."""
    flags = ("--reft", "--reft-bucket-mib", "16", *(("--ftp-faults", faults) if faults else ()))
    argv = ("--iterations", str(iterations), "--mib", str(mib), "--journal", str(journal))
    argv += ("--replicated",) if ranks > 1 else ()
    return jobs(entry=ENTRY, argv=argv, flags=flags, max_restarts=MANY, nproc=ranks)


def assert_never_torn(found):
    for entry in found:
        assert entry["torn"] == [], entry
        if "restored" in entry:
            assert entry["counter"] == entry["restored"], "small state and tensors are of one version"


def assert_at_most_one_lost(job):
    for event in job.events("state.restored"):
        assert event.fields["tier"] == "process"
        assert 0 <= event.fields["lost"] <= 1, event
    scratch = [event for event in job.events("state.lost") if event.fields["completed"] > 1]
    assert not scratch, f"started from the beginning although versions had been sealed: {scratch}"


TRAINER_POINTS = [
    "capture.begin@hit=3",
    "capture.bucket.begin@bucket=0,hit=35",
    "capture.bucket.begin@bucket=7",
    "capture.bucket.end@bucket=0,hit=35",
    "capture.bucket.end@bucket=15",
    "capture.seal.before@hit=3",
    "capture.seal.after@hit=3",
    "attach.before",
    "attach.after",
    "restore.begin",
    "restore.tensors",
    "restore.end",
    "update.begin@hit=2",
    "iteration.forward@hit=2",
]


def test_a_trainer_killed_at_every_named_point_in_turn_resumes_a_complete_version(torch_server, jobs, tmp_path):
    """One incarnation per point, after a first one that has sealed versions."""
    points = ["iteration.forward@hit=5", *TRAINER_POINTS]
    faults = ";".join(
        f"{point}{',' if '@' in point else '@'}restart={number}:kill" for number, point in enumerate(points)
    )
    journal = tmp_path / "journal"
    job = torch_server.start(fills(jobs, journal, 40, faults))
    outcome = job.wait(120)
    assert outcome["status"] == "succeeded", job.tail()
    assert outcome["restarts"] == len(points), "every point was reached and killed the trainer"
    found = entries(journal)
    assert_never_torn(found)
    assert_at_most_one_lost(job)
    assert found[-1]["ended"] == 40


POINTS_OF_ONE_OF_TWO = [
    "capture.begin@hit=3",
    "capture.bucket.begin@bucket=0",
    "capture.bucket.end@bucket=3",
    "capture.bucket.begin@bucket=7",
    "capture.seal.before@hit=3",
    "capture.seal.after@hit=3",
    "attach.before",
    "attach.after",
    "restore.begin",
    "restore.tensors",
    "restore.opened",
    "restore.end",
    "update.begin@hit=2",
    "iteration.forward@hit=2",
]


@pytest.mark.parametrize("killed", [0, 1])
def test_one_of_two_ranks_killed_at_every_named_point_in_turn_leaves_both_with_one_complete_version(
    torch_server, jobs, tmp_path, killed
):
    """What is restored is put together from both shares: one rank may have sealed a version that the other has not."""
    points = ["iteration.forward@hit=5", *POINTS_OF_ONE_OF_TWO]
    faults = ";".join(
        f"{point}{',' if '@' in point else '@'}rank={killed},restart={number}:kill"
        for number, point in enumerate(points)
    )
    journal = tmp_path / "journal"
    job = torch_server.start(fills(jobs, journal, 40, faults, ranks=2))
    outcome = job.wait(180)
    assert outcome["status"] == "succeeded", job.tail()
    assert outcome["restarts"] == len(points), "every point was reached and killed the one rank"
    found = entries(journal)
    assert_never_torn(found)
    assert_at_most_one_lost(job)
    restored = {}
    for entry in found:
        if "restored" in entry:
            restored.setdefault(entry["restart"], set()).add(entry["restored"])
    assert all(len(versions) == 1 for versions in restored.values()), "both ranks restore the same version"
    reached = [next(iter(versions)) for _, versions in sorted(restored.items())]
    assert reached == sorted(reached) and reached[-1] > reached[1] > 0, "and a later restart never an older one"
    assert [entry["ended"] for entry in found if "ended" in entry] == [40, 40]


@pytest.mark.parametrize("point", ["shutdown.before", "shutdown.after"])
def test_a_trainer_killed_at_the_messages_of_shutdown_resumes_the_last_version(torch_server, jobs, tmp_path, point):
    journal = tmp_path / "journal"
    job = torch_server.start(fills(jobs, journal, 4, f"{point}@restart=0:kill"))
    assert job.wait(60)["status"] == "succeeded", job.tail()
    restored = [entry["restored"] for entry in entries(journal) if "restored" in entry]
    assert restored == [0, 4], "everything was sealed before the shutdown"
    assert_never_torn(entries(journal))


@pytest.mark.parametrize("message", ["attach", "restore", "shutdown"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_smp_killed_at_a_message_is_replaced_and_loses_nothing(torch_server, jobs, tmp_path, message, moment):
    """The first request of the kind that arrives after a version exists: a trainer is killed for attach and restore."""
    journal = tmp_path / "journal"
    hit = 1 if message == "shutdown" else 2
    faults = f"iteration.forward@hit=3,restart=0:kill;smp.{message}.{moment}@hit={hit},adopted=0:kill"
    job = torch_server.start(fills(jobs, journal, 5, faults, mib=64))
    assert job.wait(90)["status"] == "succeeded", job.tail()
    assert len(job.events("smp.lost")) >= 1, "the SMP was killed"
    assert len(job.events("segments.adopted")) >= 1, "a new one has adopted the segments"
    restored = [entry["restored"] for entry in entries(journal) if "restored" in entry]
    assert restored in ([0, 1], [0, 2]), "one restart, for the trainer; the SMP was replaced under its request"
    assert_never_torn(entries(journal))
    assert_at_most_one_lost(job)


def kill_trainer_at_random(job, journal, kills, rng, longest):
    """Kill the trainer `kills` times, each a random time after it has begun to train; the job restarts it each time."""
    for number in range(kills):
        wait_for(journal, lambda found, n=number: len(found) > n, 60)
        pid = job.events("rank.attached")[-1].pid
        descriptor = os.pidfd_open(pid)
        try:
            _pause(rng.uniform(0, longest))
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _pause(seconds):
    """The random moment itself is what is tested; nothing is waited for."""
    import time

    time.sleep(seconds)


@pytest.mark.timeout(3600)  # a hundred restarts, a bound of its own for each
@pytest.mark.parametrize(("old", "young"), [pytest.param(12, 4, id="short"), pytest.param(72, 32, id="long")])
def test_a_trainer_killed_at_random_times_resumes_a_complete_version(torch_server, jobs, tmp_path, old, young):
    """`old` times one job that has long had versions, and `young` jobs of which most die before they have three."""
    rng = random.Random(20261121)
    found = []
    journal = tmp_path / "long" / "journal"
    journal.parent.mkdir()
    spec = fills(jobs, journal, 1_000_000)
    job = torch_server.start(spec)
    try:
        kill_trainer_at_random(job, journal, old, rng, longest=0.4)
        found += wait_for(journal, lambda written: len(written) > old, 60)
        assert_at_most_one_lost(job)
    finally:
        job.kill()
    early = []
    for number in range(young):
        folder = tmp_path / f"y{number}"
        folder.mkdir()
        spec = fills(jobs, folder / "journal", 1_000_000)
        spec = jobs(**{**vars(spec), "name": f"y{os.getpid()}-{number}", "folder": str(folder)})
        running = torch_server.start(spec)
        try:
            kill_trainer_at_random(running, folder / "journal", 1, rng, longest=0.06)
            early += wait_for(folder / "journal", lambda written: len(written) > 1, 60)
            assert_at_most_one_lost(running)
        finally:
            running.kill()
        running.wait(60)
        with Client(spec.run_dir) as client:
            client.end()  # its 768 MiB are needed by the next ones
    assert_never_torn(found + early)
    slots = [entry["found"] for entry in found + early if entry.get("found")]
    dirty = sum("DIRTY" in states for states in slots)
    young_slots = sum("EMPTY" in states or states.count("CLEAN") < 2 for states in slots)
    print(json.dumps({"kills": len(slots), "dirty": dirty, "none_dirty": len(slots) - dirty, "young": young_slots}))
    assert len(slots) >= old + young - 4  # a job that dies at once has not looked at its slots
    if old + young > 100:  # enough to have met every state
        assert dirty >= 10 and len(slots) - dirty >= 10 and young_slots >= 10
