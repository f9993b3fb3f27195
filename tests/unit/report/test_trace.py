"""The trace of a job is one that viewers accept, and holds what the events hold."""

import json
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.events import Event
from ft_plugins.report.trace import trace

EPOCH = 1_700_000_000.0


def at(time, name, rank=0, node="a", /, **fields):
    return Event(name, EPOCH + time, node, rank, 0, fields)


def sealed(time, seconds, rank=0):
    return at(time, "snapshot.sealed", rank, lineage=1, iteration=4, seconds=seconds, bytes=8, slot=1)


def checked(events):
    """The entries, which are of Chrome's schema; slices of a lane are ordered, and nested or disjoint."""
    made = json.loads(json.dumps(trace(events)))
    assert set(made) == {"traceEvents", "displayTimeUnit", "otherData"}
    lanes = defaultdict(list)
    named = set()
    for entry in made["traceEvents"]:
        assert entry["ph"] in ("X", "i", "M") and isinstance(entry["name"], str) and entry["ts"] >= 0
        assert type(entry["ts"]) is type(entry["pid"]) is type(entry["tid"]) is int and type(entry["args"]) is dict
        if entry["ph"] == "M":
            named.add((entry["pid"], entry["tid"]))
        if entry["ph"] == "X":
            assert type(entry["dur"]) is int and entry["dur"] >= 0
            lanes[entry["pid"], entry["tid"]].append(entry)
        assert entry["ph"] != "i" or entry["s"] == "p"
    assert set(lanes) <= named
    for entries in lanes.values():
        assert [entry["ts"] for entry in entries] == sorted(entry["ts"] for entry in entries)
        open_ends = []
        for entry in entries:
            while open_ends and open_ends[-1] <= entry["ts"]:
                open_ends.pop()
            end = entry["ts"] + entry["dur"]
            assert not open_ends or end <= open_ends[-1], "slices of a lane overlap"
            open_ends.append(end)
    return [entry for entry in made["traceEvents"] if entry["ph"] != "M"]


def test_a_capture_is_drawn_for_as_long_as_it_took():
    [entry] = checked([sealed(10.0, 2.5)])
    assert (entry["name"], entry["cat"], entry["dur"]) == ("capture 4", "rank 0: captures", 2_500_000)
    assert entry["args"]["bytes"] == 8


def test_the_phases_of_a_recovery_lie_within_it():
    restarted = at(4.0, "workers.restarted", None, restart=1, token=2, seen=1.0, ended=2.0, clock=3.0)
    resumed = at(
        10.0, "ranks.resumed", token=2, lineage=2, iteration=8, began=4.0, built=6.0, restored=8.0, completed=10.0
    )
    whole, *phases = checked([restarted, resumed])
    assert whole["name"] == "restart 1" and whole["dur"] == 9_000_000
    assert [phase["name"] for phase in phases][:3] == ["end old processes", "agree on a round", "start processes"]
    assert sum(phase["dur"] for phase in phases) == 9_000_000


def test_a_measured_iteration_has_its_spans_bubbles_and_windows_side_by_side_for_all_ranks():
    fields = {"iteration": 5, "spans": [["forward", 0.0, 0.5], ["send", 0.25, 0.75]], "bubbles": [[0, 0.5, 1.0]],
              "windows": [[0, 0.5, 0.75, 4096]]}  # fmt: skip
    drawn = checked([at(2.0, "timeline.recorded", 0, **fields), at(2.5, "timeline.recorded", 1, **fields)])
    forwards = [entry for entry in drawn if entry["name"] == "forward"]
    assert [entry["ts"] for entry in forwards] == [0, 0] and len(drawn) == 8
    assert next(entry for entry in drawn if entry["name"] == "window 0")["args"] == {"bubble": 0, "bytes": 4096}


def test_failures_are_marks_and_an_empty_job_is_an_empty_trace():
    [mark] = checked([at(1.0, "worker.failed", 3, exitcode=-9, signal="SIGKILL")])
    assert (mark["ph"], mark["name"], mark["args"]["rank"]) == ("i", "worker.failed", 3)
    assert checked([]) == []


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50), st.integers(0, 2)), max_size=20))
def test_captures_that_overlap_get_lanes_of_their_own(made):
    assert len(checked([sealed(*one) for one in made])) == len(made)
