"""ft-run as a user gives it: real commands, torch processes of two ranks, a training loop of torch alone."""

import fcntl
import itertools
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import termios
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ft_plugins import events
from ft_plugins.config import run_directory
from ft_plugins.rehearse.driver import free_port
from ft_plugins.report.recovery_phases import recovery_phases
from ft_plugins.smp.serve.client import Client
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.segment import paths
from harness.jobs import write_secret

WAIT = 240.0  # a start imports torch in every rank
ITERATIONS = 6
TRAINER = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch, torch.distributed as dist
import ft_plugins
from ft_plugins.base import faults
from harness.plain_host import PlainHost
from ft_plugins.config import launch_context

assert sys.argv[1:] == ["--lr", "1"], sys.argv
dist.init_process_group("gloo")
context = launch_context()
weight = torch.zeros(8)
host = PlainHost({{"weight": weight}}, rank=context.rank, world_size=context.world_size, replicated=True)
host.fault_points = {{"iteration.forward": ()}}
session = ft_plugins.attach(host)
done = session.resume()
for k in range(done + 1, {ITERATIONS} + 1):
    session.iteration_begin(k)
    faults.reach("iteration.forward", iteration=k)
    if k == 4 and context.rank == 0 and "HOLD" in os.environ:
        print("holding in 4", flush=True)
        open(os.environ["HOLD"]).read()
    gradient = torch.full((8,), float(k * (context.rank + 1)))
    dist.all_reduce(gradient)
    session.before_update(k)
    weight += gradient
    session.after_update(k)
    session.iteration_end(k)
session.shutdown()
if context.rank == 0:
    print(f"resumed {{done}} restart {{context.restart}} weight {{weight[0].item():.0f}}", flush=True)
dist.destroy_process_group()
"""
WEIGHT = sum(k * (1 + 2) for k in range(1, ITERATIONS + 1))
LAST_LINE = re.compile(rf"resumed (\d+) restart (\d+) weight {WEIGHT}\n")
numbers = itertools.count()


class FtRun:
    """One ft-run, its output of all ranks read as it comes; with `shell`, `process` is its parent, a shell.

    `terminal`, a descriptor, becomes the controlling terminal of a session that the shell leads, as of a login.
    """

    def __init__(
        self, folder, *words, shell=False, terminal=None, launcher=("-m", "ft_plugins.launcher.command"), **environment
    ):
        self.output = ""
        command = [sys.executable, *launcher, *words]
        self.process = subprocess.Popen(
            ["bash", "-c", f"{shlex.join(command)}; exit $?"] if shell else command,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)} | environment,
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=terminal is not None,
            preexec_fn=None if terminal is None else lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def read_until(self, text):
        """Read until `text` was printed; None: until every process that could print has ended."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + WAIT
        while text is None or text not in self.output:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"not within {WAIT:.0f} s: {text}\n{self.output}"
            part = os.read(self.process.stdout.fileno(), 1 << 16).decode(errors="replace")
            if not part:
                assert text is None, f"ended without: {text}\n{self.output}"
                return
            self.output += part

    def end(self):
        """Wait for the end of ft-run and of all ranks; its status."""
        self.read_until(None)
        return self.process.wait(WAIT)


class Job:
    """A job of a name of its own, on one or more nodes of this machine."""

    def __init__(self, folder):
        self.name = f"run-{os.getpid()}-{next(numbers)}"
        self.folder = folder
        self.runs = []
        self.nodes = set()
        (folder / "train.py").write_text(TRAINER)

    def start(self, *words, node="a", script="train.py", **options):
        """`options` are those of FtRun, and the environment."""
        self.nodes.add(node)
        ours = ("--reft", "--ftp-job", self.name, "--ftp-node-name", node)
        run = FtRun(self.folder, *words, *ours, script, "--lr", "1", **options)
        self.runs.append(run)
        return run

    def run_dir(self, node="a"):
        return run_directory(self.name, node)

    def events(self, name, node="a"):
        return [event for event in events.read(self.run_dir(node) / "events.jsonl") if event.name == name]

    def left_behind(self):
        return [path for node in self.nodes for path in paths.segments_of(self.name, node)]

    def clean(self):
        for run in self.runs:
            run.process.kill()
            run.process.communicate(timeout=WAIT)
        for node in self.nodes:
            if liveness.held(self.run_dir(node) / "smp.lock"):
                with Client(self.run_dir(node)) as client:
                    client.end()


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.clean()
    assert job.left_behind() == []


