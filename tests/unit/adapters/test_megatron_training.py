"""Megatron-LM's loop calls the hooks in the contract's order. What is refused is in `test_megatron_versions`."""

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest

from ft_plugins.adapters.megatron import training
from ft_plugins.adapters.megatron.arguments import extend, resolve
from ft_plugins.adapters.megatron.training import TrainingHooks, describe, identity, topology
from ft_plugins.adapters.script.script_hooks import replace_in_megatron as replace
from ft_plugins.config import Config, LaunchContext
from ft_plugins.errors import ConfigError, UnsupportedError


class RecordingLoop:
    """Stands where `Loop` stands, and writes down what it is told."""

    def __init__(self, told):
        self.told = told

    def begin_iteration(self):
        self.told.append("begin")

    def observe(self, losses):
        self.told.append(("loss", *losses.values()))

    def skip_iteration(self):
        self.told.append("skip")

    def end_iteration(self, iteration, operations, exits):
        self.told.append(("end", iteration, operations))

    def shutdown(self):
        self.told.append("shutdown")


def training_module(told, exit_code=None):
    """A module with the functions and the calling order of megatron.training.training."""
    module = ModuleType("megatron.training.training")

    def setup_model_and_optimizer(model_provider_func, model_type, checkpointing_context=None):
        return [], None, None

    def cyclic_iter(iter):  # noqa: A002
        while True:
            yield from iter

    def build_train_valid_test_data_loaders(build_train_valid_test_datasets_provider):
        told.append("loaders")

    def train_step(forward_step_func, data_iterator, iteration=None):
        told.append("train_step")
        return {"lm loss": 2.5}, 0

    def dummy_train_step(data_iterator):
        told.append("dummy_train_step")

    def checkpoint_and_decide_exit(
        model,
        optimizer,
        opt_param_scheduler,
        iteration,
        num_floating_point_operations_so_far,
        checkpointing_context,
        train_data_iterator,
    ):
        told.append("save")
        return False

    def pretrain():
        module.dummy_train_step(None)
        assert module.train_step(None, None, iteration=1) == ({"lm loss": 2.5}, 0)
        assert module.checkpoint_and_decide_exit(None, None, None, 2, 8.0, None, None) is False
        if exit_code is not None:
            raise SystemExit(exit_code)

    for function in (
        *(setup_model_and_optimizer, build_train_valid_test_data_loaders, train_step, dummy_train_step, cyclic_iter),
        *(checkpoint_and_decide_exit, pretrain),
    ):
        setattr(module, function.__name__, function)
    return module


def followed(exit_code=None):
    told = []
    module, hooks = training_module(told, exit_code), TrainingHooks()
    hooks.follow(module)
    hooks.loop = RecordingLoop(told)
    return module, told


IN_ORDER = ["begin", "dummy_train_step", "skip", "begin", "train_step", ("loss", 2.5), "save", ("end", 2, 8.0)]


def test_hooks_are_called_around_megatrons_own_functions_and_the_version_point_follows_its_save():
    module, told = followed()
    module.pretrain()
    assert told == [*IN_ORDER, "shutdown"]


def test_an_orderly_exit_ends_in_order_and_any_other_status_does_not():
    for code, ending in ((0, ["shutdown"]), (16, [])):
        module, told = followed(code)
        with pytest.raises(SystemExit):
            module.pretrain()
        assert told == [*IN_ORDER, *ending]


def test_a_function_that_this_version_lacks_is_named():
    module = training_module([])
    del module.checkpoint_and_decide_exit
    with pytest.raises(UnsupportedError, match="no function 'checkpoint_and_decide_exit'"):
        TrainingHooks().follow(module)


def test_a_function_is_wrapped_once():
    module = ModuleType("m")
    module.add = lambda value: value
    for _ in range(2):
        replace(module, "add", lambda original, value: original(value) + 1)
    assert module.add(1) == 2


def test_ranks_are_laid_out_as_the_arguments_say():
    args = argparse.Namespace(
        *(), tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2,
        context_parallel_size=1, expert_model_parallel_size=1, expert_tensor_parallel_size=None,
        virtual_pipeline_model_parallel_size=2, use_tp_pp_dp_mapping=True,
    )  # fmt: skip
    laid_out = topology(args)
    assert (laid_out.world_size, laid_out.vpp) == (8, 2)
    assert laid_out.replicas(0) == (0, 4)
    args.use_tp_pp_dp_mapping = False
    assert topology(args).replicas(0) == (0, 2)


def test_our_flags_are_in_megatrons_parser_once_and_resolve_to_what_ft_run_passed():
    module = ModuleType("megatron.training.arguments")
    module.add_megatron_arguments = lambda parser: parser
    extend(module)
    extend(module)
    parser = module.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    assert "--reft-interval" in parser.format_help()
    passed = Config.from_flags(["--reft", "--reft-interval", "3"])[0]
    context = LaunchContext(passed, None, 0, None, 0, 0, 1, 1, 0, 0)
    assert resolve(parser.parse_args([]), context) == passed
    assert resolve(parser.parse_args(["--reft", "--reft-interval=3"]), context) == passed
    with pytest.raises(ConfigError, match="--reft-interval.*ft-run says 3, the script says 4"):
        resolve(parser.parse_args(["--reft", "--reft-interval=4"]), context)


def test_data_is_known_by_name_size_and_head(tmp_path):
    prefix = str(tmp_path / "text")
    with pytest.raises(ConfigError, match=r"text.bin is missing; check --data-path"):
        describe(prefix)
    Path(f"{prefix}.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"text.bin is empty"):
        describe(prefix)
    Path(f"{prefix}.bin").write_bytes(b"tokens")
    Path(f"{prefix}.idx").write_bytes(b"index")
    described = describe(prefix)
    assert [part[:2] for part in described[1:]] == [["text.bin", 6], ["text.idx", 5]]
    Path(f"{prefix}.bin").write_bytes(b"Tokens")
    assert describe(prefix) != described
    assert describe("s3://bucket/text") == ["s3://bucket/text"]


def test_a_blend_of_many_data_sets_is_known_in_few_bytes_each_and_every_part_of_it_counts(tmp_path, monkeypatch):
    prefixes = [str(tmp_path / f"a-data-set-with-quite-a-long-name-{number:03d}") for number in range(100)]
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            Path(f"{prefix}{suffix}").write_text(prefix)
    weights = [1.0] * 100

    def identified(count, **other):
        blend = [(prefixes[:count], weights[:count])]
        monkeypatch.setattr(training, "blends", lambda args: iter(blend))
        return identity(argparse.Namespace(**{"seed": 1, "iterations_to_skip": [], **other}))

    whole = identified(100)
    assert len(json.dumps(whole)) < 1024 and whole["data"][0] == 100, "a segment's header has room for it"
    assert identified(100) == whole and identified(99) != whole
    assert identified(100, step_batch_size_schedule="0:8 4:16") != whole, "0.18 and newer have it"
    Path(f"{prefixes[70]}.bin").write_text("other")
    assert identified(100) != whole
    Path(f"{prefixes[70]}.bin").write_text(prefixes[70])
    weights[70] = 2.0
    assert identified(100) != whole, "other weights are another order of samples"
    weights[70] = 1.0
    assert identified(100, iterations_to_skip=[5]) == whole, "a bad batch may be skipped after a resume"
    assert prefixes[0] in json.dumps(identified(1)), "one data set is named in full"
