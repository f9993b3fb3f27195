"""Torch loaders that a script iterates itself: after a restore the next batch is the one that would have come next.

A process is played by `Script`: its loaders, its positions, its generators; the second one has been restored.
"""

import random

import numpy as np
import pytest
import torch

pytest.importorskip("deepspeed")

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

from ft_plugins.adapters.data.loaders import LoaderPass, generator_states, set_generator_states  # noqa: E402
from ft_plugins.adapters.deepspeed.position import Positions  # noqa: E402
from ft_plugins.errors import ResumeError  # noqa: E402
from ft_plugins.snapshot.capture import codec  # noqa: E402

BATCHES = 5  # of an epoch


class Numbers(torch.utils.data.Dataset):
    """0 to 19, that count how often they were loaded."""

    def __init__(self):
        self.loaded = 0

    def __len__(self):
        return 4 * BATCHES

    def __getitem__(self, index):
        self.loaded += 1
        return index


class Stream(IterableDataset):
    """0 to 19, drawn by lot."""

    def __iter__(self):
        yield from torch.randperm(4 * BATCHES).tolist()


class Lots(Sampler):
    """Draws from generators of its own."""

    def __init__(self, data):
        self.lots, self.numbers = random.Random(3), np.random.default_rng(4)
        self._size = len(data)

    def __len__(self):
        return self._size

    def __iter__(self):
        found = list(range(self._size))
        self.lots.shuffle(found)
        yield from np.roll(found, int(self.numbers.integers(20))).tolist()


class Later(Lots):
    """Makes its generator when its first pass begins; with `again`, in each one."""

    def __init__(self, data, again):
        self._size, self._again = len(data), again

    def __iter__(self):
        if self._again or not hasattr(self, "lots"):
            self.lots = random.Random(5)
        yield from self.lots.sample(range(self._size), self._size)


class Stateful(DataLoader):
    """Knows where it is, and has a way of its own to be iterated."""

    at, resumed = 0, 0

    def __iter__(self):
        for self.at, batch in enumerate(super().__iter__(), 1):
            if self.at > self.resumed:
                yield batch
        self.resumed = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.resumed = state["at"]


class Drawn(Numbers):
    """Augmented with random numbers of the process that loads it."""

    def __getitem__(self, index):
        return index + random.random() + float(torch.rand(())) + float(np.random.rand())


ORIGINAL = {kind: kind.__iter__ for kind in (DataLoader, Stateful)}


class Script:
    """What a process has; `seed` is what it begins with."""

    def __init__(self, monkeypatch, kind, workers=0, seed=1, data=Numbers):
        for each, original in ORIGINAL.items():
            monkeypatch.setattr(each, "__iter__", original)  # as in a new process
        self.positions, self.data, self.versions = Positions(), data(), []
        self.positions.follow_torch()
        self.positions.before_read = self._before_read
        self.pending = None
        torch.manual_seed(seed)
        self.loader = self._loader(kind, workers)

    def _loader(self, kind, workers):
        more = {"num_workers": workers, "persistent_workers": kind == "persistent"}
        match kind:
            case "shuffled" | "persistent":
                return DataLoader(self.data, 4, shuffle=True, **more)
            case "generator":
                return DataLoader(self.data, 4, shuffle=True, generator=torch.Generator().manual_seed(5), **more)
            case "sampler":
                return DataLoader(self.data, 4, sampler=Lots(self.data), **more)
            case "later" | "made again":
                return DataLoader(self.data, 4, sampler=Later(self.data, kind == "made again"), **more)
            case "distributed":
                return DataLoader(self.data, 2, sampler=DistributedSampler(self.data, 2, 1, seed=3), **more)
            case "single":
                return DataLoader(self.data, None, sampler=RandomSampler(self.data, num_samples=BATCHES), **more)
            case "stream":
                return DataLoader(Stream(), 4, **more)
        return Stateful(self.data, 4, **more)

    def _before_read(self, source):
        self.positions.expect("train", source)
        if self.pending is not None:
            position, generators = codec.decode(codec.encode(self.pending))
            self.pending = None
            self.positions.write(position)
            set_generator_states(generators)
            self.positions.restart_unplaced()
        self.versions.append((self.positions.read(), generator_states()))
        self.positions.reading("train", source)

    def train(self, count, done=0):
        """`count` batches after `done` of them, in epochs, as scripts have them, with dropout in between."""
        found = []
        epoch = done // BATCHES
        while True:
            if isinstance(self.loader.sampler, DistributedSampler):
                self.loader.sampler.set_epoch(epoch)
            for batch in self.loader:
                found.append(torch.as_tensor(batch).tolist())
                torch.rand(3)
                if len(found) == count:
                    return found
            torch.rand(7)  # what a script does between epochs
            epoch += 1


