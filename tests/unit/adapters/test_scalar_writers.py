"""Scalars go where each framework's own go, and only on the rank that has a writer."""

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch

from ft_plugins.adapters.rng import numbers_drawn
from ft_plugins.adapters.scalar_writers import of_engine, of_megatron, of_neox, of_trainer

SCALARS = {"ft/restarts": 1.0, "ft/downtime_seconds": 2.5}


class Written(list[Any]):
    """Records the calls of a writer."""

    def add_scalar(self, tag, value, step):
        self.append((tag, value, step))

    def log(self, scalars, step):
        self.append((scalars, step))

    def flush(self):
        self.flushed = len(self)

    write_events = list.extend


BY_TAG = [("ft/restarts", 1.0, 7), ("ft/downtime_seconds", 2.5, 7)]


def megatron(**writers):
    functions = {f"get_{name}_writer": lambda writer=writer: writer for name, writer in writers.items()}
    return of_megatron(cast(ModuleType, SimpleNamespace(**functions)))


def test_megatron_has_writers_of_its_own_on_one_rank():
    assert megatron(tensorboard=None, wandb=None) is None and megatron() is None
    tensorboard, wandb = Written(), Written()
    megatron(tensorboard=tensorboard, wandb=wandb)(SCALARS, 7)
    assert tensorboard == BY_TAG and tensorboard.flushed == 2 and wandb == [(SCALARS, 7)] and wandb[0][0] is not SCALARS
    megatron(tensorboard=None, wandb=wandb)(SCALARS, 8)
    assert wandb[1:] == [(SCALARS, 8)]


def test_gpt_neox_has_one_in_its_arguments():
    writer = Written()
    assert of_neox(SimpleNamespace(tensorboard_writer=None)) is None
    of_neox(SimpleNamespace(tensorboard_writer=writer))(SCALARS, 7)
    assert writer == BY_TAG


def test_a_deepspeed_engine_has_a_monitor_and_counts_samples():
    class Monitor(Written):
        enabled = True

    monitor = Monitor()
    engine = SimpleNamespace(monitor=monitor, global_rank=0, global_samples=56)
    write = of_engine(engine)
    assert write is not None
    write(SCALARS, 7)
    assert monitor == [(tag, value, 56) for tag, value, _ in BY_TAG]
    engine.global_rank = 1
    assert of_engine(engine) is None
    engine.global_rank, monitor.enabled = 0, False
    assert of_engine(engine) is None and of_engine(SimpleNamespace()) is None


def test_a_trainer_reports_through_its_integrations_and_logs_nothing(monkeypatch):
    class Reporting:
        def __init__(self):
            self.logged = []

        def on_log(self, args, state, control, logs=None, **more):
            self.logged.append(dict(logs))
            logs.clear()  # as some change it

    class Own(Reporting):
        pass

    integrations = SimpleNamespace(INTEGRATION_TO_CALLBACK={"tensorboard": Own})
    monkeypatch.setitem(sys.modules, "transformers.integrations.integration_utils", cast(Any, integrations))
    callbacks = [Reporting(), Own(), Own()]
    trainer = SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=callbacks), is_world_process_zero=lambda: True, args=None,
        state=SimpleNamespace(log_history=[]), control=None, model=None, is_in_train=True,
    )  # fmt: skip
    write = of_trainer(trainer)
    assert write is not None
    write(SCALARS, 7)
    trainer.is_in_train = False
    write(SCALARS, 8)
    assert [one.logged for one in callbacks] == [[], [SCALARS], [SCALARS]] and trainer.state.log_history == []
    trainer.is_world_process_zero = lambda: False
    assert of_trainer(trainer) is None
    trainer.is_world_process_zero, callbacks[1:] = lambda: True, []
    assert of_trainer(trainer) is None


def test_numbers_that_a_writer_draws_are_given_back():
    def add_scalar(tag, value, step):
        random.random()
        torch.rand(1)

    writer = SimpleNamespace(add_scalar=add_scalar, flush=lambda: None)
    write = of_neox(SimpleNamespace(tensorboard_writer=writer))
    assert write is not None
    before = numbers_drawn()
    write(SCALARS, 3)
    assert numbers_drawn() == before
