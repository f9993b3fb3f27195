"""The command with which a job waits for a lost node, given as it stands in the log, without what Slurm had given."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from harness.job_control import wait_until

BOUND = 240.0
SCRIPT = """\
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while not os.path.exists("go"):
    if os.path.exists("lost its peer") and os.environ["RANK"] == "0":
        os.remove("lost its peer")
        sys.exit(1)
    time.sleep(0.05)
"""


def test_the_command_in_the_log_brings_a_node_back_in_any_surroundings(own_environment, tmp_path):
    (tmp_path / "loop.py").write_text(SCRIPT)
    (tmp_path / "srun").write_text('#!/bin/sh\n[ "$6" = b ] && shift 6 && SLURM_STEP_NUM_NODES=1 exec "$@"\n')
    (tmp_path / "srun").chmod(0o700)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment |= {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(own_environment)}
    slurm = {
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(os.getpid()),
    }  # fmt: skip
    name = f"back-{os.getpid()}"
    command = [str(Path(sys.executable).with_name("ft-run")), "--ftp-job", name, "--reft", "--ftp-detect-seconds", "5"]
    started, logs = {}, [tmp_path / "a.log", tmp_path / "b.log"]
    ended = tmp_path / f"slurm-{os.getpid()}.ended"  # as train.sbatch makes it
    ended.touch()
    for node in "ab":
        surroundings = environment | slurm | {"SLURMD_NODENAME": node}
        with open(tmp_path / f"{node}.log", "wb") as log:
            started[node] = subprocess.Popen(
                [*command, "loop.py"], env=surroundings, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT
            )

    def said(pattern):
        text = "".join(path.read_text() for path in [*logs, *tmp_path.glob("*.out")])
        return re.findall(pattern, text, re.MULTILINE)

    def until(pattern, times=1):
        wait_until(lambda: len(said(pattern)) >= times, BOUND, lambda: str(said("^.*$")))
        return said(pattern)

    try:
        until("^rank", 2)
        started["b"].kill()
        (tmp_path / "lost its peer").touch()
        [(folder, line)] = until(r"to bring b back, in (\S+): (.*)$")
        assert "--ftp-node-name b" in line
        again = ["sh", "-c", f"cd {shlex.quote(folder)} && SLURM_JOB_ID={os.getpid()} {line.removesuffix(' &')}"]
        surroundings = environment | {"PATH": f"{tmp_path}:{environment['PATH']}"}
        started["b again"] = subprocess.Popen(again, env=surroundings, cwd="/")
        until("^rank", 4)
        (tmp_path / "go").touch()
        assert [started[node].wait(BOUND) for node in ("b again", "a")] == [0, 0], said("^.*$")
    finally:
        for process in started.values():
            process.kill()
            process.wait(BOUND)
    assert ended.read_text() == "0\n", "of the node in a step of its own: a shell of train.sbatch notes the others"
    assert sorted(said(r"^rank (\d) of 2$")) == ["0", "0", "1", "1"] and not said("goes on without b")
