"""What a rehearsal runs, where it kills, and which commands it refuses."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ft_plugins.adapters.data.left_passes import LONGER
from ft_plugins.cli.rehearse_command import rehearse
from ft_plugins.errors import ConfigError
from ft_plugins.rehearse import rehearsal
from ft_plugins.rehearse.driver import DriveError
from ft_plugins.rehearse.rehearsal import faults_of, place_kills, plan_rehearsal, report
from ft_plugins.rehearse.transcripts import TranscriptEntry


def planned(*words, iterations=12, kills=(), nodes=1):
    return plan_rehearsal(words, Path("/out"), iterations, kills, nodes, 60.0)


def test_a_rehearsal_is_a_job_of_its_own_with_checkpoints_of_its_own():
    plan = planned(
        "ft-run", "--nproc-per-node", "2", "train.py", "--lr", "1", "--reft", "--ftp-job", "real",
        "--ftp-resume=storage", "--reft-checkpoint-dir", "/shared/checkpoints",
    )  # fmt: skip
    words = " ".join(plan.arguments)
    assert "real" not in words and "storage" not in words and "/shared" not in words
    assert "--reft-checkpoint-dir={run}/reft-checkpoints" in plan.arguments
    assert plan.arguments[-5:] == ("--nproc-per-node", "2", "train.py", "--lr", "1")


def test_a_script_that_saves_by_itself_needs_a_folder_for_each_run():
    with pytest.raises(ConfigError, match=r"--save: both runs would save there"):
        planned("train.py", "--reft", "--save", "/real")
    assert "{run}/c" in planned("train.py", "--reft", "--save", "{run}/c").arguments


def test_faults_and_kills_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="--ftp-faults"):
        planned("train.py", "--reft", "--ftp-faults=update.end@iteration=1:kill")
    for kills in ((1, 5), (5, 12), (6, 5), (5, 5)):
        with pytest.raises(ConfigError, match="expected iterations in order"):
            planned("train.py", "--reft", kills=kills)
    with pytest.raises(ConfigError, match="expected a command"):
        planned("ft-run")


def test_two_emulated_nodes_take_half_of_the_processes_each(monkeypatch):
    plan = planned("ft-run", "--nproc_per_node=8", "--reft", "train.py", nodes=2)
    assert "--nproc-per-node=4" in plan.arguments and "--nproc_per_node=8" not in plan.arguments
    plan = planned("ft-run", "--nproc-per-node", "4", "train.py", "--reft", "--nproc-per-node", nodes=2)
    assert plan.arguments.index("--nproc-per-node=2") < plan.arguments.index("train.py")
    assert plan.arguments[-1] == "--nproc-per-node"  # the script's own
    with pytest.raises(ConfigError, match="expected an even number"):
        planned("ft-run", "--nproc-per-node", "3", "train.py", "--reft", nodes=2)
    monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
    assert "--nproc-per-node=4" in planned("ft-run", "train.py", "--reft", nodes=2).arguments


@pytest.mark.parametrize(
    ("iterations", "ends", "kills"),
    [
        (12, (), (5, 6)),
        (12, (9,), (5, 6)),  # an epoch ends after the kills anyway
        (12, (5,), (3, 4)),  # the only end is before: kill earlier
        (30, (4,), (2, 3)),
        (40, (17, 33), (19, 20)),  # in the second epoch, and a third one comes
        (20, (9, 17), (10, 11)),
        (4, (), (2, 3)),
    ],
)
def test_kills_are_placed_so_that_an_epochs_end_comes_after_them(iterations, ends, kills):
    assert place_kills(iterations, ends) == kills
    assert 2 <= kills[0] < kills[1] < iterations


def test_the_last_rank_is_killed_first_then_the_first_and_a_node_is_held_for_its_kill():
    assert faults_of((5, 6), 8, 1) == (
        "update.end@iteration=5,rank=7,restart=0:kill;update.end@iteration=6,rank=0,restart=1:kill"
    )
    assert faults_of((5, 6), 8, 2).startswith("update.end@iteration=5,rank=7,restart=0:stop;")


def test_a_rehearsal_that_is_stopped_by_a_signal_leaves_by_way_of_its_clean_up(monkeypatch, tmp_path):
    cleaned = []

    def stopped(plan, display):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            cleaned.append(plan)

    monkeypatch.setattr("ft_plugins.rehearse.rehearsal.rehearse", stopped)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as ended:
            rehearse(SimpleNamespace(args=["ft-run", "train.py", "--reft"]), out=tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM and len(cleaned) == 1


ROUTINE = (
    "ft_plugins: training starts from the beginning (no version was captured before); lineage 1",
    "ft_plugins: recovery: iteration 4 of lineage 1 from the process tier; every rank had completed 4, 0 lost; "
    "iteration 5 is computed next, again if it was logged before; lineage 2",
    "loss 0.3: the best was not captured",  # the script's own
)
BEGINS_AGAIN = (
    "ft_plugins: rank 0: begun again after the restore, since nothing restores it: main.running 0.0, was 0.18",
    "ft_plugins: state.ema (a Average) is not captured, being an object or too large, and begins again after a restart",
    "ft_plugins: data position of 'train': its workers draw; a restart will be refused",
    f"ft_plugins: {LONGER}",
)


@pytest.mark.parametrize("fails", [False, True])
def test_under_a_verdict_stands_each_line_of_either_run_that_names_what_begins_again(monkeypatch, tmp_path, fails):
    plan = plan_rehearsal(("train.py", "--reft"), tmp_path, 12, (5, 6), 1, 60.0)

    def run(plan, name, *rest):
        log = plan.folder / name / ("output.log" if name == "unfailed" else "node0/output.log")
        log.parent.mkdir(parents=True)
        said = BEGINS_AGAIN[:1] if name == "unfailed" else BEGINS_AGAIN
        log.write_text("\n".join([*ROUTINE, *said, *said]))
        if fails and name == "failed":
            raise DriveError("it ended")
        seen = {"batch": "b", "rate": None, "loss": None, "norm": None}
        return [TranscriptEntry(0, "iteration", at, 1, seen, (), {}, {}, world_size=1) for at in range(1, 13)]

    monkeypatch.setattr(rehearsal, "_run", run)
    outcome = rehearsal.rehearse(plan, SimpleNamespace())
    assert outcome.notices == BEGINS_AGAIN
    assert (outcome.comparison is None) == fails
    lines = report(outcome).splitlines()
    assert [line.strip() for line in lines if line.startswith("  ft_plugins")] == list(BEGINS_AGAIN)
