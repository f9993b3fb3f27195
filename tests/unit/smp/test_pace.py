"""How often a version counts, beside what was planned: what an event says, and what a status says in words."""

import numpy as np
import pytest

from ft_plugins.bubbles.gate.gate import GATE_BYTES, Gate
from ft_plugins.bubbles.gate.gate_pacer import GatePacer
from ft_plugins.smp.exchange.pace import Pace, pace_text
from ft_plugins.snapshot.segment.slots import Version

FIRST = Version(1, 0)


def paced(planned, interval=1, last=FIRST):
    """Of one rank, whose trainer has planned so; `last` has counted."""
    gate = Gate(np.zeros(GATE_BYTES, dtype=np.uint8))
    gate.plan(planned, 1.0, 0.0)
    pace = Pace(interval, last)
    pace.pacers = {3: GatePacer(gate)}
    return pace


@pytest.mark.parametrize(
    ("planned", "interval", "expected"), [(1, 1, 1), (2, 1, 2), (1, 5, 5), (7, 5, 10), (0, 5, None)]
)
def test_as_planned_is_a_whole_number_of_intervals(planned, interval, expected):
    assert paced(planned, interval).planned == expected


def test_the_distance_is_between_the_last_two_that_counted_in_one_lineage():
    pace = paced(2)
    assert pace.iterations is None
    seen = []
    for version in (Version(1, 3), Version(1, 5), Version(2, 5), Version(2, 9)):
        pace.committed(version)
        seen.append(pace.iterations)
    assert seen == [3, 2, 2, 4], "a recovery is no distance"
    assert Pace(1, None).iterations is None


@pytest.mark.parametrize("last", [Version(1, 90), Version(1, 100)])
def test_a_restored_version_that_is_committed_again_does_not_say_how_often_this_incarnation_commits(last):
    restored = Version(1, 100)
    pace = Pace(1, last, restored)
    assert not pace.committed(restored) and (pace.usual, pace.iterations) == (0, None)
    pace.captured(Version(2, 101))
    pace.captured(Version(2, 151))
    pace.committed(Version(2, 140))
    assert pace.usual == 50 and pace.iterations is None
    pace.committed(Version(2, 210))
    assert pace.usual == 70


def test_rarer_is_said_once_when_it_lasts_and_taken_back_when_it_is_over():
    pace, at = paced(2), 0
    told = []
    for distance in (3, 5, 6, 2, 6, 6, 20, 6, 6, 2, 2, 2):
        at += distance
        told.append((pace.committed(Version(1, at)), pace.rarer))
    usual, rare = (False, False), (False, True)
    assert told == [*[usual] * 6, (True, True), rare, rare, rare, rare, (True, False)], "6 is more than twice 2, and 1"


def test_that_nothing_counts_any_more_is_said_once_and_taken_back_when_something_does():
    pace = paced(2)
    told = [pace.captured(Version(1, at)) for at in (1, 15, 31, 32, 33)]
    assert told == [False, False, False, True, False], "three times twice as planned and 1, and a profile's iterations"
    assert not any(pace.committed(Version(1, 40 + 2 * number)) for number in range(3)), "one was far"
    assert pace.committed(Version(1, 46)) and not pace.rarer


@pytest.mark.parametrize("last", [None, Version(1, 90)])
def test_that_nothing_ever_counts_in_a_lineage_is_said_too(last):
    pace = paced(2, last=last)
    told = [pace.captured(Version(2, at)) for at in (99, 100, 130, 131, 132)]
    assert told == [False, False, False, True, False] and pace.rarer


def test_what_went_in_bubbles_is_told_of_the_last_versions():
    pace = paced(2)
    (pacer,) = pace.pacers.values()
    assert pace.share_in_bubbles is None
    pacer._state.rate_bytes = 1000  # before there was a plan
    assert pace.share_in_bubbles == 0
    for at in range(1, 30):
        pacer._state.inside_bytes += 97 if at < 20 else 30
        pacer._state.late_bytes += 3 if at < 20 else 70
        pace.committed(Version(1, 2 * at))
        told = pace.share_in_bubbles
        assert told == pace.status()["share_in_bubbles"]
        if at in (18, 29):  # eight versions of one kind
            assert told == (0.97 if at == 18 else 0.3)
    assert pace.fields()["in_bubbles"] == 19 * 97 + 10 * 30, "events have the sums"


def test_what_begins_at_a_late_iteration_waits_from_there():
    """Of a lineage that was resumed nothing is captured yet when it is asked first."""
    pace = paced(2, last=Version(1, 5000))
    assert not any(pace.captured(Version(2, at)) for at in (0, 0, 5001, 5010, 5032))
    assert pace.captured(Version(2, 5033))


def test_without_a_plan_nothing_is_rarer_than_it():
    pace = paced(0)
    assert not any(pace.committed(Version(1, 100 * number)) for number in range(1, 9))
    nothing = dict.fromkeys(("in_bubbles", "late", "by_rate", "taken", "offered"), 0)
    assert pace.fields() == {"iterations": 100, "planned": None, **nothing}


def test_a_status_says_it_in_words():
    def said(**more):
        nothing = {"iterations": 1, "planned": None, "share_in_bubbles": None, "rarer": False, "waits": 0}
        return pace_text(nothing | more)

    assert said(iterations=None) == pace_text({}) == ""
    none = "none in 40 iterations, planned 2: rarer than planned"
    assert said(iterations=None, planned=2, rarer=True, waits=40) == none
    assert said(iterations=2, planned=2, rarer=True, waits=40) == none, "not every 2, as it was before"
    assert said(iterations=None, planned=2, rarer=True, waits=1) == none.replace("40 iterations", "1 iteration")
    assert said(iterations=None, planned=2, rarer=True) == none.replace("none in 40 iterations", "one just now")
    assert said() == said(rarer=True, waits=1).partition(":")[0] == "every 1 iteration"
    assert said(iterations=3, planned=2) == "every 3 iterations, planned 2"
    assert said(iterations=9, planned=2, share_in_bubbles=0.97, rarer=True) == (
        "every 9 iterations, planned 2, 97% of it in bubbles: rarer than planned"
    )


def test_of_a_plan_that_is_given_up_nothing_is_rarer_any_more():
    for counts in (True, False):
        pace = paced(2)
        assert pace.captured(Version(1, 40))
        (pacer,) = pace.pacers.values()
        pacer._gate.plan(0, 0.0, 0.0)
        assert not (pace.committed(Version(1, 41)) if counts else pace.captured(Version(1, 41)))
        assert not pace.rarer and "rarer" not in pace_text(pace.status())


def test_the_alarm_when_the_pace_changes():
    pace = paced(2)
    assert pace.captured(Version(1, 40))
    assert pace.words().startswith("none in 40 iterations, planned 2: losing a node costs more iterations than planned")
    for at in (41, 43, 45, 47):
        pace.committed(Version(1, at))
        pace.captured(Version(1, at + 2))
    assert not pace.rarer and pace.words() == "every 2 iterations, planned 2"
