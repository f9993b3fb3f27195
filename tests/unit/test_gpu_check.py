"""The command for machines with a GPU, as far as one without can run it."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "gpu_check.sh"


def checked(*words, cwd=None):
    command = ["bash", str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=580, check=False, cwd=cwd)


def test_its_measurement_runs_and_is_reported(tmp_path):
    done = checked("--python", sys.executable, "--out", str(tmp_path), "--skip", "copies", "--skip", "jobs")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == report
    assert [(part["part"], part["status"]) for part in report["parts"]] == [("snapshot", 0)]
    assert {"slowdown", "on_a_device"} <= report["figures"].keys()
    assert "gpu_snapshot" in (tmp_path / "log.txt").read_text()


def test_what_it_does_not_know_is_named():
    for words, named in (
        (("--skp", "jobs"), "unknown argument '--skp'"),
        (("--skip", "job"), "unknown part 'job'"),
        (("--out",), "--out needs a value"),
    ):
        done = checked(*words)
        assert (done.returncode, done.stdout) == (2, "") and named in done.stderr, done.stderr


def test_a_folder_is_one_of_where_it_is_called(tmp_path):
    skipped = [word for part in ("copies", "jobs", "snapshot") for word in ("--skip", part)]
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o700)
    done = checked("--python", "./python", "--out", "out", *skipped, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out" / "report.json").read_text())["parts"] == []


def test_without_a_report_it_has_failed(tmp_path):
    skipped = [word for part in ("copies", "jobs", "snapshot") for word in ("--skip", part)]
    assert checked("--python", "false", "--out", str(tmp_path), *skipped).returncode == 1
