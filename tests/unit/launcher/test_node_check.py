"""A site's own check of a node: what it is given, how it ends, and what is said of it."""

import os
import shlex
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig

from ft_plugins.config import Config, run_directory
from ft_plugins.errors import ConfigError, NodeError
from ft_plugins.events import Event, Events, read
from ft_plugins.launcher import command
from ft_plugins.launcher.agent.node_check import NodeCheck, last_lines
from ft_plugins.launcher.agent.watcher import Job
from ft_plugins.launcher.node_launch import launch
from ft_plugins.launcher.rendezvous import round_join
from ft_plugins.launcher.rendezvous.round_join import RoundJoin
from harness.job_control import wait_until

LONG = 600.0  # seconds


def script(code):
    return shlex.join([sys.executable, "-c", code])


def checked(line, seconds=LONG):
    """What is said of a node that is checked by this command, '' if it has passed; the events."""
    events, seen = Events("b"), list[Event]()
    events.subscribe(seen.append)
    check = NodeCheck(line, seconds, "b", events)
    try:
        check.require()
    except NodeError as error:
        assert not check.passed
        return str(error), seen
    assert check.passed
    return "", seen


def test_a_check_that_ends_with_0_is_passed_and_says_nothing():
    assert checked(script("print('all is well')")) == ("", [])


def test_a_check_that_fails_is_one_line_and_one_event_with_the_end_of_its_output():
    code = "import sys; print('\\n'.join(map(str, range(99)))); print('GPU: page\\x1b[1m retirement', file=sys.stderr)"
    said, [event] = checked(script(f"{code}; sys.exit(3)"))
    assert said.startswith("node b: the check ") and "ended with status 3; its last lines: 9" in said
    assert "98" in said and "GPU: page\\x1b[1m retirement" in said and " | 12 | " not in said and "\n" not in said
    assert said.endswith("; mend the node, then give the same command there again")
    assert event.name == "node.rejected" and event.fields["status"] == 3
    assert len(event.fields["output"].splitlines()) == 5 and event.fields["reason"] in said


def test_a_check_that_cannot_be_started_has_failed():
    said, [event] = checked("/nowhere/diag -r 1")
    assert "could not be started (No such file or directory)" in said and event.fields["status"] is None


def test_a_check_that_outlasts_its_bound_is_killed_with_all_that_it_started(tmp_path):
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(999)"
    loud = "import os\nwhile True: os.write(1, b'x' * 4096 + b'\\n')"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    code += f"import os, time\nwhile not (os.path.exists({str(tmp_path / 'pid')!r})): time.sleep(0.01)\n{loud}"
    events, seen = Events("b"), list[Event]()
    events.subscribe(seen.append)
    check = NodeCheck(script(code), LONG, "b", events)
    assert not check.look()
    started = tmp_path / "pid"
    wait_until(lambda: not check.look() and len(check._output) > 1000 and bool(started.read_text()), 120, str)
    check.seconds = 0.0
    with pytest.raises(NodeError, match=r"was killed after 0 s \(--ftp-node-check-seconds\); its last lines: x{200}"):
        check.look()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 120, str)
    assert seen[0].fields["status"] is None


def test_a_check_knows_nothing_of_the_job_and_is_no_shell(monkeypatch, tmp_path):
    monkeypatch.setenv("FTP_CONFIG", "{}")
    monkeypatch.setenv("SITE", "kept")
    secret = open(tmp_path / "secret", "w")  # noqa: SIM115
    os.set_inheritable(secret.fileno(), True)
    code = (
        "import os, sys; here = [int(each) for each in os.listdir('/proc/self/fd')]; "
        "open_ = [each for each in here if os.path.exists(f'/proc/self/fd/{each}')]; "
        "ours = [name for name in os.environ if name.startswith('FTP_')]; "
        "ok = max(open_) < 3 and not ours and os.environ['SITE'] == 'kept' and sys.stdin.read() == ''"
        " and sys.argv[1] == '$HOME' and os.getsid(0) == os.getpid(); print(open_, ours, sys.argv); sys.exit(not ok)"
    )
    assert checked(f"{script(code)} '$HOME'") == ("", [])


def test_a_node_that_has_passed_is_not_checked_again_until_that_is_forgotten(tmp_path):
    runs = tmp_path / "runs"
    check = NodeCheck(script(f"open({str(runs)!r}, 'a').write('.')"), LONG, "b", Events("b"))
    for _ in range(3):
        check.require()
    assert runs.read_text() == "."
    check.forget()
    assert not check.passed and not check.look()
    check.require()
    assert runs.read_text() == ".."


