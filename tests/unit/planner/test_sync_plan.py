"""Policies of synchronisation by bandwidth: by hand, against the timeline of each, and in their limits."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from ft_plugins.planner.sync_plan import (
    MEGABIT,
    MOST_LINKS,
    PAYS,
    ComparedPolicy,
    edit_ns,
    plan_link,
    plan_sync,
)
from ft_plugins.report.plan_pictures import draw_sync
from ft_plugins.sync.layers.layer_profile import LayerProfile, LayerTimes
from ft_plugins.sync.layers.layers_schedule import LayerSchedule, period_ns

PLAIN, DREAMDDP, SPREAD, EDIT, FULL, ENP = ComparedPolicy


def profile_of(*layers, replicas=4):
    """Forward, backward and communication in seconds, and bytes."""
    times = [LayerTimes(f"h.{number}", *layer) for number, layer in enumerate(layers)]
    return LayerProfile(tuple(times), replicas)


EVEN = profile_of(*[(0.01, 0.02, 0.04, 1_000_000)] * 10)  # 0.3 s of compute, 0.4 s of communication


@st.composite
def profiles(draw):
    milliseconds = st.integers(0, 50).map(lambda number: number / 1000)
    layer = st.tuples(milliseconds, milliseconds, milliseconds, st.integers(1, 10**8))
    return profile_of(*draw(st.lists(layer, min_size=1, max_size=9)), replicas=draw(st.integers(2, 64)))


def edit_played(profile):
    """An iteration of EDiT, one event after another: a layer is exchanged while the one before it runs, not earlier."""
    forwards, times = profile.forwards_ns, profile.communication_ns
    now = times[0]
    for layer in range(len(profile)):
        begins = [now + forwards[layer]]
        if layer + 1 < len(profile):
            begins.append(now + times[layer + 1])
        now = max(begins)
    return now + profile.compute_ns - profile.forward_ns


@given(profiles())
def test_edit_exchanges_a_layer_while_the_one_before_runs(profile):
    assert edit_ns(profile) == edit_played(profile)
    assert profile.compute_ns + profile.communication_ns[0] <= edit_ns(profile)
    assert edit_ns(profile) <= profile.compute_ns + sum(profile.communication_ns)


def test_every_policy_by_hand():
    found = plan_link(EVEN, period=5)
    assert [len(own) for own in found.schedule.iterations] == [4, 2, 1, 1, 2]  # all but the last hide
    assert found.seconds[PLAIN] == pytest.approx(0.12 + 0.4)  # the link is busy from the end of the first backward
    assert found.seconds[FULL] == pytest.approx(0.3 + 0.4 / 5)
    # behind forwards of 0.01 s each; the first waits for 0.04, each of nine others for 0.03
    assert found.seconds[EDIT] == pytest.approx(0.3 + (0.04 + 9 * 0.03) / 5)
    # two layers in each: the last two end 0.3 - 0.02 + 0.08 after the begin, the two before them in time
    assert found.seconds[ENP] == pytest.approx(0.3 + (0.06 + 0.02) / 5)
    assert found.seconds[DREAMDDP] == pytest.approx(0.3 + 0.06 / 5)
    assert found.bound == 0.3 and found.pays is DREAMDDP


def test_a_link_is_a_ring_of_the_replicas():
    times = EVEN.at_link(1e6).communication_ns
    assert times == (round(1.5e9),) * 10  # 2 x 3/4 of 1 MB at 1 MB/s
    assert plan_link(EVEN, 5, mbps=8.0).seconds == plan_link(EVEN.at_link(8 * MEGABIT), 5).seconds


@given(profiles(), st.sampled_from([None, 1, 10**9]), st.floats(1, 1e6))
def test_no_policy_is_below_the_bound_and_what_pays_is_near_the_fastest(profile, period, mbps):
    period = period and min(period, len(profile))
    found = plan_link(profile, period, mbps, filled=False)
    h = found.schedule.period
    assert all(seconds >= found.bound * (1 - 1e-12) for seconds in found.seconds.values())  # of one division
    assert found.seconds[DREAMDDP] <= min(found.seconds[ENP], found.seconds[FULL])
    assert found.seconds[SPREAD] <= found.seconds[DREAMDDP] <= found.seconds[PLAIN]
    assert found.seconds[found.pays] <= found.fastest * (1 + PAYS)
    at_the_end = LayerSchedule(len(profile), ((),) * (h - 1) + (tuple(reversed(range(len(profile)))),))
    overlapped = period_ns(profile.at_link(mbps * MEGABIT), at_the_end)
    assert found.seconds[DREAMDDP] * h * 1e9 <= overlapped * (1 + 1e-12)
    if h == 1:
        assert found.seconds[DREAMDDP] == found.seconds[PLAIN]


@given(profiles(), st.floats(1, 1e5), st.floats(1, 1e5))
def test_with_a_faster_link_every_policy_is_faster(profile, one, other):
    slow, fast = (plan_link(profile, 1, mbps, filled=False) for mbps in sorted((one, other)))
    for policy in ComparedPolicy:
        assert fast.seconds[policy] <= slow.seconds[policy]


def test_plain_pays_where_it_hides_and_dreamddp_where_the_link_is_slow():
    outlook = plan_sync(EVEN, mbps=[10, 100_000])
    assert [link.pays for link in outlook.links[1:]] == [DREAMDDP, PLAIN]
    ranges = outlook.ranges()
    assert [policy for policy, _, _ in ranges] == [DREAMDDP, PLAIN]
    assert (ranges[0][1], ranges[1][2]) == (pytest.approx(10), pytest.approx(100_000)) and ranges[0][2] == ranges[1][1]
    edge = ranges[0][2]
    assert plan_link(EVEN, None, edge / 1.3).pays is DREAMDDP and plan_link(EVEN, None, edge * 1.3).pays is PLAIN
    assert len(outlook.curve) == 41


def test_links_are_chosen_where_communication_is_neither_negligible_nor_hopeless():
    found = [link.mbps for link in plan_sync(EVEN).links]
    assert found == [None, 10.0, 100.0, 1000.0]  # 12 s, 1.2 s and 0.12 s next to 0.3 s of compute
    without = replace(EVEN, layers=tuple(replace(layer, nbytes=0) for layer in EVEN.layers))
    assert [link.mbps for link in plan_sync(without).links] == [None] and not plan_sync(without).curve


def test_the_table_and_the_json_have_the_same_figures():
    outlook = plan_sync(EVEN, mbps=[100, 1000], period=5)
    lines = outlook.table().splitlines()
    assert lines[0] == ("synchronisation: 10 layers, 10 MB averaged over 4 replicas, 0.3 s of compute per iteration")
    assert lines[2].split() == ["as", "profiled", "5", "0.52", "0.312", "0.312", "0.362", "0.38", "0.316", "0.3"] + [
        f"{outlook.links[0].in_effect:.3g}", "DreamDDP"
    ]  # fmt: skip
    assert lines[-1].startswith("  pays by bandwidth: spread from 100 Mbit/s to ")
    found = json.loads(json.dumps(outlook.block()))
    assert [link["mbps"] for link in found["links"]] == [None, 100, 1000]
    assert found["links"][0]["seconds"]["dreamddp"] == outlook.links[0].seconds[DREAMDDP]
    assert found["links"][0]["schedule"][0] == [9, 8, 7, 6] and found["layers"][0] == "h.0"


def test_a_period_that_a_longer_one_would_improve_is_marked():
    short = plan_sync(EVEN, period=2)
    assert short.links[0].row()[1] == "2+" and "\n  +: a longer" in short.table()
    assert plan_sync(EVEN).links[0].hides


def test_policies_are_drawn_over_bandwidth(tmp_path):
    outlook = plan_sync(EVEN)
    draw_sync(outlook, tmp_path / "sync.svg")
    drawn = (tmp_path / "sync.svg").read_text()
    labels = [policy.title for policy in ComparedPolicy] + ["bound", "seconds per iteration", "H, iterations"]
    assert all(f"<!-- {label} -->" in drawn for label in labels)
    with pytest.raises(ConfigError, match="at least two different links"):
        draw_sync(plan_sync(EVEN, mbps=[10]), tmp_path / "one.svg")


def test_links_that_are_none_are_refused():
    for mbps in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="expected a link of more than 0 bytes per second"):
            plan_sync(EVEN, mbps=[mbps])
    with pytest.raises(ConfigError, match="the largest layer would take .* s, more than 10000; name a faster link"):
        plan_sync(EVEN, mbps=[1e-6])
    with pytest.raises(ConfigError, match=f"at most {MOST_LINKS} links, found 65"):
        plan_sync(EVEN, mbps=[10.0] * 65)
    with pytest.raises(ConfigError, match="no layer has bytes"):
        plan_sync(profile_of((1, 1, 1, 0)), mbps=[10])
