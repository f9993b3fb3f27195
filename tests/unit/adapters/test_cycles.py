"""Repeated loaders draw after a restore what they draw without one, at every batch, with torch's own loader."""

import pytest
import torch
from torch.utils.data import DataLoader

from ft_plugins.adapters.data.cycles import Cycles

BATCHES, LAST = 4, 1  # of a pass; samples that are left out


class Cyclic:
    """As Megatron's sampler for `cyclic`: a pass goes on where consumed samples say."""

    def __init__(self, consumed):
        self.consumed_samples, self.total_samples, self.last_batch_size = consumed, 2 * BATCHES + LAST, LAST

    def __iter__(self):
        for batch in range(self.consumed_samples // 2 % BATCHES, BATCHES):
            self.consumed_samples += 2
            yield [2 * batch, 2 * batch + 1]


class Whole:
    """As Megatron's for `--full-validation`."""

    def __init__(self, consumed):
        self.total_samples = 2 * BATCHES

    def __iter__(self):
        yield from ([2 * batch, 2 * batch + 1] for batch in range(BATCHES))


def cycle(loader):
    while True:
        yield from loader


def read(passes, count):
    """Batches, and the generator of the process after each of them."""
    found = []
    for _ in range(count):
        batch = next(passes).tolist()
        found.append((batch, torch.get_rng_state().numpy().tobytes()))
    return found


@pytest.mark.parametrize("workers", [0, 1], ids=["no-workers", "workers-that-persist"])
@pytest.mark.parametrize(("sampler", "points"), [(Cyclic, range(2 * BATCHES + 2)), (Whole, (0, BATCHES, 2 * BATCHES))])
def test_a_loader_that_goes_on_after_a_restore_draws_as_without(workers, sampler, points):
    def loader(consumed):
        given = {"num_workers": workers, "persistent_workers": bool(workers)}
        return DataLoader(range(100), batch_sampler=sampler(consumed), **given)

    torch.manual_seed(1)
    states, expected, made = [torch.get_rng_state()], [], Cycles()
    versions = [made.read()]
    passes = made.passes(cycle, loader(0))
    for _ in range(4 * BATCHES):
        expected += read(passes, 1)
        states.append(torch.get_rng_state())
        versions.append(made.read())
    for point in points:
        torch.manual_seed(2)
        again = Cycles()
        again.write(versions[point])
        passes = again.passes(cycle, loader(2 * point))
        torch.set_rng_state(states[point])  # after the loader was built, and before it is read
        assert read(passes, BATCHES) == expected[point : point + BATCHES], point


@pytest.mark.parametrize("workers", [0, 1], ids=["no-workers", "workers-that-persist"])
def test_one_that_was_not_read_since_a_start_from_megatrons_own_checkpoint_draws(workers):
    """Samples were consumed before that start, in another process."""

    def loader():
        given = {"num_workers": workers, "persistent_workers": bool(workers)}
        return DataLoader(range(100), batch_sampler=Cyclic(2), **given)

    loaded, restored = Cycles(), Cycles()
    next(loaded.passes(cycle, loader()))  # for training; the second, for evaluation, is not read
    restored.write(loaded.read())
    assert restored.read() == bytes([1, *bytes(15)])
    torch.manual_seed(1)
    before = torch.get_rng_state()
    restored.passes(cycle, loader())
    next(restored.passes(cycle, loader()))
    assert not torch.equal(torch.get_rng_state(), before)


def test_loaders_of_other_kinds_and_those_that_are_never_read_do_no_harm():
    restored = Cycles()
    restored.write(b"\1" * 16)
    never = DataLoader(range(3), batch_sampler=Cyclic(0))
    never.batch_sampler.total_samples = never.batch_sampler.last_batch_size = 3
    restored.passes(cycle, never)
    for loader, expected in (([1, 2], [1, 2, 1]), (DataLoader(range(2)), [0, 1, 0])):
        passes = restored.passes(cycle, loader)
        assert [int(next(passes)) for _ in expected] == expected
