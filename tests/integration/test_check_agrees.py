"""`ft-plugins check` and the job itself say the same: argument sets and configurations, each checked, then started.

Given what starts on a CPU; then a job that check refuses ends with status 78 and check's own line, one whose arguments
its framework refuses with 1 and the framework's words, and any other trains. Those of Megatron-LM where
MEGATRON_LM_PATH names a checkout.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ft_plugins.errors import EXIT_REFUSED
from harness.megatron_lm import SCRIPT, SETTINGS

CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
BOUND = 400.0  # seconds for one start; ten times what it takes on two idle cores
OURS = ("-c", "from ft_plugins.cli import main; main()")
CHECK = (*OURS, "check", "--json", "--")
FT_RUN = ("-m", "ft_plugins.launcher.command")

LOOP = """
import argparse
import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config")
parser.add_argument("--local_rank")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=parser.parse_args().deepspeed_config
)
inputs = torch.ones(2, 8, dtype=next(engine.module.parameters()).dtype)
for _ in range(engine.global_steps, 2):
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
print("trained to", engine.global_steps)
"""
TRAINER = """
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments

class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(model=Small(), args=arguments, train_dataset=[{"x": torch.full((4,), float(n))} for n in range(8)])
trainer.train()
print("trained to", trainer.state.global_step)
"""
TRAINED = (
    *("--output_dir", "saved", "--max_steps", "2", "--per_device_train_batch_size", "2", "--use_cpu", "True"),
    *("--report_to", "none", "--save_strategy", "no"),
)
TRAINING = {  # the last one is refused
    "SGD": ("--optim", "sgd", "--reft"),
    "a batch size that is looked for": ("--auto_find_batch_size", "True", "--reft"),
}
BF16, ADAM = {"enabled": True}, {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def zero(stage, **more):
    return {"bf16": BF16, "zero_optimization": {"stage": stage, **more}}


CONFIGURATIONS = {
    "fp32": {},
    "zero1": zero(1),
    "zero2, a scheduler": {**zero(2), "scheduler": {"type": "WarmupLR", "params": {}}},
    "zero3, clipped": {**zero(3), "gradient_clipping": 1.0},
    "offload of parameters": zero(3, offload_param={"device": "cpu"}),
    "MiCS": zero(3, mics_shard_size=1),
    "offload to NVMe": zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/nowhere"}),
    "offload of parameters to NVMe": zero(3, offload_param={"device": "nvme", "nvme_path": "/nowhere"}),
    "quantized weights": zero(3, zero_quantized_weights=True),
    "DeepCompile": {**zero(3), "compile": {"deepcompile": True}},
    "the hybrid engine": {**zero(2), "hybrid_engine": {"enabled": True}},
}

SMALL = (
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--num-layers", "2", "--hidden-size", "32"),
    *("--num-attention-heads", "4", "--seq-length", "32", "--max-position-embeddings", "32", "--mock-data"),
    *("--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "2", "--lr", "1e-3"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--split", "90,5,5", "--num-workers", "0"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-rope-fusion"),
    *("--no-bias-dropout-fusion", "--no-persist-layer-norm", "--eval-iters", "0", "--eval-interval", "9"),
)
ARGUMENTS = {  # refused from the eighth on
    "fp32": (),
    "bf16, distributed": ("--bf16", "--use-distributed-optimizer"),
    "SGD": ("--optimizer", "sgd"),
    "fp16": ("--fp16",),
    "recomputed": ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    "masters within FusedAdam": ("--bf16", "--use-distributed-optimizer", "--use-precision-aware-optimizer"),
    "optimizer state in host memory": (
        *("--bf16", "--use-distributed-optimizer", "--use-precision-aware-optimizer", "--optimizer-cpu-offload"),
    ),
    "evaluation alone": ("--skip-train",),
    "injected errors": ("--error-injection-rate", "100", "--error-injection-type", "transient_error"),
    "a graph of the iteration": (
        *("--cuda-graph-impl", "local", "--cuda-graph-scope", "full_iteration", "--no-check-for-nan-in-loss-and-grad"),
        "--te-rng-tracker",
    ),
}


def both(command, folder, more):
    """What check says, then status and output of the job."""
    environment = {**os.environ, **SETTINGS, "XDG_RUNTIME_DIR": str(folder), **more}

    def run(*words):
        told = folder / "out"  # no pipe: an SMP that stays has the launcher's open
        with told.open("w") as out:
            done = subprocess.run(
                [sys.executable, *words], cwd=folder, env=environment, stdout=out, stderr=out, timeout=BOUND
            )
        return done.returncode, told.read_text()

    status, said = run(*CHECK, *command)
    checked = json.loads(said.splitlines()[-1])
    refused = EXIT_REFUSED if checked["refusal"] else 0
    assert status == (1 if checked["rejected"] else refused), said
    job = f"agrees-{os.getpid()}-{folder.name}"
    ended = run(*FT_RUN, "--ftp-job", job, *command)
    run(*OURS, "end", job)  # of one that failed, whose snapshots wait for the next start
    return checked, *ended


def require_agreement(checked, status, output):
    """The job ended as check said, with the same line if it was refused."""
    if checked["rejected"]:
        assert status == 1, output[-3000:]
    elif checked["refusal"]:
        assert status == EXIT_REFUSED, output[-3000:]
        assert checked["refusal"] in output, (checked["refusal"], output[-3000:])
    else:
        assert status == 0, output[-3000:]


@pytest.fixture
def short(own_environment):
    """A folder whose path leaves room for that of a socket."""
    folder = own_environment / f"c{len(list(own_environment.iterdir()))}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_deepspeed_job_ends_as_check_says(short, name):
    (short / "train.py").write_text(LOOP)
    settings = {"train_batch_size": 2, "optimizer": ADAM, "ft_plugins": {"reft": True}, **CONFIGURATIONS[name]}
    (short / "ds.json").write_text(json.dumps(settings))
    command = ("--nproc-per-node", "1", "train.py", "--deepspeed_config", "ds.json")
    checked, status, output = both(command, short, {})
    require_agreement(checked, status, output)
    assert ("trained to 2" in output) != bool(checked["refusal"])
    assert bool(checked["refusal"]) == (list(CONFIGURATIONS).index(name) > 4), checked


@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no checkout of Megatron-LM")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_job_of_megatron_lm_ends_as_check_says(short, name):
    command = ("--nproc-per-node", "1", str(Path(CHECKOUT) / SCRIPT), *SMALL, *ARGUMENTS[name], "--reft")
    checked, status, output = both(command, short, {"PYTHONPATH": CHECKOUT})
    assert checked["notes"] == [], checked
    assert bool(checked["refusal"]) == (list(ARGUMENTS).index(name) > 6), checked
    if "--use-precision-aware-optimizer" in command and find_spec("transformer_engine") is None:
        assert status == 1 and checked["missing"], output[-3000:]  # Megatron-LM's own error, foreseen
        return
    require_agreement(checked, status, output)


REJECTED = {  # by the arguments that are at fault: what check names, and the word of the job
    ("--num-attention-heads", "5"): ("--hidden-size 32", "--num-attention-heads 5", "AssertionError"),
    ("--lr-warmup-fraction", "0.1", "--lr-warmup-iters", "1"): (
        "(--lr-warmup-iters 1)",
        "can only specify one of lr-warmup-fraction and lr-warmup-iters",
    ),
}


@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no checkout of Megatron-LM")
@pytest.mark.parametrize("options", REJECTED, ids=" ".join)
def test_what_megatron_lm_itself_refuses_is_said_with_the_arguments(short, options):
    command = ("--nproc-per-node", "1", str(Path(CHECKOUT) / SCRIPT), *SMALL, *options, "--reft")
    checked, status, output = both(command, short, {"PYTHONPATH": CHECKOUT})
    require_agreement(checked, status, output)
    for words in REJECTED[options]:
        assert words in checked["rejected"], checked
    assert REJECTED[options][-1] in output


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("name", TRAINING)
def test_a_trainer_ends_as_check_says(short, name):
    (short / "train.py").write_text(TRAINER)
    command = ("--nproc-per-node", "1", "train.py", *TRAINED, *TRAINING[name])
    checked, status, output = both(command, short, {})
    require_agreement(checked, status, output)
    assert ("trained to 2" in output) != bool(checked["refusal"])
    assert bool(checked["refusal"]) == (name != "SGD"), checked
