"""Whether a standby worker may be started, run and used; if not, why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ft_plugins.launcher.preload import standby_plan
from ft_plugins.model.imported import Imported, digests

START = {"RANK": "3", "OMP_NUM_THREADS": "1", "HOME": "/h"}
NOW = START | {"MASTER_PORT": "29500", "FTP_TOKEN": "2"}
RUNNING = Imported(
    1, "3.12", "2.6", ("torch", "model", "torch._dynamo", "sympy", "json.tool", "ft_plugins.session"), digests(START)
)


def test_what_is_handed_over_may_differ() -> None:
    assert standby_plan.environment_refusal(START, NOW | {"RANK": "1"}, {"HOME"}) == ""


@pytest.mark.parametrize(
    ("change", "read", "name"),
    [
        ({"RANK": "1"}, {"RANK"}, "RANK"),
        ({}, {"MASTER_PORT"}, "MASTER_PORT"),
        ({"OMP_NUM_THREADS": "4"}, set(), "OMP_NUM_THREADS"),  # the library of a C extension reads it
        ({"CUDA_VISIBLE_DEVICES": "1"}, set(), "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_nothing_that_imports_have_read_may_differ_and_nothing_else(
    change: dict[str, str], read: set[str], name: str
) -> None:
    assert standby_plan.environment_refusal(START, NOW | change, read) == f"the environment differs: {name}"


def test_a_variable_that_is_gone_differs() -> None:
    now = {name: value for name, value in NOW.items() if name != "HOME"}
    assert standby_plan.environment_refusal(START, now, ()) == "the environment differs: HOME"


def test_no_import_ahead_of_time_knows_the_running_job() -> None:
    assert {"MASTER_ADDR", "MASTER_PORT", "FTP_RUN_DIR", "TORCHELASTIC_ERROR_FILE"} <= standby_plan.ABSENT
    assert standby_plan.ABSENT <= standby_plan.HANDED_OVER


def test_later_come_modules_of_torch_python_and_this_package_in_their_order() -> None:
    assert standby_plan.later_names(RUNNING, {"torch"}) == ["torch._dynamo", "json.tool", "ft_plugins.session"]


@pytest.mark.parametrize("name", ["ft_plugins.adapters.megatron", "ft_plugins.deepspeed", "__main__", "torchvision"])
def test_not_what_acts_on_a_framework_and_not_what_the_script_may_have_changed(name: str) -> None:
    assert standby_plan.later_names(replace(RUNNING, names=("torch", name)), {"torch"}) == []


def test_a_variable_that_the_script_sets_before_a_later_import_reads_it() -> None:
    assert standby_plan.later_refusal(RUNNING, START, {"HOME", "RANK", "UNSET"}) == ""
    assert "HOME" in standby_plan.later_refusal(RUNNING, START | {"HOME": "/other"}, {"HOME"})
    running = replace(RUNNING, environment=digests(START | {"TORCH_LOGS": "+dynamo"}))
    refusal = standby_plan.later_refusal(running, START, {"TORCH_LOGS"})
    assert refusal == "the script sets what modules read when they are imported: TORCH_LOGS"


def test_another_version_or_a_package_that_the_running_rank_has_not_imported() -> None:
    assert standby_plan.modules_refusal(RUNNING, ("3.12", "2.6"), ["model.part", "json", "ft_plugins.base.files"]) == ""
    assert "version" in standby_plan.modules_refusal(RUNNING, ("3.12", "2.7"), [])
    names = ["a", "b.c", "d", "e", "f"]
    assert standby_plan.modules_refusal(RUNNING, ("3.12", "2.6"), names).endswith("has not: a, b, d, e and 1 more")


def test_memory_for_all_is_at_most_a_quarter_of_what_is_available() -> None:
    assert standby_plan.memory_refusal(1 << 30, 8, 32 << 30) == ""
    assert standby_plan.memory_refusal(1 << 30, 8, 31 << 30) == (
        "8 of them would take 8.0 GiB, more than 25% of the 31.0 GiB that are available"
    )


def test_without_idle_cores_it_imports_in_every_second_turn() -> None:
    assert [standby_plan.may_import(0.2, turn) for turn in range(8)] == [True, False] * 4
    assert all(standby_plan.may_import(1.5, turn) for turn in range(8))


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (["a", "p", "b"], ["a", "p", "b", "p"], [3]),  # appended, and there before
        (["a", "p", "b"], ["p", "a", "p", "b"], [0]),
        (["a", "b"], ["a", "x", "b"], [1]),
        (["a", "b"], ["x", "a", "b", "y"], [0, 3]),
        (["a", "b"], ["b"], []),
    ],
)
def test_places_that_a_statement_has_added(before: list[str], after: list[str], found: list[int]) -> None:
    assert standby_plan.added(before, after) == found


def test_filters_of_warnings_that_the_script_moves_to_the_front_again() -> None:
    ignore, error = ("ignore", None, FutureWarning, None, 0), ("error", None, Warning, None, 0)
    other = ("error", None, UserWarning, None, 0)
    assert standby_plan.put_in_front([other], [ignore, other]) == [ignore]
    assert standby_plan.put_in_front([other, ignore], [ignore, other]) == [ignore]
    assert standby_plan.put_in_front([other], [other, ignore]) == []  # appended: the second time it stays there
    assert standby_plan.filters_refusal([error, ignore], [ignore]) != ""
    assert standby_plan.filters_refusal([ignore, error], [ignore]) == ""
    assert standby_plan.filters_refusal([other, ignore], [ignore]) == ""  # no warning is both
    assert standby_plan.filters_refusal([("default", *ignore[1:]), ignore], [ignore]) == ""  # only printed
