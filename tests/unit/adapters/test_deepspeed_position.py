"""Data positions of loaders and iterators: the next batch after a restore is the one that would have come."""

import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime import dataloader  # noqa: E402
from torch.utils.data import DataLoader, RandomSampler  # noqa: E402

from ft_plugins.adapters.data.loaders import generator_states, set_generator_states
from ft_plugins.adapters.deepspeed.position import Positions  # noqa: E402
from ft_plugins.adapters.script.script_hooks import around  # noqa: E402
from ft_plugins.errors import ResumeError, UnsupportedError  # noqa: E402
from ft_plugins.snapshot.capture import codec  # noqa: E402
from tests.unit.adapters.test_deepspeed_loaders import ORIGINAL, Drawn, Numbers  # noqa: E402


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    for kind, original in ORIGINAL.items():
        monkeypatch.setattr(kind, "__iter__", original)


class Followed:
    """DeepSpeed's loaders of one 'process', followed by positions of its own."""

    def __init__(self, data=Numbers):
        self.positions = Positions()
        self.positions.follow_torch()
        self.data = data()
        self.module = SimpleNamespace(
            DeepSpeedDataLoader=type("Own", (dataloader.DeepSpeedDataLoader,), {}),
            RepeatingLoader=type("Repeating", (dataloader.RepeatingLoader,), {}),
        )
        self.positions.follow(self.module)
        torch.manual_seed(1)

    def of_deepspeed(self, workers):
        """Shuffled by torch's default generator, repeated."""
        own = self.module.DeepSpeedDataLoader(
            self.data, 4, False, 0, None, data_sampler=RandomSampler(self.data), num_local_io_workers=workers
        )
        return self.module.RepeatingLoader(own)

    def of_torch(self, workers):
        """Likewise, around torch's own loader."""
        return self.module.RepeatingLoader(DataLoader(self.data, 4, shuffle=True, num_workers=workers))

    def read(self, source, count):
        """As an engine reads, with dropout in between."""
        found = []
        for _ in range(count):
            self.positions.reading("train", source)
            found.append(next(source).tolist())
            torch.rand(3)
        return found