def test_a_rank_killed_in_its_fourth_iteration_costs_at_most_one_and_the_result_is_the_same(job):
    fault = "--ftp-faults=iteration.forward@iteration=4,rank=1,restart=0:kill"
    run = job.start("--standalone", "--nproc-per-node", "2", fault)
    assert run.end() == 0, run.output
    found = LAST_LINE.search(run.output)
    assert found, run.output
    resumed, restart = int(found[1]), int(found[2])
    # from where the last completed one is computed again; on a busy machine its snapshot may not be sealed yet
    assert restart == 1 and resumed in (1, 2)
    [failure] = [event for event in job.events("worker.failed") if event.rank == 1]
    assert failure.fields["signal"] == "SIGKILL"
    restored = [event.fields["iteration"] for event in job.events("state.restored") if event.rank == 0]
    proven = [event.fields["iteration"] for event in job.events("resume.proven")]
    assert restored == proven == [3] or (restored == [2] and proven in ([3], [])), (restored, proven)
    assert [event.fields["status"] for event in job.events("job.ended")] == ["succeeded"]
    assert job.left_behind() == [] and not liveness.held(job.run_dir() / "smp.lock")
    used = [(event.fields["count"], event.fields["cold"]) for event in job.events("preload.used")]
    assert used == [(2, 0)] * 2, job.events("preload.refused")
    [phases] = recovery_phases(events.read(job.run_dir() / "events.jsonl"))
    [again] = [event for event in job.events("ranks.resumed") if event.fields["restart"] == 1]
    assert (phases.iteration, phases.ranks, phases.phases["detect"]) == (resumed + 1, 2, None)
    absent = {"attempts", "detect", "dump"}
    assert all(seconds is not None for name, seconds in phases.phases.items() if name not in absent)
    since_failure = again.time - failure.time  # by another clock, from when the failure was reported
    assert since_failure <= phases.total + 0.1 and phases.total - since_failure < 2
    assert not (job.run_dir() / "starts").exists()


@contextmanager
def ended(pid):
    """Nothing of ft-run `pid` outlives this, also where an assertion fails."""
    descriptor = os.pidfd_open(pid)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


def test_a_job_whose_parent_shell_is_killed_goes_on(job, tmp_path):
    hold = tmp_path / "hold"
    os.mkfifo(hold)
    run = job.start("--nproc-per-node", "2", shell=True, HOLD=str(hold))
    run.read_until("holding in 4")
    [launcher] = [event.pid for event in job.events("job.started")]
    assert launcher != run.process.pid
    with ended(launcher):
        run.process.kill()
        assert run.process.wait(WAIT) == -signal.SIGKILL
        hold.write_text("go on")
        run.end()
    found = LAST_LINE.search(run.output)
    assert found and (found[1], found[2]) == ("0", "0"), run.output
    assert [event.fields["status"] for event in job.events("job.ended")] == ["succeeded"]
    assert job.left_behind() == [] and not liveness.held(job.run_dir() / "smp.lock")


def test_a_job_whose_terminal_hangs_up_with_its_shell_resumes_by_the_same_command(job, tmp_path):
    hold = tmp_path / "hold"
    os.mkfifo(hold)
    ours, theirs = os.openpty()
    run = job.start("--nproc-per-node", "2", shell=True, terminal=theirs, HOLD=str(hold))
    os.close(theirs)
    run.read_until("holding in 4")
    [launcher] = [event.pid for event in job.events("job.started")]
    with ended(launcher):
        run.process.kill()  # the leader of the session: the kernel hangs up on ft-run
        run.end()  # the ranks have ended too: nobody holds the pipe any more
    os.close(ours)
    assert job.left_behind() != [], "the SMP has outlived the hang-up"

    again = job.start("--nproc-per-node", "2")
    assert again.end() == 0, again.output
    found = LAST_LINE.search(again.output)
    assert found and int(found[1]) in (2, 3), again.output
    assert job.left_behind() == [] and not liveness.held(job.run_dir() / "smp.lock")


