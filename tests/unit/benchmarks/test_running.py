"""What all benchmarks share: the time that is left, what is missing, the table of results."""

import json
import sys
from contextlib import contextmanager

import pytest

import all as every
from ft_plugins.errors import FtError
from harness.emulated_nodes import EmulatedHost
from workloads import running
from workloads.against import compared
from workloads.result_rows import ROWS
from workloads.results import headlines, page
from workloads.running import Benchmark, arguments, last_line, run, seconds_left


def test_the_time_left_follows_from_the_steps_that_have_ended():
    assert seconds_left(expected=60, steps=6, done=0, took=0, step=0, since=0) == 60, "nothing is known yet"
    assert seconds_left(60, 6, done=2, took=40, step=1, since=5) == 15 + 3 * 20, "a step takes 20 s here"
    assert seconds_left(60, 6, done=2, took=40, step=1, since=90) == 2 + 3 * 20, "it has not ended yet"
    assert seconds_left(60, 6, done=5, took=50, step=1, since=4) == 6


def test_a_missing_package_is_named_with_its_command_before_anything_is_measured(monkeypatch):
    monkeypatch.setitem(running.BENCHMARKS, "needy", Benchmark(1, 1, ("no-such-package",)))
    monkeypatch.setattr(sys, "argv", ["needy.py"])
    with pytest.raises(SystemExit) as ended:
        run("needy", lambda chosen: pytest.fail("measured"), arguments("", ""))
    assert "needy: needs no-such-package, not installed; run in " in str(ended.value)
    assert f"{sys.executable} -m pip install " in str(ended.value) and "'.[bench]'" in str(ended.value)


@pytest.mark.parametrize("error, said", [(None, "needs network namespaces; run it as root"), (OSError("no"), ": no")])
def test_links_that_cannot_be_throttled_are_named_too(error, said, monkeypatch):
    @contextmanager
    def network(hosts):
        if error is not None:
            raise error
        yield [EmulatedHost("", "127.0.0.1", "lo") for _ in hosts]

    monkeypatch.setattr(running, "network", network)
    assert said in Benchmark(1, 1, links=True).missing() and not Benchmark(1, 1).missing()


def test_figures_go_to_the_last_line_and_to_a_file_and_an_error_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(running.BENCHMARKS, "made_up", Benchmark(1, 1))
    monkeypatch.setattr(running, "PROGRESS", running.Progress())
    monkeypatch.setattr(sys, "argv", ["made_up.py", "--quick", "--output", str(tmp_path / "new")])
    run("made_up", lambda chosen: {"x": 1.23456, "holds": chosen.quick}, arguments("", ""))
    text = capsys.readouterr().out.splitlines()[-1]
    found = json.loads(text)
    assert found["figures"]["x"] == 1.235 and found["figures"]["holds"] is True and found["quick"] is True
    assert 0 <= found["figures"]["others_share"] <= 1 and found["machine"]["cores"] >= 1 and found["versions"]["torch"]
    assert (tmp_path / "new" / "made_up.json").read_text() == f"{text}\n"

    def refuse(chosen):
        raise FtError("no such link")

    with pytest.raises(SystemExit, match="^made_up: no such link$"):
        run("made_up", refuse, arguments("", ""))


def row_of(figure):
    return next(row for row in ROWS if row.figure == figure)


def shown(figure, **figures):
    """What the table says of a figure of a whole run."""
    row = row_of(figure)
    return row.cells({row.benchmark: {"figures": figures}})[-1]


def test_the_table_has_goal_limit_peer_and_paper_and_says_what_was_not_measured():
    figures = {"stall_x": 0.01, "committed_x": 1.8, "torchsnapshot_stall_matmul_x": 2.0, "dlrover_stall_matmul_x": 1.5}
    line = json.loads(last_line("snapshot_stall", figures))
    text = page(ROWS, {"snapshot_stall": line}, ["a/snapshot_stall/p.png"])
    stall, committed, double = (
        next(line for line in text.splitlines() if f"| {row_of(figure).meaning} |" in line)
        for figure in ("stall_x", "committed_x", "double_worst")
    )
    assert stall.endswith("| measured | 0 | 1.5 (dlrover) | - | at most 0.05 (2026-11-27) | **0.01** |")
    assert committed.endswith("| at most 1.5 (2026-11-27) | 1.8, missed |")
    assert double.endswith("| not measured here: no whole run |") and "![p](a/snapshot_stall/p.png)" in text
    assert len(headlines(ROWS, {}).splitlines()) == 2 + 5


def test_a_figure_is_published_only_if_the_run_shows_what_its_row_claims():
    assert shown("slowdown", slowdown=0.271) == "not measured here: needs a GPU"
    assert shown("slowdown", slowdown=0.0004, on_a_device=True) == "**0.04%**"
    assert shown("over_overlapped_x", over_overlapped_x=2.0, columns=1) == "not measured here: 1 columns of 8"
    assert shown("over_overlapped_x", over_overlapped_x=1.7, columns=8) == "1.7, missed"
    few = {"shapes": 5, "pairs": 2}
    assert shown("overhead_worst", overhead_worst=0.006, **few) == "not measured here: 2 pairs of at least 10"
    garbage = {"text_edit_garbage_x": 1.0, "text_diloco_garbage_x": 1.01}
    assert shown("text_edit_garbage_x", **garbage) == "not measured here: this garbage does not harm DiLoCo (1.01)"


