"""The agreement on the committed version, case by case and for any reports. Whole jobs: `tests/world`."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.smp.tree.agreement import (
    LOST_LIMIT,
    ExchangeDecision,
    ExchangeEpoch,
    NodeReport,
    Summary,
    decide,
    merge,
    summarize,
)
from ft_plugins.snapshot.schedule import ChosenSchedule, Intervals
from ft_plugins.snapshot.segment.slots import (
    Version,
)

STEPS = 1000  # of a schedule

# ---- what decide says, case by case ----


def v(iteration, lineage=1):
    return Version(lineage, iteration)


FRESH = ExchangeEpoch(1, None, 3, 4)
RESTORED = ExchangeEpoch(2, v(10), 3, 4)


def summary_of(reports):
    return merge(summarize(position, report) for position, report in reports.items())


def all_of(*reports):
    return summary_of(dict(enumerate(reports)))


@pytest.mark.parametrize(
    ("begun", "interval", "named"),
    [((0, 0, 0), 1, 1), ((0, 0, 0), 4, 4), ((3, 4, 2), 4, 8), ((7, 6, 7), 4, 8), ((9, 8, 8), 1, 10)],
)
def test_the_next_turn_that_no_rank_has_begun_is_named(begun, interval, named):
    epoch = replace(FRESH, interval=interval)
    assert decide(epoch, ExchangeDecision(), all_of(*map(NodeReport, begun))) == ExchangeDecision(v(named), None)


def test_nothing_is_named_before_every_node_was_heard():
    assert decide(FRESH, ExchangeDecision(), summary_of({0: NodeReport(3), 2: NodeReport(3)})) == ExchangeDecision()


def test_a_version_counts_when_the_last_node_has_encoded_it_and_the_next_one_is_named():
    now = ExchangeDecision(v(4), None)
    ready, busy = NodeReport(6, v(4), encoded=v(4)), NodeReport(6, v(4))
    assert decide(FRESH, now, all_of(ready, ready, busy)) == now
    assert decide(FRESH, now, all_of(ready, ready, ready)) == ExchangeDecision(v(8), v(4))


def test_what_another_version_has_encoded_does_not_help():
    now = ExchangeDecision(v(8), v(4))
    before = NodeReport(9, v(8), encoded=v(4), committed=v(4))
    assert decide(FRESH, now, all_of(before, before, before)) == now


def test_a_version_that_one_node_missed_is_given_up_for_a_later_one_and_what_counted_still_does():
    now = ExchangeDecision(v(8), v(4))
    ready, missed = NodeReport(9, v(8), encoded=v(8), committed=v(4)), NodeReport(11, None, missed=v(8), committed=v(4))
    after = decide(FRESH, now, all_of(ready, missed, ready))
    assert after == ExchangeDecision(v(12), v(4))
    assert decide(FRESH, after, all_of(ready, missed, ready)) == after, "an old report does not end the next one"


def test_what_was_missed_before_or_is_still_being_said_of_it_does_not_end_what_is_exchanged_now():
    now = ExchangeDecision(v(12), v(4))
    behind = NodeReport(13, v(8), committed=v(4))
    late = all_of(behind, replace(behind, missed=v(8)), NodeReport(12, v(8)))
    assert decide(FRESH, now, late) == now


def test_a_missed_version_is_not_named_again_however_little_has_begun():
    missed = NodeReport(3, None, missed=v(8))
    assert decide(FRESH, ExchangeDecision(v(8)), all_of(missed, missed, missed)).exchange == v(12)


def changed(since, before, now):
    """Ranks capture every `now` iterations from `since` on; each is exchanged."""
    return replace(FRESH, interval=1, chosen=ChosenSchedule(since, Intervals(now, 0), Intervals(before, 0), 0))


def test_a_version_that_ranks_have_chosen_not_to_capture_is_given_up_at_once_and_never_for_an_older_one():
    before, heard = ExchangeDecision(v(24), v(16)), NodeReport(16, v(24), committed=v(16))
    assert decide(changed(18, 8, 50), before, all_of(heard, heard, heard)) == ExchangeDecision(v(50), v(16))
    assert decide(changed(18, 8, 5), before, all_of(heard, heard, heard)) == ExchangeDecision(v(25), v(16))
    assert decide(changed(25, 8, 50), before, all_of(heard, heard, heard)) == before, "it comes before the change"
    sending = NodeReport(25, v(24), encoded=v(24), committed=v(16))
    assert decide(changed(25, 8, 50), before, all_of(sending, sending, sending)) == ExchangeDecision(v(50), v(24))


def test_the_restored_version_is_exchanged_whatever_was_chosen():
    epoch = replace(changed(3, 1, 4), lineage=2, base=v(10))
    assert decide(epoch, ExchangeDecision(), all_of(*3 * [NodeReport(0)])) == ExchangeDecision(v(10), None)
    waiting = ExchangeDecision(v(10), None)
    assert decide(epoch, waiting, all_of(*3 * [NodeReport(0, v(10))])) == waiting


@pytest.mark.parametrize(
    ("committed", "begun", "named"), [(v(4), 30, v(5)), (None, 100_001, v(1))], ids=["committed", "framework"]
)
def test_what_ranks_were_past_when_it_was_announced_is_followed_by_one_further_ahead_each_time(committed, begun, named):
    """Reports and announcements take 20 iterations: after a few attempts one is announced before it is captured. So
    too if ranks continue from the framework's own checkpoint, of which nothing is known here, and no later."""
    epoch, delay, first, attempts = replace(FRESH, interval=1), 20, begun, 0
    while named.iteration <= begun:
        attempts += 1
        begun += delay
        heard = NodeReport(begun, named, missed=named, committed=committed, late=named)
        after = decide(epoch, ExchangeDecision(named, committed), all_of(heard, replace(heard, late=None), heard))
        assert after.exchange is not None and after.exchange > named and after.committed == committed
        named, begun = after.exchange, begun + delay
        assert attempts < 10
    assert named.iteration < first + 300
    differing = NodeReport(100, v(99), missed=v(99), committed=committed)
    after = decide(epoch, ExchangeDecision(v(99), committed), all_of(differing, differing, differing))
    assert after.exchange == v(101), "missed for another reason: the next one is announced"


