"""What ft-run takes from Slurm where the user gave no flags."""

import itertools
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from ft_plugins.errors import ConfigError
from ft_plugins.launcher import command, slurm
from ft_plugins.launcher.node_launch import Outcome
from ft_plugins.launcher.rendezvous import wait_report

STEP = {
    "SLURM_STEP_NUM_NODES": "5", "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "n[001-003,7],m2",
    "SLURMD_NODENAME": "n002", "SLURM_JOB_ID": "1017",
}  # fmt: skip
ENDPOINTS = "n001:29417,n002:29417,n003:29417,n7:29417"


def plan(folder, *words, **changed):
    (folder / "train.py").write_text("")
    return command.plan([*words, "train.py"], 1000, str(folder), "host0", STEP | changed)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[001-003,7],m2", ["n001", "n002", "n003", "n7", "m2"]),
        ("r[1-2]n[09-10]-ib", ["r1n09-ib", "r1n10-ib", "r2n09-ib", "r2n10-ib"]),
        ("one", ["one"]),
    ],
)
def test_a_host_list_names_its_hosts_in_order(text, names):
    assert list(slurm.expand(text)) == names


def test_of_a_huge_range_only_the_names_that_are_wanted_are_made():
    assert list(itertools.islice(slurm.expand("n[1-999999999][1-999999999]"), 2)) == ["n11", "n12"]


@pytest.mark.parametrize(
    "text", ["", "n[1-", "n[3-1]", "n[1--2]", "a,,b", "a,", "n[]", "n[1-2[3]]", "n" + "[1]" * 2000, "x" * 70_000]
)
def test_what_is_no_host_list_is_refused_by_name(text):
    with pytest.raises(ConfigError, match=r"SLURM_STEP_NODELIST.*give --rdzv-endpoint"):
        list(slurm.expand(text))


def test_in_a_step_over_several_nodes_all_is_taken_and_said(tmp_path):
    found = plan(tmp_path, "--reft")
    assert (found.torch.nnodes, found.torch.rdzv_endpoint, found.node) == ("5", ENDPOINTS, "n002")
    assert found.from_slurm == f"--nnodes 5 --rdzv-endpoint {ENDPOINTS} --ftp-node-name n002"


def test_flags_that_are_given_win_each_for_itself(tmp_path):
    found = plan(tmp_path, "--reft", "--nnodes", "4", "--ftp-node-name", "mine")
    assert (found.torch.nnodes, found.torch.rdzv_endpoint, found.node) == ("4", ENDPOINTS, "mine")
    found = plan(tmp_path, "--reft", "--rdzv-endpoint", "b:1")
    assert (found.torch.nnodes, found.torch.rdzv_endpoint) == ("5", "b:1")


def test_nothing_is_taken_on_one_node_and_without_a_system(tmp_path):
    for found in (plan(tmp_path, "--reft", SLURM_STEP_NUM_NODES="1"), plan(tmp_path)):
        assert (found.torch.nnodes, found.torch.rdzv_endpoint, found.node) == ("1:1", "", "host0")
        assert not found.from_slurm


def test_several_tasks_on_a_node_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match="40 tasks on 5 nodes.*--ntasks-per-node=1"):
        plan(tmp_path, "--reft", SLURM_STEP_NUM_TASKS="40")


@pytest.mark.parametrize("nodes", ["1", "5"])
def test_a_heterogeneous_job_is_refused_unless_the_nodes_that_belong_together_are_given(tmp_path, nodes):
    het = {"SLURM_HET_SIZE": "2", "SLURM_STEP_NUM_NODES": nodes, "SLURM_STEP_NUM_TASKS": nodes}
    with pytest.raises(ConfigError, match=r"heterogeneous \(2 components\).*give --nnodes and --rdzv-endpoint"):
        plan(tmp_path, "--reft", **het)
    found = plan(tmp_path, "--reft", "--nnodes", "6", "--rdzv-endpoint", "b:1", **het)
    assert (found.torch.nnodes, found.torch.rdzv_endpoint) == ("6", "b:1")
    assert plan(tmp_path, "--reft", **STEP, SLURM_HET_SIZE="").torch.nnodes == "5"


# ---- launch/slurm/train.sbatch

SCRIPT = Path(__file__).parents[3] / "launch/slurm/train.sbatch"
DRAINED = str(Outcome("drained").exit_status)


