"""A real Trainer, entered at every version point of a run that never failed: it goes on bit for bit as that one did.

What stands in for memory keeps model and optimizer by their own state_dict; the rest is what a `TrainerRun` carries.
"""

import copy
import json
import random
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from ft_plugins.adapters.data.loaders import generator_states, set_generator_states
from ft_plugins.errors import ResumeError, UnsupportedError
from ft_plugins.model.digest import readable
from ft_plugins.snapshot.capture import codec

transformers = pytest.importorskip("transformers")
module = pytest.importorskip("transformers.trainer")
pytest.importorskip("accelerate")
from transformers.trainer_callback import ExportableState  # noqa: E402

from ft_plugins.adapters.hf.torch_trainer import inner  # noqa: E402
from ft_plugins.adapters.hf.trainer_run import TrainerRun  # noqa: E402
from ft_plugins.adapters.host_parts import groups  # noqa: E402

SAMPLES, UPDATES = 14, 9  # 7 batches: 4 updates in an epoch, the last of one batch
TIMES = ("_runtime", "_per_second")


class Points(Dataset[Any]):
    def __init__(self):
        self.shift = 0.0  # which a callback may change

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(3) + random.random() + self.shift
        return {"x": torch.arange(3.0) + index + noise, "y": torch.tensor(float(index))}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))

    def forward(self, x, y):
        out = self.layers(x).squeeze(-1)
        return {"loss": (out - y).square().mean() / 100, "logits": out}


class Counting(transformers.TrainerCallback):
    def on_train_begin(self, *args, **kwargs):
        self.updates, self.epochs = 0, 0

    def on_step_end(self, *args, **kwargs):
        self.updates += 1

    def on_epoch_begin(self, *args, **kwargs):
        self.epochs += 1


class Meddling(transformers.TrainerCallback, ExportableState):
    """Changes what it can reach, when training begins, in every epoch, and in updates; keeps a state of its own."""

    def __init__(self):
        self.seen = []

    def state(self):
        return {"args": {}, "attributes": {"seen": self.seen}}

    def on_train_begin(self, args, state, control, **kwargs):
        args.max_grad_norm /= 2
        for group in inner(kwargs["optimizer"]).param_groups:
            group["weight_decay"] += 0.01
        kwargs["lr_scheduler"].base_lrs = [rate * 0.9 for rate in kwargs["lr_scheduler"].base_lrs]

    def on_epoch_begin(self, args, state, control, **kwargs):
        kwargs["train_dataloader"].base_dataloader.dataset.shift += 1
        for group in inner(kwargs["optimizer"]).param_groups:
            group["betas"] = (group["betas"][0] * 0.9, group["betas"][1])

    def on_step_end(self, args, state, control, **kwargs):
        args.label_smoothing_factor += 0.01
        self.seen.append(state.global_step)
        del state.log_history[:-2]
        if state.log_history:
            state.log_history[-1]["seen"] = len(self.seen)


class Memory:
    """Protects a Trainer: keeps every version, and restores one."""

    def __init__(self, restored=None):
        self.versions = {}
        self._pending, self._begun, self._completed = restored, 0, 0

    @contextmanager
    def building(self, run):
        yield
        self.run = run
        run.require_followed()
        run.protected()
        if self._pending is not None:
            version = self._pending
            for one, state in zip(self._parts(), version["parts"], strict=True):
                one.load_state_dict(state)
            run.restore(codec.decode(version["run"]))
            self._begun = self._completed = run.iteration

    def _parts(self):
        trainer = self.run.trainer
        return [trainer.model, trainer.optimizer.optimizer, trainer.lr_scheduler]

    def tensors(self):
        return list(self.run.trainer.model.parameters())

    def _place(self):
        version, self._pending = self._pending, None
        if version is not None:
            _, optimizer, scheduler = self._parts()
            for group, saved in zip(optimizer.param_groups, version["parts"][1]["param_groups"], strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})
            scheduler.load_state_dict(version["parts"][2])
            set_generator_states(version["generators"])

    def begin(self):
        step = self.run.iteration + 1
        if step != self._begun:
            self._complete()
            self._begun = step
            self._place()

    def end(self):
        self._complete()
        self._place()

    def _complete(self):
        if self._completed != self._begun:
            self._completed = self._begun
            parts = copy.deepcopy([one.state_dict() for one in self._parts()])
            run = codec.encode(self.run.state())
            self.versions[self._begun] = {"parts": parts, "run": run, "generators": generator_states()}