@pytest.mark.parametrize("kind", ["of_deepspeed", "of_torch"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("before", [0, 3, 5, 7])  # an epoch has five batches
def test_a_loader_with_a_sampler_goes_on_in_any_epoch_without_loading(kind, workers, before):
    one = Followed()
    source = getattr(one, kind)(workers)
    one.positions.expect("train", source)
    one.read(source, before)
    position, generators = codec.decode(codec.encode(one.positions.read())), generator_states()
    wanted = one.read(source, 8)

    other = Followed()
    source = getattr(other, kind)(workers)
    torch.rand(5)  # whatever else a new process draws
    other.positions.expect("train", source)
    other.positions.write(position)
    assert other.data.loaded == 0, "nothing is loaded to get there"
    set_generator_states(generators)
    assert other.read(source, 8) == wanted


@pytest.mark.parametrize("kind", ["of_deepspeed", "of_torch"])
@pytest.mark.parametrize("before", [3, 5, 7])
def test_what_workers_draw_is_drawn_again(kind, before):
    one = Followed(Drawn)
    source = getattr(one, kind)(2)
    one.positions.expect("train", source)
    one.read(source, before)
    position, generators = codec.decode(codec.encode(one.positions.read())), generator_states()
    wanted = one.read(source, 8)
    other = Followed(Drawn)
    source = getattr(other, kind)(2)
    torch.rand(5)
    other.positions.expect("train", source)
    other.positions.write(position)
    set_generator_states(generators)
    assert other.read(source, 8) == wanted


class Stateful:
    """An iterator that knows where it is."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return torch.tensor([self.at])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_an_iterator_with_a_state_of_its_own_is_asked_for_it():
    one, other = Followed(), Followed()
    source, again = Stateful(), Stateful()
    one.read(source, 3)
    other.positions.expect("train", again)
    other.positions.write(one.positions.read())
    assert other.read(again, 1) == one.read(source, 1) == [[4]]


def test_of_anything_else_as_much_is_read_again_and_that_is_said(capsys):
    def numbers():
        yield from (torch.tensor([number]) for number in range(10))

    one, other = Followed(), Followed()
    source, again = numbers(), numbers()
    one.read(source, 3)
    other.positions.expect("train", again)
    other.positions.write(one.positions.read())
    assert "3 batches were read again and dropped" in capsys.readouterr().out
    assert other.read(again, 2) == one.read(source, 2) == [[3], [4]]
    assert other.positions.read()["train"]["read"] == 5


def test_the_position_of_evaluation_waits_for_the_first_evaluation():
    one, other = Followed(), Followed()
    source, again = Stateful(), Stateful()
    one.positions.reading("eval", source)
    next(source)
    saved = one.positions.read()
    other.positions.write(saved)
    assert other.positions.read() == saved, "what was not put in place yet is captured all the same"
    before = torch.get_rng_state()
    other.positions.reading("eval", again)
    assert torch.equal(torch.get_rng_state(), before)
    assert next(again).tolist() == [2]


@pytest.mark.parametrize("order", [("train", "eval"), ("eval", "train")])
@pytest.mark.parametrize("first", ["train", "eval"])
def test_what_training_and_evaluation_both_read_has_one_position(order, first):
    def numbers():
        yield from (torch.tensor([number]) for number in range(20))

    def read(one, source, *roles):
        found = []
        for role in roles:
            one.positions.reading(role, source)
            found.append(int(next(source)))
        return found

    one, other = Followed(), Followed()
    source, again = numbers(), numbers()
    assert read(one, source, *order, "train", *order) == [0, 1, 2, 3, 4]
    saved = one.positions.read()
    if first == "train":  # else the first read in the new process puts it in place
        other.positions.expect("train", again)
    other.positions.write(saved)
    assert read(other, again, "train", "eval", "train") == [5, 6, 7]
    assert {role: state["read"] for role, state in other.positions.read().items()} == {"train": 8}


def test_a_loader_that_evaluation_reads_too_is_not_put_back_when_it_does():
    one, other = Followed(), Followed()
    for each in (one, other):
        each.loader = each.of_torch(0)
    assert one.read(one.loader, 2)
    one.positions.reading("eval", one.loader)
    next(one.loader)
    saved, generators = one.positions.read(), generator_states()
    wanted = one.read(one.loader, 2)
    other.positions.expect("train", other.loader)
    other.positions.write(saved)
    set_generator_states(generators)
    found = other.read(other.loader, 1)
    other.positions.reading("eval", other.loader)
    assert [*found, next(other.loader).tolist()] == wanted


@pytest.mark.parametrize("kind", ["shuffled", "sequential", "generator of its own", "repeating"])
@pytest.mark.parametrize("read", [5, 6])  # an epoch has five batches
def test_an_iterator_around_a_loader_that_is_shuffled_again_is_refused(kind, read, capsys):
    def source(followed):
        own = torch.Generator().manual_seed(3) if kind == "generator of its own" else None
        iterating = around(followed.positions._passes._iterating)(DataLoader.__iter__)
        loader = type("Own", (DataLoader,), {"__iter__": iterating})(
            followed.data, 4, shuffle=kind != "sequential", generator=own
        )
        if kind == "repeating":
            loader = followed.module.RepeatingLoader(loader)
        while True:
            yield from loader

    def batches(followed, it, count):
        found = []
        for _ in range(count):
            with followed.positions.around("train", it):
                found.append(next(it).tolist())
            torch.rand(3)
        return found

    one, other = Followed(), Followed()
    it, again = source(one), source(other)
    batches(one, it, read)
    saved = codec.decode(codec.encode(one.positions.read()))
    refused = read == 6 and kind in ("shuffled", "repeating")
    assert ("for a second time" in capsys.readouterr().out) == refused
    other.positions.expect("train", again)
    if refused:
        with pytest.raises(ResumeError, match="reads a shuffled loader for a second time"):
            other.positions.write(saved)
        return
    other.positions.write(saved)
    if kind != "shuffled" and kind != "repeating":
        assert batches(other, again, 3) == batches(one, it, 3)


def test_a_sampler_of_data_efficiency_that_a_second_pass_goes_on_with_is_refused():
    """Its state belongs to no pass: what a pass drops of a batch, the next one begins with."""
    followed = Followed()
    source = followed.module.DeepSpeedDataLoader(
        followed.data, 4, False, 0, None, data_sampler=[[4, 5], [1, 2], [3, 0]], num_local_io_workers=0
    )
    source.curriculum_learning_enabled, source.len = True, 3
    source.data_sampler = type("Sampler", (list,), {"curriculum_step": 0})(source.data_sampler)
    iter(source)
    assert followed.read(source, 2) == [[4, 5], [1, 2]]
    assert followed.positions.read()["train"]["read"] == 2
    source.data_sampler.curriculum_step = 2
    iter(source)
    with pytest.raises(UnsupportedError, match="data position of 'train': a second pass .*num_epochs"):
        followed.positions.read()


@pytest.mark.parametrize(("taken", "again", "named"), [(2, 4, True), (2, 2, False), (None, None, False)])
def test_a_restored_pass_that_gets_longer_than_those_that_the_loop_leaves_is_named_once(taken, again, named, capsys):
    """As where the loop counts each pass from its begin. `taken`: batches of a pass; None: all. The job is restored
    after one batch of its third pass, of which it takes `again`, the first one included."""

    def passes(followed, counts):
        source = None
        for count in counts:
            source = iter(loader)
            for _ in itertools.islice(itertools.count(), count):
                followed.positions.reading("train", source)
                if next(source, None) is None:
                    break
        return source

    first = Followed()
    loader = DataLoader(list(range(24)), 4)
    under_way = passes(first, [taken, taken, 1])
    saved = codec.decode(codec.encode(first.positions.read()))
    second = Followed()
    loader = DataLoader(list(range(24)), 4)
    second.positions.write(saved)
    passes(second, [None if again is None else again - 1, taken])
    assert ("takes more batches of the restored pass" in capsys.readouterr().err) == named and under_way
