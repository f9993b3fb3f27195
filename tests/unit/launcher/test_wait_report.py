"""What a job's log says while a node is waited for."""

import os
import sys

import pytest

from ft_plugins.launcher.rendezvous.wait_report import WaitReport, awaited, command, how_to_start, reaching
from ft_plugins.launcher.rounds.rounds import Rules


@pytest.mark.parametrize(
    ("rules", "waiting", "missing", "alive", "said"),
    [
        (Rules(2, 2), 1, ["b"], "", "waiting for a node in the place of b"),
        (Rules(4, 4), 2, ["b", "c"], "", "waiting for nodes in the place of b, c"),
        (Rules(2, 4), 3, ["b"], "", "waiting for a node in the place of b; otherwise it continues with 3"),
        (Rules(4, 4), 1, [], "", "waiting for 3 more of 4 nodes"),
        (Rules(2, 8, (4, 8)), 3, [], "", "waiting for 1 more of 4 nodes"),
        (Rules(2, 4), 3, [], "", ""),
        (Rules(2, 2), 1, ["b\x1b[2J"], "", "waiting for a node in the place of 'b\\x1b[2J'"),
        (
            Rules(4, 4), 1, ["a", "d", "c"], "ad",
            "waiting for a node in the place of c and for a, d, alive, to end the old ranks",
        ),
        (Rules(4, 4), 2, ["a", "d"], "ad", "waiting for a, d, alive, to end the old ranks"),
    ],
)  # fmt: skip
def test_it_is_said_whom_a_round_waits_for_and_who_lives_is_not_to_be_replaced(rules, waiting, missing, alive, said):
    absent = [name for name in missing if name not in alive]
    assert awaited(rules, waiting, missing, absent) == (said, not missing or bool(absent))


def test_the_command_is_the_one_given_here_without_what_is_this_nodes_own():
    own = ["--ftp-node-name", "a", "--local-addr=10.0.0.1"]
    assert (
        command(["/opt/bin/ft-run", "--nnodes", "2", *own, "train.py", "--name", "x y"])
        == "/opt/bin/ft-run --nnodes 2 train.py --name 'x y'"
    )
    python = sys.executable
    found = command(["/src/ft_plugins/launcher/command.py", "train.py"])
    assert found == f"{python} -m ft_plugins.launcher.command train.py"
    assert command(["/src/torch/distributed/run.py", "train.py"]) == f"{python} /src/torch/distributed/run.py train.py"
    assert command(["/opt/bin/torchrun", "--node-rank", "0", "train.py"]) == "/opt/bin/torchrun train.py"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("--rdzv-endpoint a:29400,b:29400", "--rdzv-endpoint 10.0.0.3:29400,a:29400,b:29400"),
        ("--rdzv_endpoint=a,b", "--rdzv_endpoint=10.0.0.3:29400,a,b"),
        ("--rdzv-endpoint a:1,10.0.0.3", "--rdzv-endpoint a:1,10.0.0.3"),
        ("--nproc-per-node 2", "--nproc-per-node 2"),
    ],
)
def test_the_command_names_a_node_that_lives(given, found):
    assert reaching(f"ft-run --nnodes 2 {given} train.py", "10.0.0.3:29400") == f"ft-run --nnodes 2 {found} train.py"


def test_a_lost_node_comes_back_under_its_own_name():
    given = "ft-run --ftp-job j --rdzv-endpoint a:1 train.py"
    named = "ft-run --ftp-node-name b --ftp-job j --rdzv-endpoint a:1 train.py"
    assert how_to_start(given, "a:1", ["b"]) == f"to bring b back, in {os.getcwd()}: {named}"
    found = how_to_start(given, "a:1", ["b", "c", "d"], ", as a spare")
    assert found == f"to bring b back, as a spare (and c, d, each with its own name), in {os.getcwd()}: {named}"
    assert how_to_start("torchrun train.py", "a:1", ["b"]).endswith(": torchrun train.py"), "it has no such flag"
    assert how_to_start(given, "a:1") == f"to start one, in {os.getcwd()}: {given}"


def test_in_a_job_of_slurm_a_node_is_brought_back_by_a_step_of_that_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    step, log = "nohup srun --jobid 7 --overlap -N1 -w", ">> slurm-7.out 2>&1 &"
    given = "ft-run --ftp-job j train.py"
    assert how_to_start(given, "a:1", ["b"]).endswith(f": {step} b ft-run --ftp-node-name b --ftp-job j train.py {log}")
    assert how_to_start(given, "a:1").endswith(f": {step} NODE {given} {log}")


def test_the_lead_says_it_every_thirty_seconds_and_the_others_once(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    lead, other = (WaitReport(10.0, "ft-run train.py") for _ in range(2))
    said = {"lead": [], "other": []}
    for _ in range(950):
        for name, each in (("lead", lead), ("other", other)):
            each.update("waiting for a node in the place of b", True, name == "lead", 400.0, "c:29400")
            if text := capsys.readouterr().err:
                said[name].append(round(now[0] - 100.0))
                left = f"for another {400.0 - now[0]:.0f} s at most"
                words = f"ft-run: waiting for a node in the place of b ({left}); to start one, in {os.getcwd()}: "
                assert text == f"{words}ft-run train.py\n"
        now[0] += 0.1
    assert said == {"lead": [10, 40, 70], "other": [10]}


def test_why_others_may_not_find_this_node_comes_first(capsys):
    report = WaitReport(0.0, "ft-run train.py", lambda: "port 29400 is taken")
    report.update("waiting for 1 more of 2 nodes", True, True, 1e9, "a:1")
    assert capsys.readouterr().err.startswith("ft-run: port 29400 is taken; waiting for 1 more of 2 nodes (for")
    assert report.trouble == "port 29400 is taken"


def test_a_node_that_lives_is_not_started_again(capsys):
    WaitReport(0.0, "ft-run train.py").update("waiting for a, alive", False, True, 1e9, "a:1")
    said = capsys.readouterr().err
    assert said.startswith("ft-run: waiting for a, alive (for another ") and "to start one" not in said
