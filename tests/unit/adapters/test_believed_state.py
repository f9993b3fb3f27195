"""A `state_dict` that stands still, is incomplete, or is not taken back is named at the second version point."""

import pytest
import torch

from ft_plugins.adapters.believed_state import BelievedState


class Counter:
    """Moves by itself; says so, and comes back."""

    def __init__(self):
        self.at, self.seed, self.seen = 0, 3, [0]

    def step(self):
        self.at += 1
        self.seen = [*self.seen, self.at]

    def state_dict(self):
        return {"at": self.at, "seen": list(self.seen)}

    def load_state_dict(self, state):
        self.at, self.seen = state["at"], list(state["seen"])


class Still(Counter):
    def state_dict(self):
        return {"seed": self.seed}


class Incomplete(Counter):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Ignored(Counter):
    def load_state_dict(self, state):
        pass


class Shared(Ignored):
    """Which a twin would change, so that it is not tried."""

    def __init__(self):
        super().__init__()
        self.inner = Counter()


class Setting(Ignored):
    """Sets what it shares with training."""

    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)

    def load_state_dict(self, state):
        torch.manual_seed(1)
        self.optimizer.param_groups[0]["lr"] = 9.0
        super().load_state_dict(state)


class Slotted:
    __slots__ = ("at",)

    def step(self):
        self.at = getattr(self, "at", 0) + 1

    def state_dict(self):
        return {"at": self.at}


class Listed(dict):
    """Which no twin can be made of."""

    step = Counter.step
    state_dict = Counter.state_dict

    def __init__(self):
        super().__init__()
        self.at, self.seen = 0, [0]


class Rising(Counter):
    def load_state_dict(self, state):
        raise ValueError("not now")


def said(source, points=(1, 2), step=None, reads=(0, 0)):
    found, look = [], None
    for iteration, read in zip(points, reads, strict=False):
        (step or source.step)()
        look = look or BelievedState(source, "scheduler", found.append)
        look.look(iteration, source.state_dict(), read)
    return found


@pytest.mark.parametrize(
    "kind, words",
    [
        (Still, "iteration 2: the state_dict of the scheduler (Still) stands still while it moves"),
        (Incomplete, "iteration 2: the state_dict of the scheduler (Incomplete) lacks 'seen', which changes"),
        (Ignored, "iteration 2: the state_dict of the scheduler (Ignored) is not what it was after its"),
    ],
)
def test_what_a_restart_could_not_continue_is_named_at_the_second_version_point(kind, words):
    source = kind()
    (line,) = said(source)
    assert line.startswith(words) and (source.at, source.seen) == (2, [0, 1, 2]), "the live one is only read"


def test_what_a_twin_sets_is_its_own():
    source, drawn = Setting(), torch.get_rng_state()
    assert "is not what it was" in said(source)[0]
    assert source.optimizer.param_groups[0]["lr"] == 0.1 and torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("kind", [Counter, Shared, Rising, Slotted, Listed])
def test_nothing_is_said_of_what_comes_back_or_cannot_be_tried(kind):
    assert said(kind(), range(1, 12), reads=range(11)) == []


def test_what_gives_batches_and_stands_still_is_named_once_it_has_given_some():
    source = Still()
    assert said(source, (4, 5), step=dict, reads=(1, 1)) == []
    (line,) = said(source, range(4, 9), step=dict, reads=(1, 1, 2, 3, 4))
    assert line.startswith("iteration 6: the state_dict of the scheduler (Still) stands still")


@pytest.mark.parametrize(
    "make",
    [
        lambda one: torch.optim.lr_scheduler.StepLR(one, 2),
        lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 9),
        lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.1, 20),
        lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda at: 1 / (at + 1)),
        lambda one: torch.optim.lr_scheduler.SequentialLR(
            one, [torch.optim.lr_scheduler.ConstantLR(one), torch.optim.lr_scheduler.ExponentialLR(one, 0.9)], [2]
        ),
    ],
)
def test_schedulers_of_torch_are_believed_and_not_touched(make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)
    scheduler = make(optimizer)

    rates = []

    def step():
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])

    assert said(scheduler, range(1, 6), step, [0] * 5) == []
    alone = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)
    other, expected = make(alone), []
    for _ in range(5):
        alone.step()
        other.step()
        expected.append(alone.param_groups[0]["lr"])
    assert rates == expected