def test_a_goal_counts_as_reached_only_if_no_peer_does_better_in_the_same_run():
    assert shown("stall_x", stall_x=0.03, checkfreq_stall_matmul_x=0.002) == "0.03, behind checkfreq"
    assert shown("stall_x", stall_x=0.03, checkfreq_stall_matmul_x=0.03) == "**0.03**"
    assert shown("stall_x", stall_x=0.06, checkfreq_stall_matmul_x=0.07) == "0.06, missed"


def test_a_ratio_of_pairs_is_shown_with_its_spread():
    name = "over_checkfreq_storage_x"
    figures = {name: 1.05, f"{name}_low": 0.9, f"{name}_high": 1.2, "pairs": 15}
    assert shown(name, **figures) == "**1.05 (0.9 to 1.2)**"


def test_only_an_interval_beyond_the_bound_makes_a_figure_worse():
    def verdicts(figure, ours, theirs):
        row = row_of(figure)
        lines = [{row.benchmark: {"figures": {figure: value}}} for value in [*ours, *theirs]]
        pairs = list(zip(lines[: len(ours)], lines[len(ours) :], strict=True))
        return [(round(one.ratio, 2), one.worse) for one in compared(ROWS, pairs)]

    assert verdicts("stall_x", [1.2, 1.3, 1.25], [1.0, 1.0, 1.0]) == [(1.25, True)], "less is better"
    assert verdicts("stall_x", [1.2, 1.0, 1.25], [1.0, 1.0, 1.0]) == [(1.2, False)], "the interval reaches 1"
    assert verdicts("recovery_x", [5.0] * 3, [10.0] * 3) == [(2.0, True)], "more is better"
    assert verdicts("stall_x", [2.0], [1.0]) == [(2.0, False)], "one run has no interval"
    assert verdicts("step_memory_x", [2.0] * 3, [1.0] * 3) == [], "it has no goal, so no direction"


def test_a_whole_run_enters_the_baseline_and_the_pages_follow_from_it(tmp_path, monkeypatch):
    for name, source in (("README", every.README), ("PAGE", every.PAGE), ("BASELINE", every.BASELINE)):
        (tmp_path / name).write_text(source.read_text())
        monkeypatch.setattr(every, name, tmp_path / name)
    monkeypatch.setattr(every, "PICTURES", tmp_path / "pictures")
    line = last_line("recovery", {"lost_iterations": 7.0})
    (tmp_path / "recovery").mkdir()
    (tmp_path / "recovery" / "recovery.json").write_text(line)
    (tmp_path / "recovery" / "p.png").write_bytes(b"png")
    assert every.publish(every.last_lines(tmp_path), tmp_path, "abc") == tmp_path / "PAGE"
    baseline = json.loads((tmp_path / "BASELINE").read_text())
    assert baseline["recovery"]["figures"] == {"lost_iterations": 7.0} and baseline["recovery"]["commit"] == "abc"
    assert baseline.keys() == json.loads(source.read_text()).keys(), "what was not measured again stays"
    assert "![p](pictures/recovery/p.png)" in (tmp_path / "PAGE").read_text()
    assert (tmp_path / "pictures" / "recovery" / "p.png").read_bytes() == b"png"
    readme = (tmp_path / "README").read_text()
    lost = row_of("lost_iterations").meaning
    assert f"| {lost} | emulated | 0 | - | - | at most 2 (2026-11-27) | 7, missed |" in readme
    before, after = every.README.read_text().split("<!-- results -->")[0], readme.split("<!-- end of results -->")[1]
    assert readme.startswith(before) and source_of_readme().endswith(after)


def source_of_readme():
    return (running.ROOT / "README.md").read_text()


def test_readme_and_page_are_made_from_the_baseline():
    baseline = json.loads(every.BASELINE.read_text())
    assert not any(line["quick"] for line in baseline.values()), "no quick figure is published"
    text, readme = every.PAGE.read_text(), source_of_readme()
    assert text.startswith(page(ROWS, {})[:400]) and headlines(ROWS, baseline) in readme
    missing = [row.meaning for row in ROWS if f"| {' | '.join(row.cells(baseline))} |" not in text]
    assert not missing, "python benchmarks/all.py --only"


def test_what_cannot_run_is_left_out_and_said_and_what_fails_is_no_figure(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(every.BENCHMARKS, "parity", Benchmark(1, 1, ("no-such-package",)))
    assert every.ready(["parity", "simulate"], smoke=False) == ["simulate"]
    assert "left out: parity: needs no-such-package" in capsys.readouterr().out
    monkeypatch.setattr(every, "ROOT", tmp_path)  # there is no such script
    assert every.measure(["simulate"], ["--quick"], tmp_path)["all_ended_well"] is False
