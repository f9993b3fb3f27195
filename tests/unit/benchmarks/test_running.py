"""What all benchmarks share: the time that is left, what is missing, the table of results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import all as every
from ft_plugins.errors import FtError
from harness.emulated_nodes import EmulatedHost
from workloads import running
from workloads.results import ROWS, headlines, page
from workloads.running import Benchmark, arguments, last_line, run, seconds_left


def test_the_time_left_follows_from_the_steps_that_have_ended() -> None:
    assert seconds_left(expected=60, steps=6, done=0, took=0, step=0, since=0) == 60, "nothing is known yet"
    assert seconds_left(60, 6, done=2, took=40, step=1, since=5) == 15 + 3 * 20, "a step takes 20 s here"
    assert seconds_left(60, 6, done=2, took=40, step=1, since=90) == 2 + 3 * 20, "it has not ended yet"
    assert seconds_left(60, 6, done=5, took=50, step=1, since=4) == 6


def test_a_missing_package_is_named_with_its_command_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(running.BENCHMARKS, "needy", Benchmark(1, 1, ("no-such-package",)))
    monkeypatch.setattr(sys, "argv", ["needy.py"])
    with pytest.raises(SystemExit) as ended:
        run("needy", lambda chosen: pytest.fail("measured"), arguments("", ""))
    assert "needy: needs no-such-package, not installed; run in " in str(ended.value)
    assert f"{sys.executable} -m pip install " in str(ended.value) and "'.[bench]'" in str(ended.value)


@pytest.mark.parametrize("error, said", [(None, "needs network namespaces; run it as root"), (OSError("no"), ": no")])
def test_links_that_cannot_be_throttled_are_named_too(
    error: OSError | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def network(hosts: list[int]) -> Iterator[list[EmulatedHost]]:
        if error is not None:
            raise error
        yield [EmulatedHost("", "127.0.0.1", "lo") for _ in hosts]

    monkeypatch.setattr(running, "network", network)
    assert said in Benchmark(1, 1, links=True).missing() and not Benchmark(1, 1).missing()


def test_figures_go_to_the_last_line_and_to_a_file_and_an_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(running.BENCHMARKS, "made_up", Benchmark(1, 1))
    monkeypatch.setattr(running, "PROGRESS", running.Progress())
    monkeypatch.setattr(sys, "argv", ["made_up.py", "--quick", "--output", str(tmp_path / "new")])
    run("made_up", lambda chosen: {"x": 1.23456, "holds": chosen.quick}, arguments("", ""))
    text = capsys.readouterr().out.splitlines()[-1]
    found = json.loads(text)
    assert found["figures"]["x"] == 1.235 and found["figures"]["holds"] is True and found["quick"] is True
    assert 0 <= found["figures"]["others_share"] <= 1 and found["machine"]["cores"] >= 1 and found["versions"]["torch"]
    assert (tmp_path / "new" / "made_up.json").read_text() == f"{text}\n"

    def refuse(chosen: argparse.Namespace) -> running.Figures:
        raise FtError("no such link")

    with pytest.raises(SystemExit, match="^made_up: no such link$"):
        run("made_up", refuse, arguments("", ""))


def test_the_table_has_goal_limit_peer_and_paper_and_says_what_was_not_measured() -> None:
    figures = {"stall_x": 0.01, "committed_x": 1.8, "torchsnapshot_stall_matmul_x": 2.0, "dlrover_stall_matmul_x": 1.5}
    line = json.loads(last_line("snapshot_stall", figures, quick=True))
    shown = [*ROWS[:2], *[row for row in ROWS if row.benchmark == "double_capture"][:2]]
    text = page({"snapshot_stall": line}, ["a/snapshot_stall/p.png"])
    rows = {row.meaning: next(line for line in text.splitlines() if row.meaning in line) for row in shown}
    stall, committed, double, sent = rows.values()
    assert stall.endswith("| 0 | 1.5 (dlrover) | - | at most 0.05 | **0.01** (quick run) |")
    assert committed.endswith("| at most 1.5 | 1.8, missed (quick run) |") and double.endswith("| not measured |")
    assert "at most 1%" in sent and "a quick run, " in text and "![p](a/snapshot_stall/p.png)" in text
    assert len(headlines(page({})).splitlines()) == 2 + 5
    later = page({"recovery": json.loads(last_line("recovery", {"lost_iterations": 1.0}))}, before=text)
    assert stall in later and "![p](a/snapshot_stall/p.png)" in later, "what was not measured again stays"
    assert "| **1** |" in later and page({}, before=later) == later
    without = page({}, before=later.replace(f"{committed}\n", ""))
    assert stall in without and "| at most 1.5 | not measured |" in without, "a figure that a section lacks is added"


def test_readme_and_page_are_those_that_the_runner_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in (("README", every.README), ("PAGE", every.PAGE)):
        (tmp_path / name).write_text(source.read_text())
        monkeypatch.setattr(every, name, tmp_path / name)
    monkeypatch.setattr(every, "PICTURES", tmp_path / "pictures")
    line = last_line("recovery", {"lost_iterations": 1.0})
    (tmp_path / "recovery").mkdir()
    (tmp_path / "recovery" / "recovery.json").write_text(line)
    (tmp_path / "recovery" / "p.png").write_bytes(b"png")
    for name, value in (("recovery", 7.0), ("watch_cost", 0.5)):  # quick runs count where there is no other
        (tmp_path / "quick" / name).mkdir(parents=True)
        quick = last_line(name, {"lost_iterations": value, "share": value}, quick=True)
        (tmp_path / "quick" / name / f"{name}.json").write_text(quick)
    assert every.write(tmp_path, smoke=False) == tmp_path / "PAGE"
    assert "at most 0.1% | 50%, missed (quick run) |" in (tmp_path / "PAGE").read_text()
    assert "![p](pictures/recovery/p.png)" in (tmp_path / "PAGE").read_text()
    assert (tmp_path / "pictures" / "recovery" / "p.png").read_bytes() == b"png"
    readme = (tmp_path / "README").read_text()
    assert "| iterations lost with a node | 0 | - | - | at most 2 | **1** |" in readme
    before, after = every.README.read_text().split("<!-- results -->")[0], readme.split("<!-- end of results -->")[1]
    assert readme.startswith(before) and every.README.read_text().endswith(after)
    assert set(every.PAGE.read_text().splitlines()) >= set(page({}).splitlines()[:8]), "python benchmarks/all.py --only"


def test_what_cannot_run_is_left_out_and_said_and_what_fails_is_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(every.BENCHMARKS, "parity", Benchmark(1, 1, ("no-such-package",)))
    assert every.ready(["parity", "simulate"], smoke=False) == ["simulate"]
    assert "left out: parity: needs no-such-package" in capsys.readouterr().out
    monkeypatch.setattr(every, "ROOT", tmp_path)  # there is no such script
    assert every.measure(["simulate"], ["--quick"], tmp_path)["all_ended_well"] is False
