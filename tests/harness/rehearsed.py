"""Rehearse a job by the command line, as a user does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def rehearsed(
    folder: Path, ranks: int, job: Sequence[object], *options: object, seconds: float, uncaptured: Sequence[str] = ()
) -> dict[str, Any]:
    """Rehearse ft-run with the words of `job`; logs and transcripts are in `folder`/out. Raises AssertionError unless
    it is exact after two restores, with nothing that is not captured but `uncaptured`. Returns the outcome."""
    tool = Path(sys.executable).with_name("ft-plugins")
    words = [tool, "rehearse", "--json", "--out", folder / "out", *options, "--"]
    words += ["ft-run", "--nproc-per-node", ranks, *job]
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    outcome: dict[str, Any] = json.loads(done.stdout)
    assert outcome["exact"] and len(outcome["comparison"]["restored"]) == 2, outcome
    assert outcome["comparison"]["uncaptured"] == list(uncaptured), outcome
    return outcome
