"""A driven job: followed, struck and cleaned up, with a real ft-run, a real SMP and two ranks of torch alone."""

import json
import os
import signal
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ft_plugins.rehearse.display import LineDisplay, display_on
from ft_plugins.rehearse.driven import GrowingLines
from ft_plugins.rehearse.driver import NODE, DriveError, DrivenJob, DrivePhase, Progress
from ft_plugins.smp.serve.client import Client
from ft_plugins.smp.serve.status import newest_common
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.segment.paths import segments_of
from ft_plugins.snapshot.segment.slots import Version
from harness.job_control import wait_until
from quickstart_report.comparison import RunRecord, compare_runs

ITERATIONS, WAITS_AT = 8, 5

SCRIPT = (
    f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parents[2])!r})
"""
    + """
    import json, signal, time
    import torch
    import torch.distributed as dist
    from ft_plugins import session
    from harness.plain_host import PlainHost
    from ft_plugins.config import launch_context
    from ft_plugins.smp.serve.client import Client

    losses, iterations, waits_at, fails_at = sys.argv[1], *map(int, sys.argv[2:])
    context = launch_context()
    dist.init_process_group("gloo")
    state = torch.ones(1000)
    protection = session.attach(PlainHost({"state": state}, rank=context.rank, world_size=2, replicated=True))
    completed = protection.resume()

    def until_named(step):  # as the next one to exchange, before it is captured: iterations are over in no time here
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with Client(context.run_dir) as client:
                version = client.status()["node_tier"]["exchange"]
            if version is not None and version[1] >= step:
                return
            time.sleep(0.01)
        raise TimeoutError(f"version {step} is not to be exchanged")

    for step in range(completed + 1, iterations + 1):
        if step < waits_at and not completed and context.local_world_size == 1:
            until_named(step)
        protection.iteration_begin(step)
        if step == fails_at:
            sys.exit(f"rank {context.rank} cannot go on")
        if step == waits_at and not completed:
            signal.pause()  # until it is killed
        protection.before_update(step)
        state *= 1.5
        protection.after_update(step)
        dist.barrier()
        if context.rank == 0:
            with open(losses, "a") as log:
                log.write(json.dumps({"iteration": step, "loss": float(state[0]), "time": time.time()}) + "\\n")
        protection.iteration_end(step)
    protection.shutdown()
    dist.destroy_process_group()
