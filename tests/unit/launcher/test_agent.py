"""The agent with a real SMP: two ranks forked from an agent that is forked from this process; real signals."""

import itertools
import json
import os
import re
import resource
import select
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException
from torch.distributed.launcher.api import LaunchConfig
from torch.utils.file_baton import FileBaton

from ft_plugins import events
from ft_plugins.config import Config, launch_context, run_directory
from ft_plugins.errors import BudgetError, BusyError
from ft_plugins.launcher import node_launch
from ft_plugins.launcher.agent import start_watch
from ft_plugins.launcher.agent.agent import ProgressAgent
from ft_plugins.launcher.agent.watcher import Job
from ft_plugins.launcher.node_launch import Outcome, launch
from ft_plugins.smp.serve.client import Client
from ft_plugins.smp.serve.status import newest_common
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.segment import paths
from ft_plugins.snapshot.segment import segment as segments
from ft_plugins.snapshot.segment.paths import path_of
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Version, choose
from harness.job_control import wait_until_gone

WAIT = 90.0
CORE_BYTES = 256 << 20
SHAPE = Shape(nbytes=4096, small_nbytes=64, buckets=1, layout=1)
fork = get_context("fork")
numbers = itertools.count()


class Told:
    """What ranks and agents say: lines in a pipe, which no killed writer can lock or tear."""

    def __init__(self):
        self._reader, self._writer = os.pipe()
        self._heard = b""
        self.cores = ""  # a folder for cores

    def say(self, who, *what):
        os.write(self._writer, json.dumps([who, *what]).encode() + b"\n")

    def hear(self, who):
        """What `who` says next; what others say before is dropped."""
        deadline = time.monotonic() + WAIT
        while True:
            while b"\n" not in self._heard:
                ready, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
                assert ready, f"nothing was heard of the {who} within {WAIT:.0f} s"
                self._heard += os.read(self._reader, 1 << 16)
            line, _, self._heard = self._heard.partition(b"\n")
            speaker, *what = json.loads(line)
            if speaker == who:
                return what
            assert speaker != "agent", f"the job ended while the {who} was waited for: {what}"

    def close(self):
        os.close(self._reader)
        os.close(self._writer)


@dataclass
class Node:
    """A job on this node: `start` it in an agent of its own, as often as it takes."""

    job: Job
    logs: Path
    told: Told = field(default_factory=Told)
    agents: list[ForkProcess] = field(default_factory=list)

    def start(self, rank, *, bounded=False, max_restarts=0):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            run_id=f"agent-{os.getpid()}-{next(numbers)}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            start_method="fork",
            max_restarts=max_restarts,
            monitor_interval=0.02,
            logs_specs=DefaultLogsSpecs(log_dir=str(self.logs)),
        )

        def agent():
            try:
                found = launch(config, rank, (self.told,), job=self.job, bounded=bounded)
                self.told.say("agent", found.status, found.reason, found.return_values, found.restarts)
            except (BusyError, SignalException) as error:
                self.told.say("agent", error.__class__.__name__)

        process = fork.Process(target=agent)
        process.start()
        self.agents.append(process)
        return process

    def outcome(self):
        """How the job ended."""
        status, reason, values, restarts = self.told.hear("agent")
        return Outcome(status, reason, {int(rank): value for rank, value in values.items()}, {}, restarts)

    def run(self, rank, **bounds):
        """Start and wait for the end."""
        self.start(rank, **bounds)
        return self.outcome()

    def pids(self):
        """By rank, once both ranks have said so."""
        return dict([self.told.hear("rank"), self.told.hear("rank")])

    def events(self, name):
        found = [event for event in events.read(self.job.run_dir / "events.jsonl") if event.name == name]
        return [{"rank": event.rank, "pid": event.pid, **event.fields} for event in found]

    def left_behind(self):
        return paths.segments_of(self.job.name, self.job.node)


@pytest.fixture
def node(tmp_path):
    name = f"agent-{os.getpid()}-{next(numbers)}"
    config, _ = Config.from_flags(["--reft", "--ftp-job", name])
    node = Node(Job(config, name, "n", run_directory(name, "n")), tmp_path)
    yield node
    for process in node.agents:
        process.kill()
        process.join(WAIT)
    if liveness.held(node.job.run_dir / "smp.lock"):
        with Client(node.job.run_dir) as client:
            client.end()
    node.told.close()
    assert node.left_behind() == []


