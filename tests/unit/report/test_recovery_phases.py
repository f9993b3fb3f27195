"""Where the time of a restart went."""

import pytest

from ft_plugins.events import Event
from ft_plugins.report.recovery_phases import PHASES, phase_lines, recovery_phases

BOOTED = 1_000_000.0  # when the monotonic clock was 0: seconds since the epoch
STEPS = {"began": 13.5, "joining": 15.5, "grouped": 0.25, "built": 16.5, "restored": 17.0, "completed": 18.0}


def restarted(seen, ended, clock, *, node="n0", token=2, restart=1, **more):
    fields = {"restart": restart, "token": token, "clock": clock, "seen": seen, "ended": ended, **more}
    return Event("workers.restarted", BOOTED + clock + 0.3, node, fields=fields)


def resumed(*, node="n0", token=2, lineage=2, iteration=8, **steps):
    fields = {"restart": 1, "token": token, "lineage": lineage, "iteration": iteration, "count": 4, **STEPS, **steps}
    return Event("ranks.resumed", BOOTED + fields["completed"], node, 0, fields=fields)


def killed(at, node="n0"):
    return Event("signal.sent", BOOTED + at, node, fields={"rank": 1})


def test_the_phases_are_disjoint_and_their_sum_is_the_time_from_kill_to_iteration():
    [one] = recovery_phases([killed(11.0), restarted(11.25, 11.5, 13.0), resumed()])
    assert one.phases == pytest.approx({
        "attempts": None, "detect": 0.25, "dump": None, "end": 0.25, "agree": 1.5, "start": 0.5, "imports": 2.0,
        "groups": 0.25, "build": 0.75, "load": 0.5, "iteration": 1.0,
    })  # fmt: skip
    assert one.total == pytest.approx(18.0 - 11.0)
    assert (one.restart, one.iteration, one.lineage, one.ranks) == (1, 8, 2, 4)
    assert tuple(one.phases) == PHASES


@pytest.mark.parametrize(
    ("missing", "unknown", "longer"),
    [("joining", ("imports", "groups"), "build"), ("built", ("build", "groups"), "load")],
)
def test_a_step_that_was_not_noted_adds_its_time_to_the_next_phase(missing, unknown, longer):
    [whole] = recovery_phases([restarted(11.25, 11.5, 13.0), resumed()])
    [one] = recovery_phases([restarted(11.25, 11.5, 13.0), resumed(**{missing: None})])
    phases, complete = one.phases, whole.phases
    assert [phases[name] for name in unknown] == [None, None]
    assert (phases[longer] or 0.0) > (complete[longer] or 0.0)
    assert one.total == pytest.approx(whole.total) == pytest.approx(18.0 - 11.25)


@pytest.mark.parametrize("known", [True, False])
def test_while_a_core_is_written_the_job_waits_for_it_whether_the_time_of_the_failure_is_known_or_not(known):
    events = [restarted(11.25, 11.5, 13.0, dumping=7.5), resumed()]
    [one] = recovery_phases([killed(7.25), *events] if known else events)
    assert (one.phases["detect"], one.phases["dump"]) == (0.25 if known else None, 3.75)
    assert one.total == pytest.approx(18.0 - (7.25 if known else 7.5))
    assert any(line.split() == ["write", "a", "core", "3.75"] for line in phase_lines([one]))


def test_a_process_that_stood_by_began_before_and_its_start_took_no_time():
    [one] = recovery_phases([restarted(11.25, 11.5, 13.0), resumed(began=4.0)])
    assert (one.phases["start"], one.phases["imports"]) == (0.0, pytest.approx(2.5))
    assert one.total == pytest.approx(18.0 - 11.25)


