"""The loops of Megatron-DeepSpeed and gpt-neox: set to where the engine was restored, once they have set themselves up.

Their modules are stand-ins with the functions that are hooked; arguments, samplers and iterators behave as theirs.
"""

import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from ft_plugins.adapters.deepspeed.clients import EngineClients
from ft_plugins.adapters.deepspeed.clients.gpt_neox import GptNeox, _building, _consuming
from ft_plugins.adapters.deepspeed.clients.megatron_deepspeed import MegatronDeepSpeed, follow
from ft_plugins.adapters.rules.megatron_forks import MEGATRON_DEEPSPEED
from ft_plugins.errors import ResumeError, UnsupportedError


def module_of(**functions):
    module = ModuleType("megatron.training")
    vars(module).update(functions)
    return module


class Sampler:
    """Of drawn samples, as Megatron-DeepSpeed's."""

    total_samples, last_batch_size = 13, 1

    def __init__(self, consumed_samples):
        self.consumed_samples = consumed_samples


# Megatron-DeepSpeed


def megatron(**arguments):
    args = SimpleNamespace(**arguments)
    module = module_of(
        train_step=lambda *_: args.steps.append("step"), cyclic_iter=itertools.cycle, get_args=lambda: args
    )
    return MegatronDeepSpeed(module, args), module, args


def test_arguments_are_captured_and_set_with_the_difficulty_of_a_curriculum():
    counts = {"consumed_train_samples": 40, "consumed_valid_samples": 8, "consumed_train_tokens": 1280}
    scheduler = SimpleNamespace(state={"current_difficulty": 24, "max_difficulty": 32})
    before, _, _ = megatron(iteration=5, curriculum_scheduler=scheduler, curriculum_seqlen=24, **counts)
    scheduler = SimpleNamespace(state={"current_difficulty": 8, "max_difficulty": 32})
    after, _, args = megatron(iteration=0, curriculum_scheduler=scheduler, **dict.fromkeys(counts, 0))
    after.restore(before.state())
    assert {name: getattr(args, name) for name in counts} == counts and after.iteration() == 5
    assert scheduler.state["current_difficulty"] == 24
    assert args.curriculum_seqlen is None, "so that the loop makes what depends on it again"


def test_before_its_arguments_are_set_a_state_of_the_same_size_is_given():
    client, _, _ = megatron()
    assert client.state()["iteration"] == 0


def test_each_step_begins_an_iteration_before_anything_of_it():
    steps = []
    client, module, _ = megatron(steps=steps)
    client.follow(None, lambda: steps.append("begin"))
    module.train_step()
    assert steps == ["begin", "step"]


@pytest.mark.parametrize("option", ["kd", "random_ltd", "repeated_dataloader", "data_efficiency_curriculum_learning"])
def test_an_option_that_cannot_be_followed_is_refused_by_name(option):
    client, _, _ = megatron(**{option: True})
    (rule,) = (one for one in MEGATRON_DEEPSPEED if one.keys == (option,))
    with pytest.raises(UnsupportedError, match="cannot protect this job: ") as refused:
        client.follow(None, lambda: None)
    assert f"{rule.name} ({rule.option}): {rule.reason}. Drop the option, or drop the" in str(refused.value)


def test_cyclic_data_are_refused_where_ranks_have_passes_of_their_own():
    client, _, _ = megatron(dataloader_type="cyclic", data_sharding=False)
    with pytest.raises(UnsupportedError, match="--dataloader-type cyclic --no-data-sharding"):
        client.follow(None, lambda: None)
    megatron(dataloader_type="cyclic", data_sharding=True)[0].follow(None, lambda: None)


class Loader(DataLoader[int]):
    """Drawn samples: to begin a pass draws a number from the process's generator."""

    def __init__(self, consumed):
        super().__init__(list(range(12)))
        self.__dict__["batch_sampler"] = Sampler(consumed)

    def __iter__(self):
        torch.rand(1)
        return iter(range(3))