def test_one_who_decides_anew_goes_on_from_reports_alone():
    running = NodeReport(9, v(8), committed=v(4))
    assert decide(FRESH, ExchangeDecision(), summary_of({1: running})) == ExchangeDecision(v(8), v(4))
    replaced = NodeReport(9, committed=v(4))
    assert decide(FRESH, ExchangeDecision(), all_of(replaced, running, running)) == ExchangeDecision(v(8), v(4))
    ahead = NodeReport(9, v(12), committed=v(8))
    assert decide(FRESH, ExchangeDecision(), all_of(replaced, running, ahead)) == ExchangeDecision(v(12), v(8))


def test_the_restored_version_comes_first_and_until_it_counts_on_every_node():
    kept, fresh = NodeReport(0, committed=v(10)), NodeReport(0)
    named = decide(RESTORED, ExchangeDecision(), all_of(kept, fresh, kept))
    assert named == ExchangeDecision(v(10), v(10)), "kept where it still is, sent to who lost it"
    ready = NodeReport(15, v(10), encoded=v(10), committed=v(10))
    busy = all_of(NodeReport(14, v(10), committed=v(10)), NodeReport(14, v(10)), ready)
    assert decide(RESTORED, named, busy) == named, "however long it takes"
    settled = NodeReport(15, v(10), encoded=v(10), committed=v(10))
    assert decide(RESTORED, named, all_of(settled, settled, settled)) == ExchangeDecision(v(16, 2), v(10))