"""
)


def drive(folder, waits_at=0, fails_at=0, nodes=1):
    """Two ranks that wait to be killed, or fail, in an iteration of their first incarnation; 0: in none."""
    script, losses = folder / "job.py", folder / "loss.jsonl"
    script.write_text(textwrap.dedent(SCRIPT))
    arguments = ["--nproc-per-node", str(2 // nodes), "--reft", "--ftp-detect-seconds", "3"]
    arguments += ["--max-restarts", "0"] if fails_at else []
    arguments += [str(script), str(losses)]
    arguments += [str(number) for number in (ITERATIONS, waits_at, fails_at)]
    return DrivenJob(f"drive-{os.getpid()}-{folder.name[-20:]}", arguments, folder, losses, ITERATIONS, nodes)


def follow(job, until, iteration=0):
    """Everything seen until the job is in phase `until` with `iteration` logged; for at most two minutes."""
    deadline = time.monotonic() + 120
    seen = [job.follow(0.05, 100)]
    while not (seen[-1].phase is until and seen[-1].iteration >= iteration):
        assert time.monotonic() < deadline, seen[-1]
        seen.append(job.follow(0.05, 100))
    return seen


def common(job):
    """What both ranks of its only node hold complete: a loss is logged while its version is still being captured."""
    with Client(job.run_dir) as client:
        return newest_common(client.status())


def nothing_is_left(job, pids):
    """No process of the job, no segment, no run directory."""
    return not (segments_of(job.job, NODE) or job.run_dir.exists() or any(map(liveness.started, pids)))


@pytest.mark.all_configurations
def test_a_killed_rank_comes_back_and_nothing_is_left_at_the_end(tmp_path):
    with drive(tmp_path, waits_at=WAITS_AT) as job:
        before = follow(job, DrivePhase.TRAINING, iteration=WAITS_AT - 1)
        assert before[-1].attached == 2
        wait_until(lambda: common(job) == Version(1, WAITS_AT - 1), 60, lambda: f"complete is {common(job)}")
        pid = job.kill(1)
        after = follow(job, DrivePhase.DONE)
    assert nothing_is_left(job, [pid])
    phases = list(dict.fromkeys(progress.phase for progress in before + after))
    assert phases[0] is DrivePhase.STARTING and phases[-1] is DrivePhase.DONE and DrivePhase.RESTARTING in phases
    assert after[-1].iteration == ITERATIONS

    events = job.events()
    kill, failure = (next(e for e in events if e.name == name) for name in ("signal.sent", "worker.failed"))
    assert (kill.rank, kill.fields["killed_pid"], kill.fields["iteration"]) == (1, pid, WAITS_AT - 1)
    assert failure.rank == 1 and failure.fields["exitcode"] == -signal.SIGKILL and failure.time > kill.time

    failed = RunRecord(job.began, job.ended, events, job.losses())
    once = {entry.iteration: entry for entry in failed.losses}
    report = compare_runs(failed, replace(failed, losses=list(once.values())))
    assert report.proven, report.unproven
    assert report.restored_from is not None and report.restored_from.iteration == WAITS_AT - 1
    assert report.iterations_lost == 0 and report.restores == 1
    assert 0 < (report.seconds.detect or 0) < 30 and (report.seconds.load or 0) > 0
    assert [entry.loss for entry in once.values()] == [1.5**k for k in range(1, ITERATIONS + 1)]


def test_a_killed_node_is_gone_with_its_memory_and_a_fresh_one_takes_its_place(tmp_path):
    with drive(tmp_path, waits_at=WAITS_AT, nodes=2) as job:
        assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
        before = follow(job, DrivePhase.TRAINING, iteration=WAITS_AT - 1)
        assert before[-1].attached == 2
        wait_until(lambda: any(e.name == "version.committed" for e in job.events()), 60, lambda: "no commit")
        assert segments_of(job.job, "node1")
        assert job.kill_node() == ("node1", "node2")
        assert not segments_of(job.job, "node1")
        after = follow(job, DrivePhase.DONE)
    assert DrivePhase.RESTARTING in [progress.phase for progress in after] and after[-1].iteration == ITERATIONS
    assert not any(segments_of(job.job, f"node{number}") for number in range(3))
    assert not (job.run_dir.exists() or (tmp_path / "secret").exists())

    events = job.events()
    assert [event.time for event in events] == sorted(event.time for event in events)
    assert any(event.name == "rank.attached" and event.node == "node1" for event in events), "what it wrote is kept"
    (kill,) = (event for event in events if event.name == "signal.sent")
    assert (kill.node, kill.fields["lost"], kill.fields["ranks"]) == ("node0", "node1", [1])
    started = [event for event in events if event.name in ("job.started", "rank.attached", "smp.started")]
    assert {event.node for event in started} == {"node0", "node1", "node2"}
    assert not any(liveness.started(event.pid) for event in started)

    report = compare_runs(
        RunRecord(job.began, job.ended, events, job.losses()),
        RunRecord(job.began, job.ended, (), job.losses()[: WAITS_AT - 1] + job.losses()[-4:]),
    )
    assert report.proven and report.victim == "node1" and report.restored_from is not None, report.unproven
    assert report.restored_from.tier == "node"


def test_a_job_that_fails_is_told_with_its_log_and_leaves_nothing(tmp_path):
    with (
        pytest.raises(DriveError, match=r"status 1 in iteration 2, expected 0; see .*output\.log"),
        drive(tmp_path, fails_at=2) as job,
    ):
        follow(job, DrivePhase.DONE)
    assert "cannot go on" in job.tail()
    assert nothing_is_left(job, [])
    assert any(event.name == "job.ended" for event in job.events())


def test_a_job_that_stands_still_is_given_up_and_leaves_nothing(tmp_path):
    pids = []
    with pytest.raises(KeyboardInterrupt), drive(tmp_path, waits_at=WAITS_AT) as job:
        follow(job, DrivePhase.TRAINING, iteration=WAITS_AT - 1)
        pids += [event.pid for event in job.events() if event.name in ("rank.attached", "job.started", "smp.started")]
        assert len(pids) == 4 and all(map(liveness.started, pids))
        with pytest.raises(DriveError, match="cannot kill rank 7: it is not running"):
            job.kill(7)
        with pytest.raises(DriveError, match=r"no progress in training for 1 s; see .*output\.log"):
            while True:
                job.follow(0.1, patience=1.0)
        raise KeyboardInterrupt  # as by a user who has seen enough
    assert nothing_is_left(job, pids)
    job.release()  # again: nothing to do


def test_lines_are_written_where_there_is_no_terminal(capsys):
    display = display_on(Console(force_terminal=False, width=200), ranks=8)
    assert isinstance(display, LineDisplay)
    display.begin("the run", iterations=20)
    for iteration in range(0, 21):
        display.show(
            Progress(DrivePhase.TRAINING if iteration else DrivePhase.STARTING, iteration, 2.5, 8, 1.0 * iteration)
        )
    display.show(Progress(DrivePhase.RESTARTING, 20, 2.5, 3, 30.0))
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[   0.0 s] the run: start-up (8/8 ranks), iteration 0 loss 2.5000"
    assert lines[-1] == "[  30.0 s] the run: restart (3/8 ranks), iteration 20 loss 2.5000"
    assert len(lines) == 1 + 1 + 10 + 1


def test_where_it_is_not_known_how_many_ranks_a_job_has_those_that_are_there_are_counted(capsys):
    display = display_on(Console(force_terminal=False, width=200), ranks=None)
    display.begin("the run", iterations=20)
    display.show(Progress(DrivePhase.STARTING, 0, None, 3, 1.0))
    assert capsys.readouterr().out.rstrip() == "[   1.0 s] the run: start-up (3 ranks), iteration 0"


def test_a_line_still_being_written_is_read_once_it_is_whole(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = GrowingLines(path)
    assert lines.new() == []
    path.write_text('{"a": 1}\n{"a"')
    assert lines.new() == [{"a": 1}]
    with open(path, "a") as file:
        file.write(": 2}\n" + json.dumps({"a": 3}) + "\n")
    assert lines.new() == [{"a": 2}, {"a": 3}]