@pytest.mark.parametrize(("consumed", "draws"), [(4, False), (12, True), (0, True)])
def test_a_pass_that_had_begun_before_the_restore_draws_nothing_again(consumed, draws):
    client, module, _ = megatron(steps=[], iteration=0)
    module.cyclic_iter = lambda loader: (one for _ in itertools.count() for one in iter(loader))
    client.follow(None, lambda: None)
    client.restore({**client.state(), "cycles": b"\1" * 16})
    torch.manual_seed(1)
    before = torch.get_rng_state()
    passes = module.cyclic_iter(Loader(consumed))
    assert next(passes) == 0
    assert (not torch.equal(before, torch.get_rng_state())) is draws
    drawn = torch.get_rng_state()
    assert [next(passes) for _ in range(3)] == [1, 2, 0]
    assert not torch.equal(drawn, torch.get_rng_state()), "the next pass draws, as ever"


def test_another_package_of_that_name_is_left_alone(tmp_path):
    (tmp_path / "training.py").write_text("def setup_model_and_optimizer(): ...")
    module = module_of(__file__=str(tmp_path / "training.py"))
    follow(module, EngineClients())
    assert not hasattr(module, "setup_model_and_optimizer")


# gpt-neox


class Batches:
    """A loader of so many batches."""

    def __init__(self, count):
        self.count, self.batch_sampler = count, SimpleNamespace(start_iter=0)

    def __len__(self):
        return self.count


def neox(iteration=0, **arguments):
    usual = {"gradient_accumulation_steps": 2, "eval_interval": 3, "eval_iters": 1, "train_iters": 7}
    args = SimpleNamespace(iteration=iteration, **{**usual, **arguments})

    def wrap_loaders(neox_args, data_loaders):  # with gpt-neox's own guess
        valid = data_loaders["valid"]
        read = (neox_args.iteration * neox_args.gradient_accumulation_steps) // neox_args.eval_interval
        valid.batch_sampler.start_iter = read * neox_args.eval_iters % len(valid)
        return "train", "valid", "test"

    module = module_of(train_step=lambda: None, shift_and_wrap_data_loaders=wrap_loaders, evaluate=lambda **_: None)
    client = GptNeox(module, args)
    client.follow(None, lambda: None)
    return client, module, args


def test_validation_continues_after_the_batches_that_were_read_not_where_gpt_neox_guesses():
    first, module, _ = neox()
    module.shift_and_wrap_data_loaders(SimpleNamespace(**vars(first.arguments)), loaders(14, 20))
    module.evaluate(data_iterator="valid")
    module.evaluate(data_iterator="test")
    first.arguments.iteration = 5  # for which it guesses 3
    again, module, args = neox()
    again.restore(first.state())
    given = loaders(14, 20)
    module.shift_and_wrap_data_loaders(args, given)
    assert given["valid"].batch_sampler.start_iter == 2
    assert (args.iteration, args.eval_interval, args.eval_iters) == (5, 3, 1)


def loaders(train, valid):
    return {"train": Batches(train), "valid": Batches(valid), "test": None}


def test_data_that_end_before_training_are_refused():
    _, module, args = neox()
    with pytest.raises(UnsupportedError, match="its data for training have 13 batches, but 14 are read"):
        module.shift_and_wrap_data_loaders(args, loaders(13, 20))
    again, module, args = neox()
    again.restore({"iteration": 5, "validation": 20})
    with pytest.raises(ResumeError, match="its data for validation have 20 batches"):
        module.shift_and_wrap_data_loaders(args, loaders(14, 20))


class Arguments:
    """NeoXArgs."""

    def __init__(self, **settings):
        self.settings = settings

    @classmethod
    def consume_deepy_args(cls, words):
        return cls(files=words)

    def get_deepspeed_main_args(self):
        return ["--megatron_config", "encoded", *self.settings["files"]]

    @classmethod
    def consume_neox_args(cls, overwrite_values=None, input_args=None):
        return input_args


def test_the_block_of_a_yml_file_goes_to_deepspeed_as_it_is(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    made = Arguments()
    _building(lambda self, **settings: self.__init__(**settings), made, num_layers=2, ft_plugins={"reft": True})
    extra = {"deepspeed_extra_args": {"ft_plugins": {"reft": True}}}
    assert made.settings == {"num_layers": 2, **extra, "global_num_gpus": 4}


def test_under_ft_run_train_takes_the_yml_files_itself(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "-d", "configs", "125M.yml"])
    assert _consuming(Arguments.consume_neox_args) == [
        *("--megatron_config", "encoded", "train.py", "-d", "configs", "125M.yml")
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", "--megatron_config", "given"])
    assert _consuming(Arguments.consume_neox_args) is None, "from deepy.py: it reads them itself"
