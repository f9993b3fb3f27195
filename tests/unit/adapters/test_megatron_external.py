"""Loaders of a Megatron-LM script's own: what they keep is their position, and what keeps nothing is refused."""

import random
from types import SimpleNamespace

import pytest

from ft_plugins.adapters.megatron.external_data import ExternalData, unfollowed
from ft_plugins.adapters.megatron.training import MegatronLoop
from ft_plugins.adapters.rules import MEGATRON, Treatment, findings
from ft_plugins.errors import ConfigError, InventoryError, ResumeError, UnsupportedError
from ft_plugins.snapshot.capture import codec


class Counting:
    """Hands out numbers in order, with noise, and reads one ahead."""

    def __init__(self):
        self.at, self.noise = 0, random.Random(7)
        self.before, self.ahead = self.noise.getstate(), self.noise.random()

    def __next__(self):
        self.at, batch = self.at + 1, self.ahead
        self.before, self.ahead = self.noise.getstate(), self.noise.random()
        return self.at, batch

    def state_dict(self):
        return {"at": self.at, "noise": self.before}

    def load_state_dict(self, state):
        self.at, self.before = state["at"], state["noise"]
        self.noise.setstate(self.before)
        self.ahead = self.noise.random()


class Energon:
    """The wrapper of Megatron-LM's multimodal examples: it saves, and has no restore."""

    def __next__(self):
        return 1

    def save_state(self):
        return object()


def generated():
    yield 1


class Job:
    """One process: its loaders, and the iteration under way."""

    def __init__(self, *train, valid=None, evaluates=True, replicas=2):
        self.step = 0
        self.data = ExternalData(3, replicas, lambda: self.step)
        self.loaders = [self.data.built(one, [valid], evaluates) for one in train or (None,)]

    def iterate(self, *reads, batch=4):
        """An iteration that reads of each loader so often."""
        self.step += 1
        read = [[next(one) for _ in range(count)] for one, count in zip(self.loaders, reads, strict=True)]
        self.data.require_read(batch)
        return read


def through_codec(position):
    return codec.decode(codec.encode(position))


class Half:
    """Saves, but does not load."""

    def state_dict(self):
        return {}


def test_what_a_loader_offers_decides_and_each_that_keeps_no_state_is_named():
    loaders = [("training", Counting()), ("training", Half()), ("evaluation", Energon()), ("evaluation", generated())]
    assert unfollowed(loaders) == ["training: Half", "evaluation: Energon", "evaluation: generator"]


@pytest.mark.parametrize("loader", [generated(), Energon()])
def test_a_loader_without_state_is_refused_when_it_is_built(loader):
    name = type(loader).__name__
    with pytest.raises(UnsupportedError, match=f"rank 3: cannot protect.*own without state_dict.*training: {name}"):
        Job(loader)
    with pytest.raises(UnsupportedError, match=f"evaluation: {name}.*--eval-iters is 0, or run without protection"):
        Job(Counting(), valid=loader)
    Job(Counting(), valid=loader, evaluates=False)


def test_loaders_go_on_where_they_were_at_the_version_point():
    """One of each virtual stage, and one for evaluation. What a loader has read ahead is read again: to set its
    generator after its own load skipped that batch."""
    first = Job(Counting(), Counting(), valid=(valid := Counting()))
    first.iterate(2, 2)
    next(valid)
    position = through_codec(first.data.read())
    expected = first.iterate(2, 2), next(valid)

    again = Job(Counting(), Counting(), valid=(other := Counting()))
    again.step = 1
    again.data.write(position)
    again.step = 0
    assert (again.iterate(2, 2), next(other)) == expected


def test_a_rank_without_loaders_has_no_position_and_needs_none():
    middle = Job()
    assert middle.loaders == [None]
    middle.step = 1
    position = through_codec(middle.data.read())
    middle.data.write(position)
    assert position["loaders"] == {"training": [], "evaluation": []}


def test_memory_is_claimed_for_a_state_that_is_not_known_yet():
    job = Job(Counting())
    claimed = len(codec.encode(job.data.read()))
    job.iterate(1)
    assert len(codec.encode(job.data.read())) < 16_384 < 100_000 < claimed


def test_a_position_restored_at_the_end_of_training_waits_for_the_loaders():
    done = Job(Counting())
    done.iterate(3)
    position = done.data.read()
    job = Job()
    job.data.write(position)
    assert job.data.read() == position
    loader = Counting()
    job.data.built(loader, None, True)
    assert loader.at == 3


def test_a_loop_that_reads_ahead_itself_is_named():
    """What it holds is in no loader's state: a restart would skip it."""
    job = Job(Counting())
    job.iterate(5)
    with pytest.raises(ConfigError, match="iteration 2 read 4 batches, but iteration 1.*5"):
        job.iterate(4)


def test_a_batch_size_that_changes_is_no_reading_ahead():
    job = Job(Counting())
    job.iterate(4)
    job.iterate(2, batch=2)
    job.iterate(2, batch=2)
    with pytest.raises(ConfigError, match="iteration 4 read 1 batches, but iteration 3.*2"):
        job.iterate(1, batch=2)
    assert job.loaders[0].at == 9, "what a script asks of its loader is the loader's own"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: Job(Counting(), replicas=4), "captured with 2 data-parallel ranks, this job has 4"),
        (lambda: Job(Counting(), Counting()), "this job has 2 training loaders.*captured one had 1"),
        (lambda: Job(), "this job has 0 training loaders.*captured one had 1"),
    ],
)
def test_another_job_does_not_take_over_a_position(other, said):
    captured = Job(Counting())
    captured.iterate(1)
    job = other()
    job.step = 2
    with pytest.raises(ResumeError, match=f"rank 3: .*{said}"):
        job.data.write(captured.data.read())


def test_a_state_that_is_not_of_plain_values_is_named_at_the_first_version_point():
    loader = Counting()
    job = Job(loader)
    loader.state_dict = lambda: {"cursor": object()}
    job.iterate(1)
    with pytest.raises(InventoryError, match="training.*cursor"):
        codec.encode(job.data.read())


def test_the_arguments_alone_say_that_own_loaders_are_followed_as_far_as_they_keep_state():
    [found] = findings(MEGATRON, {"dataloader_type": "external"})
    assert found.rule.treatment is Treatment.FOLLOWED and "refused when it is built" in found.text


@pytest.mark.parametrize(
    ("options", "evaluates"),
    [
        ({"eval_iters": 0}, False),
        ({"eval_iters": 0, "full_validation": True}, True),
        ({"eval_iters": [0, 2]}, True),
        ({"eval_iters": [0, 0], "full_validation": False}, False),
        ({"eval_iters": 3}, True),
    ],
)
def test_evaluation_loaders_count_where_the_job_evaluates(options, evaluates):
    loop = SimpleNamespace(args=SimpleNamespace(**options), _external=Job().data)
    train, valid, test = Counting(), [Energon()], Energon()
    if evaluates:
        with pytest.raises(UnsupportedError, match="evaluation: Energon"):
            MegatronLoop.follow_data(loop, (train, valid, test))
    else:
        shell, *others = MegatronLoop.follow_data(loop, (train, valid, test))
        assert others == [valid, test] and shell.at == 0, "what is asked of the shell is the loader's own"


def test_megatrons_own_loaders_are_left_as_they_are():
    built = (object(), [object()], object())
    assert MegatronLoop.follow_data(SimpleNamespace(_external=None), built) is built