def capture(iteration):
    """This rank's share of a version, complete."""
    context = launch_context(os.environ)
    assert context.run_dir is not None
    with Client(context.run_dir) as client:
        path = client.attach(context.rank, context.token, SHAPE, {"job": "test"}, fresh=False)
    segment = Segment(path)
    slot, version = choose(segment.slots()), Version(1, iteration)
    segment.dirty(slot, version, context.token)
    segment.write_small(slot, b"")
    segment.seal(slot, version, context.token, b"", segment.digests(slot).copy())
    segment.close()


def wait_for_version(iteration):
    """Until the SMP says that both ranks have it."""
    run_dir = launch_context(os.environ).run_dir
    assert run_dir is not None
    deadline = time.monotonic() + WAIT
    with Client(run_dir) as client:
        while (status := client.status()) and (
            sum(segment["attached"] for segment in status["segments"]) < 2
            or newest_common(status) != Version(1, iteration)
        ):
            assert time.monotonic() < deadline, status


def forever():
    while True:
        signal.pause()


# ---- what ranks do ----


def succeed(told):
    context = launch_context(os.environ)
    return [context.rank, context.restart, context.token]


def killed_once(told):
    context = launch_context(os.environ)
    if context.restart == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a script with a handler of its own
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        forever()
    return [context.rank, context.restart, context.token]


def killed_beside_a_stopped_peer(told):
    context = launch_context(os.environ)
    if context.restart == 0:
        told.say("rank", context.rank, os.getpid())
        if context.rank == 1:
            forever()
        os.kill(os.getpid(), signal.SIGSTOP)
    return context.rank


def always_fail(told):
    if launch_context(os.environ).rank == 1:
        raise RuntimeError("the loss is infinite")
    forever()


def hold_the_signal(told):
    context = launch_context(os.environ)
    signal.signal(signal.SIGTERM, lambda *_: told.say("held", context.rank))
    capture(1)
    told.say("rank", context.rank, os.getpid())
    forever()


def fail_after_an_iteration(told):
    context = launch_context(os.environ)
    if context.rank == 0:
        forever()
    assert context.run_dir is not None
    with Client(context.run_dir) as client:
        path = client.attach(context.rank, context.token, SHAPE, {"job": "test"}, fresh=False)
    segment = Segment(path)
    segment.header.completed = 1
    segment.close()
    raise RuntimeError("the loss is infinite")


def fail_at_version_7(told):
    context = launch_context(os.environ)
    if context.restart == 0:
        capture(7)
        wait_for_version(7)
    if context.rank == 0:
        forever()
    raise RuntimeError("the loss is infinite")