def test_a_check_that_is_stopped_leaves_no_process():
    check = NodeCheck(script("import time; time.sleep(999)"), LONG, "b", Events("b"))
    check.look()
    assert check._process
    pid, began = check._process.pid, time.monotonic()
    check.stop()
    check.stop()
    assert not psutil.pid_exists(pid) and time.monotonic() - began < LONG


@pytest.mark.parametrize("error", [None, PermissionError(1, "of another user")], ids=["in a driver", "of another user"])
def test_a_check_that_does_not_end_when_it_is_killed_is_left_behind(monkeypatch, error):
    def killpg(pid, number):
        if error:
            raise error

    check = NodeCheck(script("import time; time.sleep(20)"), LONG, "b", Events("b"))
    check.look()
    process = check._process
    assert process
    monkeypatch.setattr("ft_plugins.launcher.agent.node_check.os.killpg", killpg)
    check.seconds = 0.0
    try:
        with pytest.raises(NodeError, match=rf"was killed after 0 s .* and does not end \(pid {process.pid}\)"):
            check.require()
    finally:
        process.kill()
        process.wait(LONG)


def test_a_daemon_that_keeps_the_pipe_of_a_check_open_holds_nobody_up(tmp_path):
    daemon = "import time; time.sleep(999)"
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {daemon!r}]).pid, flush=True)"
    said, [event] = checked(f"{script(code + '; sys.exit(4)')}")
    assert "ended with status 4" in said
    psutil.Process(int(event.fields["output"])).kill()


def test_a_round_is_waited_for_as_long_as_checks_may_take_besides(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(round_join, "time", SimpleNamespace(monotonic=lambda: now[0]))
    settings = SimpleNamespace(join=600.0, rules=SimpleNamespace(wait=10.0))
    called = SimpleNamespace(check=lambda: None, wake=lambda: None, closed="")
    me = SimpleNamespace(node="b", run="job")
    join = RoundJoin(cast(Any, SimpleNamespace(settings=settings, server=called, service=called, me=me)), timedelta(1))
    join.node_check = NodeCheck("dcgmi diag -r 3", 1800.0, "b", Events("b"))
    join._extend_deadline()
    now[0] += 2409.0
    join.check()
    monkeypatch.setattr(join, "_timeout_reason", lambda: "no round")
    now[0] += 2.0
    with pytest.raises(RendezvousTimeoutError):
        join.check()


def test_the_last_lines_of_no_output_are_none():
    assert last_lines(b"") == () and last_lines(b"\n \xff\n") == ("\ufffd",)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ftp-node-check", "diag 'x"], "--ftp-node-check: expected a command line, found .*No closing quotation"),
        (["--ftp-node-check", " "], "--ftp-node-check: expected a command line, found an empty one"),
        (["--ftp-node-check-seconds", "5"], "--ftp-node-check-seconds: has no effect while --ftp-node-check is unset"),
        (["--ftp-node-check", "true", "--rdzv-backend", "c10d"], "no effect with --rdzv-backend c10d"),
    ],
)
def test_what_cannot_be_a_check_is_refused_by_name(words, said, tmp_path):
    (tmp_path / "train.py").touch()
    backend = ["--rdzv-endpoint", "localhost:0"] if "c10d" in words else []
    with pytest.raises(ConfigError, match=said):
        planned = command.plan([*backend, "--reft", *words, "train.py"], 1, str(tmp_path), "host")
        command.execute(planned)


def test_a_check_is_a_key_like_others():
    config, _ = Config.from_flags(["--reft", "--ftp-node-check", "dcgmi diag -r 1"])
    assert config.node_check == "dcgmi diag -r 1" and config.node_check_seconds == 120
    assert Config.from_json(config.block()) == config


def test_a_job_on_an_unfit_node_is_refused_before_anything_is_started(tmp_path):
    name = f"unfit-{os.getpid()}"
    config, _ = Config.from_flags(["--reft", "--ftp-job", name, "--ftp-node-check", script("raise SystemExit(4)")])
    job = Job(config, name, "n", run_directory(name, "n"))
    with pytest.raises(NodeError, match="ended with status 4"):
        launch(LaunchConfig(1, 1, 1, run_id=name, rdzv_endpoint="localhost:0"), "train.py", job=job)
    names = [event.name for event in read(job.run_dir / "events.jsonl")]
    assert names == ["node.rejected"] and not (job.run_dir / "smp.lock").exists()
