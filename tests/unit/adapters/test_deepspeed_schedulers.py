"""A scheduler that adds what it loads, as Megatron-DeepSpeed's does, is restored once, whoever else loads it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler  # noqa: E402

from ft_plugins.adapters.deepspeed import core, training  # noqa: E402
from ft_plugins.adapters.deepspeed.position import Positions  # noqa: E402
from ft_plugins.adapters.deepspeed.training import DeepSpeedLoop  # noqa: E402
from ft_plugins.adapters.schedulers import (  # noqa: E402
    SchedulerRestore,
    own_schedulers,
    restore_own,
    restore_schedules,
    schedules,
)
from ft_plugins.config import Config  # noqa: E402
from ft_plugins.errors import ResumeError, StateChangedError  # noqa: E402
from ft_plugins.snapshot.capture import codec  # noqa: E402


class Adding:
    """`load_state_dict` takes so many steps more."""

    def __init__(self):
        self.num_steps, self.rates = 0, [0.0]

    def step(self, increment=1):
        self.num_steps += increment
        self.rates = [0.1 * self.num_steps]

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.step(increment=state["num_steps"])


class Engine:
    """An engine of one update per step, whose own checkpoint is of iteration `stored`, None for none."""

    def __init__(self, stored):
        self.module, self.lr_scheduler, self.stored = torch.nn.Linear(1, 1), Adding(), stored
        self.global_steps = self.global_samples = self.micro_steps = 0

    def forward(self, batch):
        return self.module(batch)

    def step(self): ...

    def load_checkpoint(self):
        if self.stored is None:
            return None, {}
        self.lr_scheduler.load_state_dict({"num_steps": self.stored})
        self.global_steps = self.stored
        return "path", {"iteration": self.stored}


@pytest.fixture
def restarted(monkeypatch):
    """A restarted job with a version of iteration `memory`, 0 for none, and a checkpoint of iteration `stored`."""
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group=None: None)

    def restart(memory, stored):
        engine = Engine(stored)
        schedule = SchedulerRestore(engine.lr_scheduler)
        host = SimpleNamespace(rank=3, restored=False, silent=False, pace=None)
        host.schedule, host.find_tensors = schedule, lambda loaded: setattr(host, "restored", False)

        def resume(loaded):
            if not memory or memory < loaded:
                return loaded
            host.restored, engine.global_steps = True, memory
            schedule.load({"num_steps": memory}, 3)
            return memory

        session = SimpleNamespace(resume=resume, iteration_begin=lambda iteration: None)
        monkeypatch.setattr(core, "DeepSpeedHost", lambda *args: host)
        monkeypatch.setattr(training, "attach", lambda *args: session)
        monkeypatch.setattr(Positions, "follow_torch", lambda self: None)  # torch's loaders, for good
        config = Config.from_json({"reft": {}})
        loop = DeepSpeedLoop(engine, config, None, Positions(), lambda in_order: None)
        loop.resume()
        return engine

    return restart


@pytest.mark.parametrize("memory", [0, 5, 7])
@pytest.mark.parametrize("stored", [None, 5, 9])
@pytest.mark.parametrize("loads", [0, 1, 2])
def test_the_larger_iteration_wins_and_is_restored_once(restarted, memory, stored, loads):
    engine = restarted(memory, stored)
    for _ in range(loads):
        engine.load_checkpoint()
    wins = max(memory, (stored or 0) if loads else 0)
    assert engine.global_steps == wins
    assert engine.lr_scheduler.state_dict() == {"num_steps": wins}
    assert engine.lr_scheduler.rates == [pytest.approx(0.1 * wins)]
    engine.forward(torch.ones(1))
    assert engine.lr_scheduler.num_steps == wins


@pytest.mark.parametrize("change", ["load_state_dict", "step"])
def test_a_script_that_loads_or_steps_it_after_the_restore_is_refused(restarted, change):
    engine = restarted(7, 5)
    engine.load_checkpoint()
    assert engine.global_steps == 7
    if change == "step":
        engine.lr_scheduler.step()
    else:
        engine.lr_scheduler.load_state_dict({"num_steps": 5})
    with pytest.raises(
        ResumeError, match="rank 3: the learning rate scheduler Adding was changed after it was"
    ) as error:
        engine.forward(torch.ones(1))
    became = 8 if change == "step" else 12
    assert f"{{'num_steps': 7}} became {{'num_steps': {became}}}" in str(error.value)


def test_a_scheduler_that_does_not_take_its_state_is_refused():
    class Deaf(Adding):
        def load_state_dict(self, state): ...

    with pytest.raises(ResumeError, match="rank 0: the learning rate scheduler Deaf cannot be restored"):
        SchedulerRestore(Deaf()).load({"num_steps": 3}, 0)


@pytest.mark.parametrize("kind", ["cosine", "plateau", "sequence", "warmup"])
def test_schedulers_of_torch_and_deepspeed_are_restored_as_often_as_one_likes(kind):
    from deepspeed.runtime.lr_schedules import WarmupDecayLR
    from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, ExponentialLR, ReduceLROnPlateau, SequentialLR

    def built():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
        optimizer.step()
        match kind:
            case "cosine":
                return optimizer, CosineAnnealingLR(optimizer, 9)
            case "plateau":
                return optimizer, ReduceLROnPlateau(optimizer, patience=0)
            case "sequence":
                return optimizer, SequentialLR(optimizer, [ConstantLR(optimizer), ExponentialLR(optimizer, 0.5)], [2])
        return optimizer, WarmupDecayLR(optimizer, 9)

    def step(scheduler):
        scheduler.step(1.0) if kind == "plateau" else scheduler.step()

    trained, lost = built()
    for _ in range(4):
        step(lost)
    optimizer, scheduler = built()
    schedule = SchedulerRestore(scheduler)
    for _ in range(2):
        schedule.load(lost.state_dict(), 0)
        for to, source in zip(optimizer.param_groups, trained.param_groups, strict=True):
            to["lr"] = source["lr"]
    schedule.require_unchanged(0)
    for _ in range(3):
        step(lost), step(scheduler)
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in trained.param_groups]


def test_a_scheduler_that_the_script_steps_itself_is_found_and_restored():
    def built():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)

    (trained, lost), (optimizer, again) = built(), built()
    assert own_schedulers(trained, 4) == {"CosineAnnealingLR": lost}
    for _ in range(3):
        trained.step()
        lost.step()
    restore_own(optimizer, {"CosineAnnealingLR": lost.state_dict()}, 0)
    assert again.last_epoch == 3 and again.state_dict() == lost.state_dict()
    optimizer, other = built()
    del other
    with pytest.raises(ResumeError, match="rank 4: the captured job stepped a CosineAnnealingLR of its own .* is none"):
        restore_own(optimizer, {"CosineAnnealingLR": lost.state_dict()}, 4)


def stepped(kind, steps):
    """An optimizer, and two schedulers of one class over it, as the script has them."""
    from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    schedules = [ExponentialLR(optimizer, 0.5), ExponentialLR(optimizer, 0.9)]
    if kind == "inside":
        schedules = [SequentialLR(optimizer, [ConstantLR(optimizer, 0.5), ConstantLR(optimizer, 0.25)], [2])]
    for step in range(steps):
        optimizer.step()
        for one in schedules[: 1 + step % 2]:
            one.step()
    return optimizer, schedules


@pytest.mark.parametrize("kind", ["list", "inside"])
def test_several_of_one_class_are_told_apart_by_the_names_that_the_script_has_for_them(kind):
    def captured(optimizer, schedules, restored=None):
        if restored is not None:
            restore_own(optimizer, restored, 0)
        return schedules, {name: one.state_dict() for name, one in own_schedulers(optimizer, 0).items()}

    _, first = captured(*stepped(kind, 3))
    schedules, again = captured(*stepped(kind, 0), first)
    assert again == first and len(again) == len(schedules)
    if kind == "list":
        assert [one.last_epoch for one in schedules] == [3, 1]
        assert {*again} == {f"ExponentialLR 'schedules[{at}]' (a variable of captured())" for at in range(2)}


def test_several_of_one_class_that_no_variable_holds_are_refused_by_name():
    optimizer, schedules = stepped("list", 1)
    holder = iter(schedules)  # does not show what it holds
    del schedules
    with pytest.raises(StateChangedError, match="rank 2: the script has 2 schedulers of class ExponentialLR") as error:
        own_schedulers(optimizer, 2)
    assert "keep each in a variable" in str(error.value) and holder


def test_one_whose_state_cannot_be_captured_is_refused_by_name():
    class Odd(torch.optim.lr_scheduler.ConstantLR):
        def state_dict(self):
            return {"seen": {1, 2}}

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    odd = Odd(optimizer)
    with pytest.raises(StateChangedError, match=r"rank 1: the script's own scheduler Odd .*\['seen'\]"):
        own_schedulers(optimizer, 1)
    assert odd


def test_an_engines_own_schedules_are_where_they_were():
    """A curriculum up to DeepSpeed 0.18, the length of random-LTD, and the rate of a progressive layer drop."""

    def built():
        length = {"min_value": 8, "max_value": 64, "schedule_type": "fixed_linear"}
        length["schedule_config"] = {"require_steps": 10, "seq_per_step": 8}
        config = {"total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_schedule": length}
        config |= {"global_batch_size": 2, "layer_token_lr_schedule": {"enabled": False}}
        return SimpleNamespace(
            curriculum_scheduler_legacy=SimpleNamespace(state={"current_difficulty": 8, "max_difficulty": 64}),
            progressive_layer_drop=SimpleNamespace(current_theta=1.0),
            random_ltd_scheduler=RandomLTDScheduler(config),
        )

    trained, again = built(), built()
    trained.curriculum_scheduler_legacy.state["current_difficulty"] = 24
    trained.progressive_layer_drop.current_theta = np.float64(0.7)
    for step in range(7):
        trained.random_ltd_scheduler.update_seq(step)
    assert schedules(trained) != schedules(again)
    restore_schedules(again, codec.decode(codec.encode(schedules(trained))))
    assert schedules(again) == schedules(trained)
    assert again.random_ltd_scheduler.state == trained.random_ltd_scheduler.state
    assert set(schedules(SimpleNamespace()).values()) == {None}
    restore_schedules(SimpleNamespace(), schedules(SimpleNamespace()))
