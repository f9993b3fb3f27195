"""Numbers of samplers over passes: after a resume they go on, or are refused because the loop counts from 0 again."""

from __future__ import annotations

import pytest

from ft_plugins.adapters.data.loader_order import PassNumbers
from ft_plugins.errors import ResumeError
from ft_plugins.snapshot.capture import codec


def passes(path: str, before: list[int], after: list[int]) -> None:
    """Passes that begin with these numbers; the job resumes in the last of `before`."""
    numbers = PassNumbers()
    for number in before:
        numbers.begin({path: number})
    numbers = PassNumbers.restored(codec.decode(codec.encode(numbers.plain())))
    for number in after:
        numbers.begin({path: number})


@pytest.mark.parametrize(
    "path, before, after",
    [
        ("sampler.window", [10, 20, 30], [30, 30]),
        ("sampler.window", [10, 20, 30], [35, 35]),
        ("sampler.rest", [30, 20, 10], [5, 5]),
        ("sampler.window", [10, 20, 30, 30], [30, 40]),
        ("epoch", [0, 1, 2], [3, 4]),
        ("epoch", [0, 0, 0], [0, 0]),
    ],
)  # fmt: skip
def test_a_number_that_rises_as_it_did_or_by_less_goes_on(path: str, before: list[int], after: list[int]) -> None:
    """A window of a curriculum grows until it is full, before or after the resume."""
    passes(path, before, after)
    passes(path, [*before, after[0]], after[1:])


@pytest.mark.parametrize(
    "path, before, number, expected",
    [
        ("sampler.round", [0, 1, 2], 1, 3),
        ("sampler.rest", [30, 20, 10], 20, 0),
        ("epoch", [0, 1], 1, 2),
        ("epoch", [0, 1, 2], 2, 3),
        ("epoch", [0, 1, 2], 4, 3),
        ("epoch", [5], 4, 6),
    ],
)
def test_a_number_that_turns_back_is_refused_and_an_epoch_that_does_not_rise_as_before(
    path: str, before: list[int], number: int, expected: int
) -> None:
    words = f"was set to {number} for the pass after .* resumed, which had {before[-1]}: .* expected {expected}: count"
    with pytest.raises(ResumeError, match=words):
        passes(path, before, [number])
