"""The watcher: real processes in place of the SMP, killed for real; a stand-in for its socket."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_plugins.config import Config
from ft_plugins.errors import BusyError, FencedError, ProtectionError, ProtocolError
from ft_plugins.events import Event, Events
from ft_plugins.launcher.watcher import Job, Watcher

WAIT = 20.0


class Snapshots:
    """Stands in for `smp.client`: `ensure` starts a process, `connect` answers as long as it lives."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self.refusals = 0  # how many starts fail first
        self.watched: list[tuple[int, int]] = []  # (SMP, watched pid)
        self.tokens = 0
        self.hangs = 0  # the pid that lives and does not answer
        self.fence_error: Exception | None = None
        self.slots = [{"state": "CLEAN", "lineage": 1, "iteration": 4}]
        self.set_aside: dict[str, list[int]] = {}
        self.released = 0

    def ensure(self, run_dir: Path, job: str, node: str, orphan: float, faults: str, timeout: float, watch: int) -> int:
        assert watch == os.getpid()
        if self.refusals:
            self.refusals -= 1
            raise ProtectionError("no memory")
        if not self.started or self.started[-1].poll() is not None:
            self.started.append(subprocess.Popen(["sleep", "600"]))
        return self.started[-1].pid

    def connect(self, run_dir: Path, timeout: float) -> Snapshots:
        if self.started[-1].poll() is not None or self.started[-1].pid == self.hangs:
            raise ProtectionError("no SMP answers")
        return self

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def watch(self, pid: int, detect_seconds: float, orphan_seconds: float) -> None:
        self.watched.append((self.started[-1].pid, pid))

    def fence(self) -> int:
        if self.fence_error:
            error, self.fence_error = self.fence_error, None
            raise error
        self.tokens += 1
        return self.tokens

    def status(self) -> dict[str, Any]:
        return {
            "refused": [], "set_aside": self.set_aside, "node_tier": {"released": self.released},
            "segments": [{"attached": True, "slots": self.slots}],
        }  # fmt: skip

    def end(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.started[-1].kill()
        self.started[-1].wait(WAIT)


class Story:
    """A watcher over `Snapshots`, and the events as they come."""

    def __init__(self, run_dir: Path, patience: float = WAIT) -> None:
        self.smp = Snapshots()
        self.events: queue.Queue[Event] = queue.Queue()
        stream = Events("n")
        stream.subscribe(self.events.put)
        job = Job(Config(), "j", "n", run_dir)
        self.watcher = Watcher(job, stream, self.smp.ensure, self.smp.connect, patience)

    def next(self) -> tuple[str, dict[str, Any]]:
        event = self.events.get(timeout=WAIT)
        return event.name, event.fields


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    story = Story(tmp_path)
    yield story
    story.watcher.stop()
    for process in story.smp.started:
        process.kill()
        process.wait(WAIT)


def test_a_killed_smp_is_reported_and_replaced_by_one_that_knows_whom_to_watch(story: Story) -> None:
    first = story.watcher.start()
    assert story.next() == ("smp.start", {"pid": first})
    for _ in range(2):
        old = story.smp.started[-1].pid
        story.smp.kill()
        assert story.next() == ("smp.lost", {"pid": old})
        assert story.next() == ("smp.start", {"pid": story.smp.started[-1].pid})
    assert story.smp.watched == [(process.pid, os.getpid()) for process in story.smp.started]
    assert len(story.smp.started) == 3


def test_while_none_can_be_started_each_try_is_an_alarm_and_the_next_one_counts(story: Story) -> None:
    story.watcher.start()
    story.smp.refusals = 2
    story.smp.kill()
    names = [story.next()[0] for _ in range(5)]
    assert names == ["smp.start", "smp.lost", "protection.lost", "protection.lost", "smp.start"]


def test_it_raises_when_there_is_none_at_the_start(story: Story) -> None:
    story.smp.refusals = 1
    with pytest.raises(ProtectionError, match="node n.*no memory"):
        story.watcher.start()
    story.watcher.end()  # nothing to end


def test_memory_that_is_anothers_is_no_alarm_but_the_end(story: Story) -> None:
    story.smp.ensure = lambda *_: (_ for _ in ()).throw(BusyError("pid 7 has it"))  # type: ignore[method-assign]
    watcher = Watcher(story.watcher._job, Events("n"), story.smp.ensure, story.smp.connect)
    with pytest.raises(BusyError, match="^pid 7 has it$"):
        watcher.start()
    watcher.stop()


def test_a_request_waits_for_the_new_smp(story: Story) -> None:
    story.watcher.start()
    story.smp.kill()
    assert story.watcher.fence() == 1
    assert story.watcher.newest() == 4
    assert len(story.smp.started) == 2


def test_a_request_is_tried_again_when_the_smp_hangs_up_but_not_when_it_cannot_fence(story: Story) -> None:
    story.watcher.start()
    story.smp.fence_error = ProtocolError("hung up")
    assert story.watcher.fence() == 1
    story.smp.fence_error = FencedError("trainers [7] were not gone")
    with pytest.raises(FencedError):
        story.watcher.fence()


def test_a_request_gives_up_and_says_that_nothing_is_lost(tmp_path: Path) -> None:
    story = Story(tmp_path, patience=0.2)
    story.watcher.start()
    story.smp.refusals = 10**6
    story.smp.kill()
    with pytest.raises(ProtectionError, match="'fence'.*shared memory.*same command"):
        story.watcher.fence()
    story.watcher.stop()


def test_an_smp_that_hangs_is_ended_and_replaced(tmp_path: Path) -> None:
    story = Story(tmp_path, patience=0.5)
    story.smp.hangs = first = story.watcher.start()
    assert story.watcher.fence() == 1
    assert [process.poll() for process in story.smp.started] == [-signal.SIGKILL, None]
    names = [story.next() for _ in range(4)]
    assert ("smp.hangs", first) in [(name, fields.get("pid")) for name, fields in names]
    story.watcher.stop()
    story.smp.kill()


def test_a_second_smp_that_hangs_from_its_beginning_is_ended_as_well(tmp_path: Path) -> None:
    """It never answered `ensure`, so nobody was told its pid: it is known as the one that holds the lock."""
    hold = "import sys, pathlib\nfrom ft_plugins.smp import liveness\n"
    hold += "liveness.acquire(pathlib.Path(sys.argv[1])), print(), sys.stdin.read()"
    story, hanging = Story(tmp_path, patience=1.0), []

    def ensure(*arguments: Any) -> int:
        if not hanging:
            command = [sys.executable, "-c", hold, str(tmp_path / "smp.lock")]
            hanging.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert hanging[0].stdout and hanging[0].stdout.readline()
        for process in hanging:
            process.wait(WAIT)
        return story.smp.ensure(*arguments)

    first = story.watcher.start()
    story.watcher._ensure = ensure
    story.smp.hangs = first
    try:
        with pytest.raises(ProtectionError, match="'fence'"):
            story.watcher.fence()
        assert story.watcher.fence() == 1
        assert hanging[0].wait(WAIT) == -signal.SIGKILL and len(story.smp.started) == 2
        told = [story.next() for _ in range(story.events.qsize())]
        assert [fields["pid"] for name, fields in told if name == "smp.hangs"] == [first, hanging[0].pid]
    finally:
        story.watcher.stop()
        story.smp.kill()
        for process in hanging:
            process.kill()
            process.communicate(timeout=WAIT)


def test_a_refusal_that_the_job_went_on_without_this_node_is_kept_like_state(story: Story) -> None:
    """Else the end of the one job that was refused for it lets the next one begin from nothing."""
    story.watcher.start()
    assert not story.watcher.empty()
    story.smp.slots = []
    assert story.watcher.empty()
    story.smp.released = 3
    assert not story.watcher.empty()
    story.smp.released, story.smp.set_aside = 0, {"4": [0]}
    assert not story.watcher.empty()


def test_an_end_in_order_is_no_loss(story: Story) -> None:
    pid = story.watcher.start()
    story.watcher.end()
    assert story.next() == ("smp.start", {"pid": pid})
    assert story.events.empty()
    assert threading.active_count() == 1 or "ft-smp-watcher" not in [t.name for t in threading.enumerate()]


def test_an_smp_that_died_before_the_end_comes_back_to_clean_up(story: Story) -> None:
    story.watcher.start()
    story.watcher.stop()
    story.smp.kill()
    story.watcher.end()
    assert len(story.smp.started) == 2
    assert story.smp.started[-1].returncode == -signal.SIGKILL  # what `end` of the stand-in does


def test_no_smp_is_started_while_ranks_are_forked(story: Story) -> None:
    story.watcher.start()
    story.next()
    with story.watcher.paused():
        story.smp.kill()
        assert story.next()[0] == "smp.lost"
        assert len(story.smp.started) == 1
    assert story.next()[0] == "smp.start"