def test_a_restored_version_that_counted_nowhere_does_when_all_have_encoded_it():
    older = NodeReport(0, committed=v(4))
    named = decide(RESTORED, ExchangeDecision(), all_of(older, older, older))
    assert named == ExchangeDecision(v(10), v(4))
    ready = NodeReport(11, v(10), encoded=v(10), committed=v(4))
    assert decide(RESTORED, named, all_of(ready, ready, older)) == named
    counts = decide(RESTORED, named, all_of(ready, ready, ready))
    assert counts == ExchangeDecision(v(10), v(10)), "and is not left before all have it pinned"
    settled = replace(ready, committed=v(10))
    assert decide(RESTORED, counts, all_of(settled, ready, settled)) == counts
    assert decide(RESTORED, counts, all_of(settled, settled, settled)) == ExchangeDecision(v(12, 2), v(10))


def test_training_that_has_begun_nothing_since_it_was_restored_is_named_the_next_turn():
    settled = NodeReport(0, committed=v(10))
    assert decide(RESTORED, ExchangeDecision(), all_of(settled, settled, settled)) == ExchangeDecision(v(12, 2), v(10))


def test_a_restored_version_that_a_node_cannot_send_is_left_so_that_a_newer_one_can_be():
    kept, overwritten = NodeReport(13, v(10), committed=v(10)), NodeReport(13, missed=v(10))
    after = decide(RESTORED, ExchangeDecision(v(10), v(10)), all_of(kept, overwritten, kept))
    assert after == ExchangeDecision(v(16, 2), v(10))


def test_what_is_named_after_a_recovery_is_of_the_new_lineage():
    epoch = ExchangeEpoch(5, None, 1, 3)
    assert decide(epoch, ExchangeDecision(), all_of(NodeReport(0))) == ExchangeDecision(v(3, 5), None)


# ---- from any reports, what was decided before they were merged on their way ----