def crash_with_a_core(told):
    context = launch_context(os.environ)
    if context.restart:
        return context.restart
    if context.rank == 0:
        forever()
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.chdir(told.cores)
    touched = b"core" * (CORE_BYTES // 4)  # what the kernel has to write
    os.abort()
    return len(touched)


def wait_until_it_is_said(told):
    """Idle ranks, as of a service outside that comes only after the second start was found idle too."""
    context = launch_context(os.environ)
    assert context.run_dir is not None
    while not any(b"job.waiting" in path.read_bytes() for path in context.run_dir.glob("*.jsonl")):
        time.sleep(0.2)


def killed_in_a_build(told):
    context, lock = launch_context(os.environ), Path(os.environ["TORCH_EXTENSIONS_DIR"], "py311_cpu", "ext", "lock")
    if context.restart:
        return lock.exists()
    if context.rank == 0:
        forever()
    lock.parent.mkdir(parents=True)
    assert FileBaton(str(lock)).try_acquire()
    subprocess.Popen(["sleep", "600"], cwd=lock.parent)  # as a compiler, of the rank's process group
    os.kill(os.getpid(), signal.SIGKILL)
    return True


def fail_with_progress(told):
    context = launch_context(os.environ)
    if context.restart == 6:
        return context.restart
    capture(context.restart + 1)
    if context.rank == 0:
        forever()
    wait_for_version(context.restart + 1)
    os.kill(os.getpid(), signal.SIGKILL)
    return -1


def refuse_beside_an_attached_peer(told):
    context = launch_context(os.environ)
    assert context.run_dir is not None
    if context.rank == 0:
        with Client(context.run_dir) as client:
            client.attach(0, context.token, SHAPE, {"job": "test"}, fresh=False)
            forever()
    with Client(context.run_dir) as client:
        deadline = time.monotonic() + WAIT
        while not client.status()["segments"]:
            assert time.monotonic() < deadline
    raise BudgetError("rank 1: no memory")


def resume_as_told(told):
    """The first incarnation dies before any rank has attached, the second one when one rank has opened its lineage."""
    context = launch_context(os.environ)
    assert context.config is not None and context.run_dir is not None
    if context.restart < 2:
        assert context.config.resume == "fresh", f"incarnation {context.restart}"
        if context.restart == 1 and context.rank == 1:
            forever()
        if context.restart == 1:
            capture(1)
            with Client(context.run_dir) as client:
                client.open_lineage(context.rank, context.token, 5, None)
        os.kill(os.getpid(), signal.SIGKILL)
    return context.config.resume


def wait_to_be_killed(told):
    context = launch_context(os.environ)
    if context.token == 1:
        capture(3)
        told.say("rank", context.rank, os.getpid())
        forever()
    return context.token


# ---- stories ----


@pytest.fixture
def torch_waits_for_an_hour(monkeypatch):
    """For workers to end after a signal, where it is not told otherwise; half a minute in truth."""
    monkeypatch.setattr(PContext.close, "__defaults__", (None, 3600))


def test_a_job_that_succeeds_returns_its_values_and_leaves_nothing_behind(node):
    outcome = node.run(succeed)
    assert (outcome.status, outcome.return_values) == ("succeeded", {0: [0, 0, 1], 1: [1, 0, 1]})
    assert not liveness.held(node.job.run_dir / "smp.lock") and not liveness.held(node.job.run_dir / "lock")
    assert [event["status"] for event in node.events("job.ended")] == ["succeeded"]
    assert [(event["nproc"], event["script"]) for event in node.events("job.started")] == [(2, "succeed")]


def test_a_killed_rank_is_named_its_peers_end_at_once_and_all_start_again_under_a_new_token(
    node, capfd, torch_waits_for_an_hour
):
    outcome = node.run(killed_once)
    assert (outcome.status, outcome.return_values) == ("succeeded", {0: [0, 1, 2], 1: [1, 1, 2]})
    failed = node.events("worker.failed")
    assert [(event["rank"], event["exitcode"], event["signal"]) for event in failed] == [(1, -9, "SIGKILL")]
    [line] = [line for line in capfd.readouterr().err.splitlines() if "SIGKILL" in line and "ft-run: " in line]
    assert re.fullmatch(r"ft-run: rank 1 \(pid \d+, node n\) was ended by SIGKILL; all workers restart.*", line), line
    [restart] = node.events("workers.restarted")
    assert (restart["restart"], restart["token"]) == (1, 2)


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_CORE)[1] != resource.RLIM_INFINITY, reason="no process here may write a core"
)
def test_a_rank_whose_core_is_written_is_named_meanwhile_and_that_time_is_noted(node, tmp_path, capfd):
    node.told.cores = str(tmp_path)
    outcome = node.run(crash_with_a_core)
    for core in tmp_path.glob("core*"):
        core.unlink()
    assert (outcome.status, outcome.return_values) == ("succeeded", {0: 1, 1: 1})
    [restart] = node.events("workers.restarted")
    assert restart["dumping"] is not None and restart["dumping"] < restart["seen"], restart
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if "rank 1 has crashed, and the kernel writes its core" in line]) == 1


