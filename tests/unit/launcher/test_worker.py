"""The entry of a rank: real processes with what the agent gives them, without any process group.

Most are forked from this one, which has imported torch already; where the start itself matters, they are started as the
agent does it.
"""

import json
import os
import signal
import subprocess
import sys
from multiprocessing import get_context

import pytest

from ft_plugins.config import Config, worker_environment
from ft_plugins.launcher import worker

WAIT = 120.0
PLACE = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}


def environment(folder, flags, agent):
    """What the agent tells rank 3; its error file is error.json in `folder`."""
    config, _ = Config.from_flags(flags)
    told = PLACE | {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    return told | worker_environment(config, folder, 5, agent)


def started(folder, script, *words, module=False):
    """A rank with `script` as train.py, started."""
    (folder / "train.py").write_text(script)
    target = ["-m", "train"] if module else [str(folder / "train.py")]
    process = subprocess.run(
        [sys.executable, "-u", "-m", "ft_plugins.launcher.worker", *target, *words],
        env=os.environ | environment(folder, ("--reft",), os.getpid()),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    return process.returncode, process.stdout, process.stderr


def forked(folder, script, flags=("--reft",), agent=0):
    """A rank with `script` as train.py, forked."""
    (folder / "train.py").write_text(script)
    outputs = [folder / "out", folder / "err"]

    def rank():
        for descriptor, path in enumerate(outputs, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
        sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
        os.environ.update(environment(folder, flags, agent or os.getppid()))
        worker.main([str(folder / "train.py")])

    process = get_context("fork").Process(target=rank)
    process.start()
    process.join(WAIT)
    return process.exitcode, *(path.read_text() if path.exists() else "" for path in outputs)


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_a_script_runs_as_main_with_its_own_arguments_and_folder(tmp_path, module):
    (tmp_path / "beside.py").write_text("")
    script = (
        "import sys, beside, torch\n"
        "if __name__ == '__main__': print(sys.argv[1:], sys.argv[0].endswith('train.py'), torch.cuda.is_available())"
    )
    code, out, error = started(tmp_path, script, "--lr", "1", "-m", module=module)
    assert (code, out.strip()) == (0, "['--lr', '1', '-m'] True False"), error


def test_what_ft_run_decided_is_in_the_context_and_faults_are_armed(tmp_path):
    script = (
        "from ft_plugins.config import launch_context; from ft_plugins.base import faults\n"
        "c = launch_context(); print(c.rank, c.token, c.config.reft.interval, c.config.job)\n"
        "print(faults.reach('update.begin', iteration=2), faults.reach('update.begin', iteration=3))"
    )
    flags = ("--reft-interval=2", "--reft", "--ftp-job=j", "--ftp-faults=update.begin@iteration=2,rank=3,restart=0:inf")
    code, out, error = forked(tmp_path, script, flags=flags)
    assert (code, out.splitlines()) == (0, ["3 5 2 j", "inf None"]), error


def test_an_error_of_ours_is_reported_to_the_agent_in_one_line_without_a_traceback(tmp_path):
    script = "from ft_plugins.errors import *\nraise ResumeError('data changed;\\n resume with fresh')"
    code, _, error = forked(tmp_path, script)
    assert code == 78
    assert error == ""  # the agent prints the report, once
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ft_plugins: rank 3: data changed; resume with fresh"
    assert message["errorCode"] == 78


def test_an_error_that_names_its_rank_is_not_told_twice_whose_it_is(tmp_path):
    forked(tmp_path, "from ft_plugins.errors import *\nraise ResumeError('rank 3: data changed')")
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ft_plugins: rank 3: data changed"


@pytest.mark.parametrize("kind", ["ProtocolError", "ReplicaError"])
def test_a_lost_smp_and_replicas_that_differ_are_errors_that_a_restart_may_cure(tmp_path, kind):
    script = f"from ft_plugins.errors import *\nraise {kind}('the SMP hung up')"
    code, _, error = forked(tmp_path, script)
    assert (code, error) == (1, "ft_plugins: rank 3: the SMP hung up\n")


def test_other_errors_pass_unchanged_and_reach_the_agent(tmp_path):
    code, _, error = forked(tmp_path, "def train(): raise RuntimeError('out of memory')\ntrain()")
    assert code == 1
    assert "in train\n" in error and error.rstrip().endswith("RuntimeError: out of memory")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "RuntimeError: out of memory"


@pytest.mark.parametrize("status", [0, 3])
def test_the_scripts_own_exit_status_is_kept(tmp_path, status):
    assert forked(tmp_path, f"import sys; sys.exit({status})")[0] == status


def test_a_rank_whose_agent_has_died_before_it_could_bind_ends_at_once(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait(WAIT)
    code, out, _ = forked(tmp_path, "print('trains on')", agent=dead.pid)
    assert (code, out) == (-signal.SIGKILL, "")


def test_children_that_the_script_spawns_do_not_break(tmp_path):
    script = (
        "import multiprocessing\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(double, [1, 2]))\n"
        "    with multiprocessing.get_context('spawn').Manager() as manager: print(manager.list([3])[0])\n"
    )
    code, out, error = started(tmp_path, script)
    assert (code, out.splitlines()) == (0, ["[2, 4]", "3"]), error