def test_each_of_several_restarts_has_its_own_phases_and_its_own_kill():
    steps = {"began": 31.0, "joining": 32.0, "built": 33.0, "restored": 34.0, "completed": 35.0}
    first, second = recovery_phases([
        killed(11.0), restarted(11.25, 11.5, 13.0), resumed(),
        killed(30.0), restarted(30.5, 30.5, 30.5, token=3, restart=2),
        resumed(token=3, lineage=3, iteration=12, **steps),
    ])  # fmt: skip
    assert (first.phases["detect"], second.phases["detect"]) == pytest.approx((0.25, 0.5))
    assert (first.total, second.total) == pytest.approx((7.0, 5.0))
    assert [one.restart for one in (first, second)] == [1, 2]


def test_columns_are_numbered_in_order_though_each_ft_run_counts_its_own_restarts():
    [one] = recovery_phases([restarted(11.25, 11.5, 13.0), resumed()])
    assert phase_lines([one, one])[0].split() == ["seconds,", "by", "restart", "1", "2"]
    assert phase_lines([one] * 7)[0].split()[3:] == ["3", "4", "5", "6", "7"], "the newest"


def test_starts_that_failed_before_an_iteration_are_a_phase_of_the_recovery():
    [one] = recovery_phases([
        killed(5.0), restarted(6.0, 6.25, 6.5, token=2), restarted(11.25, 11.5, 13.0, token=3, restart=2),
        resumed(token=3),
    ])  # fmt: skip
    assert (one.starts, one.phases["attempts"], one.phases["detect"]) == (2, 5.25, 1.0)
    assert one.total == pytest.approx(18.0 - 5.0)


def test_of_several_nodes_the_one_that_took_longest_counts_and_no_clocks_of_two_are_compared():
    later = {name: at + 5000.0 for name, at in STEPS.items() if name != "grouped"}  # another machine's clock
    events = [
        killed(11.0), restarted(11.25, 11.5, 13.0), resumed(),
        restarted(5012.0, 5012.5, 5013.0, node="n1"), resumed(node="n1", **later),
    ]  # fmt: skip
    [one] = recovery_phases(events)
    assert (one.node, one.nodes, one.phases["detect"]) == ("n0", 2, 0.25)
    [one] = recovery_phases([event for event in events if event.name != "signal.sent" or event.node == "n1"][:2])
    assert (one.node, one.phases["detect"], one.total) == ("n0", None, pytest.approx(6.75))


def test_restarts_of_one_node_from_the_same_iteration_stay_apart():
    """Without versions in memory there is no lineage, and the job goes on from the same checkpoint twice."""
    steps = {"began": 31.0, "joining": 32.0, "built": 33.0, "restored": 34.0, "completed": 35.0}
    found = recovery_phases([
        restarted(11.25, 11.5, 13.0), resumed(lineage=0),
        restarted(30.5, 30.5, 30.5, token=3, restart=2), resumed(token=3, lineage=0, **steps),
    ])  # fmt: skip
    assert [(one.nodes, one.restart) for one in found] == [(1, 1), (1, 2)]


def test_recoveries_come_by_time_whichever_nodes_saw_them():
    """n0 was replaced after the first one, so the second is known of n1 alone."""
    later = {"began": 31.0, "joining": 32.0, "built": 33.0, "restored": 34.0, "completed": 35.0}
    found = recovery_phases([
        restarted(11.25, 11.5, 13.0, node="n1"), resumed(node="n1"),
        restarted(30.5, 30.5, 30.5, node="n0", token=3, restart=2),
        resumed(node="n0", token=3, lineage=3, iteration=12, **later),
    ])  # fmt: skip
    assert [one.restart for one in found] == [1, 2]


def test_a_substitute_whose_node_saw_no_failure_is_not_described():
    assert recovery_phases([resumed(node="n9")]) == ()


def test_a_start_that_another_one_has_replaced_does_not_count_as_resumed():
    assert recovery_phases([restarted(11.25, 11.5, 13.0, token=2), resumed(token=1)]) == ()


def test_old_events_without_clocks_are_passed_over():
    old = Event("workers.restarted", BOOTED, "n0", fields={"restart": 1, "token": 2, "seconds": 0.5})
    assert recovery_phases([old, resumed()]) == ()
