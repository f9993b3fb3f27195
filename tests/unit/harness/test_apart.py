"""What the tests leave in shared memory is found, what other jobs of the machine have there is not."""

import os
import subprocess
from pathlib import Path

import pytest

APART = Path(__file__).resolve().parents[2] / "apart.sh"


def apart(script):
    done = subprocess.run(["bash", str(APART), "bash", "-c", script], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout


def test_what_a_command_leaves_behind_is_a_failure_and_its_own_failure_stays_one():
    name = f"/dev/shm/ftp-apart-{os.getpid()}@n@0.lock"
    try:
        assert apart(f"touch {name}") == (1, f"FAILED: left behind in /dev/shm:\n{name}\n")
    finally:
        Path(name).unlink(missing_ok=True)
    assert apart(f"touch {name}; rm {name}; exit 3") == (3, "")


def test_a_lock_of_another_job_that_begins_meanwhile_is_no_failure(tmp_path):
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no permission for a /dev/shm of its own")
    other, gate = Path(f"/dev/shm/ftp-other-{os.getpid()}@n@0.lock"), tmp_path / "gate"
    os.mkfifo(gate)
    command = ["bash", str(APART), "bash", "-c", f"echo > {gate}; read < {gate}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert gate.read_text() == "\n", "it has looked at what there is"
        other.touch()
        gate.write_text("\n")
        assert (process.communicate(timeout=300)[0], process.returncode) == ("", 0)
    finally:
        process.kill()
        other.unlink(missing_ok=True)
