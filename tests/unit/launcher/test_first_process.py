"""ft-run as the first process of a container: a PID namespace of its own, as docker makes one."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WAIT = 240.0
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
ENTRY = "ft_plugins.launcher.first_process"
JOB_WITH_AN_ORPHAN = """
import pathlib, subprocess, sys, time, types
from ft_plugins.launcher import first_process

def job():
    pid = int(subprocess.run(["sh", "-c", "sleep 1 >/dev/null & echo $!"], stdout=subprocess.PIPE, check=True).stdout)
    deadline = time.monotonic() + 120
    while pathlib.Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, pathlib.Path(f"/proc/{pid}/status").read_text()
        time.sleep(0.02)
    print("reaped", flush=True)
    return 3

sys.modules["ft_plugins.launcher.command"] = types.SimpleNamespace(main=job)
if __name__ == "__main__":
    sys.exit(first_process.main())
"""


def permitted():
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not permitted(), reason="needs PID namespaces, which this user may not make")


@pytest.fixture
def start(tmp_path):
    started = []

    def start(*words):
        process = subprocess.Popen(
            [*NAMESPACE, sys.executable, *words], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def first_child(pid):
    """The process that `pid` has started, once there is one."""
    deadline = time.monotonic() + WAIT
    while not (found := children(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found[0]


def is_ready(pid):
    """Whether a SIGTERM to it is not dropped: it has a handler, or it has started what it passes signals on to."""
    [caught] = re.findall(r"^SigCgt:\s(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1 or children(pid))


def test_it_is_what_the_command_runs():
    assert f'"ft-run = {ENTRY}:main"' in (Path(__file__).parents[3] / "setup.py").read_text()


def test_a_signal_that_comes_before_torch_is_imported_ends_it(start):
    process = start("-c", f"import sys, {ENTRY} as entry; sys.exit(entry.main())", "--nproc-per-node", "1", "train.py")
    first = first_child(process.pid)
    deadline = time.monotonic() + WAIT
    while not (Path(f"/proc/{first}/cmdline").read_text().startswith(sys.executable) and is_ready(first)):
        assert "libtorch" not in Path(f"/proc/{first}/maps").read_text(), "torch is imported without a handler"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(first, signal.SIGTERM)
    output, _ = process.communicate(timeout=WAIT)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "ft-run: ended by SIGTERM before the job started" in output


def test_it_reaps_orphans_and_ends_as_the_job_does(start):
    process = start("-c", JOB_WITH_AN_ORPHAN)
    output, _ = process.communicate(timeout=WAIT)
    assert (process.returncode, output) == (3, "reaped\n")
