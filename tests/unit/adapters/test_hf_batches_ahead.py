"""The data position of loops over accelerate's loaders, which read one batch ahead."""

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from ft_plugins.adapters.data.loaders import generator_states, set_generator_states
from ft_plugins.errors import ResumeError, UnsupportedError
from ft_plugins.snapshot.capture import codec

data_loader = pytest.importorskip("accelerate.data_loader")
from ft_plugins.adapters.hf.batches_ahead import BatchesAhead  # noqa: E402

BATCHES, EPOCHS = 5, 3


class Augmented(torch.utils.data.Dataset):
    """Draws from the process's generators, and counts what it has read."""

    read = 0

    def __len__(self):
        return 2 * BATCHES

    def __getitem__(self, index):
        self.read += 1
        return [float(index), random.random(), float(torch.rand(())), float(self.read)]


class Stream(IterableDataset):
    def __init__(self, draws):
        self.draws = draws

    def __iter__(self):
        for index in range(2 * BATCHES):
            yield [float(index), float(torch.rand(())) if self.draws else 0.0]


class Counted(Augmented):
    """Counts, and draws nothing."""

    def __getitem__(self, index):
        self.read += 1
        return [float(index), float(self.read)]


class Plain(Augmented):
    def __getitem__(self, index):
        return [float(index)]


class Seeded(Augmented):
    """Draws from a generator of its own, which each worker seeds."""

    generator = None

    def __getitem__(self, index):
        return [float(index), float(torch.rand((), generator=self.generator))]


def seeding(worker):
    info = torch.utils.data.get_worker_info()
    if isinstance(info.dataset, Seeded):
        info.dataset.generator = torch.Generator().manual_seed(info.seed)


def shuffled(data=None, workers=0):
    """As Accelerator.prepare makes it: its sampler makes a generator when it is first iterated."""
    data = Augmented() if data is None else data
    init = seeding if workers else None
    plain = DataLoader(data, batch_size=2, sampler=RandomSampler(data), num_workers=workers, worker_init_fn=init)
    return data_loader.prepare_data_loader(plain, num_processes=1, process_index=0, use_seedable_sampler=True)


def streamed(draws):
    return data_loader.prepare_data_loader(
        DataLoader(Stream(draws), batch_size=2), num_processes=1, process_index=0, dispatch_batches=False
    )


