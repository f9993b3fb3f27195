"""The command for machines with a GPU, as far as one without can run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "gpu_check.sh"


def checked(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_its_measurement_runs_and_is_reported(tmp_path: Path) -> None:
    done = checked("--python", sys.executable, "--out", str(tmp_path), "--skip", "copies", "--skip", "jobs")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == report
    assert [(part["part"], part["status"]) for part in report["parts"]] == [("snapshot", 0)]
    assert {"slowdown", "on_a_device"} <= report["figures"].keys()
    assert "gpu_snapshot" in (tmp_path / "log.txt").read_text()


def test_what_it_does_not_know_is_named() -> None:
    for words, named in ((("--skp", "jobs"), "unknown argument '--skp'"), (("--out",), "--out needs a value")):
        done = checked(*words)
        assert (done.returncode, done.stdout) == (2, "") and named in done.stderr, done.stderr
