"""Where the wall time of a job went."""

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.events import Event
from ft_plugins.report.goodput import PARTS, goodput

EPOCH = 1_700_000_000.0


def at(time, name, rank=None, /, pid=0, **fields):
    return Event(name, EPOCH + time, "n0", rank, pid, fields)


def resumed(seconds, iteration, token=1, **fields):
    steps = {"began": 0.0, "built": 0.0, "restored": 0.0, "completed": seconds, **fields}
    return at(seconds, "ranks.resumed", 0, token=token, lineage=token, iteration=iteration, **steps)


def restarted(seconds, seen, token=2):
    return at(seconds, "workers.restarted", restart=1, token=token, seen=seen, ended=seen + 1, clock=seconds - 1)


def failed(seconds):
    return at(seconds, "worker.failed", rank=3, local_rank=3, exitcode=-9, signal="SIGKILL", message="")


def story():
    """Killed at 100 after iteration 20; restored at 10; computes 11 to 20 again until 140."""
    return [
        at(0, "job.started", nproc=4, script="train.py"),
        resumed(10, 1),
        at(99, "signal.sent", 3),
        failed(100),
        restarted(105, 100),
        at(109, "state.restored", 0, lineage=1, iteration=10, completed=20, lost=10),
        resumed(112, 11, 2, began=106.0, built=108.0, restored=110.0),
        at(141, "snapshot.sealed", 0, lineage=2, iteration=20, seconds=1.0),
        at(150, "fence.waited", 0, pid=7, iteration=21, seconds=0.5),
        at(160, "fence.waited", 1, pid=8, iteration=21, seconds=0.25),
        at(200, "job.ended", status="succeeded"),
    ]


def seconds(one):
    assert one is not None
    return {name: value / 1e6 for name, value in one.parts.items() if value}


def test_every_second_of_a_job_that_was_killed_once_has_its_place():
    one = goodput(story())
    assert one is not None and seconds(one) == pytest.approx({
        "launch": 10, "training": 89 + 59.5, "recomputed": 28, "waits": 0.5, "detect": 1, "end": 1, "agree": 3,
        "start": 2, "build": 2, "load": 2, "iteration": 2,
    })  # fmt: skip
    assert one.ettr == pytest.approx(148.5 / 200) and (one.failures, one.unseen, one.ended) == (1, 0, True)
    assert one.lines()[0] == "goodput (ETTR) 74.25 % of 200.00 s, seen by node n0"


def test_the_time_is_unknown_if_no_event_shows_when_the_iterations_were_recomputed():
    events = [event for event in story() if event.name != "snapshot.sealed"]
    assert seconds(goodput(events))["unknown"] == pytest.approx(88) and "recomputed" not in seconds(goodput(events))
    later = at(151, "snapshot.sealed", 0, lineage=2, iteration=25, seconds=1.0)
    assert seconds(goodput([*events, later]))["unknown"] == pytest.approx(38)


def test_a_hang_is_no_training_from_the_last_iteration_on():
    hang = at(90, "job.hung", about=1, seconds=60.0)
    assert seconds(goodput([*story(), hang]))["hangs"] == pytest.approx(60)


def test_ft_run_that_is_killed_leaves_time_of_which_nothing_is_known():
    events = [at(0, "job.started"), resumed(10, 1), at(50, "rank.recovered", about=1), at(80, "job.started")]
    one = goodput([*events, resumed(90, 9)])
    assert seconds(one) == pytest.approx({"launch": 20, "training": 40, "unknown": 30})
    assert one is not None and not one.ended and "until the newest event" in one.lines()[0]


def test_what_outlives_ft_run_or_comes_just_before_the_next_one_is_no_training():
    begun = [at(0, "job.started"), resumed(10, 1), at(50, "checkpoint.completed", pid=1)]
    adopted = [at(78, "segments.adopted", pid=2), at(79, "smp.started", pid=2), at(80, "job.started"), resumed(90, 9)]
    assert seconds(goodput([*begun, *adopted])) == pytest.approx({"launch": 20, "training": 40, "unknown": 30})
    orphan = [at(50, "smp.orphaned", pid=1, seconds=1800.0), at(70, "node.lost", pid=1, lost=["node b"])]
    again = [at(80, "job.started"), resumed(90, 9)]
    assert seconds(goodput([*begun[:2], *orphan, *again])) == pytest.approx(
        {"launch": 20, "training": 40, "unknown": 30}
    )


