"""The world holds for the same seeds each time, and for others: what must hold, held."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900  # far more than it takes


def world(*arguments):
    """What `python -m tests.world` ends with, and says."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.world", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return found.returncode, found.stdout + found.stderr


def test_what_must_hold_holds_for_these_seeds():
    status, said = world("--first", "1", "--count", "24", "--seconds", "600", "--workers", "1")
    assert status == 0 and "24 jobs" in said, said


def test_what_must_hold_holds_for_fresh_seeds():
    status, said = world("--count", "6", "--seconds", "600", "--workers", "1")
    assert status == 0 and "6 jobs" in said, said  # which begins with the first seed


def test_a_seed_replays():
    first, second = (world("61", "--lines", "5000") for _ in range(2))
    assert first == second and "round 2, rank 0" in first[1], first[1]


def test_bugs_that_were_there_once_are_found():
    status, said = world("--bugs")
    assert status == 0, said


@pytest.mark.all_configurations
def test_what_must_hold_holds_for_two_minutes():
    status, said = world("--seconds", "120")
    print(said)
    assert status == 0, said
