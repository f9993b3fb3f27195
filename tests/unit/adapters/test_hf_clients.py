"""The clients of a DeepSpeed engine that Hugging Face made: what they carry, and when an iteration begins."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

data_loader = pytest.importorskip("accelerate.data_loader")
from ft_plugins.adapters import hf  # noqa: E402
from ft_plugins.adapters.deepspeed.clients import EngineClients, hf_trainer  # noqa: E402
from ft_plugins.adapters.deepspeed.clients.accelerate_loop import AccelerateClient, skipping  # noqa: E402
from ft_plugins.adapters.deepspeed.clients.hf_trainer import TrainerClient  # noqa: E402
from ft_plugins.config import Config  # noqa: E402
from ft_plugins.errors import ResumeError, UnsupportedError  # noqa: E402
from ft_plugins.snapshot.capture import codec  # noqa: E402


def accelerator(loaders=1, rate=0.5):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    prepared = [data_loader.DataLoaderShard(list(range(6)), batch_size=2) for _ in range(loaders)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, rate)
    return SimpleNamespace(
        _dataloaders=prepared, _schedulers=[SimpleNamespace(scheduler=scheduler)], process_index=1,
    )  # fmt: skip


def engine():
    return SimpleNamespace(lr_scheduler=None, module=torch.nn.Linear(1, 1), _config=SimpleNamespace(_param_dict={}))


class Library(SimpleNamespace):
    """Weak references to it are possible, as to accelerate's own."""


def client_of(made):
    begun = []
    client = AccelerateClient(Library(**vars(made)))
    client.state()  # an engine asks for its size
    client.follow(engine(), lambda: begun.append("begin"))
    return client, begun


@pytest.mark.parametrize(
    ("block", "flags", "followed"),
    [({}, [], False), ({"ft_plugins": {"reft": {}}}, [], True), ({}, ["--reft"], True)],
)
def test_a_trainer_whose_job_asks_for_nothing_is_left_alone(monkeypatch, block, flags, followed):
    """Hooked, and not protected, it would leave out no batches when it resumes from its own checkpoint."""
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config={"train_batch_size": 8, **block}))
    state = SimpleNamespace(deepspeed_plugin=plugin)
    trainer = SimpleNamespace(is_deepspeed_enabled=True, accelerator=SimpleNamespace(state=state))
    context = SimpleNamespace(config=Config.from_flags(flags)[0])
    monkeypatch.setattr(hf_trainer, "launch_context", lambda: context)
    assert hf_trainer._is_protected(trainer) is followed
    trainer.is_deepspeed_enabled = False
    assert not hf_trainer._is_protected(trainer)


def test_a_loop_over_accelerate_begins_with_its_first_read_in_training_mode_alone():
    made = accelerator()
    client, begun = client_of(made)
    client._engine.module.eval()
    list(made._dataloaders[0])
    assert begun == []
    client._engine.module.train()
    next(iter(made._dataloaders[0]))
    assert begun == ["begin"]


def test_schedulers_are_restored_when_training_begins_and_positions_at_once():
    made = accelerator()
    client, _ = client_of(made)
    read = iter(made._dataloaders[0])
    first = next(read)
    for _ in range(3):
        made._schedulers[0].scheduler.step()
    saved = client.state()
    rest = [batch.tolist() for batch in read]

    again = accelerator()
    restored, _ = client_of(again)
    restored.restore(saved)
    assert again._schedulers[0].scheduler.last_epoch == 0, "it may be prepared later"
    assert [batch.tolist() for batch in again._dataloaders[0]] == rest != [first.tolist(), *rest]
    assert again._schedulers[0].scheduler.last_epoch == 3


def test_another_number_of_loaders_is_refused_by_name():
    saved = client_of(accelerator(loaders=2))[0].state()
    with pytest.raises(ResumeError, match="1 loaders were given to Accelerator.prepare .* 2 in the captured job"):
        client_of(accelerator())[0].restore(saved)


def test_another_number_of_schedulers_is_refused_by_name():
    saved = client_of(accelerator())[0].state()
    made = accelerator()
    made._schedulers.clear()
    client, _ = client_of(made)
    client.restore(saved)
    with pytest.raises(ResumeError, match="0 schedulers were given to Accelerator.prepare, but 1 in the captured job"):
        next(iter(made._dataloaders[0]))


