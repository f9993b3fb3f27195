"""The command with which a job waits for a node, given as it stands in the log, without what Slurm had given."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from harness.job_control import wait_until

BOUND = 240.0
SCRIPT = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"


def test_the_command_in_the_log_brings_a_node_back_in_any_surroundings(own_environment: Path, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment |= {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(own_environment)}
    slurm = {
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost",
        "SLURMD_NODENAME": "a", "SLURM_JOB_ID": str(os.getpid()),
    }  # fmt: skip
    name = f"back-{os.getpid()}"
    command = [str(Path(sys.executable).with_name("ft-run")), "--ftp-job", name, "--reft", "--ftp-detect-seconds", "5"]
    with open(tmp_path / "a.log", "wb") as log:
        first = subprocess.Popen(
            [*command, "loop.py"], env=environment | slurm, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT
        )
    said = re.compile(r"to start one, in (\S+): (.*)$", re.MULTILINE)
    try:
        wait_until(
            lambda: said.search((tmp_path / "a.log").read_text()) is not None, BOUND,
            lambda: (tmp_path / "a.log").read_text(),
        )  # fmt: skip
        found = said.search((tmp_path / "a.log").read_text())
        assert found is not None
        words = shlex.split(found[2])
        words[words.index("loop.py") : words.index("loop.py")] = ["--ftp-node-name", "b"]
        second = subprocess.run(
            ["sh", "-c", f"cd {shlex.quote(found[1])} && {shlex.join(words)}"], env=environment, cwd="/",
            capture_output=True, text=True, timeout=BOUND,
        )  # fmt: skip
        assert second.returncode == 0 == first.wait(BOUND), (second, (tmp_path / "a.log").read_text())
    finally:
        first.kill()
        first.wait(BOUND)
    printed = second.stdout + (tmp_path / "a.log").read_text()
    assert sorted(re.findall(r"rank (\d) of (\d)", printed)) == [("0", "2"), ("1", "2")]