KINDS = ["shuffled", "generator", "sampler", "later", "made again", "distributed", "single", "stream", "stateful"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("done", [0, 3, 5, 7, 12])
def test_the_batch_that_would_have_come_next_comes_next(monkeypatch, kind, done):
    one = Script(monkeypatch, kind)
    wanted = one.train(done + 8)
    other = Script(monkeypatch, kind, seed=2)
    ends = max(0, done - 1) // BATCHES if kind == "stream" else 0  # reads that gave nothing, which is not known before
    other.pending = one.versions[done + ends]
    torch.rand(5)
    loaded = []
    reading = other.positions.restart_unplaced
    monkeypatch.setattr(other.positions, "restart_unplaced", lambda: (reading(), loaded.append(other.data.loaded)))
    assert other.train(8, done) == wanted[done:]
    assert kind in ("stream", "stateful") or loaded == [0], "nothing is loaded to get there"


@pytest.mark.parametrize("done", [2, 7])
@pytest.mark.parametrize("kind", ["shuffled", "persistent", "generator"])
def test_worker_processes_read_ahead_but_are_not_ahead(monkeypatch, kind, done):
    one = Script(monkeypatch, kind, workers=2)
    wanted = one.train(done + 8)
    other = Script(monkeypatch, kind, workers=2, seed=2)
    other.pending = one.versions[done]
    assert other.train(8, done) == wanted[done:]


@pytest.mark.parametrize("done", [2, 7])
@pytest.mark.parametrize("kind", ["shuffled", "generator"])
def test_what_workers_draw_is_drawn_again(monkeypatch, kind, done, capsys):
    one = Script(monkeypatch, kind, workers=2, data=Drawn)
    wanted = one.train(done + 8)
    other = Script(monkeypatch, kind, workers=2, seed=2, data=Drawn)
    other.pending = one.versions[done]
    assert other.train(8, done) == wanted[done:]
    assert "2 batches were read again and dropped" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "words"), [("persistent", "outlive a pass"), ("stateful", "a state_dict of")])
def test_what_workers_draw_that_cannot_be_brought_there_is_named_and_refused(monkeypatch, kind, words, capsys):
    one = Script(monkeypatch, kind, workers=2, data=Drawn)
    one.train(9)
    said = capsys.readouterr().err
    assert said.count("'train': its worker processes draw random numbers, and " + words) == 1, said
    other = Script(monkeypatch, kind, workers=2, data=Drawn)
    other.pending = one.versions[8]
    with pytest.raises(ResumeError, match=words):
        other.train(1)


def test_a_script_that_begins_with_another_epoch_is_refused(monkeypatch):
    one = Script(monkeypatch, "distributed")
    one.train(8)
    other = Script(monkeypatch, "distributed")
    other.pending = one.versions[7]
    with pytest.raises(ResumeError, match="epoch 0 on its sampler, but the captured epoch is 1: begin the loop"):
        other.train(8)


def test_a_loader_with_other_generators_is_refused(monkeypatch):
    one = Script(monkeypatch, "generator")
    one.train(3)
    other = Script(monkeypatch, "shuffled")
    other.pending = one.versions[2]
    with pytest.raises(ResumeError, match="no generator of its own"):
        other.train(1)


def test_what_is_read_again_is_said(monkeypatch, capsys):
    one = Script(monkeypatch, "stream")
    one.train(4)
    other = Script(monkeypatch, "stream", seed=2)
    other.pending = one.versions[3]
    other.train(1, 3)
    assert "3 batches were read again and dropped" in capsys.readouterr().out


def test_two_loaders_that_are_read_at_the_same_time_have_a_position_each(monkeypatch):
    def pairs(script, second, count):
        return [[a.tolist(), b.tolist()] for (a, b), _ in zip(zip(script.loader, second, strict=False), range(count))]  # noqa: B905

    one = Script(monkeypatch, "shuffled")
    wanted = pairs(one, DataLoader(Numbers(), 3, shuffle=True), 5)
    other = Script(monkeypatch, "shuffled", seed=2)
    other.pending = one.versions[4]  # before the third pair
    assert pairs(other, DataLoader(Numbers(), 3, shuffle=True), 3) == wanted[2:]


@pytest.mark.parametrize("kept", [True, False])
def test_an_evaluation_that_was_broken_off_begins_anew_unless_somebody_holds_it(monkeypatch, kept):
    def evaluated(script, held):
        source = held or iter(script.loader)
        script.positions.reading("eval", source)
        return [next(source).tolist(), next(source).tolist()]

    one = Script(monkeypatch, "generator")
    one.positions.before_read = lambda source: None
    held = iter(one.loader) if kept else None
    evaluated(one, held)
    saved, generators = codec.decode(codec.encode(one.positions.read())), generator_states()
    wanted = evaluated(one, held)

    other = Script(monkeypatch, "generator", seed=2)
    other.positions.before_read = lambda source: None
    held = iter(other.loader) if kept else None
    other.positions.write(saved)
    set_generator_states(generators)
    assert evaluated(other, held) == wanted


def test_a_pass_is_what_torch_gives(monkeypatch):
    script = Script(monkeypatch, "shuffled")
    script.positions.before_read = lambda source: None
    found = iter(script.loader)
    assert isinstance(found, LoaderPass) and len(found) == BATCHES and iter(found) is found
    next(found)
    assert found._num_yielded == 1, "what is asked of torch's own is answered by it"
    assert len(list(found)) == BATCHES - 1
    with pytest.raises(StopIteration):
        next(found)
