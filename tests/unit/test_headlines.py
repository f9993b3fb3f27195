"""Which tests run by default."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture(scope="module")
def tiers():
    spec = importlib.util.spec_from_file_location("tiers", CONFTEST)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "marked", "expected"),
    [
        ("tests/scenarios/test_x.py::test_a[one]", False, True),
        ("tests/scenarios/test_x.py::test_a[one]", True, True),  # it is the one of its kind
        ("tests/scenarios/test_x.py::test_a[two]", False, False),
        ("tests/integration/test_y.py::test_b", False, True),
        ("tests/integration/test_z.py::test_b", False, False),
        ("tests/unit/test_x.py::test_a", False, True),
        ("tests/unit/test_x.py::test_a", True, False),
    ],
)
def test_a_test_that_starts_jobs_runs_if_it_is_named_and_any_other_unless_it_is_marked(tiers, name, marked, expected):
    begin = ("tests/scenarios/test_x.py::test_a[one]", "tests/integration/test_y.py::")
    item = SimpleNamespace(nodeid=name, get_closest_marker=lambda mark: object() if marked else None)
    assert tiers.runs_by_default(item, begin) is expected


def test_the_headlines_are_tests_that_start_jobs(tiers):
    begin = tiers.headlines()
    assert len(begin) > 40 and len(set(begin)) == len(begin)
    assert all(line.startswith(tiers.WHOLE_JOBS) for line in begin)


class Item:
    """A test, as far as it decides when it runs."""

    def __init__(self, nodeid):
        self.nodeid = nodeid

    def get_closest_marker(self, name):
        return None


def test_all_parts_together_are_what_all_adds_each_test_once_and_whole_files(tiers):
    files = [f"tests/scenarios/test_{name}.py" for name in ("storage", "paft", "export", "a_new_one", "drain")]
    items = [Item(f"{file}::test_{number}") for file in files for number in range(3)]
    begin = ("tests/scenarios/test_storage.py::test_1",)
    seen = list[str]()
    for place in range(1, 4):
        left_out = tiers.outside(f"{place}/3", items, begin)
        ran = [item.nodeid for item in items if item not in left_out]
        assert len({one.partition("::")[0] for one in ran} & {one.partition("::")[0] for one in seen}) == 0
        seen += ran
    assert sorted(seen) == sorted(item.nodeid for item in items if not item.nodeid.startswith(begin))
    assert {item.nodeid for item in tiers.outside(None, items, begin)} == set(seen)


def test_tests_of_properties_draw_a_quarter_of_their_examples(tiers):
    drawn = list[int]()

    @settings(max_examples=80, database=None)
    @given(st.integers())
    def test_of_a_property(number):
        drawn.append(number)

    tiers.draw_fewer({test_of_a_property, test_the_headlines_are_tests_that_start_jobs})
    test_of_a_property()
    assert len(drawn) == 20
