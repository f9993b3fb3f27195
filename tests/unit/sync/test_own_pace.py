"""Replicas that train at their own pace agree when to synchronise: no deadlock, and no wait beyond one iteration."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.sync.rounds.own_pace import Timekeeper, WorkDone, next_period


@dataclass
class Board:
    """What the replicas of one emulated job have announced."""

    announced: list[int]
    latency: float = 0.0  # until the last announcement has reached all
    complete: float = 0.0  # when it was made


@dataclass
class Announcements:
    """The `Readiness` of one replica. A wait takes no virtual time."""

    board: Board
    place: int
    clock: Callable[[], float]

    def announce(self):
        self.board.announced[self.place] += 1
        self.board.complete = self.clock()

    def all_ready(self, patience):
        known = self.clock() + patience >= self.board.complete + self.board.latency
        return known and min(self.board.announced) >= self.board.announced[self.place]


@dataclass
class Emulated:
    """One job in virtual time. `duration(replica, iteration)` in seconds."""

    replicas: int
    duration: Callable[[int, int], float]
    period: float
    latency: float = 0.0
    now: float = 0.0
    joined: list[list[int]] = field(default_factory=list)  # by synchronisation, each replica's iteration
    waited: list[list[float]] = field(default_factory=list)

    def run(self, synchronisations):
        board = Board([0] * self.replicas, self.latency)

        def clock():
            return self.now

        keepers = [Timekeeper(Announcements(board, place, clock), clock) for place in range(self.replicas)]
        step = [0] * self.replicas
        ends = [(0.0, place) for place in range(self.replicas)]
        heapq.heapify(ends)
        for keeper in keepers:
            keeper.begin(self.period)
        arrived = {}
        while len(self.joined) < synchronisations:
            assert ends, f"deadlock: {len(arrived)} of {self.replicas} replicas have joined"
            self.now, place = heapq.heappop(ends)
            if step[place] and keepers[place].joins():
                arrived[place] = self.now
            else:
                step[place] += 1
                heapq.heappush(ends, (self.now + self.duration(place, step[place]), place))
            if len(arrived) == self.replicas:
                self.joined.append(list(step))
                self.waited.append([self.now - arrived[each] for each in range(self.replicas)])
                for each, keeper in enumerate(keepers):
                    keeper.begin(self.period)
                    step[each] += 1
                    heapq.heappush(ends, (self.now + self.duration(each, step[each]), each))
                arrived = {}
        return self


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=5), min_size=1, max_size=12),
    st.floats(0.0, 10.0),
)
def test_every_replica_joins_every_synchronisation_and_waits_for_one_iteration_at_most(durations, period):
    job = Emulated(len(durations), lambda place, step: durations[place][step % len(durations[place])], period).run(6)
    longest = max(max(each) for each in durations)
    assert all(waited <= longest + 1e-9 for round_waits in job.waited for waited in round_waits)
    for before, after in zip([[0] * len(durations), *job.joined], job.joined, strict=False):
        assert all(then < now for then, now in zip(before, after, strict=True)), "each trains before it is synchronised"


def test_a_thousand_replicas_with_a_slow_one():
    job = Emulated(1000, lambda place, step: 2.0 if place == 700 else 1.0 + place / 1e5, 20.0).run(3)
    steps = job.joined[-1]
    assert steps[700] < 0.6 * steps[0]
    assert max(max(each) for each in job.waited) <= 2.0


def test_replicas_train_on_until_the_last_one_is_ready():
    """The slow one ends its period at 9 s, the others at 4: they make use of the time in between."""
    job = Emulated(3, lambda place, step: 9.0 if place == 2 else 1.0, 4.0).run(1)
    assert job.joined == [[9, 9, 1]] or job.joined == [[10, 10, 1]]
    assert max(job.waited[0]) <= 1.0


def test_the_last_replica_that_is_ready_does_not_begin_another_long_iteration():
    """Although the answer that all are ready takes a while to arrive."""
    job = Emulated(3, lambda place, step: 9.0 if place == 2 else 1.0, 4.0, latency=0.5).run(2)
    assert [each[2] for each in job.joined] == [1, 2]
    assert max(max(each) for each in job.waited) <= 1.0


def test_progress_counts_the_work_of_all_replicas():
    one = WorkDone(2, (10, 4))
    after = one.after([14, 6])
    assert after == WorkDone(3, (14, 6)) and after.since(one) == (4, 2)
    assert after.reaches(10) and not after.reaches(11)


@pytest.mark.parametrize(
    ("done", "elapsed", "expected"),
    [
        ((10, 10), 10.0, 20.0),  # 100 iterations are left, 50 s at 2 per second
        ((40, 40), 10.0, 12.5),  # 100 are left, at 8 per second
        ((0, 0), 10.0, 20.0),
        ((10, 10), 0.0, 20.0),
    ],
)
def test_the_last_period_is_as_long_as_the_work_that_is_left(done, elapsed, expected):
    assert next_period(20.0, WorkDone(1, (100, 100)), done, elapsed, 150) == pytest.approx(expected)


def test_no_work_left_is_no_negative_period():
    assert next_period(20.0, WorkDone(1, (100, 100)), (10, 10), 10.0, 90) == 0.0


def test_a_job_that_is_shorter_than_a_period_ends_in_time():
    """Half of what is left, at equal shares; then the speed is known."""
    assert WorkDone(0, (0, 0)).first_quota(10) == 5
    assert WorkDone(3, (18, 1)).first_quota(10) == 1
    keeper = Timekeeper(Announcements(Board([0]), 0, lambda: 0.0), lambda: 0.0)
    keeper.begin(1e9, 3)
    assert [keeper.joins() for _ in range(3)] == [False, False, True]
