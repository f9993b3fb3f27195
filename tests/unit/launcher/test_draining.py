"""When a node that is to leave a job leaves it, and what lets it stay."""

from types import SimpleNamespace

import pytest

from ft_plugins.config import Config
from ft_plugins.errors import ProtectionError
from ft_plugins.events import Event, Events
from ft_plugins.launcher import node_launch
from ft_plugins.launcher.agent import draining
from ft_plugins.launcher.agent.draining import (
    MOST_SECONDS,
    Departure,
    DrainStep,
    cannot_be_drained,
    longest_wait,
    next_step,
)
from ft_plugins.smp.serve.status import leaves_at
from ft_plugins.systems.reft.reft import HOLD_SECONDS


class Smp:
    """What an SMP reports, and whether it holds its ranks."""

    def __init__(self):
        self.held, self.at, self.held_at, self.gone = list[bool](), None, 0, False
        self.segments = [False]  # of each rank: whether it is held

    def hold(self, on):
        self.segments = [on] * len(self.segments)
        if self.held[-1:] != [on]:
            self.held.append(on)

    def leaves_at(self):
        if self.gone:
            raise ProtectionError("the SMP is gone")
        return self.at, self.held_at


class Story:
    """A drain in made-up time."""

    def __init__(self, monkeypatch):
        self.now, self.smp, self.seen = 1000.0, Smp(), list[Event]()
        monkeypatch.setattr(draining, "time", SimpleNamespace(monotonic=lambda: self.now))
        events = Events("b")
        events.subscribe(self.seen.append)
        self.departure = Departure(self.smp, events)

    def step(self, wanted=True, seconds=1.0):
        self.now += seconds
        return self.departure.step(wanted)


@pytest.fixture
def story(monkeypatch):
    return Story(monkeypatch)


def test_a_node_that_is_to_leave_holds_its_ranks_and_leaves_once_nothing_would_be_lost(story):
    assert story.step(wanted=False) == DrainStep() and not story.smp.held
    assert story.step() == DrainStep() and story.smp.held == [True]
    assert story.step(seconds=2 * MOST_SECONDS) == DrainStep(), "an evaluation takes as long as it takes"
    story.smp.held_at = 8
    assert story.step() == DrainStep() and story.step(seconds=MOST_SECONDS) == DrainStep()
    story.smp.at = 8
    assert story.step(seconds=0.01) == DrainStep(), "the SMP is not asked without end"
    assert story.step() == DrainStep(leave=8) and story.smp.held == [True] and not story.seen


def test_ranks_that_wait_for_a_commit_that_does_not_come_go_on_and_that_is_an_alarm(story):
    story.smp.held_at = 7
    story.step()
    found = story.step(seconds=MOST_SECONDS + 1)
    assert found.leave is None and "no version was committed while the ranks waited" in found.give_up
    assert story.smp.held == [True, False]
    assert [event.name for event in story.seen] == ["drain.failed"]
    assert MOST_SECONDS < HOLD_SECONDS, "a rank does not go on by itself before its agent says so"


def test_a_rank_that_starts_after_the_drain_was_asked_for_waits_too(story):
    story.step()
    story.smp.segments.append(False)
    story.step()
    assert story.smp.segments == [True, True]


def test_a_drain_of_ranks_that_train_on_and_capture_nothing_is_given_up(story):
    for _ in range(1000):
        if found := story.step(seconds=100.0).give_up:
            break
    assert "came to no version that is exchanged for 12" in found and story.smp.held == [True, False]
    assert [event.name for event in story.seen] == ["drain.failed"]


def test_ranks_go_on_before_a_limit_that_was_given_takes_them_for_a_hang():
    assert longest_wait("auto") == longest_wait(0) == longest_wait(1e4) == MOST_SECONDS
    assert longest_wait(60.0) == longest_wait("auto", 60.0) == longest_wait(1e4, 60.0) == 30.0
    assert next_step(None, 31.0, 30.0).give_up and not next_step(None, 29.0, 30.0).give_up


@pytest.mark.parametrize("how", ["not wanted any more", "no answer"])
def test_a_drain_that_ends_otherwise_lets_the_ranks_go_on(story, how):
    story.step()
    story.smp.gone = how == "no answer"
    found = story.step(wanted=story.smp.gone)
    assert story.smp.held == [True, False] and bool(found.give_up) == story.smp.gone == bool(story.seen)


def test_a_version_at_which_a_node_may_leave_is_of_this_incarnation_and_behind_no_rank():
    def at(committed, *completed, lineage=3, held_at=8):
        segments = [{"attached": True, "completed": each, "lineage": lineage, "held_at": 0} for each in completed]
        segments[-1]["held_at"] = held_at
        segments.append({"attached": False, "completed": 99, "lineage": 9, "held_at": 8})
        return leaves_at({"segments": segments, "node_tier": {"committed": committed}})

    assert at([3, 8], 8, 8) == (8, 8)
    assert at([3, 8], 8, 8, held_at=0) == (None, 0), "its ranks are at work in the next iteration"
    assert at([3, 8], 8, 8, held_at=5) == (None, 5)
    assert at([3, 8], 8, 9) == (None, 8), "a rank has gone past"
    assert at([2, 8], 8, 8) == (None, 8), "restored: a substitute may not protect it yet"
    assert at(None, 8) == (None, 8) and at([3, 7], 8) == (None, 8)


def test_jobs_whose_nodes_cannot_leave_without_loss_say_why():
    assert not cannot_be_drained("raim5", False) and not cannot_be_drained("neighbour", False)
    assert "do not protect each other" in cannot_be_drained("none", False)
    assert "do not protect each other" in cannot_be_drained("", False)
    assert "--reft-versions every" in cannot_be_drained("raim5", True)
    assert "--sync-tau does not divide" in cannot_be_drained("raim5", False, deferred=True)


@pytest.mark.parametrize(
    ("interval", "apply", "refused"), [(4, "forward", True), (3, "forward", False), (4, "wait", False)]
)
def test_a_job_whose_every_exchanged_version_ends_later_cannot_be_drained(interval, apply, refused):
    reft = {"versions": "every", "interval": interval}
    config = Config.from_json({"reft": reft, "sync": {"policy": "edit", "tau": 4, "apply": apply}})
    assert ("end in the next iteration" in node_launch._refused(config, stop=False)) is refused


def test_what_comes_next_depends_on_the_commit_and_on_how_long_the_ranks_waited():
    assert next_step(5, 1e9) == DrainStep(leave=5)
    assert next_step(None, MOST_SECONDS) == DrainStep() and next_step(None, MOST_SECONDS + 1).give_up
