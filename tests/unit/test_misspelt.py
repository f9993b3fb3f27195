"""A typing error never leaves a job unprotected, and a flag of the script's own is never refused for its looks."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from ft_plugins.config import keys, sources
from ft_plugins.errors import ConfigError
from ft_plugins.launcher import command

# of megatron/training/arguments.py, those that look most like ours
MEGATRON = """--warmup --patch-dim --sft --grpo-iterations --num-workers --ddp-bucket-size --checkpoint-activations
--merge-file --calc-ft-timeouts --sgd-momentum --inprocess-granularity --adlr-autoresume-interval --fim-spm-rate
--ict-load --muon-momentum --refit-method --inprocess-max-iterations --ft-num-warmup-iters --spec --indexer-log-interval
--muon-tp-mode --inprocess-hard-timeout --inprocess-soft-timeout --data-path --reset-position-ids --grpo-group-size
--inprocess-heartbeat-interval --moe-upcycling-granularity --adlr-autoresume --decoupled-lr --split --fim-rate
--fp8-param-gather --overlap-param-gather-with-optimizer-step --bert-load --use-nccl-ub --app-tag-run-name --mscale
--local-rank --lr --no-one-logger --num-distributed-optimizer-instances --reset-attention-mask --hysteresis
--no-load-rng --loss-scale --rope-type --batch-size --use-sharp --img-h --img-w --min-lr --swiglu --async-save
--save-interval --eval-interval --log-interval --use-persistent-ckpt-worker --enable-ft-package --replication
--non-persistent-save-interval --ckpt-format --test-mode --train-sync-interval --seed --sync-bn-free""".split()
OWN = "--reset --draft --async --async-save --synch --ref --rest --left --part --craft --test-interval -r -s".split()


def flags_of_deepspeed():
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.submodule_search_locations
    text = "".join(path.read_text() for path in Path(spec.submodule_search_locations[0]).rglob("*.py"))
    return sorted(set(re.findall(r"[\"'](--[A-Za-z][\w-]+)[\"']", text)))


def test_no_flag_of_megatron_or_deepspeed_and_no_word_of_english_is_taken_for_one_of_ours():
    others = flags_of_deepspeed()
    assert "--deepspeed_config" in others and len(others) > 50
    assert {word: meant for word in [*MEGATRON, *OWN, *others] if (meant := sources.meant_flag(word, keys()))} == {}


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--refft", "--reft"), ("-reft", "--reft"), ("--REFT", "--reft"), ("\u2014reft", "--reft"),
        ("--rfet", "--reft"), ("--re-ft", "--reft"), ("--bbafft", "--baft"), ("--snyc", "--sync"),
        ("--refft-interval=4", "--reft-interval"),
        ("--fpt-job", "--ftp-job"), ("--ftpjob", "--ftp-job"), ("--rfet_intervall", "--reft-interval"),
    ],
)  # fmt: skip
def test_what_has_the_letters_of_a_flag_of_ours_is_meant_for_it(word, meant):
    assert sources.meant_flag(word, keys()) == meant


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text("")
    return tmp_path


def plan(folder, *words):
    return command.plan([*words[:-1], "train.py", words[-1]], 1000, str(folder), "host0")


def test_a_misspelt_flag_is_refused_unless_the_script_has_it(folder):
    with pytest.raises(ConfigError, match=r"^--refft: unknown flag; did you mean --reft\?$"):
        plan(folder, "--refft")
    (folder / "train.py").write_text("parser.add_argument('--refft', action='store_true')")
    assert plan(folder, "--refft").torch.training_script_args == ["--refft"]


def test_a_job_name_without_a_system_says_which_word_may_have_been_meant_for_one(folder):
    with pytest.raises(ConfigError, match=r"^--ftp-job=x: has no effect .*; did you mean --reft by --rft\?$"):
        plan(folder, "--ftp-job", "x", "--rft")
    with pytest.raises(ConfigError, match="add --reft or drop it"):
        plan(folder, "--ftp-job", "x", "--lr")


def test_a_job_with_nothing_on_says_so_at_its_start_and_at_its_end(folder, monkeypatch, capsys):
    monkeypatch.setattr(command, "launch", lambda *words, **more: print("the job", file=command.sys.stderr))
    command.execute(plan(folder, "--rft"))
    remedy = "did you mean --reft by --rft?"
    assert capsys.readouterr().err.splitlines() == [
        f"ft-run: no system is on, nothing is protected: running as torchrun. {remedy}",
        "the job",
        f"ft-run: the job ends; nothing was protected, as no system was on. {remedy}",
    ]


@pytest.mark.parametrize(
    ("block", "meant"),
    [
        ("ft_plugin", "ft_plugins"),
        ("ftplugins", "ft_plugins"),
        ("FT-plugins", "ft_plugins"),
        ("reft", "ft_plugins.reft"),
    ],
)
def test_a_misspelt_block_of_a_deepspeed_configuration_is_refused(folder, block, meant):
    (folder / "ds.json").write_text(json.dumps({"train_batch_size": 8, block: {"reft": {}}}))
    with pytest.raises(ConfigError, match=rf"ds.json: {block}: unknown key; did you mean {meant}\?"):
        plan(folder, "--deepspeed_config=ds.json")
