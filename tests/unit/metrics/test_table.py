"""The table of metrics: what is unknown is left out, and what is derived from it is up to date."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ft_plugins.events import Severity, catalogue
from ft_plugins.metrics.derived import KINDS, rule_name
from ft_plugins.metrics.event_counts import Counts
from ft_plugins.metrics.exposition import text_of
from ft_plugins.metrics.scalars import SCALARS, scalars_of, tag_of
from ft_plugins.metrics.table import ALARMS, METRICS, Node

ROOT = Path(__file__).parents[3]
GENERATED = {
    "page": "docs/metrics.md",
    "alerts": "launch/prometheus/alerts.yml",
    "dashboard": "launch/grafana/ft_plugins.json",
}
TIERS = {
    "process": {"lineage": 2, "iteration": 12, "age_seconds": 0.5},
    "node": {"lineage": 2, "iteration": 8, "age_seconds": 4.0},
    "storage": None,
}
STATUS = {
    "segments": [{"rank": 0, "bytes": 100}, {"rank": 1, "bytes": 50}],
    "ranks": 2,
    "node_tier": {"nodes": ["a", "b"], "parity_bytes": 7, "taken": 30, "offered": 40},
    "progress": {"no_progress_seconds": 0.1, "hang_seconds": 60.0, "iteration_seconds": 0.75, "slow": [[3, 2.5]]},
    "world_size": 16,
    "history": {
        "restarts": 1, "downtime_seconds": 24.5, "down_for_seconds": None, "iteration": 13,
        "iteration_age_seconds": 0.2, "tiers": TIERS,
    },
}  # fmt: skip
NOTHING = Counts({})


def shown(status=STATUS, counts=NOTHING):
    """Value by series, without the labels that every series has."""
    text = text_of([Node("j", "a", status, counts)])
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.replace('ftp_job="j",node="a"', "").replace("{}", "").replace("{,", "{"): v for name, _, v in lines}


def test_what_the_smp_knows_is_shown_with_its_labels():
    found = shown()
    expected = {
        "ftp_smp_answered": "1", "ftp_iteration": "13", "ftp_iteration_seconds": "0.75", "ftp_restarts_total": "1",
        "ftp_downtime_seconds_total": "24.5", 'ftp_version_iteration{tier="node"}': "8",
        'ftp_version_age_seconds{tier="process"}': "0.5", "ftp_memory_claimed_bytes": "157", "ftp_parity_bytes": "7",
        "ftp_exchange_backlog_iterations": "4", "ftp_bubble_fill_ratio": "0.75", 'ftp_slow_rank_ratio{rank="3"}': "2.5",
        "ftp_ranks": "2",
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected


def test_what_is_unknown_is_left_out_and_not_zero():
    found = shown()
    absent = ("ftp_down_seconds", 'ftp_version_age_seconds{tier="storage"')
    assert not [name for name in found if name.startswith(absent)]
    silent = shown(status=None)
    assert silent.pop("ftp_smp_answered") == "0"
    counts = {each.name for each in METRICS if each.counts and not each.labels}
    assert {name.partition("{")[0] for name in silent} == {"ftp_alarms_total", *counts}, "only what needs no SMP"
    alone = shown({**STATUS, "node_tier": {"nodes": [], "offered": 0}})
    assert not [name for name in alone if "backlog" in name or "bubble_fill" in name]


def test_ranks_on_which_there_is_no_verdict_are_not_said_to_be_idle_for_no_time():
    assert (shown()["ftp_idle_seconds"], shown()["ftp_hang_limit_seconds"]) == ("0.1", "60")
    found = shown(STATUS | {"progress": STATUS["progress"] | {"no_progress_seconds": 0.0, "hang_seconds": 0.0}})
    assert not found.keys() & {"ftp_idle_seconds", "ftp_hang_limit_seconds"}


def test_a_backlog_is_not_computed_over_two_lineages():
    older = TIERS | {"node": TIERS["node"] | {"lineage": 1}}
    found = shown(STATUS | {"history": STATUS["history"] | {"tiers": older}})
    assert "ftp_exchange_backlog_iterations" not in found


def test_events_are_summed_over_the_node_or_shown_by_rank():
    values = {
        ("snapshot.sealed", "", 0): 3, ("snapshot.sealed", "", 1): 4, ("snapshot.sealed", "bytes", 0): 10,
        ("fence.waited", "seconds", 1): 0.5, ("smp.lost", "", None): 2,
    }  # fmt: skip
    found = shown(counts=Counts(values, "smp.lost"))
    assert (found["ftp_snapshots_total"], found["ftp_captured_bytes_total"]) == ("7", "10")
    assert found['ftp_fence_wait_seconds_total{rank="1"}'] == "0.5"
    assert (found['ftp_alarms_total{alarm="smp.lost"}'], found['ftp_alarms_total{alarm="job.hung"}']) == ("2", "0")
    assert found['ftp_alarm_standing{alarm="smp.lost"}'] == "1"


def test_some_metrics_are_scalars_without_a_label_for_the_rank():
    counts = Counts({("fence.waited", "seconds", 0): 0.5, ("fence.waited", "seconds", 1): 2.5})
    assert scalars_of(Node("j", "a", STATUS, counts)) == {
        "ft/restarts": 1.0, "ft/downtime_seconds": 24.5, "ft/version_age_seconds/process": 0.5,
        "ft/version_age_seconds/node": 4.0, "ft/memory_claimed_bytes": 157.0, "ft/fence_wait_seconds": 2.5,
        "ft/snapshots_skipped": 0.0, "ft/exchange_backlog_iterations": 4.0, "ft/bubble_fill_ratio": 0.75,
        "ft/lost_iterations": 0.0, "ft/averaging_wait_seconds": 0.0, "ft/synchronisation_wait_seconds": 0.0,
    }  # fmt: skip
    assert scalars_of(Node("j", "a", None, NOTHING)) == {"ft/snapshots_skipped": 0.0}, "nothing unknown is 0"
    assert all(f"`{tag_of(metric)}`" in KINDS["page"]() for metric in SCALARS)


def test_a_count_begins_at_zero_so_that_the_first_event_is_an_increase():
    before, after = shown(), shown(counts=Counts({("snapshot.skipped", "", 1): 1}))
    assert [found["ftp_snapshots_skipped_total"] for found in (before, after)] == ["0", "1"]
    lost = shown(counts=Counts({("state.restored", "lost", 1): 3}))
    for rank, values in (("0", ["0", "0"]), ("1", ["0", "3"])):
        assert [found[f'ftp_lost_iterations_total{{rank="{rank}"}}'] for found in (before, lost)] == values


def test_an_alarm_that_came_has_an_age_and_one_that_never_came_has_none():
    found = shown(None, Counts({}, "", {"job.hung": 100.5}))
    assert {name: value for name, value in found.items() if "_age_" in name} == {
        'ftp_alarm_age_seconds{alarm="job.hung"}': "100.5"
    }


def test_names_follow_the_conventions_of_prometheus():
    assert len({each.name for each in METRICS}) == len(METRICS)
    for each in METRICS:
        assert re.fullmatch("ftp(_[a-z]+)+", each.name) and each.meaning.endswith("."), each.name
        assert (each.kind == "counter") == each.name.endswith("_total")
        assert each.counts is None or each.counts[0] in catalogue.EVENTS
        if each.counts and each.counts[1]:
            kind = catalogue.EVENTS[each.counts[0]].fields[each.counts[1]]
            assert each.unit == {"s": "seconds"}.get(kind.unit, kind.unit), each.name


def test_a_rank_that_alone_computes_is_infinitely_slow():
    found = shown(STATUS | {"progress": {"slow": [[3, float("inf")]]}})
    assert found['ftp_slow_rank_ratio{rank="3"}'] == "+Inf"


def test_a_label_is_escaped():
    text = text_of([Node('a"b\\c', "n\n", None, NOTHING)])
    assert 'ftp_job="a\\"b\\\\c",node="n\\n"' in text


@pytest.mark.parametrize("kind", GENERATED)
def test_what_is_generated_from_the_table_is_up_to_date(kind):
    path = ROOT / GENERATED[kind]
    assert path.read_text() == KINDS[kind](), f"python -m ft_plugins.metrics.derived {kind} > {GENERATED[kind]}"


def test_a_rule_about_what_has_no_node_says_what_it_has():
    """What is known of a job alone names no node."""
    summaries = re.findall(r"alert: (\w+)\n.*\n.*\n.*\n *summary: \"(.*)\"", KINDS["alerts"]())
    assert len(summaries) > len(ALARMS)
    places = {name: set(re.findall(r"[$]labels[.](\w+)", summary)) for name, summary in summaries}
    assert places.pop("FtpUnreachable") == {"ftp_job"}
    assert set(map(frozenset, places.values())) == {frozenset({"ftp_job", "node"})}


def test_the_dashboard_shows_rates_in_units_that_grafana_knows_and_asks_the_chosen_source():
    board = json.loads(KINDS["dashboard"]())
    units = {panel["title"]: panel["fieldConfig"]["defaults"]["unit"] for panel in board["panels"]}
    assert set(units.values()) == {"none", "s", "bytes", "percentunit", "Bps", "cps"}
    expected = {"ftp_captured_bytes_total": "Bps", "ftp_capture_seconds_total": "percentunit"}
    assert {name: units[name] for name in expected} == expected
    source, job = board["templating"]["list"]
    assert job["datasource"]["uid"] == f"${{{source['name']}}}"
    assert job["query"] == "label_values(ftp_smp_answered, ftp_job)", "known before the first iteration"


def test_every_alarm_of_the_catalogue_has_a_rule():
    rules = KINDS["alerts"]()
    alarms = [name for name, kind in catalogue.EVENTS.items() if kind.severity is Severity.ALARM]
    assert sorted(alarms) == ALARMS
    assert not [name for name in alarms if f'alarm=\\"{name}\\"' not in rules or rule_name(name) not in rules]


RULE_TESTS = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'ftp_alarm_age_seconds{{alarm="protection.stalled",ftp_job="j",node="a"}}', values: '_x5 7+60x20'}}
      - {{series: 'ftp_alarm_age_seconds{{alarm="job.hung",ftp_job="j",node="a"}}', values: '86400+60x30'}}
      - {{series: 'ftp_alarm_age_seconds{{alarm="state.lost",ftp_job="k",node="a"}}', values: '3+60x30'}}
      - {{series: 'ftp_alarms_total{{alarm="state.lost",ftp_job="k",node="a"}}', values: '1x30'}}
      - {{series: 'ftp_alarm_age_seconds{{alarm="smp.lost",ftp_job="k",node="a"}}', values: '3 stale'}}
      - {{series: 'ftp_world_size{{ftp_job="lost",node="a"}}', values: '2x30'}}
      - {{series: 'ftp_world_size{{ftp_job="lost",node="b"}}', values: '2x10 stale'}}
      - {{series: 'ftp_ranks{{ftp_job="lost",node="a"}}', values: '1x30'}}
      - {{series: 'ftp_ranks{{ftp_job="lost",node="b"}}', values: '1x10 stale'}}
      - {{series: 'ftp_world_size{{ftp_job="ended",node="a"}}', values: '2x10 stale'}}
      - {{series: 'ftp_world_size{{ftp_job="ended",node="b"}}', values: '2x10 stale'}}
      - {{series: 'ftp_ranks{{ftp_job="ended",node="a"}}', values: '1x10 stale'}}
      - {{series: 'ftp_ranks{{ftp_job="ended",node="b"}}', values: '1x10 stale'}}
      - {{series: 'ftp_world_size{{ftp_job="stopped",node="a"}}', values: '2x30'}}
      - {{series: 'ftp_world_size{{ftp_job="stopped",node="b"}}', values: '2x10 stale'}}
      - {{series: 'ftp_ranks{{ftp_job="stopped",node="a"}}', values: '1x9 0x20'}}
      - {{series: 'ftp_ranks{{ftp_job="stopped",node="b"}}', values: '1x10 stale'}}
      - {{series: 'ftp_world_size{{ftp_job="drained",node="a"}}', values: '2x30'}}
      - {{series: 'ftp_world_size{{ftp_job="drained",node="s"}}', values: '2x30'}}
      - {{series: 'ftp_ranks{{ftp_job="drained",node="a"}}', values: '1x30'}}
      - {{series: 'ftp_ranks{{ftp_job="drained",node="b"}}', values: '1x10 0x10 stale'}}
      - {{series: 'ftp_ranks{{ftp_job="drained",node="s"}}', values: '0x10 1x20'}}
      - {{series: 'up{{job="ft_plugins",instance="b:9400"}}', values: '1x10 0x20'}}
      - {{series: 'ftp_down_seconds{{ftp_job="j",node="a"}}', values: '_x5 60+60x25'}}
      - {{series: 'ftp_down_seconds{{ftp_job="moved",node="a"}}', values: '60+60x30'}}
      - {{series: 'ftp_iteration_age_seconds{{ftp_job="moved",node="b"}}', values: '1x30'}}
      - {{series: 'ftp_smp_answered{{ftp_job="j",node="a"}}', values: '1x10 0x20'}}
      - {{series: 'ftp_slow_rank_ratio{{ftp_job="j",node="a",rank="3"}}', values: '2x4 _x30'}}
    promql_expr_test:
      - expr: count by (alertname) (ALERTS{{alertstate="firing"}})
        eval_time: 8m
        exp_samples:
          - {{labels: '{{alertname="FtpProtectionStalled"}}', value: 1}}
          - {{labels: '{{alertname="FtpStateLost"}}', value: 1}}
          - {{labels: '{{alertname="FtpSmpLost"}}', value: 1}}
      - expr: count by (alertname) (ALERTS{{alertname=~"FtpStateLost|FtpSmpLost",alertstate="firing"}})
        eval_time: 11m
        exp_samples: []
      - expr: ALERTS{{alertname="FtpUnreachable",alertstate="firing"}}
        eval_time: 15m
        exp_samples: []
      - expr: count by (alertname, ftp_job) (ALERTS{{alertname="FtpUnreachable",alertstate="firing"}})
        eval_time: 17m
        exp_samples: [{{labels: '{{alertname="FtpUnreachable",ftp_job="lost"}}', value: 1}}]
      - expr: count by (alertname) (ALERTS{{alertstate="firing"}})
        eval_time: 25m
        exp_samples:
          - {{labels: '{{alertname="FtpDown"}}', value: 1}}
          - {{labels: '{{alertname="FtpSmpSilent"}}', value: 1}}
          - {{labels: '{{alertname="FtpUnreachable"}}', value: 1}}
"""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Prometheus, is not installed")
def test_promtool_accepts_the_rules_and_they_fire_when_they_should(tmp_path):
    rules = ROOT / GENERATED["alerts"]
    (tmp_path / "tests.yml").write_text(RULE_TESTS.format(rules=rules))
    config = str(rules.with_name("prometheus.yml"))
    for words in (["check", "config", config], ["test", "rules", str(tmp_path / "tests.yml")]):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Prometheus, is not installed")
def test_promtool_finds_no_fault_in_the_text():
    counts = Counts({(each.counts[0], each.counts[1], 0): 1.5 for each in METRICS if each.counts}, "smp.lost")
    text = text_of([Node("j", "a", STATUS, counts), Node("j", "b", STATUS, counts)])
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