def test_a_spare_that_lived_longer_than_those_that_trained_is_not_the_one_that_is_shown():
    spare = [at(-5, "job.started"), resumed(195, 30), at(220, "job.ended", status="succeeded")]
    one = goodput([*story(), *(replace(event, node="spare") for event in spare)])
    assert one is not None and one.node == "n0" and seconds(one) == seconds(goodput(story()))


def test_time_between_two_ft_runs_is_that_of_none():
    events = [at(0, "job.started"), resumed(10, 1), at(50, "job.ended", status="failed"), at(80, "job.started")]
    assert seconds(goodput([*events, resumed(90, 9)]))["stopped"] == pytest.approx(30)


def test_a_failure_of_unknown_time_is_counted_and_said():
    one = goodput([event for event in story() if event.name != "signal.sent"])
    assert one is not None and one.unseen == 1
    assert any("noticed at an unknown time" in line for line in one.lines())


def test_sums_of_waits_are_not_counted_twice():
    fields = {"of": "fence.waited", "count": 1, "first": 21, "last": 21, "longest": 0.5, "seconds": 0.5}
    assert seconds(goodput([*story(), at(170, "routine.summed", 0, pid=7, **fields)]))["waits"] == pytest.approx(0.5)


def test_a_slow_rank_is_named_and_its_cost_not_guessed():
    one = goodput([*story(), at(50, "rank.slowed", 0, about=2, factor=2.0, seconds=0.5, iterations=16)])
    assert one is not None and one.slow == (2,) and one.lines()[-1].endswith("rank 2")


def test_without_events_there_is_nothing_to_say():
    assert goodput([]) is None


MAKERS = st.sampled_from([
    lambda t: at(t, "job.started"), lambda t: resumed(t, 5), failed, lambda t: restarted(t, t - 3.3),
    lambda t: at(t, "state.restored", 0, lineage=1, iteration=3, completed=9, lost=6),
    lambda t: at(t, "snapshot.sealed", 0, lineage=1, iteration=9, seconds=0.7),
    lambda t: at(t, "job.hung", about=1, seconds=12.34), lambda t: at(t, "job.waiting", about=1, seconds=4.0),
    lambda t: at(t, "job.advanced", iteration=4, seconds=3.0), lambda t: at(t, "signal.sent", 1),
    lambda t: at(t, "fence.waited", 1, iteration=4, seconds=999.0), lambda t: at(t, "job.ended", status="failed"),
])  # fmt: skip


@given(st.lists(st.tuples(MAKERS, st.floats(0, 1000)), min_size=1, max_size=25))
def test_the_parts_add_up_to_the_wall_time_to_the_microsecond(made):
    events = [make(time) for make, time in made]
    one = goodput(events)
    assert one is not None and tuple(one.parts) == PARTS
    assert sum(one.parts.values()) == one.wall and min(one.parts.values()) >= 0
    first, last = min(event.time for event in events), max(event.time for event in events)
    assert one.wall == round(last * 1e6) - round(first * 1e6)


def work_of(restarts):
    """How many instructions the account of a job takes: the same on every machine."""
    events = [at(0, "job.started")]
    for number in range(restarts):
        events += [
            at(100 * number + 1, "state.restored", 0, lineage=number, iteration=5, completed=9, lost=4),
            resumed(100 * number + 2, 6, number), at(100 * number + 9, "snapshot.sealed", 0, iteration=9, seconds=1.0),
            at(100 * number + 20, "job.hung", about=1, seconds=5.0), failed(100 * number + 30),
            restarted(100 * number + 40, 100 * number + 30, number + 1),
        ]  # fmt: skip
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        goodput(events)
    finally:
        sys.settrace(before)
    return count


def test_the_work_grows_with_the_restarts_and_not_with_their_square():
    assert work_of(200) < 3 * work_of(100)


def test_times_that_are_unknown_or_below_nothing_take_none_of_the_others():
    odd = [at(50, "job.hung", about=1, seconds=None), at(155, "fence.waited", 5, pid=9, iteration=21, seconds=-9.0)]
    one = goodput([*story(), *odd])
    assert seconds(one) == seconds(goodput(story()))
    alone = goodput([at(1, "fence.waited", 5, pid=9, iteration=21, seconds=-9.0)])
    assert alone is not None and alone.wall == 0 and not any(alone.parts.values()) and len(alone.lines()) == 1
