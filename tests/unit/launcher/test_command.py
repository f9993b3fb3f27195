"""What ft-run reads from a command line, before anything is started."""

import argparse
import json
import signal
import tempfile

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ft_plugins.config import run_directory
from ft_plugins.errors import ConfigError
from ft_plugins.events import Events, catalogue, file_sink
from ft_plugins.launcher import command
from ft_plugins.launcher.node_launch import Outcome


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text("")
    return tmp_path


def plan(folder, *words, host="host0"):
    return command.plan(words, 1000, str(folder), host)


def test_our_flags_may_stand_before_or_after_the_script_and_are_seen_by_no_one_else(folder):
    before = plan(folder, "--nproc-per-node", "2", "--reft", "--reft-interval", "3", "train.py", "--lr", "1")
    after = plan(folder, "--nproc-per-node", "2", "train.py", "--reft", "--lr", "1", "--reft-interval=3")
    for found in (before, after):
        assert found.config.reft is not None and found.config.reft.interval == 3
        assert found.torch.training_script_args == ["--lr", "1"]
        assert found.torch.nproc_per_node == "2"
    assert before.job == after.job


def test_two_values_for_one_key_are_refused(folder):
    with pytest.raises(ConfigError, match="--reft-interval.*3.*4.*once"):
        plan(folder, "--reft", "--reft-interval", "3", "train.py", "--reft-interval", "4")


def test_an_abbreviation_of_ours_is_not_taken_silently(folder, capsys):
    with pytest.raises(SystemExit):
        plan(folder, "--ref", "train.py")
    assert "--ref" in capsys.readouterr().err.splitlines()[-1]


def test_a_key_without_effect_is_an_error(folder):
    with pytest.raises(ConfigError, match="--ftp-job.*no effect"):
        plan(folder, "--ftp-job", "x", "train.py")


def test_without_our_flags_it_is_torchrun_with_its_default_of_no_restart(folder):
    found = plan(folder, "train.py")
    assert not found.protected and found.bounded


def test_unset_max_restarts_means_as_long_as_there_is_progress(folder, monkeypatch):
    assert not plan(folder, "--reft", "train.py").bounded
    given = plan(folder, "--reft", "--max-restarts", "0", "train.py")
    assert given.bounded and given.torch.max_restarts == 0
    monkeypatch.setenv("PET_MAX_RESTARTS", "4")
    from_environment = plan(folder, "--reft", "train.py")
    assert from_environment.bounded and from_environment.torch.max_restarts == 4


def test_the_job_is_named_by_flag_then_rendezvous_id_then_command(folder):
    assert plan(folder, "--reft", "--ftp-job", "a", "--rdzv-id", "b", "train.py").job == "a"
    assert plan(folder, "--reft", "--rdzv-id", "b", "train.py").job == "b"
    digest = plan(folder, "--reft", "train.py").job
    assert digest.startswith("train-")
    assert plan(folder, "--reft", "--standalone", "--rdzv-id", "ignored", "train.py").job == digest
    assert plan(folder, "--reft", "--ftp-resume", "fresh", "--nproc-per-node", "8", "train.py").job == digest
    assert plan(folder, "--reft", "train.py", "--seed", "2").job != digest


def test_the_node_is_named_by_flag_or_host(folder):
    assert plan(folder, "--reft", "--ftp-node-name", "a", "train.py", host="h").node == "a"
    assert plan(folder, "--reft", "train.py", host="h").node == "h"


def test_what_cannot_run_is_refused_with_the_reason(folder):
    with pytest.raises(ConfigError, match="--no-python.*hooks"):
        plan(folder, "--reft", "--no-python", "train.py")
    with pytest.raises(ConfigError, match="no such file"):
        plan(folder, "--reft", "other.py")
    assert plan(folder, "--no-python", "true").torch.no_python  # as torchrun
    assert plan(folder, "--reft", "-m", "some.module").torch.module


def test_help_shows_torchruns_arguments_and_ours(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for flag in ("usage: ft-run", "--nproc-per-node", "--rdzv-backend", "--ftp-job", "--reft-interval"):
        assert flag in shown


def test_a_bad_flag_is_one_line_and_a_status(folder, capsys):
    assert command.main(["--reft-intervall", "3", "--reft", str(folder / "train.py")]) == 78
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and "did you mean --reft-interval?" in errors[0]


PROTECTED = ["--reft", "--ftp-job", "j", "--ftp-node-name", "a"]


def where():
    """The end of a protected job's last line."""
    return f" (node a; what happened is in {run_directory('j', 'a') / 'events.jsonl'})"


def failed(rank, message):
    failure = ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file="")
    failure.message = message
    return failure


@pytest.mark.parametrize(
    ("outcome", "code", "lines"),
    [
        (Outcome("succeeded"), 0, []),
        (
            Outcome("refused", "ft_plugins: rank 1: bad", failures={1: failed(1, "bad")}),
            78,
            ["ft_plugins: rank 1: bad"],
        ),
        (
            Outcome("drained", "node b is drained after iteration 7"),
            199,
            ["ft-run: node b is drained after iteration 7"],
        ),
        (Outcome("failed", "another node ended the job"), 1, ["ft-run: another node ended the job"]),
    ],
    ids=lambda value: value.status if isinstance(value, Outcome) else "",
)
def test_how_the_job_ended_is_the_status_and_at_most_one_line(outcome, code, lines, folder, monkeypatch, capsys):
    monkeypatch.setattr(command, "execute", lambda planned: outcome)
    assert command.main([*PROTECTED, str(folder / "train.py")]) == code
    assert capsys.readouterr().err.splitlines() == [line + where() for line in lines]


