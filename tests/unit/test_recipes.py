"""What tests/recipes.py reads in files of recipes, and how it counts what would be refused."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "recipes.py"
spec = importlib.util.spec_from_file_location("recipes", FILE)
assert spec and spec.loader
recipes = sys.modules["recipes"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipes)

SCRIPT = """
# --skip-train is a comment
TP=${1:-4}
SIZES=(--num-layers 12 --lr=1e-4)
OPTIONS="
    --tensor-model-parallel-size ${TP} \\
    --data-path $DATA --bf16
"
torchrun pretrain_gpt.py ${SIZES[@]} $OPTIONS --fp8-format hybrid
"""
TEMPLATE = """{"train_batch_size": GBSIZE, "zero_optimization": {"stage": $STAGE},
"eigenvalue": {"enabled": EIGEN}, "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
"a": [true, null, "$WORD b"]}"""


def test_a_recipe_in_yaml_is_a_command_line(tmp_path):
    for name, mode in (("one", "MODE: pretraining"), ("two", "MODE: inference")):
        folder = tmp_path / "tests" / "functional_tests" / "test_cases" / "gpt" / name
        folder.mkdir(parents=True)
        (folder / "model_config.yaml").write_text(
            f"{mode}\nMODEL_ARGS:\n  --bf16: true\n  --fp16: false\n  --spec: '[a b]'\n  --lr: 0.1\n  other: 3\n"
        )
    ((name, words),) = recipes.megatron_words(tmp_path)
    assert name.endswith("gpt/one") and words == ["--bf16", "--spec", "a", "b", "--lr", "0.1"]


def test_a_recipe_in_a_shell_script_is_read_without_running_it(tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "train.sh").write_text(SCRIPT)
    (tmp_path / "examples" / "convert.sh").write_text("python convert.py --bf16")
    ((name, words),) = recipes.megatron_words(tmp_path)
    assert name == "examples/train.sh"
    assert words[:6] == ["--num-layers", "12", "--lr", "1e-4", "--tensor-model-parallel-size", "4"]
    assert words[-2:] == ["--fp8-format", "hybrid"] and "--skip-train" not in words


def test_options_that_a_version_does_not_understand_are_left_out():
    parser = recipes._Parser(allow_abbrev=False)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--bf16", action="store_true")
    given = ["--sizes", "1", "2", "--bf16", "pretrain.py", "--unknown", "3", "--sizes", "$N"]
    assert list(recipes._understood(parser, given)) == ["--sizes", "1", "2", "--bf16"]


def test_configurations_are_found_in_json_templates_scripts_and_yml(tmp_path):
    (tmp_path / "template.json").write_text(TEMPLATE)
    (tmp_path / "vocabulary.json").write_text('{"a": 1}')
    (tmp_path / "run.sh").write_text(f"cat <<EOT > ds.json\n{TEMPLATE}\nEOT\n")
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "serve.json").write_text(TEMPLATE)
    (tmp_path / "neox.yml").write_text("train-batch-size: 4\nzero_optimization: {stage: 1}\n")
    found = dict(recipes.deepspeed_settings(tmp_path))
    expected = {
        "train_batch_size": 1, "zero_optimization": {"stage": 1}, "eigenvalue": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-5}}, "a": [True, None, "$WORD b"],
    }  # fmt: skip
    assert found == {
        "template.json": expected,
        "run.sh": expected,
        "neox.yml": {"train_batch_size": 4, "zero_optimization": {"stage": 1}},
    }


def test_each_recipe_counts_once_for_a_rule_the_most_frequent_first(tmp_path):
    muon, hybrid = {"optimizer": {"type": "Muon"}}, {"hybrid_engine": {"enabled": True}}
    for number, settings in enumerate(({}, hybrid, hybrid | muon)):
        (tmp_path / f"{number}.json").write_text(json.dumps({"train_batch_size": 1, **settings}))
    read = recipes.recipes_of(tmp_path, ["reft"])
    first, *rows = recipes.table("here", read)
    assert first == "here: 2 of 3 recipes are refused"
    assert [row.split() for row in rows] == [
        ["2", "1", "alone", "the", "hybrid", "engine", "(hybrid_engine)"],
        ["1", "0", "alone", *"Muon (optimizer.type)".split()],
    ]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")
def test_what_the_installed_deepspeed_refuses_itself_counts_apart():
    from deepspeed.runtime import config

    if not hasattr(config, "_reject_removed_config_keys"):
        pytest.skip("this DeepSpeed still takes all of these")
    gone = ({"eigenvalue": {"enabled": True}}, {"elasticity": {}}, {"optimizer": {"type": "OneBitLamb"}})
    usual = ({}, {"optimizer": {"type": "AdamW"}}, {"optimizer": {"type": "NAdam"}})
    assert all(map(recipes.outdated, gone)) and not any(map(recipes.outdated, usual))
    assert not recipes.outdated(gone[2], own_optimizer=True)
    refused = (("a rule", "its phrase"),)
    apart = [recipes.Recipe("one", refused, "gone"), recipes.Recipe("two", (), "gone")]
    lines = list(recipes.table("here", [recipes.Recipe("three", refused), recipes.Recipe("four", ()), *apart]))
    assert lines[0] == "here: 1 of 2 recipes are refused"
    assert lines[1].split() == ["1", "1", "alone", "a", "rule"]
    assert "2 more the installed DeepSpeed refuses itself, 1 of which" in lines[2]