class Run:
    """The parts of a TrainerRun that its client calls."""

    def __init__(self, scheduler):
        self.calls = []
        self.last, self.place = 10, list
        args = SimpleNamespace(process_index=0)
        self.trainer = SimpleNamespace(lr_scheduler=scheduler, model_wrapped=None, args=args)

    def require_followed(self):
        self.calls.append("require_followed")

    def protected(self):
        self.calls.append("protected")

    def state(self):
        return {"place": 3}

    def restore(self, saved):
        self.calls.append(f"restore {saved}")


def trainer_client(scheduler):
    client, run = TrainerClient(EngineClients()), Run(scheduler)
    with client.building(run):
        pass
    return client, run


def test_a_trainer_is_followed_once_its_engine_is_protected_and_carries_the_scheduler_that_it_steps():
    scheduler = accelerator()._schedulers[0].scheduler
    client, run = trainer_client(scheduler)
    assert run.calls == [], "nothing is protected yet"
    client.state()
    client.follow(engine(), lambda: None)
    scheduler.step()
    saved = client.state()
    assert run.calls == ["require_followed", "protected"]
    assert saved["trainer"] == {"place": 3} and saved["scheduler"]["last_epoch"] == 1

    other = accelerator()._schedulers[0].scheduler
    again, its = trainer_client(other)
    again.follow(engine(), lambda: None)
    again.restore(saved)
    assert its.calls == ["restore {'place': 3}"] and other.last_epoch == 1
    other.step()  # by a callback, when training begins
    again.begin()
    assert other.last_epoch == 1
    other.step()
    again.begin()
    assert other.last_epoch == 2, "only before the first iteration"


def test_a_second_training_is_refused_by_name_with_the_first_ones_result_saved_and_an_unprotected_one_is_not(
    monkeypatch,
):
    class Trainer:
        args = SimpleNamespace(output_dir="out")

        def save_model(self, folder):
            saved.append((self, folder))
            if len(saved) > 1:
                raise OSError("no space left")

        def train(self, resume_from_checkpoint=None, trial=None):
            return resume_from_checkpoint, trial

    module = ModuleType("transformers.trainer")
    module.Trainer = Trainer
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setattr(hf, "TrainerRun", lambda *given: made.append(given))
    made = []
    saved = []
    hf.follow(module, lambda trainer: trainer.protected, lambda: object())
    trainer = Trainer()
    trainer.protected = False
    assert [trainer.train(), trainer.train("checkpoint-4")] == [(None, None), ("checkpoint-4", None)] and not made
    trainer.protected = True
    assert trainer.train(False, trial="a trial") == (False, "a trial")
    assert [given[4:] for given in made] == [("a trial", "")]
    called_twice = r"Trainer.train was called twice.*\(--ftp-job\) with .*; what the first has trained "
    with pytest.raises(UnsupportedError, match=called_twice + "is saved in out/first-training"):
        trainer.train()
    assert saved == [(trainer, "out/first-training")]
    other = Trainer()
    other.protected = True
    with pytest.raises(UnsupportedError, match=called_twice + r"could not be saved in out/.* \(no space left\)"):
        other.train()
    assert [each[0] for each in saved] == [trainer, trainer]


def test_an_engines_own_scheduler_is_left_to_it():
    client, _ = trainer_client(accelerator()._schedulers[0].scheduler)
    its = engine()
    its.lr_scheduler = object()
    client.follow(its, lambda: None)
    assert client.state()["scheduler"] is None


def test_batches_that_a_restored_loader_leaves_out_by_itself_are_not_skipped_twice():
    """accelerate's own recipe for the epoch in which a loop is resumed."""
    made = accelerator()
    client, _ = client_of(made)
    (loader,) = made._dataloaders
    reading = iter(loader)
    next(reading)
    state = codec.decode(codec.encode(client.state()))

    again = accelerator()
    resumed, _ = client_of(again)
    resumed.restore(state)
    (loader,) = again._dataloaders
    assert skipping(data_loader.skip_first_batches, loader, 1) is loader
    assert [one.tolist() for one in loader] == [one.tolist() for one in reading]
    (other,) = accelerator()._dataloaders
    assert len(list(skipping(data_loader.skip_first_batches, other, 1))) == 2, "of a loop that is not followed"
    (fresh,) = (made := accelerator())._dataloaders
    client_of(made)
    with pytest.raises(UnsupportedError, match=r"skip_first_batches \(1\): the position of this loader"):
        skipping(data_loader.skip_first_batches, fresh, 1)
