"""The entry of a rank: real processes, started as the agent starts them, without any process group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ft_plugins.config import Config, worker_environment

WAIT = 60.0
PLACE = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}


def start(
    tmp_path: Path, script: str, *words: str, flags: tuple[str, ...] = ("--reft",), agent: int = 0, module: bool = False
) -> subprocess.Popen[str]:
    """A rank with `script` as train.py, its error file in tmp_path/error.json."""
    (tmp_path / "train.py").write_text(script)
    config, _ = Config.from_flags(flags)
    environment = os.environ | PLACE | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    environment |= worker_environment(config, tmp_path, 5, agent or os.getpid())
    target = ["-m", "train"] if module else [str(tmp_path / "train.py")]
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "ft_plugins.launcher.worker", *target, *words],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=WAIT)
    return process.returncode, out, error


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_a_script_runs_as_main_with_its_own_arguments_and_folder(tmp_path: Path, module: bool) -> None:
    (tmp_path / "beside.py").write_text("")
    script = (
        "import sys, beside, torch\n"
        "if __name__ == '__main__': print(sys.argv[1:], sys.argv[0].endswith('train.py'), torch.cuda.is_available())"
    )
    code, out, error = ended(start(tmp_path, script, "--lr", "1", "-m", module=module))
    assert (code, out.strip()) == (0, "['--lr', '1', '-m'] True False"), error


def test_what_ft_run_decided_is_in_the_context_and_faults_are_armed(tmp_path: Path) -> None:
    script = (
        "from ft_plugins.config import launch_context; from ft_plugins import faults\n"
        "c = launch_context(); print(c.rank, c.token, c.config.reft.interval, c.config.job)\n"
        "print(faults.reach('update.begin', iteration=2), faults.reach('update.begin', iteration=3))"
    )
    flags = ("--reft-interval=2", "--reft", "--ftp-job=j", "--ftp-faults=update.begin@iteration=2,rank=3,restart=0:inf")
    code, out, error = ended(start(tmp_path, script, flags=flags))
    assert (code, out.splitlines()) == (0, ["3 5 2 j", "inf None"]), error


def test_an_error_of_ours_is_reported_to_the_agent_in_one_line_without_a_traceback(tmp_path: Path) -> None:
    script = "from ft_plugins.errors import *\nraise ResumeError('data changed;\\n resume with fresh')"
    code, _, error = ended(start(tmp_path, script))
    assert code == 78
    assert error == ""  # the agent prints the report, once
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ft_plugins: rank 3: data changed; resume with fresh"
    assert message["errorCode"] == 78


def test_a_lost_smp_is_an_error_that_a_restart_may_cure(tmp_path: Path) -> None:
    script = "from ft_plugins.errors import *\nraise ProtocolError('the SMP hung up')"
    code, _, error = ended(start(tmp_path, script))
    assert (code, error) == (1, "ft_plugins: rank 3: the SMP hung up\n")


def test_other_errors_pass_unchanged_and_reach_the_agent(tmp_path: Path) -> None:
    code, _, error = ended(start(tmp_path, "def train(): raise RuntimeError('out of memory')\ntrain()"))
    assert code == 1
    assert "in train\n" in error and error.rstrip().endswith("RuntimeError: out of memory")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "RuntimeError: out of memory"


@pytest.mark.parametrize("status", [0, 3])
def test_the_scripts_own_exit_status_is_kept(tmp_path: Path, status: int) -> None:
    assert ended(start(tmp_path, f"import sys; sys.exit({status})"))[0] == status


def test_a_rank_whose_agent_has_died_before_it_could_bind_ends_at_once(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait(WAIT)
    code, out, _ = ended(start(tmp_path, "print('trains on')", agent=dead.pid))
    assert (code, out) == (-signal.SIGKILL, "")


def test_children_that_the_script_spawns_do_not_break(tmp_path: Path) -> None:
    script = (
        "import multiprocessing\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(double, [1, 2]))\n"
        "    with multiprocessing.get_context('spawn').Manager() as manager: print(manager.list([3])[0])\n"
    )
    code, out, error = ended(start(tmp_path, script))
    assert (code, out.splitlines()) == (0, ["[2, 4]", "3"]), error
