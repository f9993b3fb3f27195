"""Any version's unmodified pretrain_gpt.py under ft-run: killed, it ends in the checkpoint of an unprotected run.

Runs where MEGATRON_LM_PATH names a checkout; tests/matrix.sh --megatron-lm runs it for a folder of them. 4 ranks, TP1 x
PP2 x DP2, bf16 with the distributed optimizer, dropout on. Witness: the checkpoint that Megatron saves at the end, in
the version's default format from 0.16 on, entry by entry and bit for bit.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from ft_plugins.rehearse.display import LineDisplay
from ft_plugins.rehearse.rehearsal import plan_rehearsal, rehearse, report
from harness import megatron_checkpoints
from harness.megatron_lm import (
    SCRIPT,
    SETTINGS,
    ft_run,
    read_checkout,
    write_corpus,
)

pytestmark = pytest.mark.timeout(900)

RANKS = 4
ITERATIONS, EVALUATED = 12, 6  # an evaluation after every 6
# torch_dist fails by itself before 0.16: 0.14 calls np.product, which NumPy 2 lacks; 0.15 refuses torch's Adam, whose
# state has a scalar
OLDEST_WITH_DEFAULT_FORMAT = (0, 16)
JOB = (
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--tensor-model-parallel-size", "1"),
    *("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "8"),
    *("--train-iters", str(ITERATIONS), "--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--split", "90,5,5", "--num-workers", "0"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-rope-fusion"),
    *("--no-bias-dropout-fusion", "--no-persist-layer-norm", "--seed", "1234", "--log-interval", "1"),
    *("--eval-iters", "1", "--eval-interval", str(EVALUATED), "--save-interval", "100"),
    *("--bf16", "--use-distributed-optimizer", "--untie-embeddings-and-output-weights"),
)


@dataclass(frozen=True)
class Kill:
    """Where rank 1 is killed, and in which iteration."""

    point: str
    iteration: int


KILLS = {
    "before-the-first-evaluation": Kill("iteration.forward", EVALUATED - 2),
    "after-the-first-evaluation": Kill("update.middle", EVALUATED + 3),
}


@pytest.fixture(scope="module")
def tree():
    named = os.environ.get("MEGATRON_LM_PATH")
    if not named:
        pytest.skip("set MEGATRON_LM_PATH")
    return read_checkout(Path(named).resolve())


@pytest.fixture(scope="module")
def script(tree, tmp_path_factory):
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "text")
    saving = () if tree.number[:2] >= OLDEST_WITH_DEFAULT_FORMAT else ("--ckpt-format", "torch")
    return [tree.folder / SCRIPT, *JOB, *saving, "--data-path", corpus]


@pytest.fixture(scope="module")
def unprotected(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unprotected")
    run = ft_run(script, folder, "--save", folder, job="unprotected", ranks=RANKS)
    print(run.output)
    run.require_success()
    return run


@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS)
def test_killed_in_forward_or_update_it_ends_in_the_checkpoint_of_an_unprotected_run(
    script, unprotected, tmp_path, kill, record_property
):
    record_property("unprotected", "succeeded")  # for tests/matrix.sh
    fault = f"{kill.point}@iteration={kill.iteration},rank=1,restart=0:kill"
    killed = ft_run(
        *(script, tmp_path, "--save", tmp_path),
        *("--reft", "--ftp-faults", fault, "--ftp-orphan-seconds", 30),
        job=f"killed-{kill.iteration}",
        ranks=RANKS,
    )
    print(killed.output)
    killed.require_success()
    assert [event.fields["signal"] for event in killed.events("worker.failed") if event.rank == 1] == ["SIGKILL"]
    restored = killed.events("state.restored")
    assert sorted(event.rank for event in restored) == list(range(RANKS)), restored
    versions = {(event.fields["tier"], event.fields["iteration"]) for event in restored}
    sealed, older = ("process", kill.iteration - 1), ("process", kill.iteration - 2)
    assert versions in ({sealed}, {older}), versions
    assert not killed.events("values.restarted"), killed.output

    iteration = f"iter_{ITERATIONS:07d}"
    comparison = megatron_checkpoints.compare(
        megatron_checkpoints.read(unprotected.saved / iteration), megatron_checkpoints.read(killed.saved / iteration)
    )
    record_property("compared", str(comparison))
    print(comparison.listing(), comparison, sep="\n")
    assert not comparison.differences, "\n".join([str(comparison), *comparison.differences])


SAMPLES = ("--train-samples", "96", "--lr-decay-samples", "96", "--lr-warmup-samples", "24")
OPTIONS = {
    "ramp-up": (*SAMPLES, "--rampup-batch-size", "4", "2", "24"),
    "train-samples": SAMPLES,
    "cyclic": ("--dataloader-type", "cyclic"),
    "both-overlaps": ("--overlap-grad-reduce", "--overlap-param-gather"),
    "experts": ("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2"),
}
EXPERTS_ON_CPU = (0, 20)  # older ones call Transformer Engine's matrix product whether it is installed or not


@pytest.mark.all_configurations
@pytest.mark.parametrize("name", OPTIONS)
def test_a_rehearsal_of_it_is_exact(tree, name, tmp_path_factory, tmp_path, monkeypatch):
    ranks = 2
    if name == "experts":
        ranks = 4  # two replicas over which experts are spread
        if tree.number[:2] < EXPERTS_ON_CPU:
            pytest.skip("experts need Transformer Engine in this version")
    for variable, value in SETTINGS.items():
        monkeypatch.setenv(variable, value)
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "text")
    counted = "--train-samples" in OPTIONS[name]
    job = [word for word in JOB if word not in ("--train-iters", str(ITERATIONS))] if counted else JOB
    words = ["--nproc-per-node", str(ranks), "--reft", "--ftp-preload", "off", str(tree.folder / SCRIPT), *job]
    plan = plan_rehearsal([*words, *OPTIONS[name], "--data-path", str(corpus)], tmp_path, 10, (4, 5), 1, 600.0)
    outcome = rehearse(plan, LineDisplay(Console(), 2))
    assert outcome.exact, report(outcome)
    assert "evaluation" not in " ".join(outcome.not_exercised)
