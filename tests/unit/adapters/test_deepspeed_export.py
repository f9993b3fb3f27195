"""Exporting to DeepSpeed, one rank: what is exported equals what DeepSpeed saves at the same moment, value by value."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STORIES = Path(__file__).with_name("deepspeed_export_stories.py")

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The differences, by mode."""
    command = [sys.executable, "-W", "ignore", str(STORIES), str(tmp_path_factory.mktemp("exported"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and lines, done.stderr[-4000:]
    return dict(json.loads(lines[-1].removeprefix("FOUND ")))


MODES = [
    *("fp32 zero0", "fp32 zero1", "bf16 zero0", "bf16 zero0 accumulated in bf16", "bf16 zero1", "bf16 zero2"),
    *("bf16 zero2 frozen", "bf16 zero3", "pipeline fp32 zero0", "pipeline bf16 zero1"),
]


@pytest.mark.parametrize("mode", MODES)
def test_an_export_is_what_deepspeed_would_have_saved(found, mode):
    assert found[mode] == []


def test_what_deepspeed_itself_cannot_load_is_not_told(found):
    (problem,) = found["pipeline bf16 zero0"]
    assert "cannot load its own checkpoints of bf16 without ZeRO" in problem
