"""Repeated loaders draw after a restore what they draw without one, at every batch, with torch's own loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ft_plugins.adapters.data.cycles import continued

BATCHES, LAST = 4, 1  # of a pass; samples that are left out


class Cyclic:
    """As Megatron's sampler for `cyclic`: a pass goes on where consumed samples say."""

    def __init__(self, consumed: int) -> None:
        self.consumed_samples, self.total_samples, self.last_batch_size = consumed, 2 * BATCHES + LAST, LAST

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(self.consumed_samples // 2 % BATCHES, BATCHES):
            self.consumed_samples += 2
            yield [2 * batch, 2 * batch + 1]


class Whole:
    """As Megatron's for `--full-validation`: each pass is a whole one."""

    consumed_samples = 0

    def __init__(self, consumed: int) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([2 * batch, 2 * batch + 1] for batch in range(BATCHES))


def cycle(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def read(passes: Iterator[Any], count: int) -> list[tuple[list[int], bytes]]:
    """Batches, and the generator of the process after each of them."""
    found = []
    for _ in range(count):
        batch = next(passes).tolist()
        found.append((batch, torch.get_rng_state().numpy().tobytes()))
    return found


@pytest.mark.parametrize("workers", [0, 1], ids=["no-workers", "workers-that-persist"])
@pytest.mark.parametrize(("sampler", "points"), [(Cyclic, range(2 * BATCHES + 2)), (Whole, (0, BATCHES, 2 * BATCHES))])
def test_a_loader_that_goes_on_after_a_restore_draws_as_without(workers: int, sampler: Any, points: Any) -> None:
    def loader(consumed: int) -> Any:
        given: Any = {"num_workers": workers, "persistent_workers": bool(workers)}
        return DataLoader(range(100), batch_sampler=sampler(consumed), **given)  # type: ignore[arg-type]

    torch.manual_seed(1)
    states = [torch.get_rng_state()]
    expected = []
    passes = cycle(loader(0))
    for _ in range(4 * BATCHES):
        expected += read(passes, 1)
        states.append(torch.get_rng_state())
    for point in points:
        torch.manual_seed(2)
        passes = continued(cycle, loader(2 * point), read=bool(point))
        torch.set_rng_state(states[point])  # after the loader was built, and before it is read
        assert read(passes, BATCHES) == expected[point : point + BATCHES], point
