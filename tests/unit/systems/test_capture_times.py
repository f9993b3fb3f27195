"""Intervals that the job chooses: all ranks capture at the same iterations, also after a restart, and say why.

Real SMP, segments and ranks; what is chosen, and after how many snapshots, is the test's.
"""

import functools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ft_plugins.collective import PendingGather
from ft_plugins.collective.switch import Call
from ft_plugins.config import Config, ReftConfig
from ft_plugins.errors import ProtectionError, ProtocolError
from ft_plugins.events import Events
from ft_plugins.planner.job_intervals import Choice, Measured, MeasuredJob
from ft_plugins.session import attach
from ft_plugins.snapshot.schedule import Intervals, SnapshotSchedule
from ft_plugins.snapshot.segment.header import Header
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import PAGE
from ft_plugins.systems.reft import capture_times
from ft_plugins.systems.reft.capture_times import CaptureTimes, PeerDegraded
from harness.job_control import wait_until
from harness.plain_host import PlainHost

from ..incarnation import context

Node = Any  # the fixture's class lives in conftest
AUTO = {"interval": "auto"}
CHOICES = ((3, 100), (2, 100))  # one after another
WAIT = 120.0


def _life(rank, world, run_dir, token, until, reft, choices=(), **block):
    """A life of a rank up to the fence of iteration `until` + 1, which snapshots it took and what it measured."""
    left, measured = list(choices), list[Measured]()

    def choose(job, seen, captured, stored):
        measured.append(seen)
        return Choice(*(left.pop(0) if left else (captured, stored)), reason="the test says so")

    capture_times.choose, capture_times.SNAPSHOTS = choose, 4
    tensor, sealed, changes = torch.zeros(100), list[int](), list[dict[str, Any]]()
    host = PlainHost({"w": tensor}, rank=rank, world_size=world)
    config = Config.from_json({"reft": reft, "node_name": run_dir.name, **block})
    session = attach(host, config, context(rank, world, run_dir, token))
    session._events.subscribe(
        lambda event: (
            sealed.append(event.fields["iteration"]) if event.name == "snapshot.sealed"
            else changes.append(event.fields) if event.name == "interval.changed" else None
        )
    )  # fmt: skip
    resumed = session.resume()
    assert set(tensor.tolist()) == {float(resumed)}
    for step in range(resumed + 1, until + 2):
        session.iteration_begin(step)
        torch.distributed.barrier()  # as the reduction of gradients
        session.before_update(step)
        if step > until:
            break
        tensor.fill_(step)
        session.after_update(step)
        session.iteration_end(step)
    torch.distributed.barrier()
    return {"resumed": resumed, "sealed": sealed, "changes": changes, "measured": measured}


@pytest.fixture
def live(node, ranks):
    """A life of a job of three ranks, which are then gone without an orderly end."""
    node.start()
    return lambda *arguments, **block: ranks(
        functools.partial(_life, **block), 3, node.run_dir, node.fence(), *arguments
    )


def of_all_ranks(lives):
    """Where all ranks resumed, and the versions that all of them captured."""
    first = lives[0]
    assert all(one["resumed"] == first["resumed"] and one["sealed"] == first["sealed"] for one in lives)
    assert all(one["measured"] == first["measured"] for one in lives), "they choose by the same figures"
    assert not any(one["changes"] for one in lives[1:]), "one says it for all"
    return first["resumed"], first["sealed"]


def chosen(node, rank=0):
    return Segment(node.segment(rank)).header.chosen


def test_all_ranks_change_together_and_a_restart_goes_through_the_same_iterations(node, live):
    first = live(15, AUTO, CHOICES)  # the second change is known at the fence of 16, where all ranks are killed
    assert of_all_ranks(first) == (0, [1, 2, 3, 4, 6, 9, 12, 15])
    said = [(one["interval"], one["checkpoint_interval"], one["iteration"]) for one in first[0]["changes"]]
    assert said == [(3, 100, 5), (2, 100, 16)]
    known = chosen(node)
    assert known is not None and (known.since, known.now, known.restarts) == (16, Intervals(2, 100), 0)
    Segment(node.segment(0)).header.chosen = None  # as that of a node that takes the place of a lost one
    second = live(19, AUTO)
    assert of_all_ranks(second) == (15, [16, 17, 18, 19]), "a restart halves the interval"
    (halved,) = second[0]["changes"]
    assert (halved["interval"], halved["iteration"]) == (1, 16) and "the job was restarted" in halved["reason"]
    after = chosen(node)
    assert after is not None and (after.since, after.now, after.before) == (16, Intervals(1, 100), Intervals(2, 100))
    assert [after] * 3 == [chosen(node, rank) for rank in range(3)] and after.restarts == 1
    assert after.began == known.began, "failures are counted over the whole job"
    third = live(27, AUTO)
    assert of_all_ranks(third) == (19, [*range(20, 28)])
    assert {one.restarts for one in third[0]["measured"]} == {2}


