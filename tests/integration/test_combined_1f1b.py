"""Megatron's combined 1F1B, which calls layers outside of modules: killed, and with a wrong copy, a job ends as a clean
one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("combined_1f1b.py")
JOB = ("--bf16", "--distributed-optimizer", "--iterations", "6", "--layers", "2", "--global-batch", "16")
RANKS = 4
BOUND = 280.0  # seconds; ten times what a run takes on two idle cores
KILLED = ("--reft", "--ftp-faults", "update.middle@iteration=4,rank=1,restart=0:kill")
AUDIT = ("--paft", "--paft-mode", "audit", "--paft-audit-interval", "1")
FLIPPED = (*AUDIT, "--ftp-faults", "update.copies@iteration=3,rank=2:flip=12~5")


@pytest.fixture(scope="module")
def folder(own_environment):
    place = own_environment / "combined"
    for one in (place, place / "r"):
        one.mkdir(mode=0o700)
    return place


def run(folder, name, *flags):
    """Exit status, output, and the final state of each rank."""
    words = ["-m", "ft_plugins.launcher.command", "--nproc-per-node", str(RANKS), str(SCRIPT), *JOB, *flags]
    words += ["--state-digest", str(folder / name), *(("--ftp-job", name) if flags else ())]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "XDG_RUNTIME_DIR": str(folder / "r"),
    }
    told = folder / f"{name}.log"  # no pipe: an SMP that stays has the launcher's open
    with told.open("w") as out:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=out, timeout=BOUND)
    states = [path.read_bytes() for path in sorted(folder.glob(f"{name}0*.json"))]
    return done.returncode, told.read_text(), states


@pytest.fixture(scope="module")
def clean(folder):
    """The final state of an unprotected run."""
    status, output, states = run(folder, "clean")
    assert status == 0 and len(states) == RANKS, output[-3000:]
    return states


def test_a_job_that_is_killed_within_an_update_ends_as_the_unprotected_one(folder, clean):
    status, output, states = run(folder, "killed", *KILLED)
    said = "".join(path.read_text() for path in folder.glob("r/ft_plugins/killed/*/events.jsonl"))
    assert status == 0 and "state.restored" in output + said, output[-3000:]
    assert states == clean


def test_a_wrong_copy_is_found_and_its_iteration_computed_again(folder, clean):
    status, output, states = run(folder, "flipped", *FLIPPED)
    assert status == 0 and "audit.failed: rank 0" in output and "after iteration 3" in output, output[-3000:]
    assert "gradients are recomputed" in output
    assert states == clean
