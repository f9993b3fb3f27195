"""What a loop of plain torch counts in variables is compared after a restore."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ft_plugins.errors import ResumeError
from tests.unit.adapters.torch_small import Small


def counted(seen: int, bad: int, version: Any = None, ignored: tuple[str, ...] = ()) -> list[Any]:
    """A loop that carries `seen` on, and ends by `bad`. Returns its versions; `version` is the restored one."""
    small = Small(ignored=ignored)
    versions: list[Any] = []
    begin = small.session.iteration_begin

    def iteration_begin(step: int) -> None:
        begin(step)
        if step == 1 and version is not None:
            small.host.restore_position(version)

    small.session.iteration_begin = iteration_begin  # type: ignore[method-assign]
    small.session.iteration_end = lambda step, ends: versions.append(small.host.small_state())  # type: ignore[method-assign]
    for _step in small.session.iterations(3):
        small.backward()
        small.optimizer.step()
        small.optimizer.zero_grad()
        seen += 1
        bad += 2
        if bad > 9:
            break
    return versions


def test_counters_that_end_a_loop_must_be_restored_and_others_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, version, _ = counted(0, 0)
    counted(2, 4, version)
    assert "after the restore" not in capsys.readouterr().err
    counted(0, 4, version)
    assert "after the restore `seen` in counted() is 0, and was 2 when" in capsys.readouterr().err
    with pytest.raises(ResumeError, match=r"rank 0: the loop does not continue: `bad` in counted\(\) is 0, and was 4"):
        counted(2, 0, version)
    counted(0, 0, version, ignored=("seen", "bad"))
    assert "after the restore" not in capsys.readouterr().err


def averaged(total: float, age: int, version: Any = None) -> list[Any]:
    """The same with an average that a closure carries on, and an age in an object with slots that ends the loop."""
    small, versions, own = Small(), [], Aged(age)
    begin = small.session.iteration_begin

    def iteration_begin(step: int) -> None:
        begin(step)
        if step == 1 and version is not None:
            small.host.restore_position(version)

    def train() -> None:
        nonlocal total
        small.backward()
        small.optimizer.step()
        small.optimizer.zero_grad()
        total += 0.5

    small.session.iteration_begin = iteration_begin  # type: ignore[method-assign]
    small.session.iteration_end = lambda step, ends: versions.append(small.host.small_state())  # type: ignore[method-assign]
    for _step in small.session.iterations(3):
        train()
        if own.is_old():
            break
    return versions


class Aged:
    __slots__ = ("age",)

    def __init__(self, age: int) -> None:
        self.age = age

    def is_old(self) -> bool:
        self.age += 1
        return self.age > 9


def test_what_is_counted_in_functions_and_slots_is_compared_too(capsys: pytest.CaptureFixture[str]) -> None:
    _, version, _ = averaged(0.0, 0)
    averaged(1.0, 2, version)
    assert "after the restore" not in capsys.readouterr().err
    averaged(0.0, 2, version)
    assert "after the restore `total` in averaged() is 0.0, and was 1.0 when" in capsys.readouterr().err
    with pytest.raises(ResumeError, match=r"the loop does not continue: `own.age` in averaged\(\) is 0, and was 2"):
        averaged(1.0, 0, version)


class Stream:
    """Has a position of its own, and draws from a generator of its own."""

    def __init__(self, kept: Any = None) -> None:
        self.at, self.drawing, self.kept = 0, random.Random(3), kept

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        self.at += 1
        return self.drawing.random()


def streamed(stream: Any, version: Any = None, by_next: bool = True) -> list[Any]:
    """A loop that reads a stream which nothing follows."""
    small, versions = Small(), []
    begin = small.session.iteration_begin

    def iteration_begin(step: int) -> None:
        begin(step)
        if step == 1 and version is not None:
            small.host.restore_position(version)

    def train(weight: float) -> None:
        (small.model(torch.ones(2, 4)) * weight).square().mean().backward()
        small.optimizer.step()
        small.optimizer.zero_grad()

    small.session.iteration_begin = iteration_begin  # type: ignore[method-assign]
    small.session.iteration_end = lambda step, ends: versions.append(small.host.small_state())  # type: ignore[method-assign]
    if by_next:
        for _step in small.session.iterations(3):
            train(next(stream))
    else:
        for _step, weight in zip(small.session.iterations(3), stream, strict=False):
            train(weight)
    return versions


@pytest.mark.parametrize("by_next", [True, False])
def test_a_stream_that_draws_other_numbers_after_a_restart_is_named(
    by_next: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _, version, _ = streamed(Stream(), by_next=by_next)
    continued = Stream()
    next(continued), next(continued)
    capsys.readouterr()
    streamed(continued, version, by_next)
    assert "after the restore" not in capsys.readouterr().err
    streamed(Stream(), version, by_next)
    assert "after the restore `stream` in streamed() is a Stream (" in capsys.readouterr().err
    _, version, _ = streamed(Stream(kept=object()), by_next=by_next)
    streamed(Stream(kept=object()), version, by_next)
    said = "what cannot be compared is what the script has set: `stream` in streamed() (Stream)"
    assert said in capsys.readouterr().err