def test_two_nodes_on_one_machine_start_again_together(job):
    endpoint = f"127.0.0.1:{free_port()}"
    words = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    words += ("--ftp-secret-file", str(write_secret(job.folder)))
    fault = "--ftp-faults=iteration.forward@iteration=4,rank=1,restart=0:kill"
    nodes = {node: job.start(*words, "--rdzv-id", job.name, fault, node=node) for node in ("a", "b")}
    assert {node: run.end() for node, run in nodes.items()} == {"a": 0, "b": 0}, "".join(
        run.output for run in nodes.values()
    )
    [line] = [found for run in nodes.values() if (found := LAST_LINE.search(run.output))]
    assert (int(line[1]) in (2, 3), int(line[2])) == (True, 1)
    killed = [event for node in nodes for event in job.events("worker.failed", node) if event.fields["signal"]]
    assert [event.rank for event in killed] == [1]
    every = [event for node in nodes for event in events.read(job.run_dir(node) / "events.jsonl")]
    [phases] = recovery_phases(every)
    assert (phases.nodes, phases.iteration) == (2, int(line[1]) + 1)
    for node in nodes:
        assert [event.fields["restart"] for event in job.events("workers.restarted", node)] == [1]
        assert not liveness.held(job.run_dir(node) / "smp.lock")


def test_a_node_that_waits_for_others_ends_by_sigterm_as_one_that_trains(job):
    words = ("--nnodes", "2", "--nproc-per-node", "1", "--ftp-secret-file", str(write_secret(job.folder)))
    run = job.start(*words, "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    run.read_until("waiting for 1 more of 2 nodes")
    run.process.send_signal(signal.SIGUSR1)  # nothing to write yet, and no reason to end
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM
    assert "ft-run: ended by SIGTERM; give the same command again to resume" in run.output
    assert json.loads((job.run_dir() / "ft-run.json").read_text())["status"] == "signalled"


def test_a_job_of_which_all_was_killed_resumes_although_a_stranger_has_the_port_of_an_smp(job, tmp_path):
    words = ("--nnodes", "2", "--nproc-per-node", "1", "--ftp-secret-file", str(write_secret(job.folder)))
    words += ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-conf")
    ranks = {"a": "node_rank=0", "b": "node_rank=1"}  # rank 0, which holds, is on a
    os.mkfifo(tmp_path / "hold")
    nodes = {node: job.start(*words, rank, node=node, HOLD=str(tmp_path / "hold")) for node, rank in ranks.items()}
    nodes["a"].read_until("holding in 4")
    for node, run in nodes.items():
        with Client(job.run_dir(node)) as client:
            smp = client.status()["pid"]
        run.process.kill()  # first: it would replace its SMP
        os.kill(smp, signal.SIGKILL)
    for run in nodes.values():
        run.read_until(None)

    recorded = json.loads((job.run_dir("b") / "endpoint.json").read_text())
    with socket.create_server((recorded["address"], recorded["port"])):
        nodes = {node: job.start(*words, rank, node=node) for node, rank in ranks.items()}
        assert [run.end() for run in nodes.values()] == [0, 0], "".join(run.output for run in nodes.values())
    found = LAST_LINE.search(nodes["a"].output)
    assert found and int(found[1]) in (2, 3), nodes["a"].output


def test_what_no_restart_can_cure_is_one_line_and_no_restart(job):
    (job.folder / "refused.py").write_text(
        "from ft_plugins.errors import *\nraise TopologyError('dp 3 does not divide 8 ranks; choose another')"
    )
    run = job.start("--nproc-per-node", "1", script="refused.py")
    assert run.end() == 78
    assert run.output.startswith("ft_plugins: rank 0: dp 3 does not divide 8 ranks; choose another (node ")
    assert run.output.count("\n") == 1 and run.output.endswith("/events.jsonl)\n")
    assert job.events("workers.restarted") == []
    assert [event.fields["status"] for event in job.events("job.ended")] == ["refused"]


def test_without_our_flags_it_is_torchrun_and_says_that_nothing_is_protected(tmp_path):
    (tmp_path / "plain.py").write_text("import os, sys; print(sys.argv[1:], os.environ['RANK']); sys.exit(3)")
    run = FtRun(tmp_path, "--nproc-per-node", "1", "-m", "plain", "--epochs", "2")
    assert run.end() == 1
    first, ours, *report = run.output.splitlines()
    assert "nothing is protected" in first and ours == "['--epochs', '2'] 0"
    assert "exitcode  : 3" in run.output
    assert report[-1] == "ft-run: rank 0 exited with status 3"
