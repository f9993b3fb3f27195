"""The agreement on the committed version: case by case, in `agreement.txt`, and for any reports. Whole jobs, in which
nodes lag, repeat themselves, forget and are replaced: `tests/world`."""

from dataclasses import replace

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
from ft_plugins.snapshot.segment.slots import Version
from tests import transcripts


def v(iteration, lineage=1):
    return Version(lineage, iteration)


def summary_of(reports):
    return merge(summarize(position, report) for position, report in reports.items())


class Job:
    """What position 0 hears of the nodes, and what it `decides`: the version to exchange, and the committed one."""

    def __init__(self):
        self.heard, self.before = {}, ExchangeDecision()
        self.epoch()

    def epoch(self, lineage=1, base=None, nodes=3, interval=4):
        self.known = ExchangeEpoch(lineage, base, nodes, interval)

    def changed(self, since, before, now):
        """Ranks capture every `now` iterations from `since` on; each is exchanged."""
        chosen = ChosenSchedule(since, Intervals(now, 0), Intervals(before, 0), 0)
        self.known = replace(self.known, interval=1, chosen=chosen)

    def was(self, exchange=None, committed=None):
        self.before = ExchangeDecision(exchange, committed)

    def node(self, *at, begun=0, **said):
        self.heard |= {one: NodeReport(begun, **said) for one in at}

    def decides(self):
        self.before = decide(self.known, self.before, summary_of(self.heard))
        return self.before

    def passes(self, begun, delay):
        """Ranks are past what is named when they read of it: reports and announcements take `delay` iterations."""
        said = []
        while (named := self.before.exchange).iteration <= begun and len(said) < 10:
            begun += delay
            late = {"exchange": named, "missed": named, "committed": self.before.committed}
            self.node(0, 2, begun=begun, late=named, **late)
            self.node(1, begun=begun, **late)
            begun += delay
            said.append(f"begun {begun}: {transcripts.shown(self.decides())}")
        return "\n".join(said)


test_agreement = transcripts.of(__file__, Job)


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