def test_a_job_that_was_stopped_ends_with_torchs_report_and_our_line(folder, monkeypatch, capsys):
    outcome = Outcome("stuck", "stopped: iteration 7 ...: rank 3 ...", failures={3: failed(3, "loss is infinite")})
    monkeypatch.setattr(command, "execute", lambda planned: outcome)
    assert command.main([*PROTECTED, str(folder / "train.py")]) == 1
    shown = capsys.readouterr().err
    assert "train.py FAILED" in shown and "loss is infinite" in shown
    assert shown.splitlines()[-1] == f"ft-run: stopped: iteration 7 ...: rank 3 ...{where()}"


def test_a_failed_job_ends_with_why_it_failed_since_this_ft_run_was_started(folder, monkeypatch, capsys):
    def execute(planned):
        events = Events("a")
        events.subscribe(file_sink(run_directory("j", "a") / "events.jsonl"))
        for rank, message in ((1, "of an earlier ft-run"), (3, "ValueError: loss")):
            events.emit(catalogue.JOB_STARTED, nproc=4, script="train.py")
            events.emit(catalogue.WORKER_FAILED, rank=rank, local_rank=rank, exitcode=1, signal="", message=message)
        return Outcome("stuck", "stopped")

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(command, "execute", execute)
    assert command.main([*PROTECTED, str(folder / "train.py")]) == 1
    failed, error, advice, last = capsys.readouterr().err.splitlines()
    assert failed.startswith("ft-run:   failed     rank 3 on node a, ") and error.endswith("  ValueError: loss")
    assert advice.startswith("ft-run:   to do  ") and last == f"ft-run: stopped{where()}"


def test_a_signal_is_told_by_the_status_as_a_shell_does(folder, monkeypatch, capsys):
    def execute(planned):
        raise SignalException("Process 7 got signal: 15", signal.SIGTERM)

    monkeypatch.setattr(command, "execute", execute)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    assert command.main([*PROTECTED, str(folder / "train.py")]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == f"ft-run: ended by SIGTERM; give the same command again to resume{where()}\n"
    written = json.loads((folder / "error.json").read_text())["message"]  # as torchrun writes it
    assert written["message"] == "SignalException: Process 7 got signal: 15"
    assert "in execute" in written["extraInfo"]["py_callstack"] and written["extraInfo"]["timestamp"].isdigit()


def test_without_a_temporary_folder_there_is_one_line_with_what_to_do(folder, monkeypatch, capsys):
    absent = str(folder / "absent")
    monkeypatch.setattr(tempfile, "tempdir", absent)
    assert command.main(["--reft", str(folder / "train.py")]) == 78
    [line] = capsys.readouterr().err.splitlines()
    assert "No such file" in line and "set TMPDIR, or --log-dir, to a folder" in line


SEVERAL = ("--reft", "--nnodes", "2")


def rendezvous(folder, *words):
    """Back-end, endpoint and id that are handed to torch."""
    planned = plan(folder, *words, "train.py")
    options = argparse.Namespace(**vars(planned.torch))
    command._choose_rendezvous(options, planned)
    return options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id


def test_with_a_system_on_an_endpoint_means_our_rendezvous_under_the_name_of_the_job(folder):
    job = plan(folder, "--reft", "train.py").job
    assert rendezvous(folder, *SEVERAL, "--rdzv-endpoint", "a:1,b:2") == ("ft_plugins", "a:1,b:2", job)
    assert rendezvous(folder, *SEVERAL, "--rdzv-endpoint", "a:1", "--rdzv-id", "x") == ("ft_plugins", "a:1", "x")
    assert rendezvous(folder, "--reft", "--rdzv-endpoint", "a:1")[0] == "ft_plugins"  # one node, and spares
    assert rendezvous(folder, *SEVERAL, "--rdzv-endpoint", "a:1", "--rdzv-backend", "c10d")[:2] == ("c10d", "a:1")
    assert rendezvous(folder, "--reft")[:2] == ("ft_plugins", "localhost:0")
    assert rendezvous(folder, "--reft", "--standalone", "--rdzv-endpoint", "a:1")[:2] == ("ft_plugins", "localhost:0")


def test_without_a_system_the_rendezvous_is_torchruns(folder):
    assert rendezvous(folder, "--nnodes", "2", "--rdzv-endpoint", "a:1") == ("static", "a:1", "none")
    assert rendezvous(folder, "--nnodes", "2", "--master-addr", "a", "--node-rank", "1")[0] == "static"
    assert rendezvous(folder, "--rdzv-backend", "ft_plugins")[0] == "ft_plugins"
    planned = plan(folder, "train.py")
    command._choose_rendezvous(planned.torch, planned)
    assert (planned.torch.node_rank, planned.torch.master_addr, planned.torch.max_restarts) == (0, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "no --rdzv-endpoint"),
        (("--master-addr", "a"), "--master-addr"),
        (("--node-rank", "0", "--rdzv-endpoint", "a:1"), "--node-rank"),
        (("--rdzv-backend", "static", "--rdzv-endpoint", "a:1"), "--rdzv-backend static"),
    ],
)
def test_several_nodes_in_fixed_places_are_refused_with_the_remedy(folder, words, named):
    with pytest.raises(ConfigError, match=f"--nnodes 2 with .*{named}.*give --rdzv-endpoint host:port of any one node"):
        plan(folder, *SEVERAL, *words, "train.py")
    assert not plan(folder, "--nnodes", "2", *words, "train.py").protected  # torchrun's business