class Loop:
    """A loop that draws random numbers in each iteration, and that can be entered in any of them."""

    def __init__(self, loader):
        self.loader, self.position = loader, BatchesAhead(loader)
        self.trace = []

    def iterate(self, start, end):
        """Iterations `start` up to `end`."""
        iterator = iter(())
        for number in range(start, end):
            if number == start or number % BATCHES == 0:
                if number % BATCHES == 0:
                    self.position.turning()
                self.loader.set_epoch(number // BATCHES)
                iterator = iter(self.loader)
            batch = next(iterator)
            self.position.taking(1)
            self.trace.append((number, [one.tolist() for one in batch], float(torch.rand(())), random.random()))
            if number == end - 1 and end % BATCHES == 0:
                self.position.turning()
        self.iterator = iterator
        return self

    def captured(self):
        return codec.encode({"position": self.position.read(), "generators": generator_states()})

    def restored(self, captured):
        saved = codec.decode(captured)
        self.position.write(saved["position"])
        set_generator_states(saved["generators"])
        return self


@pytest.mark.parametrize("killed_after", range(1, BATCHES * EPOCHS))
def test_a_loop_goes_on_with_the_batch_that_was_read_ahead_and_all_later_ones(killed_after):
    """Samples depend on the random numbers with which they were read, and on how many were read before."""
    random.seed(3), torch.manual_seed(3)
    golden = Loop(shuffled()).iterate(0, BATCHES * EPOCHS).trace

    random.seed(3), torch.manual_seed(3)
    captured = (first := Loop(shuffled()).iterate(0, killed_after)).captured()
    random.seed(3), torch.manual_seed(3)  # another process
    second = Loop(shuffled()).restored(captured).iterate(killed_after, BATCHES * EPOCHS)
    assert first.trace + second.trace == golden


def test_a_second_kill_in_the_same_pass_is_restored_too():
    random.seed(3), torch.manual_seed(3)
    golden = Loop(shuffled()).iterate(0, 2 * BATCHES).trace
    random.seed(3), torch.manual_seed(3)
    once = (first := Loop(shuffled()).iterate(0, 6)).captured()
    random.seed(3), torch.manual_seed(3)
    twice = (second := Loop(shuffled()).restored(once).iterate(6, 8)).captured()
    random.seed(3), torch.manual_seed(3)
    third = Loop(shuffled()).restored(twice).iterate(8, 2 * BATCHES)
    assert first.trace + second.trace + third.trace == golden


@pytest.mark.parametrize("kind", [Augmented, Counted, Seeded, Plain])
def test_what_worker_processes_draw_and_count_goes_on_and_is_read_again_only_then(kind, capsys):
    random.seed(3), torch.manual_seed(3)
    golden = Loop(shuffled(kind(), 2)).iterate(0, 2 * BATCHES).trace
    trace, captured, last = [], None, 0
    for killed_after in (1, 4, 5, 8, 2 * BATCHES):  # twice in a pass, at its end, once more
        random.seed(3), torch.manual_seed(3)
        loop = Loop(shuffled(kind(), 2))
        if captured is not None:
            loop.restored(captured)
        trace += loop.iterate(last, killed_after).trace
        captured, last = loop.captured(), killed_after
    assert trace == golden
    said = capsys.readouterr().out
    words = {Counted: "count in their copies of the data set", Augmented: "draw random numbers and count in"}
    assert said.count("whose worker processes") == (0 if kind is Plain else 3)
    assert said.count(words.get(kind, "draw random numbers")) == (0 if kind is Plain else 3)
    assert ("data position: 4 batches of a data set whose" in said) is (kind is not Plain)


@pytest.mark.parametrize("killed_after", [2, 5, 8])
def test_an_iterable_data_set_is_read_again(killed_after, capsys):
    golden = Loop(streamed(False)).iterate(0, 2 * BATCHES).trace
    golden_batches = [batch for _, batch, *_ in golden]
    torch.manual_seed(5), random.seed(5)
    captured = (first := Loop(streamed(False)).iterate(0, killed_after)).captured()
    second = Loop(streamed(False)).restored(captured).iterate(killed_after, 2 * BATCHES)
    assert [batch for _, batch, *_ in first.trace + second.trace] == golden_batches
    assert ("were read again and dropped" in capsys.readouterr().out) == (killed_after % BATCHES > 0)


def test_an_iterable_data_set_that_draws_is_named_when_it_does_and_refused_at_a_restart(capsys):
    loop = Loop(streamed(True)).iterate(0, 1)
    said = "draws random numbers of the process while it is read"
    assert capsys.readouterr().err.count(said) == 1, "in the first iteration"
    captured = loop.iterate(1, 3).captured()
    assert said not in capsys.readouterr().err, "and once"
    with pytest.raises(ResumeError, match="draws random numbers of the process while it is read"):
        Loop(streamed(True)).restored(captured).iterate(3, 4)


def test_other_data_than_those_that_were_captured_are_refused():
    with pytest.raises(ResumeError, match="the data are iterable, those of the captured job sampled"):
        Loop(streamed(False)).restored(Loop(shuffled()).iterate(0, 2).captured())


def test_a_loader_that_keeps_its_own_position_is_refused():
    loader = shuffled()
    loader.base_dataloader.state_dict = loader.base_dataloader.load_state_dict = dict
    with pytest.raises(UnsupportedError, match="itself .DataLoader.: it would be restored twice.*use_stateful"):
        BatchesAhead(loader)


def test_loaders_whose_position_cannot_be_had_are_refused_by_name():
    data = Augmented()
    kept = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    for loader, words in (
        (DataLoader(data, batch_size=2), r"accelerator.prepare\(loader\)"),
        (data_loader.DataLoaderDispatcher(data, batch_size=2), "rank 0 reads for all .--accelerator_config"),
        (data_loader.prepare_data_loader(kept, num_processes=1, process_index=0), "dataloader_persistent_workers"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            BatchesAhead(loader)


def test_a_loop_over_epochs_whose_batches_are_counted_goes_on_from_every_iteration():
    """It never mentions the position, and begins in the epoch of its iteration."""

    def loop(start, captured):
        """From iteration `start` on: what it reads and draws, and what is captured right before each iteration."""
        random.seed(3), torch.manual_seed(3)
        loader = shuffled()
        ahead, trace, captures = BatchesAhead(loader), list[Any](), list[bytes]()
        saved = None if captured is None else codec.decode(captured)
        if saved is not None:
            ahead.write(saved["position"])

        def begin():
            if saved is not None and not captures:
                set_generator_states(saved["generators"])
            captures.append(codec.encode({"position": ahead.read(), "generators": generator_states()}))

        ahead.count(begin)
        for _ in range(start // BATCHES, EPOCHS):
            for batch in loader:
                trace.append(([one.tolist() for one in batch], float(torch.rand(()))))
            trace.append(("evaluation", random.random()))
        return trace, captures

    golden, captures = loop(0, None)
    assert len(captures) == BATCHES * EPOCHS
    for iteration, captured in enumerate(captures):
        rest, _ = loop(iteration, captured)
        assert rest == golden[iteration + iteration // BATCHES :], iteration


@pytest.mark.parametrize("loader", [lambda: streamed(False), lambda: shuffled(Plain())], ids=["iterable", "sampled"])
def test_batches_that_a_checkpoint_of_its_own_passes_over_are_not_read_ahead(loader):
    """accelerate reads them again if the data set is iterable."""
    followed = loader()
    position = BatchesAhead(followed)
    rest = data_loader.skip_first_batches(followed, 2)
    position.skipping(rest, 2)
    position.turning()
    for taken, _ in enumerate(rest, 3):
        position.taking(1)
        assert position.ahead in (0, 1) and position.read()["pass"]["taken"] == taken
