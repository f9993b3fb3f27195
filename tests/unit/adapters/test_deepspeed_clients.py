"""A program with its own loop over a DeepSpeed engine: its state is captured, set again, and its own count is checked.

The engine computes nothing; the loop's hooks are the real ones.
"""

from types import SimpleNamespace

import pytest
from torch import nn

pytest.importorskip("deepspeed")

from ft_plugins.adapters.deepspeed import core, training  # noqa: E402
from ft_plugins.adapters.deepspeed.clients import EngineClients, lightning  # noqa: E402
from ft_plugins.adapters.deepspeed.position import Positions  # noqa: E402
from ft_plugins.adapters.deepspeed.training import DeepSpeedLoop  # noqa: E402
from ft_plugins.adapters.schedulers import SchedulerRestore  # noqa: E402
from ft_plugins.config import Config  # noqa: E402
from ft_plugins.errors import ResumeError, UnsupportedError  # noqa: E402


class Counting:
    """A client that counts its own iterations, or does not."""

    name, places_data = "Counter", True

    def __init__(self, at=0):
        self.at = at
        self.begin = lambda: None

    def follow(self, engine, begin):
        self.begin = begin

    def iteration(self):
        return self.at

    def state(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]


class Engine(nn.Module):
    """Counters, and the methods that are hooked."""

    def __init__(self, at):
        super().__init__()
        self.module = nn.Linear(1, 1)
        self.global_steps, self.global_samples, self.micro_steps = at, at, at

    def step(self): ...
    def load_checkpoint(self): ...


@pytest.fixture
def events(monkeypatch):
    told = []
    session = SimpleNamespace(
        iteration_begin=lambda iteration: told.append(f"begin {iteration}"),
        iteration_end=lambda iteration, ends: told.append(f"{'last ' if ends else ''}end {iteration}"),
        restore_position=lambda: told.append("position"),
        wait_for_capture=lambda: told.append("sealed"),
        resume=lambda loaded: told.append("restored") or 9,
    )
    monkeypatch.setattr(training, "attach", lambda *_: session)
    monkeypatch.setattr(training, "replace", lambda *_: None)
    monkeypatch.setattr(Positions, "follow_torch", lambda self: None)  # torch's loaders, for good
    host = SimpleNamespace(rank=1, restored=True, silent=False, pace=None)
    host.schedule = SchedulerRestore(None)
    monkeypatch.setattr(core, "DeepSpeedHost", lambda *_: host)
    return told


def loop_of(client, at):
    config = Config()
    context = None
    return DeepSpeedLoop(Engine(at), config, context, Positions(), lambda _: None, None, client)


def test_a_client_that_is_where_the_engine_was_restored_begins_there(events):
    client = Counting(5)
    loop_of(client, 5)
    client.begin()
    assert events == ["begin 6"]


def test_a_client_that_begins_at_its_own_start_is_refused_before_the_iteration_begins(events):
    client = Counting(0)
    loop_of(client, 5)
    with pytest.raises(ResumeError, match="rank 1: the engine has completed iteration 5, but Counter's loop is at 0"):
        client.begin()
    assert events == []


def test_a_client_that_loses_count_later_is_refused_before_that_iteration_is_captured(events):
    client = Counting(5)
    loop = loop_of(client, 5)
    client.begin()
    loop.engine.global_steps = loop._updated = 6  # an update that the client did not count
    with pytest.raises(ResumeError, match="iteration 6, but Counter's loop is at 5"):
        client.begin()
    assert events == ["begin 6"]


def test_a_client_that_does_not_count_must_read_the_engines_counters(events):
    silent, reading = Counting(None), Counting(None)
    loop_of(silent, 5)
    with pytest.raises(ResumeError, match="the loop begins at its own start"):
        silent.begin()
    loop = loop_of(reading, 5)
    assert loop.engine.global_steps == 5
    reading.begin()
    assert events == ["begin 6"]


