"""Turns as a resumed job goes on from them: every one of them comes, and none of another state's."""

from typing import cast

import pytest
import torch

from ft_plugins.events import Events
from ft_plugins.sync.averaging.averager import Averaging
from ft_plugins.sync.averaging.averaging_times import NoiseDriven, NoisePart, Periodic, Turn
from ft_plugins.sync.averaging.policy import PaftPolicy
from ft_plugins.sync.background import Background
from ft_plugins.sync.layers.turns import SyncTurns
from ft_plugins.sync.links import Links

SIGNAL = [0.0, 0.0, 4.0, 0.0, 0]


class Nothing:
    """Averages nothing, and is alone."""

    def save_parameters(self): ...

    def measure(self, rate):
        return NoisePart(signal=4.0)

    def average(self):
        return NoisePart()

    def apply(self): ...

    def gather_job(self, row):
        return torch.tensor([row], dtype=torch.float64).numpy()


@pytest.fixture
def background():
    found = Background(torch.device("cpu"))
    yield found
    found.close(10)


def turns(background, schedule, waits=False):
    nothing = Nothing()
    policy = PaftPolicy(schedule, waits)
    return SyncTurns(
        policy, schedule, cast(Averaging, nothing), cast(Links, nothing), background, Events("n", 0)
    )  # fmt: skip


def state(turn, signal=None):
    return {"turn": [turn.at, turn.interval, turn.reason], "diverged": True, "rates_squared": 3.0, "signal": signal}


def test_a_turn_that_lies_behind_becomes_the_first_of_what_is_gone_on_from(background):
    """It would be waited for forever, and replicas would never be averaged again."""
    one = turns(background, NoiseDriven(5, 2, 50))
    one.begin(20, state(Turn(15, 5)))
    assert (one.turn.at, one.turn.interval) == (25, 5)
    one.begin(12, state(Turn(15, 5, "as said")))
    assert one.turn == Turn(15, 5, "as said")


def test_an_interval_is_within_the_bounds_that_hold_now(background):
    one = turns(background, NoiseDriven(5, 2, 10))
    one.begin(101, state(Turn(200, 100)))
    assert one.turn == Turn(110, 10)
    one.begin(150, state(Turn(200, 100)))
    assert one.turn.at == 155, "what lies behind is the first again"
    one.begin(200, state(Turn(200, 100), SIGNAL))
    assert one.turn == Turn(200, 10), "the one in flight has come"
    assert one.before(201, 0.1) is not None and one.turn.at == 210
    waiting = turns(background, Periodic(4), waits=True)
    waiting.begin(11, state(Turn(15, 5)))
    assert (waiting.turn.at, waiting.turn.interval) == (12, 4)
    waiting.begin(11, state(Turn(12, 4, "as said")))
    assert waiting.turn == Turn(12, 4, "as said")


def test_who_begins_without_a_state_has_not_drifted(background):
    one = turns(background, NoiseDriven(5, 2, 50))
    one.begin(12, state(Turn(15, 5)))
    one.begin(30, None)
    assert not one.diverged and one.state()["rates_squared"] == 0.0 and one.turn.at == 35
