"""Jobs that end in order before training is at its own end, are asked to, or get a signal when they are over already.

Real commands and processes: ranks of a loop of torch alone, on one node or two.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ft_plugins import events
from ft_plugins.config import run_directory
from ft_plugins.errors import EXIT_DRAINED
from ft_plugins.rehearse.driver import free_port
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.segment import paths
from harness.job_control import wait_until, wait_until_stopped
from harness.jobs import write_secret

WAIT = 280.0  # a start imports torch in every rank
LAST = 12
LOOP = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch, torch.distributed as dist
import ft_plugins
from harness.plain_host import PlainHost

last, how, at, progress = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo")
rank = dist.get_rank()
weight = torch.zeros(8)
host = PlainHost({{"weight": weight}}, rank=rank, world_size=dist.get_world_size(), replicated=True)
session = ft_plugins.attach(host)
for k in session.iterations(last):
    if how in ("one", "silent") and k > at and rank == 0:
        sys.exit(0)
    if how == "silent" and k > at:
        time.sleep(3600)  # as in a collective of NCCL, which does not fail where a peer is gone
    if how == "apart" and k > at + rank:
        sys.exit(0)
    gradient = torch.full((8,), float(k * (rank + 1)))
    if how != "apart":
        dist.all_reduce(gradient)
    session.before_update(k)
    weight += gradient
    session.after_update(k)
    if rank == 0:
        with open(progress, "a") as file:
            print(k, file=file)
    if how == "slowly":
        time.sleep(0.01)
        while os.path.exists("hold"):
            time.sleep(0.01)
if rank == 0:
    print(f"weight {{weight[0].item():.0f}}", flush=True)
"""
numbers = itertools.count()


