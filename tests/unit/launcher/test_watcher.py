"""The watcher: real processes in place of the SMP, killed for real; a stand-in for its socket."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from unittest.mock import ANY

import pytest

from ft_plugins.config import Config
from ft_plugins.errors import BusyError, FencedError, ProtectionError, ProtocolError
from ft_plugins.events import Events, catalogue
from ft_plugins.launcher.agent.watcher import Job, Watcher
from ft_plugins.smp.watch import liveness

WAIT = 90.0


class Snapshots:
    """Stands in for `smp.serve.client`: `ensure` starts a process, `connect` answers as long as it lives."""

    def __init__(self):
        self.started = []
        self.killed = []
        self.refusals = 0  # how many starts fail first
        self.watched = []  # (SMP, watched pid)
        self.metrics = []  # where each SMP serves them
        self.unserved = ""  # why it does not
        self.tokens = 0
        self.hangs = 0  # the pid that lives and does not answer
        self.fence_error = None
        self.slots = [{"state": "CLEAN", "lineage": 1, "iteration": 4}]
        self.previous_sizes = {}
        self.released = 0
        self.missing = []

    def ensure(self, run_dir, job, node, orphan, faults, timeout, watch):
        assert watch == os.getpid()
        if self.refusals:
            self.refusals -= 1
            raise ProtectionError("no memory")
        if not self.started or self.started[-1] in self.killed or self.started[-1].poll() is not None:
            self.started.append(subprocess.Popen(["sleep", "600"]))
        return self.started[-1].pid

    def connect(self, run_dir, timeout):
        if self.started[-1].poll() is not None or self.started[-1].pid == self.hangs:
            raise ProtectionError("no SMP answers")
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def watch(self, pid, detect_seconds, orphan_seconds, metrics):
        self.watched.append((self.started[-1].pid, pid))
        self.metrics.append(metrics)
        return self.unserved

    def fence(self):
        if self.fence_error:
            error, self.fence_error = self.fence_error, None
            raise error
        self.tokens += 1
        return self.tokens

    def status(self):
        return {
            "refused": [], "previous_sizes": self.previous_sizes, "node_tier": {"released": self.released},
            "segments": [{"attached": True, "slots": self.slots}], "storage": {}, "missing": self.missing,
        }  # fmt: skip

    def end(self):
        self.kill()

    def kill(self):
        self.killed.append(self.started[-1])  # while another thread waits for it, `poll` does not see that it has ended
        self.started[-1].kill()
        self.started[-1].wait(WAIT)


class Story:
    """A watcher over `Snapshots`, and the events as they come."""

    def __init__(self, run_dir, patience=WAIT):
        self.smp = Snapshots()
        self.events = queue.Queue()
        stream = Events("n")
        stream.subscribe(self.events.put)
        job = Job(Config.from_json({"reft": {}, "metrics": 9400}), "j", "n", run_dir)
        self.watcher = Watcher(job, stream, self.smp.ensure, self.smp.connect, patience)

    def next(self):
        event = self.events.get(timeout=WAIT)
        return event.name, event.fields


@pytest.fixture
def story(tmp_path):
    story = Story(tmp_path)
    yield story
    story.watcher.stop()
    for process in story.smp.started:
        process.kill()
        process.wait(WAIT)


def test_that_a_job_may_only_be_waiting_is_printed_once_and_only_of_the_running_incarnation(story, tmp_path, capsys):
    story.watcher.say_waiting(3)
    (tmp_path / "waiting.json").write_text('{"token": 3, "words": "job.waiting: node a: rank 0 uploads"}')
    for token in (2, 3, 3):
        story.watcher.say_waiting(token)
    (tmp_path / "waiting.json").write_text('{"token": 3}')
    story.watcher.say_waiting(3)
    assert capsys.readouterr().err == "ft-run: job.waiting: node a: rank 0 uploads\n"


def test_a_killed_smp_is_reported_and_replaced_by_one_that_knows_whom_to_watch(story):
    first = story.watcher.start()
    assert story.next() == ("smp.started", {"pid": first})
    for _ in range(2):
        old = story.smp.started[-1].pid
        story.smp.kill()
        assert story.next() == ("smp.lost", {"pid": old})
        started, new = story.next(), story.smp.started[-1].pid
        assert started == ("smp.started", {"pid": new})
        reason = f"a new SMP, pid {new}, has adopted the snapshots of the lost one"
        assert story.next() == ("protection.restored", {"reason": reason})
    assert story.smp.watched == [(process.pid, os.getpid()) for process in story.smp.started]
    assert len(story.smp.started) == 3
    assert story.smp.metrics == 3 * [("127.0.0.1", 9400)]


def test_while_none_can_be_started_each_try_is_an_alarm_and_the_next_one_counts(story):
    story.watcher.start()
    story.smp.refusals = 2
    story.smp.kill()
    names = [story.next()[0] for _ in range(6)]
    lost = ["smp.lost", "protection.lost", "protection.lost"]
    assert names == ["smp.started", *lost, "smp.started", "protection.restored"]


def test_it_raises_when_there_is_none_at_the_start(story):
    story.smp.refusals = 1
    with pytest.raises(ProtectionError, match="node n.*no memory"):
        story.watcher.start()
    story.watcher.end()  # nothing to end


def test_memory_that_is_anothers_is_no_alarm_but_the_end(story):
    story.smp.ensure = lambda *_: (_ for _ in ()).throw(BusyError("pid 7 has it"))
    watcher = Watcher(story.watcher._job, Events("n"), story.smp.ensure, story.smp.connect)
    with pytest.raises(BusyError, match="^pid 7 has it$"):
        watcher.start()
    watcher.stop()


def test_a_request_waits_for_the_new_smp(story):
    story.watcher.start()
    story.smp.kill()
    assert story.watcher.fence() == 1
    assert story.watcher.newest() == 4
    assert len(story.smp.started) == 2


def test_nothing_is_promised_from_memory_while_ranks_have_lost_theirs(story):
    story.watcher.start()
    assert story.watcher.newest() == 4 and [each.iteration for each in story.watcher.held()] == [4]
    story.smp.missing = ["/dev/shm/segment of rank 1"]
    assert story.watcher.newest() is None and story.watcher.held() == []


def test_a_request_is_tried_again_when_the_smp_hangs_up_but_not_when_it_cannot_fence(story):
    story.watcher.start()
    story.smp.fence_error = ProtocolError("hung up")
    assert story.watcher.fence() == 1
    story.smp.fence_error = FencedError("trainers [7] were not gone")
    with pytest.raises(FencedError):
        story.watcher.fence()


def test_a_request_gives_up_and_says_that_nothing_is_lost(tmp_path):
    story = Story(tmp_path, patience=0.2)
    story.watcher.start()
    story.smp.refusals = 10**6
    story.smp.kill()
    with pytest.raises(ProtectionError, match="'fence'.*shared memory.*same command"):
        story.watcher.fence()
    story.watcher.stop()


def test_an_smp_that_hangs_is_ended_and_replaced(tmp_path):
    story = Story(tmp_path, patience=0.5)
    story.smp.hangs = first = story.watcher.start()
    assert story.watcher.fence() == 1
    assert [process.poll() for process in story.smp.started] == [-signal.SIGKILL, None]
    names = [story.next() for _ in range(4)]
    assert ("smp.hung", first) in [(name, fields.get("pid")) for name, fields in names]
    story.watcher.stop()
    story.smp.kill()


class Hanging:
    """What a story's watcher starts in place of its first SMP: one that holds the lock and never answers; afterwards
    those of the story."""

    def __init__(self, story, run_dir):
        self._story = story
        self._lock = run_dir / "smp.lock"
        self.processes = []

    def ensure(self, *arguments):
        if not self.processes:
            hold = "import sys, pathlib\nfrom ft_plugins.smp.watch import liveness\n"
            hold += "liveness.acquire(pathlib.Path(sys.argv[1]))\nprint(flush=True)\nsys.stdin.read()"
            command = [sys.executable, "-c", hold, str(self._lock)]
            self.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert self.processes[0].stdout is not None and self.processes[0].stdout.readline()
        if liveness.held(self._lock):
            time.sleep(0.05)  # a real one asks for as long as 30 s
            raise ProtectionError("no SMP answers")
        return self._story.smp.ensure(*arguments)

    def end(self):
        for process in self.processes:
            process.kill()
            process.communicate(timeout=WAIT)


@pytest.fixture
def hanging(tmp_path):
    story = Story(tmp_path, patience=1.0)
    hanging = Hanging(story, tmp_path)
    story.watcher._ensure = hanging.ensure
    yield story, hanging
    story.watcher.stop()
    hanging.end()
    for process in story.smp.started:
        process.kill()
        process.wait(WAIT)


def test_a_second_smp_that_hangs_from_its_beginning_is_ended_as_well(hanging):
    """It never answered, so nobody was told its pid: it is known as the one that holds the lock."""
    story, second = hanging
    story.watcher._ensure = story.smp.ensure
    story.smp.hangs = first = story.watcher.start()
    story.watcher._ensure = second.ensure
    answered = 0
    for _ in range(20):  # requests, as the agent makes them: each has patience of its own
        with suppress(ProtectionError):
            answered = answered or story.watcher.fence()
    assert answered == 1
    assert second.processes[0].wait(WAIT) == -signal.SIGKILL and len(story.smp.started) == 2
    told = [story.next() for _ in range(story.events.qsize())]
    assert [fields["pid"] for name, fields in told if name == "smp.hung"] == [first, second.processes[0].pid]


def test_an_smp_that_hung_before_the_launcher_came_is_ended_unless_it_is_young(hanging):
    story, old = hanging
    story.watcher._patience = WAIT  # it is younger than that
    with pytest.raises(ProtectionError, match="there is no SMP on node n: no SMP answers"):
        story.watcher.start()
    assert old.processes[0].poll() is None and story.events.empty(), "it may be about to answer"
    (owner,) = liveness.holder(old._lock)
    story.watcher._patience = 0.0  # it is older than that
    assert story.watcher.start() == story.smp.started[0].pid
    assert story.next() == ("smp.hung", {"pid": owner[0], "request": "watch", "reason": ANY})
    assert old.processes[0].wait(WAIT) == -signal.SIGKILL


def test_a_refusal_that_the_job_went_on_without_this_node_is_kept_like_state(story):
    """Else the end of the one job that was refused for it lets the next one begin from nothing."""
    story.watcher.start()
    assert not story.watcher.empty()
    story.smp.slots = []
    assert story.watcher.empty()
    story.smp.released = 3
    assert not story.watcher.empty()
    story.smp.released, story.smp.previous_sizes = 0, {"4": [0]}
    assert not story.watcher.empty()


def test_an_end_in_order_is_no_loss(story):
    pid = story.watcher.start()
    story.watcher.end()
    assert story.next() == ("smp.started", {"pid": pid})
    assert story.events.empty()
    assert threading.active_count() == 1 or "ft-smp-watcher" not in [t.name for t in threading.enumerate()]


def test_an_smp_that_died_before_the_end_comes_back_to_clean_up(story):
    story.watcher.start()
    story.watcher.stop()
    story.smp.kill()
    story.watcher.end()
    assert len(story.smp.started) == 2
    assert story.smp.started[-1].returncode == -signal.SIGKILL  # what `end` of the stand-in does


def test_no_smp_is_started_while_ranks_are_forked(story):
    story.watcher.start()
    story.next()
    with story.watcher.paused():
        story.smp.kill()
        assert story.next()[0] == "smp.lost"
        assert len(story.smp.started) == 1
    assert story.next()[0] == "smp.started"


def test_a_port_for_the_metrics_that_is_taken_is_in_the_log_of_the_job(story, capsys):
    story.smp.unserved = "127.0.0.1, port 9400: Address already in use"
    story.watcher.start()
    assert capsys.readouterr().err == (
        f"ft-run: metrics.failed: node n: {story.smp.unserved}. {catalogue.METRICS_FAILED.action}\n"
    )
