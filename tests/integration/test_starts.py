"""Starts that do not come to an iteration: the lock of a killed build, ranks that all wait, nothing that attaches."""

import re
from pathlib import Path

import pytest

from ft_plugins.smp.watch import liveness

from .test_ft_run import LAST_LINE, TRAINER, Job

BUILDS = """
import os, signal, subprocess
from torch.utils.file_baton import FileBaton

folder = os.path.join(os.environ["EXTENSIONS"], "py311_cpu", "ext")
os.makedirs(folder, exist_ok=True)
baton = FileBaton(os.path.join(folder, "lock"))
if baton.try_acquire():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        compiler = subprocess.Popen(["sleep", "600"], cwd=folder, start_new_session=True, stdout=subprocess.DEVNULL)
        print("compiler", compiler.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    baton.release()
else:
    baton.wait()
"""
QUICK = """
import sys
from ft_plugins.launcher import command
from ft_plugins.launcher.agent import build_locks, start_watch
start_watch.LOOK_SECONDS = 2.0
start_watch.IDLE_SECONDS = build_locks.QUIET_SECONDS = 15.0
sys.exit(command.main())
"""
NEVER = "import torch\nprint('trained', flush=True)\n"


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    (tmp_path / "builds.py").write_text(BUILDS + TRAINER)
    (tmp_path / "never.py").write_text(NEVER)
    yield job
    job.clean()
    assert job.left_behind() == []


def test_ranks_that_start_again_do_not_wait_for_the_lock_of_a_build_that_was_killed(job):
    folder = str(job.folder / "extensions")
    run = job.start("--nproc-per-node", "2", script="builds.py", EXTENSIONS=folder, TORCH_EXTENSIONS_DIR=folder)
    assert run.end() == 0, run.output
    found = LAST_LINE.search(run.output)
    assert found and found[2] == "1", run.output
    [removed] = job.events("lock.removed")
    assert removed.fields["path"] == f"{folder}/py311_cpu/ext/lock"
    compiler = re.search(r"compiler (\d+)", run.output)
    assert compiler and not liveness.started(int(compiler[1])), "it would go on writing into the folder"


@pytest.mark.parametrize("known", [True, False], ids=["for a stale lock", "for something else"])
def test_a_start_in_which_all_ranks_wait_is_named_with_its_stacks_and_begins_again_once(job, known):
    lock = job.folder / "extensions" / "py311_cpu" / "ext" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (job.folder / "quick.py").write_text(QUICK)
    folder = {"TORCH_EXTENSIONS_DIR": str(job.folder / ("extensions" if known else "other"))}
    run = job.start(
        "--nproc-per-node", "2", script="builds.py", launcher=(str(job.folder / "quick.py"),),
        EXTENSIONS=str(job.folder / "extensions"), **folder,
    )  # fmt: skip
    if not known:
        run.read_until("job.waiting")
        lock.unlink()
    status, hung = run.end(), job.events("job.hung")
    for event in hung:
        assert event.fields["ranks"] == [0, 1] and "file_baton.py" in event.fields["reason"], event.fields
        assert "file_baton.py" in (Path(event.fields["stacks"]) / "rank1.txt").read_text()
    found = LAST_LINE.search(run.output)
    assert status == 0 and found and found[2] == "1", run.output
    assert (len(hung), len(job.events("lock.removed"))) == (1, known)
    assert len(job.events("job.waiting")) == len(job.events("job.advanced")) == (not known)


def test_a_script_that_never_attaches_is_an_alarm_and_ends_the_job_if_protection_is_required(job):
    run = job.start("--nproc-per-node", "2", script="never.py")
    assert run.end() == 0, run.output
    [line] = [line for line in run.output.splitlines() if "ranks.unattached" in line]
    assert "nothing is protected" in line and "ft_plugins.attach(host)" in line
    run = job.start("--nproc-per-node", "2", "--ftp-require-protection", script="never.py")
    assert run.end() == 78, run.output
    assert "ft-run: --ftp-require-protection: The script has run for long, or has ended" in run.output
