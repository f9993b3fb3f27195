"""Instructions are counted: of twice the size, twice as many where it is linear, four times where it is quadratic."""

import gc
import sys

import pytest

from harness.operations import doubling, instructions


def test_linear_and_quadratic_computations_are_told_apart():
    assert doubling(lambda n: [k + 1 for k in range(n)], 200) == pytest.approx(2, abs=0.1)
    assert doubling(lambda n: [j + k for k in range(n) for j in range(n)], 50) == pytest.approx(4, abs=0.2)


def test_the_count_is_the_same_again_and_tracing_ends_with_it():
    work = lambda: sorted(str(k) for k in range(50))  # noqa: E731
    gc.collect()  # what other tests left would be finalized, and counted
    assert instructions(work) == instructions(work) > 100
    assert sys.gettrace() is None
    with pytest.raises(ZeroDivisionError):
        instructions(lambda: 1 // 0)
    assert sys.gettrace() is None