def decided_from_all(epoch, before, heard):
    """`decide` as it was while position 0 received every report itself."""
    newest = lambda *versions: max((version for version in versions if version is not None), default=None)  # noqa: E731
    committed = newest(before.committed, *(report.committed for report in heard.values()))
    exchange = newest(before.exchange, *(report.exchange for report in heard.values()))
    if exchange is not None and committed is not None and exchange <= committed:
        exchange = None
    if len(heard) < epoch.nodes:
        return ExchangeDecision(exchange, committed)
    if exchange is not None and all(report.encoded == exchange for report in heard.values()):
        committed, exchange = exchange, None
    elif exchange is not None and any(report.missed == exchange for report in heard.values()):
        exchange = None
    if exchange is not None:
        return ExchangeDecision(exchange, committed)
    missed, base = newest(*(report.missed for report in heard.values())), epoch.base
    unsettled = base is not None and (committed is None or committed <= base) and missed is None
    if base is not None and unsettled and any(report.committed != base for report in heard.values()):
        return ExchangeDecision(base, committed)
    begun = max(base.iteration if base else 0, *(report.begun for report in heard.values()), 0)
    if missed is not None and missed.lineage == epoch.lineage:
        begun = max(begun, missed.iteration)
    late = newest(*(report.late for report in heard.values()))
    if late is not None and late == missed and (committed is None or missed > committed):
        since = committed if committed is not None and committed.lineage == epoch.lineage else base
        if since is not None:
            begun += (begun - since.iteration) // 2
        elif missed.lineage == epoch.lineage and missed.iteration > epoch.interval:
            begun += max(2 * (begun - missed.iteration), min(begun // 2, 64))
    return ExchangeDecision(v((begun // epoch.interval + 1) * epoch.interval, epoch.lineage), committed)


iterations = st.integers(0, 12)
versions = st.none() | st.builds(v, st.integers(0, 6), st.integers(1, 2))


@st.composite
def any_reports(draw, nodes):
    """What nodes may report: a node has missed only what was announced to it. Few values, so that they often agree."""
    some = {}
    usual = draw(versions)
    for position in draw(st.sets(st.integers(0, nodes - 1)) | st.just(set(range(nodes)))):
        exchange = draw(st.just(usual) | versions)
        missed = draw(st.none() | st.just(exchange) | versions)
        if missed is not None and (exchange is None or missed > exchange):
            missed = exchange
        encoded, committed = draw(st.just(usual) | versions), draw(st.just(usual) | versions)
        late = draw(st.none() | st.just(missed))
        some[position] = NodeReport(draw(st.integers(0, 9)), exchange, missed, encoded, committed, late)
    return some


epochs = st.builds(ExchangeEpoch, st.just(2), versions, st.just(4), st.integers(1, 3))
decisions = st.builds(ExchangeDecision, versions, versions)


@settings(max_examples=800, deadline=None)
@given(epochs, decisions, any_reports(4))
def test_merged_reports_lead_to_the_same_decision_as_all_of_them(epoch, before, heard):
    assert decide(epoch, before, summary_of(heard)) == decided_from_all(epoch, before, heard)


@settings(max_examples=200, deadline=None)
@given(any_reports(6), any_reports(6), any_reports(6), st.sets(st.integers(0, 5)))
def test_reports_are_merged_in_any_order_and_more_than_once(first, second, third, lost):
    one, two, three = (summary_of(reports) for reports in (first, second, third))
    one = replace(one, lost=tuple(sorted(lost)))
    whole = merge([one, two, three])
    assert whole == merge([merge([one, two]), three]) == merge([one, merge([three, two])]) == merge([two, whole, one])
    assert merge([one]) == one == merge([one, one]) == merge([Summary(), one])
    assert whole.covered == sum(1 << position for position in first.keys() | second.keys() | third.keys())
    assert whole.lost == tuple(sorted(lost))


@settings(max_examples=400, deadline=None)
@given(epochs, decisions, any_reports(4), any_reports(4))
def test_an_outdated_report_that_arrives_on_another_way_never_causes_a_commit(epoch, before, heard, outdated):
    after = decide(epoch, before, merge([summary_of(heard), summary_of(outdated)]))
    every = [*heard.values(), *outdated.values()]
    known = [before.committed, *(report.committed for report in every)]
    if after.committed not in known:
        assert {report.encoded for report in every} == {after.committed}
        assert heard.keys() | outdated.keys() == set(range(4))


def test_a_summary_names_the_lowest_of_the_lost_and_no_more_than_fit():
    halves = [Summary(lost=tuple(range(start, 200, 2))[:LOST_LIMIT]) for start in (0, 1)]
    assert merge(halves).lost == tuple(range(LOST_LIMIT))


@st.composite
def reports(draw):
    """Anything that nodes may say, as long as nobody has encoded or missed what no rank has begun."""
    found = {}
    for position in range(3):
        if draw(st.integers(0, 5)):
            begun = draw(iterations)
            past = st.none() | st.builds(v, st.integers(1, max(1, begun)))
            found[position] = NodeReport(
                begun, draw(st.none() | st.builds(v, iterations)), draw(past), draw(past), draw(past)
            )
    return found


@settings(max_examples=400, deadline=None)
@given(
    st.builds(ExchangeDecision, st.none() | st.builds(v, iterations), st.none() | st.builds(v, iterations)),
    reports(),
    st.integers(1, 4),
)
def test_whatever_is_reported_nothing_is_taken_back_and_nothing_counts_by_hearsay(before, heard, interval):
    after = decide(ExchangeEpoch(1, None, 3, interval), before, summary_of(heard))
    known = [before.committed, *(report.committed for report in heard.values())]
    newest = max((version for version in known if version), default=None)
    assert newest is None or after.committed is not None and after.committed >= newest
    if after.committed != newest:
        assert len(heard) == 3 and {report.encoded for report in heard.values()} == {after.committed}
    begun = max((report.begun for report in heard.values()), default=0)
    if after.exchange is not None and after.committed is not None and after.committed.iteration <= begun:
        assert after.exchange > after.committed
    if len(heard) == 3:
        assert after.exchange is not None, "there is always a version to wait for"
    known = [before.exchange, *(report.exchange for report in heard.values())]
    if after.exchange is not None and after.exchange not in known:
        assert after.exchange.iteration % interval == 0
        assert after.exchange.iteration > begun
        assert all(report.missed is None or after.exchange > report.missed for report in heard.values())
