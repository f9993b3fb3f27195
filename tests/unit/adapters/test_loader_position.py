"""What loops of plain torch read goes on exactly after a restart, or is refused by name, in the unfailed run too."""

import copy
import functools
import itertools
import pickle
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, Subset

from ft_plugins.adapters.data.loaders import generator_states
from ft_plugins.adapters.data.worker_draws import watched
from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.errors import ConfigError, ResumeError, StateChangedError
from ft_plugins.model.digest import readable

from .torch_small import handed_over, session_of

ITERATIONS, SAMPLES = 14, 20  # 5 batches of 4 are an epoch
Loader = Callable[[], Any]


class Numbers(Dataset[Any]):
    """Each sample is its index and a vector that depends on the level of a curriculum and on how often one was read."""

    def __init__(self, rise=0.01):
        self.level, self.calls, self.rise, self.names = 0, 0, rise, [f"sample {i}" for i in range(SAMPLES)]
        self.vectors = torch.arange(SAMPLES * 4.0).reshape(SAMPLES, 4).sin()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.calls += 1
        return index, self.vectors[index] * (1 + self.level + self.rise * self.calls)


class Noisy(Numbers):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)

    def __getitem__(self, index):
        order, vector = super().__getitem__(index)
        return order, vector + torch.rand(4, generator=self.generator)


class Jitter:
    """An augmentation that draws from a generator of its own, and counts."""

    def __init__(self):
        self.random, self.calls = np.random.RandomState(2), 0

    def __call__(self, vector):
        self.calls += 1
        return vector * (1 + 0.01 * self.calls) + float(self.random.rand())


class Augmented(Dataset[Any]):
    """A data set around another one, and its augmentation, under names of its own."""

    def __init__(self):
        self.base, self.steps = Numbers(0.0), {"jitter": Jitter()}

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        order, vector = self.base[index]
        return order, self.steps["jitter"](vector)


_of_this_module = random.Random(8)


class Shaken(Numbers):
    """Draws from a generator of its module."""

    def __getitem__(self, index):
        order, vector = super().__getitem__(index)
        return order, vector + _of_this_module.random()


def shaken():
    _of_this_module.seed(8)  # as in a new process
    return DataLoader(Shaken(), 4, shuffle=True)


def masking():
    """A collate function that keeps a generator in its closure."""
    random_numbers = np.random.default_rng(6)
    return lambda samples: masked(samples, random_numbers)


def masked(samples, random_numbers):
    order, vectors = torch.utils.data.default_collate(samples)
    return order, vectors * torch.from_numpy(random_numbers.random(vectors.shape) > 0.3)


class InPlace(Sampler[int]):
    """Shuffles its own list in place when a pass begins."""

    def __init__(self, count=SAMPLES):
        self.order, self.passes = list(range(count)), 0

    def __iter__(self):
        random.shuffle(self.order)
        self.passes += 1
        return iter([one % SAMPLES for one in self.order[:SAMPLES]])

    def __len__(self):
        return SAMPLES


class Weights(Sampler[int]):
    """Draws each sample again more rarely, from `generator`, or from numpy's own one."""

    def __init__(self, generator=np.random):
        self.weights = np.ones(SAMPLES)
        if generator is not np.random:
            self.generator = generator
        self.draw = generator.choice

    def __iter__(self):
        for _ in range(SAMPLES):
            index = int(self.draw(SAMPLES, p=self.weights / self.weights.sum()))
            self.weights[index] *= 0.5
            yield index

    def __len__(self):
        return SAMPLES

    def __getstate__(self):
        return {key: value for key, value in vars(self).items() if key != "draw"}


class Later(Numbers):
    """Makes what it draws from with `make` when its first sample is read; its state has more entries with each one."""

    def __init__(self, make):
        super().__init__()
        self.make, self.random, self.state = make, None, dict[str, Any]()

    def __getitem__(self, index):
        order, vector = super().__getitem__(index)
        if self.random is None:
            self.random = self.make()
        self.state.setdefault("shards", {})[f"{index}"] = {"read": [self.calls]}
        return order, vector + float(self.random.random()) + len(self.state["shards"])


class Ordered(Sampler[int]):
    """Makes its generator when its first pass begins; with `again`, in each one."""

    def __init__(self, again):
        self.again, self.passes = again, 0

    def __iter__(self):
        if self.again or not hasattr(self, "generator"):
            self.generator = torch.Generator().manual_seed(self.passes)
        self.passes += 1
        yield from torch.randperm(SAMPLES, generator=self.generator).tolist()

    def __len__(self):
        return SAMPLES


