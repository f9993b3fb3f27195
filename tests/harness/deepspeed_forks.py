"""Run an unmodified checkout of Megatron-DeepSpeed or gpt-neox under ft-run on the CPU, unfailed and killed.

Invariant: a checkout is never edited; at the first start it compiles its data set helpers, as for any user. An unfailed
run has no protection, unless its configuration asks for it. Otherwise both runs of a case have the same command, and
save with the fork's own `--save`.

In: a checkout, a case, a folder. Out: `MegatronLmRun`s; the state that the fork saved at the end."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from harness.megatron_checkpoints import CheckpointComparison, compare, read
from harness.megatron_lm import MegatronLmRun, ft_run

ITERATIONS = 7
IMPORTED = {"GPT_NEOX_PATH": ("requests", "sentencepiece", "ftfy", "tiktoken")}  # further, by a checkout itself


@dataclass(frozen=True)
class ForkCase:
    """A configuration, how it is protected, and where `killed` is killed."""

    name: str
    ranks: int = 4
    tp: int = 2
    pp: int = 2
    zero: int = 0
    options: tuple[str, ...] = ()  # of the script
    settings: Mapping[str, Any] = field(default_factory=dict)  # of DeepSpeed, or of gpt-neox
    loads: bool = False  # the fork loads its own checkpoints, too
    kill: str = "iteration.forward@iteration=6,rank=1,restart=0"
    protected: tuple[str, ...] = ("--reft", "--reft-interval", "1")
    before: tuple[int, int] | None = None  # only with an older DeepSpeed
    iterations: int = ITERATIONS
    samples: int = 0  # the length of the training in samples, in so many iterations; 0: it is given in iterations

    def __str__(self) -> str:
        return self.name


def checkout_of(variable: str) -> Path:
    """The checkout that an environment variable names; skips the test if it is not set, or lacks what it imports."""
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"set {variable}")
    for name in ("transformers", *IMPORTED.get(variable, ())):
        pytest.importorskip(name)
    return Path(named).resolve()


def applicable(cases: Sequence[ForkCase]) -> list[ForkCase]:
    """The cases for the installed DeepSpeed."""
    try:
        major, minor = map(int, metadata.version("deepspeed").split(".")[:2])
    except metadata.PackageNotFoundError:
        return list(cases)
    return [case for case in cases if case.before is None or (major, minor) < case.before]


def megatron_deepspeed(checkout: Path, corpus: Path, case: ForkCase, folder: Path, saved: Path) -> list[object]:
    """The script and its arguments; writes its DeepSpeed configuration into `folder`."""
    configuration = folder / "ds.json"
    settings = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": case.zero},
        **case.settings,
    }
    configuration.write_text(json.dumps(settings))
    unit, length, warmup = ("samples", case.samples, 8) if case.samples else ("iters", case.iterations, 2)
    return [
        *(checkout / "pretrain_gpt.py", "--deepspeed", "--deepspeed_config", configuration, "--zero-stage", case.zero),
        *("--distributed-backend", "gloo", "--tensor-model-parallel-size", case.tp),
        *("--pipeline-model-parallel-size", case.pp, *(("--no-pipeline-parallel",) if case.pp == 1 else ())),
        *("--num-layers", 4, "--hidden-size", 32, "--num-attention-heads", 4, "--seq-length", 32),
        *("--max-position-embeddings", 32, "--micro-batch-size", 1, "--global-batch-size", 8),
        *(
            f"--train-{unit}",
            length,
            f"--lr-warmup-{unit}",
            warmup,
            "--lr",
            "1e-2",
            "--min-lr",
            "1e-4",
            "--lr-decay-style",
            "cosine",
        ),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", 127, "--split", "90,5,5"),
        *("--num-workers", 0, "--data-path", corpus, "--data-impl", "mmap", "--data-cache-path", corpus.parent),
        *("--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion"),
        *("--no-gradient-accumulation-fusion", "--seed", 1234, "--log-interval", 1, "--eval-iters", 1),
        *("--eval-interval", 3, "--save-interval", 4, "--save", saved, *(("--load", saved) if case.loads else ())),
        *case.options,
    ]


def gpt_neox(checkout: Path, corpus: Path, case: ForkCase, folder: Path, saved: Path) -> list[object]:
    """The same for gpt-neox. With pipelines its evaluation fails by itself."""
    settings = {
        "pipe_parallel_size": case.pp if case.pp > 1 else 0,
        "model_parallel_size": case.tp,
        **{"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32},
        **{"max_position_embeddings": 32, "norm": "layernorm", "pos_emb": "rotary", "no_weight_tying": True},
        "optimizer": {"type": "adam", "params": {"lr": 0.01, "betas": [0.9, 0.95]}},
        **{"min_lr": 0.0001, "zero_optimization": {"stage": case.zero}, "gradient_clipping": 1.0},
        **{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "weight_decay": 0.1},
        **{"hidden_dropout": 0.1, "attention_dropout": 0.1, "precision": "fp32", "checkpoint_activations": False},
        **{"train_iters": case.iterations, "lr_decay_iters": case.iterations, "lr_decay_style": "cosine"},
        **{"warmup": 0.3, "distributed_backend": "gloo", "checkpoint_factor": 4, "eval_interval": 3},
        **{"eval_iters": 0 if case.pp > 1 else 1, "log_interval": 1, "data_path": str(corpus), "data_impl": "mmap"},
        **{"split": "90,5,5", "num_workers": 0, "tokenizer_type": "CharLevelTokenizer", "save": str(saved)},
        **({"load": str(saved)} if case.loads else {}),
        **case.settings,
    }
    (folder / "job.yml").write_text(json.dumps(settings))
    return [checkout / "train.py", "-d", folder, "job.yml", *case.options]


SCRIPTS = {"Megatron-DeepSpeed": megatron_deepspeed, "gpt-neox": gpt_neox}


def run(
    fork: str, checkout: Path, corpus: Path, case: ForkCase, folder: Path, ours: Sequence[object] = ()
) -> MegatronLmRun:
    """Run the case with our words `ours`. What it saves is in `folder`/saved."""
    saved = folder / "saved"
    saved.mkdir(parents=True)
    script = SCRIPTS[fork](checkout, corpus, case, folder, saved)
    return ft_run(script, saved, *ours, job=f"{folder.name}-{case.name}", ranks=case.ranks)


def killed(fork: str, checkout: Path, corpus: Path, case: ForkCase, folder: Path) -> MegatronLmRun:
    """Run the case, protected, and kill a rank of it."""
    faults = ("--ftp-faults", f"{case.kill}:kill", "--ftp-orphan-seconds", 30)
    return run(fork, checkout, corpus, case, folder, (*case.protected, *faults))


def comparison(unfailed: Path, other: Path, iterations: int) -> CheckpointComparison:
    """What the fork saved at the end of both runs, compared entry by entry, except for a rank's number on its node."""
    tag = f"global_step{iterations}"
    found = compare(read(unfailed / tag), read(other / tag))
    assert len(found.tensors) > 50, found
    return replace(found, differences=tuple(one for one in found.differences if "/args/local_rank:" not in one))


def require_exact(case: ForkCase, unfailed: MegatronLmRun, other: MegatronLmRun) -> CheckpointComparison:
    """Raises AssertionError unless the killed run was killed, restored on every rank, and ended like the other."""
    iteration = int(re.search(r"iteration=(\d+)", case.kill)[1])  # type: ignore[index]
    restored = other.events("state.restored")
    assert {event.rank for event in restored} == set(range(case.ranks)), restored  # again, after a load of its own
    versions = {(event.fields["tier"], event.fields["iteration"]) for event in restored}
    assert versions in ({("process", iteration - 1)}, {("process", iteration - 2)}), versions
    found = comparison(unfailed.saved, other.saved, case.iterations)
    assert not found.differences, "\n".join([str(found), *found.differences])
    assert not other.events("values.restarted"), other.events("values.restarted")
    return found
