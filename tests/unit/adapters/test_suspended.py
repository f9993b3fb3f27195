"""What generators that a loop reads from carry on is named where it begins again after a restore."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ft_plugins.adapters.data.loaders import LoaderPass, Passes
from ft_plugins.adapters.script.suspended import SuspendedValues
from ft_plugins.snapshot.capture import codec

Values = Iterator[Any]


class Reading:
    """Holds the generator in an attribute."""

    def __init__(self, values: Values) -> None:
        self.values = values


def versions(
    make: Callable[[], Values], restored: Any = None, ignored: tuple[str, ...] = ()
) -> tuple[list[Any], list[str]]:
    """What each of four steps captured, and what was said, in a start or after the restore of a version."""
    reading, own = Reading(make()), SuspendedValues()
    claimed = codec.encode(own.captured(first=True))
    captured, said = [], []
    if restored is not None:
        own.begin(restored, ignored)
        said.append(own.remark)
    for _ in range(4):
        next(reading.values)
        captured.append(codec.decode(codec.encode(own.captured(first=False))))
        said.append(own.remark)
        assert len(codec.encode(captured[-1])) < len(claimed)
    return captured, [one for one in said if one]


def counted(number: int = 0) -> Values:
    while True:
        number += 1
        yield number


def warmed(rate: float = 0.5) -> Values:
    while True:
        yield rate
        rate = min(rate * 1.5, 9.0)


def inner() -> Values:
    """The generator that counts is in another one."""
    values = counted()
    while True:
        yield next(values)


def evaluated() -> Values:
    """Over a loader that is not followed, through two iterators that no variable has."""
    for number, batch in enumerate(zip(loader(), range(9), strict=False)):
        yield batch, number


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(9, 1)))


def shuffled() -> Values:
    order = list(range(20))

    def values() -> Values:
        while True:
            random.shuffle(order)
            yield from order[:2]

    return values()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (counted, "`number` in counted(), of 'reading.values' is 0, and was 3 when that version was captured"),
        (warmed, "`rate` in warmed(), of 'reading.values' is 0.5, and was 1.125 when that version was captured"),
        (inner, "`number` in counted(), of 'values' is 1, and was 3 when that version was captured"),
        (evaluated, "_SingleProcessDataLoaderIter` in evaluated(), of 'reading.values' is 1, and was 3 when"),
        (shuffled, "`order` in values(), of 'reading.values' is a list of 20"),
    ],
)
def test_a_generator_that_begins_again_is_named_by_what_it_carries_on(make: Callable[[], Values], words: str) -> None:
    captured, said = versions(make)
    assert said == []
    _, said = versions(make, captured[2])
    assert len(said) == 1 and words in said[0] and said[0].startswith("after the restore `")


def test_one_that_goes_on_from_there_is_not_named_nor_what_is_ignored() -> None:
    captured, _ = versions(counted)
    assert versions(lambda: counted(3), captured[2])[1] == []
    assert versions(counted, captured[2], ignored=("number",))[1] == []
    assert versions(counted, None)[1] == []


def test_a_pass_that_the_position_follows_is_none_of_it() -> None:
    def endless(source: DataLoader[Any]) -> Values:
        while True:
            for [batch] in LoaderPass(source, DataLoader.__iter__, Passes(lambda one: None)):
                yield batch

    captured, _ = versions(lambda: endless(loader()))
    assert versions(lambda: endless(loader()), captured[2])[1] == []


def test_what_a_version_has_of_many_passes_stays_within_the_room_that_was_reserved() -> None:
    values = SuspendedValues()
    reserved = len(codec.encode(values.captured(first=True)))
    names = [f"{'of_some_length_' * 30}{number}" for number in range(100)]
    source = "def reading():\n" + "".join(f"    {name} = iter(loader())\n" for name in names) + "    yield\n"
    space: dict[str, Any] = {"loader": loader}
    exec(source, space)  # a function of as many variables
    it = space["reading"]()
    next(it)
    captured = values.captured(first=False)
    assert captured["last"] and len(codec.encode(captured)) <= reserved