def test_from_a_version_before_the_last_change_half_of_the_interval_of_then_is_used(live):
    assert of_all_ranks(live(15, AUTO, CHOICES))[1][-3:] == [9, 12, 15]
    assert of_all_ranks(live(19, AUTO, resume="before:13")) == (12, [13, 14, 15, 16, 17, 18, 19])


def test_another_flag_ends_it_and_a_new_beginning_begins_again(node, live):
    live(7, AUTO, CHOICES)
    assert chosen(node) is not None
    assert of_all_ranks(live(8, {"interval": 1})) == (6, [7, 8])
    assert chosen(node) is None, "or SMPs would follow it"
    assert of_all_ranks(live(10, AUTO)) == (8, [9, 10])


def test_measured_seconds_are_the_worst_of_any_rank(live):
    (measured,) = live(6, AUTO)[0]["measured"]
    assert measured.iteration > 0 and measured.fences >= 0 and measured.restarts == 0
    assert (measured.exchange, measured.storage) == (0, 0), "there is neither"


def test_checkpoints_are_written_by_the_interval_that_was_chosen_and_their_time_is_measured(node, live, tmp_path):
    reft = {"interval": 2, "checkpoint_interval": "auto", "checkpoint_dir": str(tmp_path)}
    assert of_all_ranks(live(24, reft, ((2, 6),))) == (0, [*range(2, 25, 2)])
    known = chosen(node)
    assert known is not None and (known.since, known.now) == (9, Intervals(1, 6)), "snapshots stay as configured"
    wait_until(lambda: bool(node.events("checkpoint.completed")), WAIT, lambda: "no checkpoint")
    assert min(event.fields["iteration"] for event in node.events("checkpoint.completed")) >= 12
    again = live(34, reft)
    assert of_all_ranks(again) == (24, [26, 28, 30, 32, 34])
    assert again[0]["measured"][0].storage > 0


# ---- when ranks lose each other ----


class LostRanks:
    """A collective whose gathers end as the test says."""

    rank = 1

    def __init__(self, reason, refused=False, degraded=False):
        self.started, self._reason, self._refused, self._degraded = 0, reason, refused, degraded

    def announced(self, word):
        return self._degraded

    def gather(self, payload):
        return [payload, payload]

    def start_gather(self, payload):
        self.started += 1
        over = threading.Event()
        if not self._degraded:
            over.set()

        def result(call):
            raise ProtocolError(self._reason)

        switch = SimpleNamespace(result=result, seconds=WAIT)
        return PendingGather(switch, Call(over=over, reason=self._reason, refused=self._refused), 2, payload)


def times(ranks):
    job = MeasuredJob(True, False, 1, 2, 0)
    found = CaptureTimes(SnapshotSchedule.of(1, 1, 0), ReftConfig.model_validate(AUTO), job, ranks, Events())
    found.resume(Header(np.zeros(PAGE // 8, dtype=np.uint64)), 0)
    return found


def run(found, iterations):
    for iteration in range(1, iterations + 1):
        found.fence(iteration, 0.0)
        assert found.captures(iteration)
        found.captured(iteration)


def test_where_ranks_have_lost_each_other_before_the_intervals_stay_as_they_are():
    ranks = LostRanks("rank 1: the connection to rank 0 is lost", refused=True)
    run(times(ranks), 100)
    assert ranks.started == 1, "and no rank asks again"


def test_a_rank_that_cannot_know_what_the_others_chose_captures_no_more():
    found = times(LostRanks("rank 1: the connection to rank 0 is lost"))
    with pytest.raises(
        ProtectionError, match="rank 1: at which iterations snapshots are taken from 17 on is not known"
    ):
        run(found, 100)


def test_figures_are_not_awaited_from_a_rank_that_lost_protection():
    with pytest.raises(PeerDegraded):
        run(times(LostRanks("never asked", degraded=True)), 100)