class StatefulLoader(DataLoader[Any]):
    """Keeps its position as torchdata's StatefulDataLoader does: a loaded state is used by the next `iter`, which draws
    from the process's generator."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.made = None
        self.loaded = None
        self.fresh = False

    def __iter__(self):
        if not self.fresh or self.made.over:
            self.made = StatefulPass(super().__iter__(), self.loaded)
            self.loaded = None
            if self.made.over:
                self.made = StatefulPass(super().__iter__(), None)
        self.fresh = False
        return self.made

    def state_dict(self):
        if self.made is None:
            self.made, self.fresh = StatefulPass(super().__iter__(), self.loaded), True
            self.loaded = None
        return {"read": self.made.read, "over": self.made.over}

    def load_state_dict(self, state):
        self.made, self.loaded, self.fresh = None, state, False


class StatefulPass:
    def __init__(self, batches, state):
        self.batches, self.read, self.over = batches, 0, False
        if state is not None:
            self.batches._sampler_iter = itertools.islice(self.batches._sampler_iter, state["read"], None)
            self.read, self.over = state["read"], state["over"]

    def __iter__(self):
        return self

    def __next__(self):
        try:
            batch = next(self.batches)
        except StopIteration:
            self.over = True
            raise
        self.read += 1
        return batch


def torchdata_loader(data=None, **named):
    module = pytest.importorskip("torchdata.stateful_dataloader")
    rise = 0.01 * ("num_workers" not in named)  # what workers count is theirs
    return module.StatefulDataLoader(data or Numbers(rise), 4, **named)


class Stream(IterableDataset):
    """Begins each pass where it was placed last, as streaming `datasets` do within one epoch."""

    def __init__(self):
        self.numbers, self.placed, self.shard, self.at = Numbers(0.0), None, None, {"read": 0}

    def __iter__(self):
        self.at = dict(self.placed or {"read": 0})
        while self.at["read"] < len(self.numbers):
            self.at["read"] += 1
            yield self.numbers[self.at["read"] - 1]

    def state_dict(self):
        return dict(self.at)

    def load_state_dict(self, state):
        self.placed, self.shard = state, {"file": object()}  # and what cannot be captured


class StreamLoader(StatefulLoader):
    def state_dict(self):
        return super().state_dict() | {"data": self.dataset.state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.dataset.load_state_dict(state["data"])


class Drawing(Numbers):
    """Draws random numbers, in its worker processes."""

    def __getitem__(self, index):
        order, vector = super().__getitem__(index)
        return order, vector + torch.rand(4) + random.random()


# ---- loops ----


class Loop:
    """A model with dropout that is trained on the batches of `loader`."""

    def __init__(self, loader):
        torch.manual_seed(3)
        self.loader = loader
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.4), torch.nn.Linear(6, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.host = TorchHost(self.model, self.optimizer, None, loader)
        self.read = {}

    def begin(self):
        """Before the loop."""

    def batch(self, step):
        raise NotImplementedError

    def iterate(self, step):
        order, vectors = self.batch(step)
        self.read[step] = order.tolist()
        self.train(vectors)

    def train(self, vectors):
        self.model(vectors).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def described(self):
        state = self.model.state_dict(), torch.get_rng_state(), np.random.get_state()[1], random.getstate()
        return [readable({"": part}) for part in state], self.read


class Endless(Loop):
    """A generator function, which sets the epoch of a sampler that has one."""

    def begin(self):
        self.batches = self.endless()

    def endless(self):
        sampler = self.loader.sampler
        for epoch in itertools.count(getattr(sampler, "epoch", 0)):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            yield from self.loader

    def batch(self, step):
        return next(self.batches)


class Again(Loop):
    """Makes its iterator where it lacks one, and again where one ended."""

    def batch(self, step):
        try:
            return next(self.batches)
        except (AttributeError, StopIteration):
            self.batches = iter(self.loader)
            return next(self.batches)


class Before(Again):
    """Makes its iterator before the loop."""

    def begin(self):
        self.batches = iter(self.loader)


class Dropped(Loop):
    """Takes the first batch of a new pass in each iteration."""

    def batch(self, step):
        return next(iter(self.loader))


class Curriculum(Endless):
    def iterate(self, step):
        self.loader.dataset.level = step // 6
        super().iterate(step)


def train(kind, loader, *ends):
    """A job that is killed behind each of the iterations `ends` but the last, and goes on."""
    read = {}
    handed = None
    done = 0

    def live(life, end):
        nonlocal handed, done
        torch.manual_seed(life), np.random.seed(life), random.seed(life)
        loop = kind(loader())
        session = resuming(loop, handed)
        torch.manual_seed(70 + life), np.random.seed(70 + life), random.seed(70 + life)
        loop.begin()
        for step in session.iterations(end, done):
            loop.iterate(step)
            loop.host.small_state()
        handed, done = handed_over(loop.host), end
        read.update(loop.read)
        loop.read = read
        return loop.described()

    return [live(life, end) for life, end in enumerate(ends)][-1]  # a loop's counters would be compared


def resuming(loop, handed):
    session = session_of(loop.host)
    loop.host.small_state()  # as memory is claimed
    if handed is not None:
        small, tensors = handed
        for name, tensor in loop.host.tensors().items():
            tensor.copy_(tensors[name])
        loop.host.restore(small)
        session._pending = small  # restored as the first iteration begins
    return session


LOADERS = {
    "shuffled": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "epochs": lambda: DataLoader(Numbers(), 4, sampler=DistributedSampler(Numbers(), 1, 0)),
    "generator": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "in place workers": lambda: DataLoader(Numbers(0.0), 4, sampler=InPlace(), num_workers=2),
    "drawing workers": lambda: DataLoader(Drawing(0.0), 4, shuffle=True, num_workers=2),
    "in place": lambda: DataLoader(Numbers(), 4, sampler=InPlace()),
    "noisy": lambda: DataLoader(ConcatDataset([Subset(Noisy(), range(SAMPLES))]), 4, sampler=InPlace()),
    "augmented": lambda: DataLoader(Augmented(), 4, shuffle=True),
    "augmented workers": lambda: DataLoader(Augmented(), 4, shuffle=True, num_workers=2),
    "closure": lambda: DataLoader(Numbers(), 4, shuffle=True, collate_fn=masking()),
    "partial": lambda: DataLoader(
        Numbers(), 4, shuffle=True, collate_fn=functools.partial(masked, random_numbers=np.random.default_rng(6))
    ),
    "of a module": shaken,
    "later": lambda: DataLoader(Later(lambda: np.random.default_rng(4)), 4, shuffle=True),
    "later random": lambda: DataLoader(Later(lambda: random.Random(4)), 4, shuffle=True),
    "later legacy": lambda: DataLoader(Later(lambda: np.random.RandomState(4)), 4, shuffle=True),
    "later sampler": lambda: DataLoader(Numbers(), 4, sampler=Ordered(again=False)),
    "later samplers": lambda: DataLoader(Numbers(), 4, sampler=Ordered(again=True)),
    "weights": lambda: DataLoader(Numbers(), 4, sampler=Weights(np.random.RandomState(5))),
    "stateful": lambda: StatefulLoader(Numbers(), 4),
    "stateful epochs": lambda: StatefulLoader(Numbers(), 4, sampler=DistributedSampler(Numbers(), 1, 0)),
    "stream": lambda: StreamLoader(Stream(), 4),
    "torchdata": lambda: torchdata_loader(shuffle=True),
    "torchdata stream": lambda: torchdata_loader(Stream()),
    "torchdata epochs": lambda: torchdata_loader(sampler=DistributedSampler(Numbers(), 1, 0)),
    "torchdata workers": lambda: torchdata_loader(shuffle=True, num_workers=2),
    "torchdata persistent": lambda: torchdata_loader(shuffle=True, num_workers=2, persistent_workers=True),
}
KILLS = [(3, 4), (5, 6), pytest.param((7, 10), marks=pytest.mark.all_configurations)]  # (5: an epoch's end)


@pytest.mark.parametrize("ends", KILLS)
@pytest.mark.parametrize(
    "data, loop",
    [
        *((data, Endless) for data in LOADERS if data.rpartition(" ")[2] not in ("workers", "persistent")),
        *((data, kind) for data in ("in place", "stateful", "torchdata") for kind in (Again, Before)),
        ("shuffled", Curriculum),
        ("torchdata", Dropped),
        ("torchdata workers", Again),
        ("in place workers", Again),
        ("augmented workers", Again),
        ("drawing workers", Again),
        ("drawing workers", Before),
        ("torchdata persistent", Endless),
    ],
)
def test_killed_twice_it_reads_and_draws_as_without_a_failure(data, loop, ends):
    golden = train(loop, LOADERS[data], ITERATIONS)
    assert len(golden[1]) == ITERATIONS
    assert train(loop, LOADERS[data], *ends, ITERATIONS) == golden


@dataclass
class Shard:
    """What a data set has of the one that it reads, made when its first sample is."""

    path: str = "shard"
    read: int = 0
    random: Any = None


class Opened(Numbers):
    """A streaming data set whose state has more entries with every sample."""

    def __init__(self, generator=False):
        super().__init__(0.0)
        self.generator, self.opened = generator, dict[str, Any]()

    def __getitem__(self, index):
        shard = self.opened.setdefault(f"{index % 3}", Shard())
        shard.read += 1
        if self.generator and shard.random is None:
            shard.random = random.Random(4)
        order, vector = super().__getitem__(index)
        return order, vector + 0.01 * shard.read


@pytest.mark.parametrize("ends", [(3, 6), (5, 7)])
def test_objects_that_a_data_set_makes_while_it_is_read_are_put_back(capsys, ends):
    def opened():
        return DataLoader(Opened(), 4, shuffle=True)

    assert train(Endless, opened, *ends, ITERATIONS) == train(Endless, opened, ITERATIONS)
    assert "not captured" not in capsys.readouterr().out


def test_a_generator_that_a_restart_could_not_make_is_refused_in_the_first_iteration():
    with pytest.raises(StateChangedError, match=r"draws from dataset.opened\d.random, which was made after the loader"):
        train(Endless, lambda: DataLoader(Opened(generator=True), 4, shuffle=True), 1)


def test_a_generator_that_the_captured_loader_was_made_with_is_not_made_for_another_one():
    loaders = iter([LOADERS["generator"], LOADERS["shuffled"]])
    with pytest.raises(ResumeError, match="draws from no generator of its own, the captured one from"):
        train(Endless, lambda: next(loaders)(), 3, ITERATIONS)


def test_workers_that_draw_and_outlive_a_pass_are_named_and_their_restart_is_refused(capsys):
    def outliving():
        return DataLoader(Drawing(0.0), 4, shuffle=True, num_workers=1, persistent_workers=True)

    epoch = SAMPLES // 4
    golden = train(Again, outliving, epoch)
    assert train(Again, outliving, 2, epoch) == golden, "in their first pass they are brought there"
    assert "outlive a pass" not in capsys.readouterr().err
    with pytest.raises(ResumeError, match="draw random numbers .*outlive a pass .* leave out persistent_workers"):
        train(Again, outliving, epoch + 2, ITERATIONS)
    assert capsys.readouterr().err.count("and outlive a pass (persistent_workers), so that what they load") == 1


def test_workers_that_draw_for_a_loader_with_its_own_state_are_named_and_their_restart_is_refused(capsys):
    def stateful():
        return StatefulLoader(Drawing(0.0), 4, num_workers=1)

    with pytest.raises(ResumeError, match="draw random numbers, which its state_dict does not have"):
        train(Again, stateful, 2, ITERATIONS)
    assert capsys.readouterr().err.count("a restart would draw others: let __getitem__") == 1


def test_two_loaders_are_both_followed():
    def loaders():
        return [DataLoader(Numbers(), 4, shuffle=True), DataLoader(Numbers(), 2, sampler=InPlace())]

    golden = train(Two, loaders, ITERATIONS)
    assert train(Two, loaders, 4, 5, ITERATIONS) == golden


class Two(Loop):
    """Reads one batch of each of two loaders; evaluates on a third one."""

    def begin(self):
        self.several = [self.endless(one) for one in self.loader]

    def endless(self, loader):
        while True:
            yield from loader

    def batch(self, step):
        (order, vectors), (others, more) = (next(one) for one in self.several)
        return torch.cat([order, others]), torch.cat([vectors, more])

    def iterate(self, step):
        super().iterate(step)
        self.model.eval()
        for _, vectors in DataLoader(Numbers(), 4):
            self.model(vectors)
        self.model.train()


# ---- reads ----


class Cycled(Loop):
    def begin(self):
        self.batches = itertools.cycle(self.loader)

    def batch(self, step):
        return next(self.batches)


class CycledInside(Cycled):
    def begin(self):
        self.batches = itertools.cycle(batch for batch in self.loader)


class Stored(Before):
    """Uses a batch for two iterations."""

    def batch(self, step):
        if step % 2:
            self.stored = super().batch(step)
        return self.stored


class Ahead(Before):
    """Reads the next batch before it trains on the present one."""

    def batch(self, step):
        present = super().batch(step) if step == 1 else self.following
        self.following = super().batch(step)
        return present


class Other(Before):
    """Trains on a second loader, too."""

    def batch(self, step):
        next(iter(DataLoader(Numbers(), 4)))
        return super().batch(step)


class InThread(Before):
    def batch(self, step):
        found = []

        def read():
            try:
                found.append(super(InThread, self).batch(step))
            except ConfigError as error:
                found.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        if isinstance(found[0], ConfigError):
            raise found[0]
        return found[0]


@pytest.mark.parametrize("data", ["shuffled", "stateful"])
@pytest.mark.parametrize(
    "loop, last, words",
    [
        (Cycled, 5, r"iteration 6: an update came without a batch .* If itertools.cycle repeats it: write"),
        (CycledInside, 5, r"iteration 6: an update came without a batch .* If itertools.cycle repeats it: write"),
        (Stored, 1, r"iteration 2: an update came without a batch .* in every iteration"),
        (Ahead, 1, r"iteration 2 read 1 batches, but iteration 1, the first one of this start, 2: .* reads ahead"),
        (Other, 0, r"iteration 1: before the update .* another DataLoader \(over a Numbers\).*\[loader, other\]"),
        (InThread, 0, r"a batch was read by another thread"),
    ],
)
def test_a_loop_that_trains_on_what_the_position_does_not_cover_is_refused(loop, last, words, data):
    """In the unfailed run, and at once."""
    made = loop(LOADERS[data]())
    trained = []
    session = session_of(made.host)
    made.begin()
    with pytest.raises(ConfigError, match=words):
        for step in session.iterations(ITERATIONS):
            made.iterate(step)
            trained.append(step)
    assert trained == list(range(1, last + 1))


def test_an_evaluation_on_another_loader_is_none_of_it():
    class Evaluated(Before):
        def iterate(self, step):
            with torch.no_grad():
                next(iter(DataLoader(Numbers(), 4)))
            super().iterate(step)
            next(iter(DataLoader(Numbers(), 4)))

    assert len(train(Evaluated, LOADERS["shuffled"], ITERATIONS)[1]) == ITERATIONS


def test_batches_accumulated_to_the_end_of_an_epoch_may_be_fewer():
    class Accumulated(Before):
        def iterate(self, step):
            read = list(itertools.islice(self.batches, 3))
            if len(read) < 3:
                self.batches = iter(self.loader)
            self.train(torch.cat([vectors for _, vectors in read]))
            self.read[step] = [len(read)]

    assert list(train(Accumulated, LOADERS["shuffled"], 6)[1].values()) == [[3], [2], [3], [2], [3], [2]]
    assert train(Accumulated, LOADERS["shuffled"], 1, 3, 6) == train(Accumulated, LOADERS["shuffled"], 6)


class Budget(Endless):
    """Reads two or three batches for an update, as many as it needs."""

    def iterate(self, step):
        read = [next(self.batches) for _ in range((2, 3, 2, 3, 3, 2)[step - 1])]
        self.train(torch.cat([vectors for _, vectors in read]))
        self.read[step] = [int(order) for order, _ in read]


def test_updates_on_varying_numbers_of_batches_go_on_after_a_restart():
    def loader():
        return DataLoader(Numbers(), 1, shuffle=True)

    golden = train(Budget, loader, 6)
    assert [len(read) for read in golden[1].values()] == [2, 3, 2, 3, 3, 2]
    assert train(Budget, loader, 4, 6) == golden


class Begun(Loop):
    """Makes an iterator only where an epoch begins, and does not say what it does at an end."""

    def batch(self, step):
        if step % 5 == 1:
            self.batches = iter(self.loader)
        return next(self.batches)


def test_an_iterator_made_where_an_epoch_begins_is_refused_with_the_line_to_write():
    with pytest.raises(StopIteration, match="after the last batch of a pass .*begin the next one where it ends"):
        train(Begun, LOADERS["shuffled"], 5, ITERATIONS)


def test_workers_that_outlive_a_pass_over_a_stream_are_refused_where_its_next_pass_begins():
    with pytest.raises(ConfigError, match="a second pass over the data begins: .*: leave out persistent_workers"):
        train(Endless, lambda: StreamLoader(Stream(), 4, num_workers=1, persistent_workers=True), 6)


# ---- samplers and data sets ----


class Kept(InPlace):
    """Keeps an object."""

    def __iter__(self):
        self.rest = super().__iter__()
        return self.rest


@pytest.mark.parametrize(
    "sampler, kind, words",
    [
        (Weights, ConfigError, "the sampler Weights draws from the process's generators in the middle of a pass"),
        (Kept, StateChangedError, r"sampler.rest \(a list_iterator\) changes, but is not captured.*get_state"),
        (lambda: InPlace(500_000), StateChangedError, r"sampler.order \(a list\) changes.*too large"),
    ],
)
def test_a_sampler_whose_order_would_be_another_one_is_refused(sampler, kind, words):
    with pytest.raises(kind, match=words):
        train(Endless, lambda: DataLoader(Numbers(), 4, sampler=sampler()), ITERATIONS)


def test_protection_goes_on_where_values_grow_without_end():
    class Cached(Numbers):
        def __init__(self):
            super().__init__()
            self.cache = {}

        def __getitem__(self, index):
            self.cache[index] = bytes(3000)
            return super().__getitem__(index)

    assert len(train(Endless, lambda: DataLoader(Cached(), 4), 6)[1]) == 6


def test_a_sampler_made_with_another_seed_is_refused_at_the_resume():
    seeds = iter((1, 2))
    with pytest.raises(ResumeError, match="sampler.seed is 2, but the captured job was started with another value"):
        train(
            Endless,
            lambda: DataLoader(Numbers(), 4, sampler=DistributedSampler(Numbers(), 1, 0, seed=next(seeds))),
            *(3, ITERATIONS),
        )


def test_a_stateful_loader_that_draws_its_order_again_is_refused_at_start():
    with pytest.raises(ConfigError, match="order of its InPlace again after a restart.*use torch's DataLoader"):
        Loop(StatefulLoader(Numbers(), 4, sampler=InPlace()))


def test_a_stateful_loader_that_reads_its_data_again_is_refused_at_start():
    class Stream(IterableDataset[int]):
        def __iter__(self):
            yield from range(4)

    with pytest.raises(ConfigError, match="read its Stream again from the start.*state_dict and load_state_dict"):
        Loop(StatefulLoader(Stream(), 4))


def test_a_followed_sampler_can_be_pickled():
    """As a data set that holds it is, for a worker process."""
    loop = Loop(DataLoader(Numbers(), 4, sampler=InPlace()))
    copied = copy.copy(loop.loader.sampler)
    assert type(copied) is InPlace and copied.order == list(range(SAMPLES))
    assert b"InPlace" in pickle.dumps(loop.loader.sampler)


# ---- epochs ----


class Counted(Before):
    """Counts its epochs from 0 in a variable of its own."""

    setter = "set_epoch"

    def begin(self):
        self.count = 0
        self.set(self.count)
        super().begin()

    def set(self, count):
        getattr(self.loader.sampler, self.setter)(count)

    def batch(self, step):
        try:
            return next(self.batches)
        except StopIteration:
            self.count += 1
            self.set(self.count)
            self.batches = iter(self.loader)
            return next(self.batches)


def test_killed_in_the_first_epoch_such_a_loop_is_right():
    assert train(Counted, LOADERS["epochs"], 3, 22) == train(Counted, LOADERS["epochs"], 22)


def test_a_loader_that_a_script_drops_goes_at_once_and_its_workers_with_it():
    loader = DataLoader([1, 2, 3], num_workers=1)
    watched(lambda one: None)(loader)
    gone = weakref.ref(loader)
    del loader
    assert gone() is None


def test_a_source_that_draws_from_the_system_has_no_state_and_ends_nothing():
    class Noisy(Dataset[int]):
        def __init__(self):
            self.rng, self.seeded = random.SystemRandom(), random.Random(3)

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return index

    assert [path.rpartition(".")[2] for path in generator_states(DataLoader(Noisy()))["own"]] == ["seeded"]
