"""The rules over a framework's own arguments: each is found by name, before a job and from what it has built."""

import argparse
from pathlib import Path

import pytest

from ft_plugins.adapters.rules import DEEPSPEED, HUGGING_FACE, MEGATRON, Treatment, findings, line, refused
from ft_plugins.adapters.rules.hugging_face import PERSISTENT
from ft_plugins.adapters.rules.megatron_forks import GPT_NEOX, MEGATRON_DEEPSPEED
from ft_plugins.adapters.rules.page import with_rules

LIMITS = Path(__file__).resolve().parents[3] / "docs" / "limits.md"
SYSTEMS = ("reft", "baft", "paft", "sync")
ZERO = "zero_optimization"


def nested(path, value):
    """The settings with `value` at a dotted path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


GIVEN = {  # by what a person writes: settings with which it is found
    "optimizer.type": (nested("optimizer.type", "OneBitAdam"), nested("optimizer.type", "Muon")),
    f"{ZERO}.offload_optimizer.device": tuple(
        nested(f"{ZERO}.offload_optimizer.device", one) for one in ("cpu", "nvme")
    ),
    f"{ZERO}.offload_optimizer.ratio": (nested(f"{ZERO}.offload_optimizer", {"device": "cpu", "ratio": 0.5}),),
    f"{ZERO}.offload_optimizer.super_offload": (
        nested(f"{ZERO}.offload_optimizer", {"device": "cpu", "super_offload": True}),
    ),
    f"{ZERO}.offload_optimizer": (nested(f"{ZERO}.cpu_offload", True),),
    f"{ZERO}.offload_param.device": (
        *(nested(f"{ZERO}.offload_param.device", one) for one in ("cpu", "nvme")),
        nested(f"{ZERO}.cpu_offload_param", True),
    ),
    f"{ZERO}.zero_hpz_partition_size": (nested(f"{ZERO}.zero_hpz_partition_size", 8),),
    f"{ZERO}.mics_shard_size": (nested(f"{ZERO}.mics_shard_size", 4),),
    f"{ZERO}.stage": (nested(f"{ZERO}.stage", 3),),
    f"{ZERO}.zenflow": (nested(f"{ZERO}.zenflow.topk_ratio", 0.1),),
    "torch_autocast.dtype": (nested("torch_autocast", {"enabled": True, "dtype": "float16"}),),
    "managed_gradient_accumulation": ({"managed_gradient_accumulation": False},),
    "compression_training": (nested("compression_training.sparse_pruning.shared_parameters.enabled", True),),
    "gradient_allreduce_op": ({"gradient_allreduce_op": "sum"},),
    "scheduler.type": (nested("scheduler.type", "WarmupLR"),),
}  # fmt: skip
BLOCKS = (
    *("progressive_layer_drop", "eigenvalue", "expert_parallel", "hybrid_engine", "bf16", "fp16"),
    *("curriculum_learning", "amp"),
    *("data_efficiency.data_routing.random_ltd", "data_efficiency.data_sampling.curriculum_learning"),
)


@pytest.mark.parametrize(
    "rule", [rule for rule in DEEPSPEED if rule.option], ids=lambda rule: f"{rule.name} {rule.option}"
)
def test_each_rule_about_a_deepspeed_configuration_is_found_by_what_a_person_writes(rule):
    block = nested(f"{rule.option}.enabled", True)
    given = GIVEN.get(rule.option, (block if rule.option in BLOCKS else nested(rule.option, True),))
    found = [one for settings in given for one in findings(DEEPSPEED, settings, systems=SYSTEMS)]
    assert rule in {one.rule for one in found}, found
    texts = [one.text for one in found if one.rule is rule]
    assert all(rule.option in text and rule.reason in text for text in texts)


GIVEN_TO_A_TRAINER = {  # by option, and what only a loader shows
    "--optim": {"optim": "adalomo"},
    "--accelerator_config": {"built": {"dispatched": True}},
}  # fmt: skip


ARGUMENTS = [rule for rule in (PERSISTENT, *HUGGING_FACE) if rule.option]


@pytest.mark.parametrize("rule", ARGUMENTS, ids=lambda rule: rule.name)
def test_each_rule_about_a_trainers_arguments_is_found_by_what_a_person_writes(rule):
    given = GIVEN_TO_A_TRAINER.get(rule.option, {rule.option.removeprefix("--"): True})
    assert rule in {one.rule for one in findings(ARGUMENTS, given)}


@pytest.mark.parametrize("rule", [rule for rule in HUGGING_FACE if not rule.option], ids=lambda rule: rule.name)
def test_each_rule_about_what_a_trainer_has_built_is_found_and_says_its_value(rule):
    (one,) = findings(HUGGING_FACE, nested(rule.keys[0], "Mine"), systems=rule.systems)
    assert one.rule is rule and "(Mine): " in one.text


TABLES = (MEGATRON, DEEPSPEED, HUGGING_FACE, MEGATRON_DEEPSPEED, GPT_NEOX)


@pytest.mark.parametrize("rules", TABLES, ids=["Megatron", "DeepSpeed", "Hugging Face", "Megatron-DeepSpeed", "neox"])
def test_a_job_of_defaults_is_neither_refused_nor_remarked_on(rules):
    for settings in (
        argparse.Namespace(),
        {},
        {"built": {}},
        {"zero_optimization": False},
        {"zero_optimization": True},
    ):
        assert findings(rules, settings, systems=SYSTEMS) == ()


def test_what_a_configuration_has_switched_off_is_not_found():
    off = {
        "fp16": {"enabled": "auto"},
        ZERO: {"stage": 0, "offload_optimizer": {"device": "none"}, "offload_param": None},
    }
    assert findings(DEEPSPEED, off, systems=SYSTEMS) == ()
    assert findings(GPT_NEOX, {"curriculum_learning": {"enabled": False}}, systems=SYSTEMS) == ()
    assert findings(GPT_NEOX, {"curriculum_learning": {"enabled": True}}, systems=SYSTEMS)


def test_a_refusal_is_one_line_with_each_reason_and_each_remedy_once():
    settings = argparse.Namespace(
        qk_clip=True, fp8="hybrid", use_distributed_optimizer=True, overlap_param_gather=True, bf16=True
    )
    found = findings(MEGATRON, settings, settings, systems=("paft", "sync"))
    assert line(found, "run without protection") == (
        "cannot protect this job: "
        "fp8 with delayed scaling (--fp8-recipe): replicas of its scales were neither compared nor averaged yet; "
        "QK clipping (--qk-clip): it changes parameters and masters separately after the update; "
        "the distributed optimizer over all replicas (--use-distributed-optimizer): a replica cannot update alone. "
        "Choose --fp8-recipe tensorwise, blockwise or mxfp8, or drop --paft and --sync-policy; drop the option; "
        "give --num-distributed-optimizer-instances (an instance is one replica), "
        "or run without protection"
    )
    others = {one.rule.option: one.rule.treatment for one in found if one not in refused(found)}
    assert others == {
        "--use-distributed-optimizer": Treatment.FOLLOWED,
        "--fp8-recipe": Treatment.FOLLOWED,
        "--bf16": Treatment.FOLLOWED,
        "--overlap-param-gather": Treatment.INEFFECTIVE,
    }
    assert line(findings(MEGATRON, argparse.Namespace(bf16=True)), "run without protection") == ""


def test_each_rule_says_what_it_looks_at_and_why():
    for rules in TABLES:
        told = [(rule.name, rule.option, rule.systems, rule.treatment) for rule in rules]
        assert len(set(told)) == len(told)
        for rule in rules:
            assert rule.keys and rule.name and rule.reason and rule.remedy, rule
            assert rule.option or all(key.startswith("built.") for key in rule.keys), rule


def test_the_page_of_limits_has_todays_rules():
    page = LIMITS.read_text()
    assert with_rules(page) == page, "run `python -m ft_plugins.adapters.rules.page docs/limits.md`"
    with pytest.raises(ValueError, match="rules of Megatron"):
        with_rules("# A page without marks")


@pytest.mark.parametrize("value", [1, "true"])
@pytest.mark.parametrize("block", ["amp", "eigenvalue", "hybrid_engine", "expert_parallel"])
def test_what_deepspeed_takes_for_on_is_on(block, value):
    assert refused(findings(DEEPSPEED, {block: {"enabled": value}}))


@pytest.mark.parametrize("value", [0, False, None, "false", "auto"])
def test_what_deepspeed_takes_for_off_is_off(value):
    assert not findings(DEEPSPEED, {"hybrid_engine": {"enabled": value}})


def test_an_offload_of_no_part_is_one_of_a_part():
    """DeepSpeed makes all updates with another optimizer then."""
    settings = nested(f"{ZERO}.offload_optimizer", {"device": "cpu", "ratio": 0.0})
    assert any(one.rule.name.startswith("offload of a part") for one in findings(DEEPSPEED, settings))
    assert not refused(findings(DEEPSPEED, settings))


@pytest.mark.parametrize("kind", ["MuonWithAuxAdam", "OnebitAdam"])
def test_an_optimizer_that_has_a_reason_of_its_own_is_named_once(kind):
    assert len(findings(DEEPSPEED, {"built": {"own_optimizer": kind}})) == 1
