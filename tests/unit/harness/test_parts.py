"""Which part of the other tests a commit runs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import parts

ROOT = Path(__file__).resolve().parents[3]
FILES = st.dictionaries(st.text("abc", min_size=1, max_size=6), st.floats(1, 900), min_size=1, max_size=60)


@given(FILES, st.integers(1, 12))
def test_each_file_is_in_one_part_and_no_part_is_longer_than_another_by_more_than_a_file(seconds, number):
    divided = parts.divide(seconds, number)
    assert sorted(file for part in divided for file in part) == sorted(seconds)
    totals = [sum(seconds[file] for file in part) for part in divided]
    assert max(totals) - min(totals) <= max(seconds.values()) + 1e-6
    assert parts.divide(dict(reversed(seconds.items())), number) == divided


def test_every_part_takes_about_a_quarter_of_an_hour_and_every_file_named_is_there():
    seconds = parts.durations()
    assert [file for file in seconds if not (ROOT / file).exists()] == []
    totals = [sum(seconds[file] for file in part) for part in parts.divide(seconds, parts.number_of_parts(seconds))]
    assert all(0.5 * parts.SECONDS < total < 1.5 * parts.SECONDS for total in totals), totals


def test_commits_choose_all_parts_and_each_always_the_same():
    chosen = [parts.part_of(f"{number * 0x9E3779B97F4A7C15:040x}", 7) for number in range(200)]
    assert set(chosen) == {f"{place}/7" for place in range(1, 8)}
    assert parts.part_of("befbb795705a171d0d7ada2b4de10898af4af964", 7) == "6/7"


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b", "1/0", ""])
def test_what_is_no_part_is_refused(part):
    with pytest.raises(ValueError, match="expected K/N"):
        parts.files_of(part, [])


def test_a_file_that_was_never_measured_is_in_one_part_too():
    new = "tests/scenarios/test_a_new_one.py"
    assert sum(new in parts.files_of(f"{place}/4", [new]) for place in range(1, 5)) == 1


def test_what_was_measured_are_the_seconds_of_each_file_without_what_was_skipped(tmp_path):
    cases = [("tests.unit.test_a", 2.5, ""), ("tests.unit.test_a", 3, ""), ("tests.unit.test_b", 1, "<skipped/>")]
    rows = "".join(f'<testcase classname="{name}" time="{time}">{inner}</testcase>' for name, time, inner in cases)
    (tmp_path / "results.xml").write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    assert parts.measured(tmp_path / "results.xml") == {"tests/unit/test_a.py": 5.5}


def test_a_part_begins_at_another_file_with_another_commit_and_files_stay_whole():
    tests = [f"{file}::{number}" for file in "abcde" for number in range(3)]
    begun = set()
    for commit in range(0, 40 * parts.number_of_parts(parts.durations()), parts.number_of_parts(parts.durations())):
        order = parts.rotated(tests, lambda test: test[0], f"{commit:x}")
        assert sorted(order) == tests and [order[at] for at in (0, 1, 2)] == [f"{order[0][0]}::{n}" for n in range(3)]
        begun.add(order[0][0])
    assert begun == set("abcde")
