"""What tests/matrix.py makes of pytest's report, and of the table in docs/versions.md."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "matrix.py"
spec = importlib.util.spec_from_file_location("matrix", FILE)
assert spec and spec.loader
matrix = sys.modules["matrix"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(matrix)

REPORT = """<testsuites><testsuite>
<testcase name="test_it[exact]"><properties><property name="unprotected" value="succeeded"/></properties></testcase>
<testcase name="test_it[differs]"><properties><property name="unprotected" value="succeeded"/></properties>
  <failure message="AssertionError: rank 3 differs">E  AssertionError: rank 3 differs&#10;found</failure></testcase>
<testcase name="test_it[broken]">
  <failure message="assert 'failed' == 'succeeded'">E  RuntimeError: a view&#10;tests/x.py:1: AssertionError</failure>
</testcase>
<testcase name="test_it[unstarted]"><error message="failed on setup">PatchError: no longer applies</error></testcase>
<testcase name="test_it[left-out]"><skipped message="needs the extra"/></testcase>
</testsuite></testsuites>"""


def test_a_version_is_a_name_a_number_and_a_torch():
    assert matrix.Version.of("megatron-core-0.15.3") == matrix.Version("megatron-core", "0.15.3")
    assert matrix.Version.of("deepspeed") == matrix.Version("deepspeed")
    assert matrix.Version.of("deepspeed-0.18.9+torch-2.10.0") == matrix.Version("deepspeed", "0.18.9", "2.10.0")
    for wrong in ("deepspeed-", "apex-1", "deepspeed==0.18.9", ""):
        with pytest.raises(ValueError, match="expected deepspeed or megatron-core"):
            matrix.Version.of(wrong)


def test_a_checkout_is_a_version_of_megatron_lm_and_keeps_its_folder(tmp_path):
    for name, minor in (("core_v0.16.1", 16), ("HEAD", 20)):
        core = tmp_path / name / "megatron" / "core"
        core.mkdir(parents=True)
        (tmp_path / name / "pretrain_gpt.py").touch()
        (core / "package_info.py").write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 1\n")
    found = matrix.megatron_lm(tmp_path)
    assert [str(version) for version in found] == ["Megatron-LM 0.16.1", "Megatron-LM 0.20.1-HEAD"]
    assert found[0].checkout == tmp_path / "core_v0.16.1"
    assert matrix.overlay(found[0]) == [], "it is run where it lies"


def test_checkouts_of_deepspeeds_clients_are_known_by_their_files_and_labelled_by_their_folders(tmp_path):
    for name, files in (
        ("head", ["training.py"]),
        ("v2", ["training.py", "neox_arguments/__init__.py"]),
        ("other", []),
    ):
        for file in ("README.md", *(f"megatron/{one}" for one in files)):
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text("engine = deepspeed.initialize(model=model)")
    found = matrix.clients(tmp_path)
    assert [str(version) for version in found] == ["Megatron-DeepSpeed head", "gpt-neox v2"]
    assert matrix.clients(tmp_path / "v2") == [matrix.Version("gpt-neox", "v2", checkout=(tmp_path / "v2").resolve())]
    assert set(matrix.PATHS) == set(matrix.TESTS) - set(matrix.PACKAGES)
    with pytest.raises(matrix.FtError, match="expected a checkout of Megatron-DeepSpeed or gpt-neox"):
        matrix.clients(tmp_path / "other")


def test_a_checkout_counts_only_where_a_script_in_it_would_import_it(tmp_path):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    version = matrix.Version("Megatron-LM", "0.16.1", checkout=tmp_path)
    environment = dict(os.environ)
    with pytest.raises(RuntimeError, match="megatron.core comes from|does not find megatron.core"):
        matrix.resolved(version, sys.executable, [], environment)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    found = matrix.resolved(version, sys.executable, [], environment)
    assert (found.number, found.checkout) == ("0.16.1", tmp_path) and found.torch


def test_a_version_that_cannot_be_run_is_a_line_with_the_reason(tmp_path, monkeypatch, capsys):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    version = matrix.Version("Megatron-LM", "0.16.1", checkout=tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    found, (cell,) = matrix.run(version)
    assert cell.failed and cell.verdict.startswith("FAILED: ") and cell.verdict in capsys.readouterr().out
    assert "| Megatron-LM 0.16.1 | unknown |" in matrix.row(found, [cell], "2026-01-02")


def test_what_was_compared_is_in_the_line():
    case = """<testcase name="t[killed]"><properties><property name="unprotected" value="succeeded"/>
      <property name="compared" value="9 tensors; masked: 4 elements"/></properties></testcase>"""
    (cell,) = matrix.verdicts(f"<testsuite>{case}</testsuite>", "2.13.0")
    assert cell.passed and cell.verdict == "passed: 9 tensors; masked: 4 elements"


def test_only_what_failed_unprotected_is_not_held_against_this_project():
    found = {cell.mode: cell for cell in matrix.verdicts(REPORT, "2.13.0")}
    assert {mode for mode, cell in found.items() if cell.passed} == {"exact"}
    assert {mode for mode, cell in found.items() if cell.failed} == {"differs", "unstarted", "left-out"}
    assert found["differs"].verdict == "FAILED: AssertionError: rank 3 differs"
    assert found["unstarted"].verdict == "FAILED before the kill: PatchError: no longer applies"
    assert found["broken"].verdict == "fails without protection too, with torch 2.13.0: RuntimeError: a view"


def test_a_row_counts_all_three_kinds():
    cells = list(matrix.verdicts(REPORT, "2.13.0"))
    said = matrix.row(matrix.Version("deepspeed", "0.18.9", "2.13.0"), cells, "2026-01-02")
    assert "| deepspeed 0.18.9 | 2.13.0 |" in said and "| 1 of 5;" in said and said.endswith("| 2026-01-02 |")
    assert "1 fail without protection too; 3 FAILED" in said


def test_rows_of_other_versions_stay_and_those_of_the_same_are_replaced(tmp_path):
    def line(version, torch, day):
        return f"| {version} | {torch} | 3.11.7 | 8 of 8 | {day} |"

    page = tmp_path / "versions.md"
    page.write_text(f"before\n{matrix.BEGIN}\n{matrix.END}\nafter\n")
    matrix.write(page, [line("deepspeed 0.19.8", "2.13.0", "old"), line("deepspeed 0.9.1", "2.13.0", "old")])
    new = [line("deepspeed 0.19.8", "2.13.0", "new"), line("deepspeed 0.19.8", "2.10.0", "new")]
    matrix.write(page, new)
    assert page.read_text().splitlines() == [
        *("before", matrix.BEGIN, *matrix.HEAD.splitlines(), line("deepspeed 0.9.1", "2.13.0", "old")),
        *(new[1], new[0], matrix.END, "after"),
    ]
    with pytest.raises(RuntimeError, match="has no lines"):
        (tmp_path / "other.md").write_text("")
        matrix.write(tmp_path / "other.md", new)


def test_a_tag_and_a_folder_of_the_same_number_have_a_row_each():
    def line(version):
        return f"| {version} | 2.13.0 | 3.11.7 | 2 of 2 | 2026-01-02 |"

    old = matrix.merged("", [line("Megatron-LM 0.20.0-HEAD"), line("Megatron-LM 0.9.0"), line("deepspeed")])
    found = matrix.merged(old, [line("Megatron-LM 0.20.0"), line("megatron-core 0.16.1")])
    assert found.splitlines()[2:] == [
        line("deepspeed"),
        line("megatron-core 0.16.1"),
        line("Megatron-LM 0.9.0"),
        line("Megatron-LM 0.20.0"),
        line("Megatron-LM 0.20.0-HEAD"),
    ]


def test_the_table_has_a_row_for_every_version_that_runs_by_default():
    page = (FILE.parents[1] / "docs" / "versions.md").read_text()
    table = page.partition(matrix.BEGIN)[2].partition(matrix.END)[0]
    pins = (FILE.parents[1] / "launch" / "constraints.txt").read_text()
    for text in matrix.DEFAULT:
        version = matrix.Version.of(text)
        numbers = [version.number] if version.number else re.findall(rf"(?m)^{version.name}==([\w.]+)", pins)
        rows = [f"\n| {version.name} {number} |" in table for number in numbers]  # pins may differ by Python version
        assert any(rows), f"run tests/matrix.sh --docs {text}"
    series = [*(f"0.{minor}." for minor in range(14, 20)), "0.20.0-HEAD"]
    absent = [one for one in series if f"\n| Megatron-LM {one}" not in table]
    assert not absent, f"run tests/matrix.sh --docs --megatron-lm with the checkouts of {absent}"


def test_another_torch_comes_with_what_it_requires_itself():
    pins = "numpy==2.4.6\nsympy==1.14.0\ntorch==2.13.0\nTyping-Extensions==4.16.0\n"
    required = ["sympy==1.13.1; python_version >= '3.9'", "typing-extensions>=4.10.0"]
    assert matrix.pins_with(pins, "2.6.0", required) == "numpy==2.4.6\ntorch==2.6.0\n"