class Job:
    """A job of this loop, on nodes of this machine."""

    def __init__(self, folder):
        self.name = f"ends-{os.getpid()}-{next(numbers)}"
        self.folder, self.progress = folder, folder / "progress"
        self.running = {}
        self.nodes = set()
        (folder / "train.py").write_text(LOOP)
        self.endpoint = f"127.0.0.1:{free_port()}"
        write_secret(folder)

    def start(self, *flags, how="whole", at=0, last=LAST, nodes="a", of=0):
        """The same command on each node, with two ranks in all; `of`: the number of nodes, if there are others too."""
        of = of or len(nodes)
        several = ("--nnodes", str(of), "--rdzv-endpoint", self.endpoint, "--ftp-secret-file", "secret")
        for node in nodes:
            self.nodes.add(node)
            words = ["--nproc-per-node", str(2 // of), *(several if of > 1 else ())]
            words += ["--reft", "--ftp-job", self.name, "--ftp-node-name", node, *flags, "train.py", str(last), how]
            with self.log(node).open("w") as log:
                self.running[node] = subprocess.Popen(
                    [sys.executable, "-m", "ft_plugins.launcher.command", *words, str(at), str(self.progress)],
                    cwd=self.folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT,
                )  # fmt: skip

    def log(self, node):
        return self.folder / f"{node}.log"

    def end(self):
        """What each node has printed; all have status 0."""
        found = {}
        for node, process in self.running.items():
            status = process.wait(WAIT)
            found[node] = self.log(node).read_text()
            assert status == 0, found[node]
        return found

    def iterations(self):
        """That rank 0 has computed, in all starts."""
        return [int(line) for line in self.progress.read_text().split()] if self.progress.exists() else []

    def until_iteration(self, iteration):
        wait_until(lambda: iteration in self.iterations(), WAIT, lambda: self.log("a").read_text())

    def until_spare(self, node):
        note = self.run_dir(node) / "ft-run.json"
        wait_until(lambda: note.exists() and "is a spare" in note.read_text(), WAIT, self.log(node).read_text)

    def run_dir(self, node="a"):
        return run_directory(self.name, node)

    def events(self, name, node="a"):
        return [event for event in events.read(self.run_dir(node) / "events.jsonl") if event.name == name]

    def in_memory(self):
        """Nodes with segments."""
        return {node for node in self.nodes if paths.segments_of(self.name, node)}

    def checkpoints(self):
        return {path.name for path in (self.folder / "ck" / self.name).glob("v*")}

    def plugins(self, *words):
        command = [sys.executable, "-c", "from ft_plugins.cli import main; main()", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False, cwd=self.folder)

    def clean(self):
        for process in self.running.values():
            process.kill()
            process.wait(WAIT)
        for node in self.nodes:
            liveness.kill_and_wait(liveness.holder(self.run_dir(node) / "smp.lock"), WAIT)
            paths.remove(self.name, node)
            shutil.rmtree(self.run_dir(node), ignore_errors=True)


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.clean()


WEIGHT = f"weight {sum(3 * k for k in range(1, LAST + 1))}\n"


def test_a_rank_that_exits_amid_training_ends_the_job_and_the_same_command_goes_on(job):
    job.start(how="one", at=5)
    output = job.end()["a"]
    kept = r"training ended after iteration [45], before its own end: iteration [45] is kept in memory for 30.0 min"
    assert re.search(kept, output)
    assert f"`ft-plugins end {job.name}` on each node drops it" in output
    assert job.in_memory() == {"a"} and not job.events("workers.restarted")
    assert job.events("job.ended")[-1].fields["status"] == "stopped"
    shown = job.plugins("status", "--job", job.name).stdout
    assert "ENDED" in shown and "give the same command again to resume from memory" in shown
    job.start()
    assert WEIGHT in job.end()["a"] and not job.in_memory()
    assert job.iterations()[:5] == [1, 2, 3, 4, 5] and job.iterations()[5:] in ([*range(k, LAST + 1)] for k in (5, 6))


@pytest.mark.parametrize("nodes", ["a", "ab"])
def test_a_rank_that_exits_amid_training_ends_the_job_also_if_its_peers_only_hang(job, nodes):
    """On two nodes its own has no rank left, and that of its peers alone can find that they hang."""
    job.start("--ftp-hang-seconds", "5", "--reft-checkpoint-dir", "ck", how="silent", at=5, nodes=nodes)
    said = "training ended after iteration 5, before its own end: iteration 5 is in"
    assert all(said in each for each in job.end().values())
    assert job.iterations() == [1, 2, 3, 4, 5] and not job.events("workers.restarted")


def test_ranks_that_exit_after_different_iterations_leave_a_version_that_both_have(job):
    job.start("--reft-checkpoint-dir", "ck", how="apart", at=5)
    output = job.end()["a"]
    assert "before its own end: iteration 5 is in " in output and "computes up to iteration 6 again" in output
    assert job.checkpoints() == {"v1-5"} and not job.in_memory()


@pytest.mark.parametrize("how", ["one", "whole"])
def test_on_two_nodes_a_job_that_is_left_is_stored_and_one_at_its_end_is_dropped(job, how):
    job.start("--reft-checkpoint-dir", "ck", "--reft-checkpoint-interval", "100", how=how, at=5, nodes="ab")
    output = job.end()
    assert not job.in_memory()
    if how == "whole":
        said = f"ft-run: the job succeeded: training ended after iteration {LAST}; exit status 0"
        assert WEIGHT in output["a"] and output["a"].splitlines()[-1] == said and said not in output["b"]
        assert not (job.folder / "ck").exists() or not job.checkpoints()
        return
    [stored] = job.checkpoints()
    assert stored in ("v1-4", "v1-5")
    assert all(f"before its own end: iteration {stored[3:]} is in " in each for each in output.values()), output
    job.start("--reft-checkpoint-dir", "ck", "--reft-checkpoint-interval", "100", nodes="ab")
    assert WEIGHT in job.end()["a"]


def stop_flags(interval):
    return "--reft-checkpoint-dir", "ck", "--reft-checkpoint-interval", "1000", "--reft-interval", str(interval)


@pytest.mark.parametrize("interval", [1, 50])
def test_one_command_ends_a_job_on_all_nodes_at_one_version_that_is_stored(job, interval):
    job.start(*stop_flags(interval), how="slowly", last=100_000, nodes="ab")
    job.until_iteration(60)
    asked = job.plugins("stop", "--job", job.name)
    assert asked.returncode == 0, asked
    output = job.end()
    reached = job.iterations()[-1]
    assert job.checkpoints() == {f"v1-{reached}"}, "no share is missing"
    assert f"iteration {reached}, before its own end: iteration {reached} is in " in asked.stdout
    assert all(f"iteration {reached} is in " in each for each in output.values()) and not job.in_memory()
    again = job.plugins("stop", "--job", job.name)
    assert again.returncode == 1 and "runs under ft-run here; node a: ENDED, " in again.stderr
    assert f"iteration {reached} is in " in again.stderr
    job.start(*stop_flags(interval), last=reached + 20, nodes="ab")
    assert f"weight {sum(3 * k for k in range(1, reached + 21))}\n" in job.end()["a"]
    assert job.iterations() == [*range(1, reached + 21)], "no iteration was computed twice"


def test_a_job_whose_leader_is_lost_while_it_is_to_stop_ends_under_the_next_one(job):
    flags = stop_flags(1)
    job.start(*flags, how="slowly", last=100_000, nodes="b", of=2)
    note = job.run_dir("b") / "ft-run.json"
    wait_until(lambda: note.exists() and "waiting for" in note.read_text(), WAIT, lambda: job.log("b").read_text())
    job.start(*flags, how="slowly", last=100_000, nodes="a", of=2)
    job.until_iteration(20)
    (job.folder / "hold").touch()
    with (job.folder / "stop.log").open("w") as log:
        command = [sys.executable, "-c", "from ft_plugins.cli import main; main()", "stop", "--job", job.name]
        stop = job.running["stop"] = subprocess.Popen(command, cwd=job.folder, stdout=log, stderr=subprocess.STDOUT)
    said = job.folder / "stop.log"
    wait_until(lambda: "all nodes end" in said.read_text(), WAIT, said.read_text)
    job.running["b"].kill()
    job.running["b"].wait(WAIT)
    (job.folder / "hold").unlink()
    job.start(*flags, how="slowly", last=100_000, nodes="b", of=2)
    assert stop.wait(WAIT) == 0, said.read_text()
    output = job.end()
    reached = job.iterations()[-1]
    assert f"iteration {reached}, before its own end" in said.read_text()
    assert job.checkpoints() == {f"v2-{reached}"} and all(
        f"iteration {reached} is in " in output[each] for each in "ab"
    )


def test_a_job_of_one_node_without_a_folder_keeps_its_memory_when_it_is_stopped(job):
    job.start(how="slowly", last=100_000)
    job.until_iteration(20)
    asked = job.plugins("stop")
    assert asked.returncode == 0 and "is kept in memory for 30.0 min" in asked.stdout, asked
    job.end()
    assert job.in_memory() == {"a"}
    reached = job.iterations()[-1]
    job.start(last=reached + 10)
    job.end()
    assert job.iterations() == [*range(1, reached + 11)] and not job.in_memory()


def test_a_signal_after_the_ranks_have_ended_changes_nothing(job):
    job.start("--ftp-faults", "smp.end.before:stop")
    smp = run_directory(job.name, "a") / "smp.lock"
    wait_until(lambda: bool(liveness.holder(smp)), WAIT, lambda: job.log("a").read_text())
    [(pid, _)] = liveness.holder(smp)
    wait_until_stopped(pid, WAIT)
    job.running["a"].send_signal(signal.SIGTERM)
    os.kill(pid, signal.SIGCONT)
    assert WEIGHT in job.end()["a"] and not job.in_memory()
    assert job.events("job.ended")[-1].fields["status"] == "succeeded"


def test_a_job_that_is_over_on_all_nodes_writes_nothing_at_a_signal(job):
    """Given a node whose ranks have ended, and another one whose ft-run is late to report that its have, too."""
    limits = "--ftp-grace-seconds", "600", "--ftp-detect-seconds", "300"
    (job.folder / "hold").touch()
    job.start(*stop_flags(1), *limits, how="slowly", nodes="ab")
    job.until_iteration(1)
    job.running["b"].send_signal(signal.SIGSTOP)
    (job.folder / "hold").unlink()
    note = job.run_dir("a") / "ft-run.json"
    wait_until(lambda: "have ended; ft-run waits" in note.read_text(), WAIT, lambda: job.log("a").read_text())
    waits = note.read_text()
    job.running["a"].send_signal(signal.SIGTERM)
    wait_until(lambda: note.read_text() != waits, WAIT, lambda: job.log("a").read_text())
    job.running["b"].send_signal(signal.SIGCONT)
    assert WEIGHT in job.end()["a"] and not job.in_memory()
    assert not job.events("checkpoint.started") and not job.events("checkpoint.missed")


def test_a_drained_node_holds_nothing_once_the_job_is_protected_without_it(job):
    flags = *stop_flags(1), "--reft-redundancy", "raim5"
    job.start(*flags, how="slowly", last=100_000, nodes="ab")
    job.until_iteration(20)
    job.start(*flags, how="slowly", last=100_000, nodes="c", of=2)
    job.until_spare("c")
    drained = job.plugins("drain", "b", "--job", job.name)
    assert drained.returncode == 0 and job.running.pop("b").wait(WAIT) == EXIT_DRAINED, drained
    refused = job.plugins("end", job.name)
    assert refused.returncode == 1 and "--node NAME" in refused.stderr and not refused.stdout, refused
    job.start(*flags, how="slowly", last=100_000, nodes="b", of=2)
    job.until_spare("b")
    wait_until(lambda: job.in_memory() == {"a", "c"}, WAIT, lambda: job.log("b").read_text())
    assert job.plugins("stop", "--job", job.name).returncode == 0
    job.end()
    assert "this node was a spare and was not needed" in job.run_dir("b").joinpath("ft-run.json").read_text()
    assert not job.in_memory() and f"v2-{job.iterations()[-1]}" in job.checkpoints()


def test_memory_that_another_node_waits_for_is_dropped_only_on_purpose(job):
    job.start(how="slowly", last=100_000, nodes="ab")
    job.until_iteration(20)
    job.running["a"].send_signal(signal.SIGTERM)
    assert job.running["a"].wait(WAIT) == 128 + signal.SIGTERM
    note = job.run_dir("b") / "ft-run.json"
    wait_until(lambda: "waiting for " in note.read_text(), WAIT, lambda: job.log("b").read_text())
    refused = job.plugins("end", job.name, "--node", "a")
    assert refused.returncode == 1
    assert re.search(r"holds version \d+ \(lineage 1\) in memory, and the job on b waits for nodes", refused.stderr)
    assert job.in_memory() == {"a", "b"}
    assert job.plugins("end", job.name, "--node", "a", "--force").returncode == 0 and job.in_memory() == {"b"}
