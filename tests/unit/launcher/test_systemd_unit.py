"""The unit of launch/systemd, as systemd itself reads it."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from ft_plugins.errors import EXIT_DRAINED, EXIT_REFUSED

UNIT = Path(__file__).parents[3] / "launch/systemd/ft-run@.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_every_line(tmp_path):
    made = tmp_path / "ft-run@my-job.service"
    made.write_text(UNIT.read_text())
    done = subprocess.run(["systemd-analyze", "verify", made], capture_output=True, text=True, timeout=120, check=False)
    assert made.name not in done.stderr, done.stderr  # other units of this machine may have faults


def test_a_refused_job_and_a_drained_node_are_not_started_again_and_its_memory_outlives_the_unit():
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert int(service["RestartPreventExitStatus"]) == EXIT_REFUSED and service["Restart"] == "on-failure"
    assert int(service["SuccessExitStatus"]) == EXIT_DRAINED
    assert service["KillMode"] == "process" and service["RuntimeDirectoryPreserve"] == "yes"