def test_the_lock_that_a_rank_held_which_was_killed_in_a_build_is_gone_when_ranks_start_again(
    node, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    outcome = node.run(killed_in_a_build)
    assert (outcome.status, outcome.return_values) == ("succeeded", {0: False, 1: False})
    assert [event["path"] for event in node.events("lock.removed")] == [str(tmp_path / "py311_cpu" / "ext" / "lock")]


def test_a_start_in_which_all_ranks_wait_begins_again_once_and_if_they_wait_again_they_are_left_to_it(
    node, monkeypatch
):
    for name, seconds in (("LOOK_SECONDS", 0.5), ("IDLE_SECONDS", 3.0)):
        monkeypatch.setattr(start_watch, name, seconds)
    node.job = replace(node.job, config=Config.from_flags([*node.job.config.flags(), "--ftp-require-protection"])[0])
    outcome = node.run(wait_until_it_is_said)
    assert (outcome.status, outcome.restarts) == ("refused", 1), "they have ended without having attached"
    [hung], [waiting] = node.events("job.hung"), node.events("job.waiting")
    assert hung["ranks"] == [0, 1]
    for event in (hung, waiting):
        assert (event["iteration"], event["phase"]) == (0, "starting")
        assert all(f"rank {rank} stands in " in event["reason"] for rank in (0, 1)), event["reason"]
        assert "in wait_until_it_is_said" in (Path(event["stacks"]) / "rank0.txt").read_text()


@pytest.mark.parametrize(("required", "status"), [(False, "succeeded"), (True, "refused")])
def test_ranks_that_end_without_having_attached_are_an_alarm_and_an_error_where_protection_is_required(
    node, required, status, capfd
):
    words = ["--ftp-require-protection"] * required
    node.job = replace(node.job, config=Config.from_flags([*node.job.config.flags(), *words])[0])
    outcome = node.run(lambda told: launch_context(os.environ).restart)
    assert (outcome.status, outcome.restarts) == (status, 0)
    assert len(node.events("ranks.unattached")) == 1
    assert "ft_plugins.attach(host)" in capfd.readouterr().err
    assert ("--ftp-require-protection" in outcome.reason) is required


def test_a_stopped_peer_does_not_keep_the_job_from_starting_again(node, torch_waits_for_an_hour):
    node.start(killed_beside_a_stopped_peer)
    pids = node.pids()
    os.kill(pids[1], signal.SIGKILL)
    outcome = node.outcome()
    assert (outcome.status, outcome.return_values) == ("succeeded", {0: 0, 1: 1})
    assert node.events("workers.restarted")[0]["seconds"] < 3600


def test_a_signal_that_comes_between_the_end_of_the_ranks_and_that_of_their_agent_changes_nothing(node, monkeypatch):
    barrier, signals = ProgressAgent._exit_barrier, [signal.SIGTERM]

    def signalled(agent, *seconds):
        while signals:
            os.kill(os.getpid(), signals.pop())
        barrier(agent, *seconds)
        signals.append(signal.SIGTERM)  # and later

    monkeypatch.setattr(ProgressAgent, "_exit_barrier", signalled)
    drop = node_launch._end_in_order

    def dropped(*words):
        os.kill(os.getpid(), signals.pop())
        drop(*words)

    monkeypatch.setattr(node_launch, "_end_in_order", dropped)
    assert node.run(succeed).status == "succeeded" and node.left_behind() == []


def test_a_job_that_fails_in_the_same_way_before_its_first_iteration_is_started_twice(node):
    outcome = node.run(always_fail)
    assert (outcome.status, outcome.restarts) == ("stuck", 1)
    assert "failed twice in the same way before the first iteration" in outcome.reason
    assert "rank 1 exited with status 1: RuntimeError: the loss is infinite" in outcome.reason
    assert [event["restart"] for event in node.events("workers.restarted")] == [1]
    assert [event["status"] for event in node.events("job.ended")] == ["stuck"]
    assert liveness.held(node.job.run_dir / "smp.lock")  # it keeps what there is


def test_a_job_that_fails_before_its_first_version_but_not_before_its_first_iteration_is_tried_more_often(node):
    outcome = node.run(fail_after_an_iteration)
    assert (outcome.status, outcome.restarts) == ("stuck", 3)
    assert "the beginning was tried again 3 times" in outcome.reason


def test_a_job_that_fails_after_the_same_version_each_time_is_stopped(node):
    outcome = node.run(fail_at_version_7)
    assert (outcome.status, outcome.restarts) == ("stuck", 3)
    assert "iteration 7 was restored 3 times without a newer version" in outcome.reason


def test_a_job_that_gets_further_is_restarted_also_beside_the_segments_of_a_wider_earlier_one(node):
    segments.create(path_of(node.job.name, "n", 2), SHAPE, 2, {"job": "test"})
    outcome = node.run(fail_with_progress)
    assert (outcome.status, outcome.restarts) == ("succeeded", 6), outcome.reason


def test_a_command_to_begin_afresh_holds_until_a_rank_has_begun_and_no_longer(node):
    node.job = replace(node.job, config=Config.from_flags([*node.job.config.flags(), "--ftp-resume", "fresh"])[0])
    agent = node.start(wait_to_be_killed)
    ranks = node.pids()
    with Client(node.job.run_dir) as client:
        client.open_lineage(0, 1, 3, None)  # what an earlier ft-run opened is no beginning of this one's
    agent.kill()
    for pid in ranks.values():
        wait_until_gone(pid, WAIT)
    outcome = node.run(resume_as_told)
    assert (outcome.return_values, outcome.restarts) == ({0: "auto", 1: "auto"}, 2), outcome


def test_an_explicit_number_of_restarts_is_respected(node):
    outcome = node.run(always_fail, bounded=True, max_restarts=1)
    assert (outcome.status, outcome.restarts) == ("failed", 1)
    assert outcome.reason == "rank 1 exited with status 1: RuntimeError: the loss is infinite"
    assert len(node.events("worker.failed")) == 2


def test_what_a_rank_refuses_is_not_tried_again_and_keeps_no_memory_in_which_there_is_no_version(node):
    outcome = node.run(refuse_beside_an_attached_peer)
    assert (outcome.status, outcome.restarts) == ("refused", 0)
    assert outcome.reason == "ft_plugins: rank 1: no memory"
    assert [(event["rank"], event["exitcode"]) for event in node.events("worker.failed")] == [(1, 78)]
    assert node.left_behind() == [] and not liveness.held(node.job.run_dir / "smp.lock")


def test_ranks_end_with_a_killed_agent_and_the_same_job_goes_on_from_memory(node):
    agent = node.start(wait_to_be_killed)
    ranks = node.pids()
    agent.kill()
    for pid in ranks.values():
        wait_until_gone(pid, WAIT)
    with Client(node.job.run_dir) as client:
        assert len(client.status()["segments"]) == 2
    outcome = node.run(wait_to_be_killed)
    assert (outcome.status, outcome.return_values) == ("succeeded", {0: 2, 1: 2})


def test_a_second_agent_of_the_same_job_is_refused_and_disturbs_nothing(node):
    first = node.start(wait_to_be_killed)
    node.pids()
    node.start(wait_to_be_killed)
    assert node.told.hear("agent") == ["BusyError"]
    assert first.is_alive()
    with Client(node.job.run_dir) as client:
        assert client.status()["token"] == 1


def test_a_killed_smp_comes_back_with_the_segments_while_ranks_run_on(node):
    node.start(wait_to_be_killed)
    ranks = node.pids()
    with Client(node.job.run_dir) as client:
        old = client.status()["pid"]
    os.kill(old, signal.SIGKILL)
    wait_until_gone(old, WAIT)
    with Client(node.job.run_dir, WAIT) as client:
        found = client.status()
    assert found["pid"] != old and len(found["segments"]) == 2
    assert node.events("smp.lost") == [{"rank": None, "pid": old}]
    os.kill(ranks[0], signal.SIGKILL)  # and the next start is fenced by the new one
    assert node.outcome().return_values == {0: 2, 1: 2}


def test_ranks_that_hold_the_signal_are_killed_when_their_part_of_the_grace_is_over(node, torch_waits_for_an_hour):
    config, _ = Config.from_flags([*node.job.config.flags(), "--ftp-grace-seconds", "2"])
    node.job = replace(node.job, config=config)
    agent = node.start(hold_the_signal)
    ranks = node.pids()
    os.kill(agent.pid or 0, signal.SIGTERM)
    assert node.told.hear("held") and node.told.hear("held"), "they have got it"
    assert node.told.hear("agent") == ["SignalException"]
    assert [event["status"] for event in node.events("job.ended")] == ["signalled"]
    for pid in ranks.values():
        wait_until_gone(pid, WAIT)
    assert len(node.left_behind()) == 2