def test_local_sgd_with_a_client_is_refused_by_its_name_before_its_engine_is_built():
    hooks = training.EngineHooks()
    block = {"reft": {}, "sync": {"policy": "edit"}}

    def build(model, config):
        raise AssertionError("nothing is built")

    refused = pytest.raises(UnsupportedError, match=r"\(Counter\): it is untested with local SGD. Drop")
    with hooks.clients.setting_up(Counting()), refused:
        hooks.initialize(build, nn.Linear(1, 1), {"train_batch_size": 2, "ft_plugins": block})
    with pytest.raises(AssertionError, match="nothing is built"):
        hooks.initialize(build, nn.Linear(1, 1), {"train_batch_size": 2})


def test_the_last_iteration_ends_where_a_client_says_that_training_has(events):
    """What it does with the engine from there on, such as loading its best checkpoint, is in no version."""
    client, other = Counting(5), Counting(5)
    hooks = training.EngineHooks()
    hooks.loop = loop_of(client, 5)
    client.begin()
    hooks.loop.engine.global_steps = hooks.loop._updated = 6
    hooks.clients.trained(other)
    assert events == ["begin 6"], "it has no engine"
    hooks.clients.trained(client)
    hooks.clients.trained(client)
    assert events == ["begin 6", "last end 6", "position", "sealed", "position", "sealed"]


def test_a_checkpoint_that_is_loaded_amid_training_ends_it_so_the_iteration_before_is_captured_whatever_the_interval(
    events,
):
    client = Counting(5)
    loop = loop_of(client, 5)
    client.begin()
    loop._updated = loop.engine.global_steps = 6
    assert loop._loading(lambda: "best") == "best"
    loop.trained()
    assert events[:3] == ["begin 6", "last end 6", "sealed"] and "restored" not in events


@pytest.mark.parametrize("trains", [True, False])
def test_what_a_client_loads_when_training_has_ended_is_its_own_matter(events, trains):
    """Also after a restart at the end, where nothing is left to train: the best checkpoint stays loaded."""
    client = Counting(5)
    loop = loop_of(client, 5)
    if trains:
        client.begin()
        loop._updated = loop.engine.global_steps = 6
    loop.trained()
    assert loop._loading(lambda *args, **kwargs: ("best", kwargs), strict=True) == ("best", {"strict": True})
    assert "restored" not in events and events[-1] == "sealed"


def test_of_nested_clients_the_outermost_is_set_up_once():
    finished = []
    clients = EngineClients(finished.append)
    outer, inner = Counting(), Counting()
    with clients.setting_up(outer):
        with clients.setting_up(inner):
            assert clients.current is outer
        assert finished == []
    assert finished == [outer] and clients.current is None


def test_a_client_whose_set_up_failed_is_not_restored():
    finished = []
    clients = EngineClients(finished.append)
    with pytest.raises(KeyError), clients.setting_up(Counting()):
        raise KeyError
    assert finished == [] and clients.current is None


class Adding:
    """Adds the loaded number of steps to its own, as Megatron's scheduler does."""

    def __init__(self, adds=True):
        self.steps, self.adds = 0, adds

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = self.steps + state["steps"] if self.adds else 1


def test_a_scheduler_that_adds_is_restored_once_however_often_it_is_loaded():
    scheduler = Adding()
    restore = SchedulerRestore(scheduler)
    scheduler.load_state_dict({"steps": 40})  # by DeepSpeed
    restore.load({"steps": 56}, 0)
    scheduler.load_state_dict({"steps": 40})  # by the client
    restore.load({"steps": 56}, 0)
    assert scheduler.steps == 56


def test_a_scheduler_that_ends_elsewhere_is_refused():
    with pytest.raises(ResumeError, match="rank 2: the learning rate scheduler Adding cannot be restored"):
        SchedulerRestore(Adding(adds=False)).load({"steps": 56}, 2)


def test_lightning_is_refused_by_name_as_it_builds_an_engine():
    clients = EngineClients()

    class Trainer:
        def fit(self, model):
            assert clients.current is not None and model == "a model"
            clients.current.follow(object(), lambda: None)  # as when an engine that is built is protected

    lightning.follow(SimpleNamespace(Trainer=Trainer), clients)
    with pytest.raises(UnsupportedError, match="cannot protect this job: a loop .*PyTorch Lightning.: it counts"):
        Trainer().fit("a model")
    assert clients.current is None
