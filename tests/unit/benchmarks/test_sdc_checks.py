"""The rules by which results stand in the paper's order: its own table passes, what is out of order does not."""

import math

import pytest

from workloads.sdc_checks import SCALES, judge, order_holds
from workloads.sdc_runs import VARIANCES

CLEAN = [94.0]
TABLE = {  # 1 of the paper, ResNet-18
    "noised": (93.7, 91.1, 60.5, 13.5),
    "sync_5": (93.8, 93.3, 85.2, 32.8),
    "sync_10": (93.9, 93.6, 84.7, 31.9),
    "sync_50": (93.9, 93.4, 84.3, 28.5),
    "dyn": (93.9, 93.4, 85.2, 33.2),
}


def table(changed=None):
    found = {(noise, method): [row[at]] for method, row in TABLE.items() for at, noise in enumerate(VARIANCES)}
    return found | {key: [value] for key, value in (changed or {}).items()}


def broken(results):
    return {one.rule for one in judge(SCALES["digits"].losses(CLEAN, results)) if not one.holds}


def test_the_paper_s_own_table_is_in_order_and_every_rule_is_judged():
    verdicts = judge(SCALES["digits"].losses(CLEAN, table()))
    assert order_holds(verdicts)
    assert {one.rule for one in verdicts} == {"harm", "growth", "close", "gain", "often", "never"}


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        ("harm", {("1e-2", "noised"): 90.0}),
        ("growth", {("1e-3", "noised"): 94.0, ("1e-4", "noised"): 92.5}),
        ("close", {("1e-3", "dyn"): 92.9}),
        ("gain", {("1e-2", "sync_10"): 70.0}),
        ("gain", {("burst_1", "noised"): 40.0, ("burst_1", "dyn"): 60.0}),
        ("often", {("1e-2", "sync_5"): 83.0}),
        ("never", {("1e-1", "dyn"): 12.0}),
        ("gain", {("1e-2", "noised"): math.nan, ("1e-2", "dyn"): math.nan}),
    ],
)
def test_what_is_out_of_order_breaks_its_rule(rule, changed):
    assert rule in broken(table(changed))


def test_a_run_without_a_number_left_is_the_worst_and_what_is_finite_has_gained():
    assert not broken(table({("1e-1", "noised"): math.nan}))


def test_of_a_loss_less_is_better():
    assert SCALES["text"].losses([2.0], {("1e-2", "noised"): [2.5]}) == {("1e-2", "noised"): pytest.approx(10.0)}


def test_nothing_judged_is_no_order():
    assert not order_holds(judge({}))
