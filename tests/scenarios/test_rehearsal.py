"""A rehearsal of whole jobs: a loop that continues is exact, any other is named with its iteration and cause."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("loops_to_rehearse.py")
SECONDS = 1200.0  # a bound for a job that hangs


def rehearsed(folder, *words, options=(), ranks=1):
    """The outcome of a rehearsal, as programs see it."""
    tool = str(Path(sys.executable).with_name("ft-plugins"))
    job = ["ft-run", "--nproc-per-node", str(ranks), "--ftp-preload", "off", "--reft", *words]
    done = subprocess.run(
        [tool, "rehearse", "--json", "--out", str(folder), *options, "--", *job],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["exact"] == (done.returncode == 0), outcome
    return outcome


def test_a_loop_that_continues_is_exact_over_an_epochs_end_and_evaluations(tmp_path):
    outcome = rehearsed(tmp_path, str(SCRIPT), "--case", "exact", options=("--iterations", "13"))
    assert outcome["exact"], outcome
    assert outcome["kills"] == [5, 6] and outcome["comparison"]["restored"] == [3, 4], "each is computed again"
    missing = " ".join(outcome["not_exercised"])
    assert "an epoch's end" not in missing and "an evaluation" not in missing and "own checkpoint" in missing
    assert not list(Path("/dev/shm").glob("ftp-rehearsal-*"))


@pytest.mark.parametrize(
    ("case", "kind", "said"),
    [
        ("generator", "the batch", "main.noise a Generator"),  # drawn from a generator that starts again
        ("curriculum", "state", "main.seen 0, was "),  # the batch is right, what is made of it is not
        ("from_zero", "the batch", "iteration 4 reads what iteration 1 read"),
        ("rate", "learning rate", "learning rate 0.01 in place of 0.0025"),
    ],
)
def test_state_that_nothing_captures_is_named_by_the_first_iteration_that_lacks_it_and_by_what_begins_again(
    tmp_path, case, kind, said
):
    outcome = rehearsed(tmp_path, str(SCRIPT), "--case", case)
    difference = outcome["comparison"]["difference"]
    assert not outcome["exact"] and difference["iteration"] == 4 and difference["kind"] == kind
    assert said in " ".join(outcome["notices"])


def test_what_a_data_set_makes_later_is_restored_and_what_the_script_carries_is_named_under_the_verdict(tmp_path):
    outcome = rehearsed(tmp_path, str(SCRIPT), "--case", "later")
    assert outcome["exact"], outcome
    named = [line for line in outcome["notices"] if "since nothing restores it: main.running 0.0, was " in line]
    assert len(named) == 2 == len(outcome["kills"]), outcome["notices"]
    assert outcome["comparison"]["uncaptured"] == ["main.running", "main.seen"], outcome
    assert "another phase" not in " ".join(outcome["not_exercised"]), "a step of the rate was seen"


def test_data_that_no_seed_decides_is_not_exact_and_that_shows_without_a_failure(tmp_path):
    outcome = rehearsed(tmp_path, str(SCRIPT), "--case", "unseeded")
    difference = outcome["comparison"]["irreproducible"]
    assert not outcome["exact"] and (difference["iteration"], difference["kind"]) == (1, "the batch")


def test_kernels_that_are_not_deterministic_leave_everything_but_the_trajectory(tmp_path):
    outcome = rehearsed(tmp_path, str(SCRIPT), "--case", "kernel")
    assert outcome["exact"] and outcome["comparison"]["irreproducible"]["kind"] == "state"


def test_a_job_on_two_emulated_nodes_survives_the_loss_of_one(tmp_path):
    outcome = rehearsed(
        tmp_path, "launch/examples/torch_loop.py", "--iterations", "40", options=("--nodes", "2"), ranks=2
    )
    assert outcome["exact"], outcome
    assert len(outcome["comparison"]["restored"]) == 2