def stand_ins(folder, commands):
    """Make these commands of Slurm in `folder`; the environment of a batch script that finds them."""
    for name, line in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o700)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}", "FT_SECRET": str(folder / "job.secret"),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "my-job", "SLURM_RESTART_COUNT": "1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("statuses", "requeued", "status", "allowed"),
    [
        (f"{DRAINED} 143", True, 1, 1), (DRAINED, True, 1, 1),  # the others are lost
        (f"{DRAINED} 1 1", False, 1, 1),  # it failed once more
        (f"{DRAINED} 0 0", False, 0, 1), (f"{DRAINED} 78", False, 78, 1), ("143 143", True, 1, 1), ("0 0", False, 0, 1),
        ("143 143", False, 1, 0),  # --no-requeue, of which scontrol would complain
    ],
)  # fmt: skip
def test_a_node_that_was_drained_does_not_decide_whether_the_job_is_requeued(
    statuses, requeued, status, allowed, tmp_path
):
    """Slurm's commands are stand-ins: `srun` has each node end with one of these statuses."""
    (tmp_path / "job.secret").write_text("secret")
    commands = {
        "squeue": "echo 7.batch",
        "srun": '[ "$1" = --wait=0 ] || exit 90; shift 3\n'
        'for status in $STATUSES; do "${@:1:4}" sh -c "exit $status" & done; wait',
        "scontrol": 'echo "$1" >> asked; echo "JobId=7 JobState=RUNNING Reason=None Requeue=$REQUEUE Restarts=0"',
    }
    environment = stand_ins(tmp_path, commands) | {"STATUSES": statuses, "REQUEUE": str(allowed)}
    done = subprocess.run(["bash", SCRIPT, "train.py"], env=environment, cwd=tmp_path, timeout=600, check=False)
    asked = (tmp_path / "asked").read_text().split() if (tmp_path / "asked").exists() else []
    assert ("requeue" in asked, done.returncode) == (requeued, status)


def test_the_script_waits_for_a_node_that_was_brought_back_and_passes_its_end_and_signals_on(tmp_path):
    """All nodes of its own step were drained; the first look at the steps fails. The step of the other node ends
    when it is signalled, with status 0."""
    (tmp_path / "job.secret").write_text("secret")
    commands = {
        "srun": "echo $PPID > script",
        "sleep": "exec /bin/sleep 0.05",
        "squeue": '[ -e failed ] || { touch failed; exit 1; }; echo 7.batch; echo 7.extern; [ -s "$ENDED" ] && exit\n'
        "echo 7.3; [ -e signalled ] || kill -USR1 $(cat script)",
        "scancel": '[ "$*" = "--signal=TERM 7" ] && touch signalled && echo 0 >> "$ENDED"',
        "scontrol": "touch asked; echo JobState=RUNNING Reason=None Requeue=1",
    }
    done = subprocess.run(
        ["bash", SCRIPT, "train.py"], env=stand_ins(tmp_path, commands), cwd=tmp_path, timeout=600, check=False
    )
    assert done.returncode == 0 and (tmp_path / "signalled").exists() and not (tmp_path / "asked").exists()


def test_the_command_for_another_node_is_whole_without_slurm_and_with_what_only_surroundings_gave(
    tmp_path, monkeypatch
):
    """As an operator gives it: `srun --jobid JOB --overlap -N1 -w NODE`, whose step has one node, or by ssh."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    given = plan(tmp_path, "--reft", "--ftp-node-name", "mine")
    monkeypatch.delenv("PET_NPROC_PER_NODE")
    words = shlex.split(wait_report.command(["/opt/bin/ft-run", *given.words]))
    assert words[0] == "/opt/bin/ft-run" and "mine" not in words
    again = command.plan(words[1:], 1001, str(tmp_path), "n7", {})
    wanted = ("nnodes", "rdzv_endpoint", "nproc_per_node", "training_script", "training_script_args")
    assert [getattr(again.torch, name) for name in wanted] == [getattr(given.torch, name) for name in wanted]
    assert (again.job, again.node, again.torch.nproc_per_node) == (given.job, "n7", "4")
    assert again.words == tuple(words[1:]), "nothing is left to be said"
    found = wait_report.how_to_start(shlex.join(words), "n001:29417", ["n003"]).partition(": ")[2]
    back = command.plan(shlex.split(found)[1:], 1001, str(tmp_path), "n7", {})
    assert (back.job, back.node) == (given.job, "n003"), "a lost node comes back as itself"