def trained(folder, memory, *callbacks, kind=None, resume=None, **arguments):
    """What a run ends with."""
    usual = {
        "max_steps": UPDATES, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "seed": 5,
        "learning_rate": 0.05, "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 2,
        "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": True,
    }  # fmt: skip
    transformers.set_seed(5)
    counting = Counting()
    trainer = (kind or transformers.Trainer)(
        model=Model(), args=transformers.TrainingArguments(output_dir=str(folder), **{**usual, **arguments}),
        train_dataset=Points(), eval_dataset=Points(), callbacks=[counting, *callbacks],
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    TrainerRun(trainer, module, memory, transformers.__version__, None)
    outcome = trainer.train(resume_from_checkpoint=resume)
    logged = trainer.state.log_history
    history = [{key: one for key, one in entry.items() if not key.endswith(TIMES)} for entry in logged]
    state = {
        "parameters": dict(trainer.model.named_parameters()),
        "optimizer": [dict(one) for one in trainer.optimizer.optimizer.state.values()],
        "scheduler": trainer.lr_scheduler.state_dict(),
        "state": {name: value for name, value in vars(trainer.state).items() if name != "log_history"},
        "history": history,
        "loss": outcome.training_loss,
        "callbacks": [vars(one) for one in (counting, *callbacks)],
        "groups": groups(trainer.optimizer),
        "args": {name: one for name, one in vars(trainer.args).items() if type(one) in (int, float, bool)},
        "data": vars(trainer.train_dataset),
        "rng": [torch.get_rng_state(), list(random.getstate()[1])],
    }
    return json.loads(json.dumps(readable(state)))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 1, "logging_strategy": "epoch", "eval_strategy": "epoch"},
        {"train_sampling_strategy": "sequential", "eval_on_start": True, "logging_first_step": True},
    ],
    ids=["accumulated", "by-epochs", "in-order"],
)
def test_entered_at_any_version_point_it_ends_as_the_unfailed_run(tmp_path, arguments):
    whole = Memory()
    golden = trained(tmp_path, whole, **arguments)
    assert sorted(whole.versions) == list(range(1, UPDATES + 1))
    for iteration, version in whole.versions.items():
        again = Memory(version)
        assert trained(tmp_path, again, **arguments) == golden, f"restored at {iteration}"
        assert sorted(again.versions) == list(range(iteration + 1, UPDATES + 1))
        for number, one in again.versions.items():
            own, theirs = (readable(codec.decode(each["run"])) for each in (one, whole.versions[number]))
            assert own == theirs, f"restored at {iteration}: what would be captured of {number}"


def test_what_callbacks_change_when_training_and_epochs_begin_is_not_changed_twice(tmp_path):
    """Arguments, groups, scheduler, data set, log history; a state that the TrainerState refers to."""
    whole = Memory()
    golden = trained(tmp_path, whole, Meddling(), eval_on_start=True)
    assert golden["state"]["stateful_callbacks"]["Meddling"]["attributes"]["seen"] == list(range(1, UPDATES + 1))
    for iteration in (2, 4, 5, UPDATES):
        again = trained(tmp_path, Memory(whole.versions[iteration]), Meddling(), eval_on_start=True)
        assert again == golden, f"restored at {iteration}"


def test_intervals_of_a_checkpoint_that_the_trainer_loads_are_captured_too(tmp_path):
    """A restart may not load it again."""
    usual = {"save_strategy": "steps", "save_steps": 4}
    trained(tmp_path, Memory(), max_steps=4, logging_steps=1, **usual)
    whole = Memory()
    golden = trained(tmp_path, whole, resume=str(tmp_path / "checkpoint-4"), **usual)
    assert golden["state"]["logging_steps"] == 1, "as in the checkpoint, not as in the arguments"
    for iteration in (6, 8):
        assert trained(tmp_path, Memory(whole.versions[iteration]), **usual) == golden

    whole = Memory()
    golden = trained(tmp_path / "other", whole, **usual)
    again = trained(tmp_path / "other", Memory(whole.versions[6]), resume=str(tmp_path / "checkpoint-4"), **usual)
    assert again == golden, "it loads one that it had not loaded at first"


@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin"])
def test_a_callback_that_would_change_restored_parameters_again_is_named_at_first_and_refused_at_a_restart(
    tmp_path, event, capsys
):
    def halve(*args, model, **kwargs):
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)

    class Halving(transformers.TrainerCallback):
        pass

    setattr(Halving, event, staticmethod(halve))
    whole = Memory()
    trained(tmp_path, whole, Halving())
    assert capsys.readouterr().err.count("called again after a restart: a restart will be refused; change them") == 1
    with pytest.raises(ResumeError, match="changed parameters, .* in on_train_begin or .* iteration 5 was restored"):
        trained(tmp_path, Memory(whole.versions[5]), Halving())


def test_a_trainer_that_drops_a_batch_is_refused_by_name(tmp_path):
    class Dropping(transformers.Trainer):
        def get_batch_samples(self, *args):
            batches, items = super().get_batch_samples(*args)
            return batches[:1], items

    with pytest.raises(UnsupportedError, match=r"\(Dropping, iteration 1: 1 returned, 2 more read\)"):
        trained(tmp_path, Memory(), kind=Dropping)


def test_another_accumulation_is_named_when_a_callback_sets_it_and_refused_at_a_restart(tmp_path, capsys):
    class Growing(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            args.gradient_accumulation_steps = 1 if state.global_step > 4 else 2

    whole = Memory()
    trained(tmp_path, whole, Growing())
    assert capsys.readouterr().err.count("has changed args.gradient_accumulation_steps") == 1
    trained(tmp_path, Memory(whole.versions[3]), Growing())
    with pytest.raises(ResumeError, match="a callback has changed args.gradient_accumulation_steps"):
        trained(tmp_path, Memory(whole.versions[6]), Growing())


def test_a_trainer_with_something_that_is_not_followed_ends_before_it_trains(tmp_path):
    with pytest.raises(UnsupportedError, match="auto_find_batch_size"):
        trained(tmp_path, Memory(), auto_find_batch_size=True)
