"""Whole jobs on a device, killed and compared with unprotected ones bit for bit: plain torch, DeepSpeed, Megatron-LM.

One rank over NCCL, which takes a device of its own; two ranks that share one device over gloo.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from ft_plugins.events import read
from harness import megatron_checkpoints
from harness.deepspeed_runs import EXAMPLE, DeepSpeedConfiguration, DeepSpeedRun
from harness.golden import assert_identical
from harness.megatron_lm import write_corpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FT_RUN, TORCHRUN = ("-m", "ft_plugins.launcher.command"), ("-m", "torch.distributed.run", "--standalone")
TORCH_LOOP = EXAMPLE.with_name("torch_loop.py")
BOUND = 150  # of one run, which takes 15 to 45 seconds on an idle machine
# CUBLAS_WORKSPACE_CONFIG, NCCL_ALGO: else two runs of the same job differ, protected or not
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
MEGATRON = (
    *("--distributed-backend", "nccl", "--transformer-impl", "local", "--deterministic-mode", "--bf16"),
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--max-position-embeddings", "64", "--micro-batch-size", "2", "--global-batch-size", "8"),
    *("--train-iters", "7", "--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine", "--seed", "1234"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--split", "90,5,5", "--num-workers", "0"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-rope-fusion"),
    *("--no-bias-dropout-fusion", "--no-persist-layer-norm", "--log-interval", "1", "--eval-iters", "1"),
    *("--eval-interval", "3", "--ckpt-format", "torch", "--save-interval", "4"),
)


@dataclass(frozen=True)
class Run:
    """Of the loop of plain torch, in `folder`."""

    folder: Path

    @property
    def digests(self):
        return self.folder / "state-"

    @property
    def loss_log(self):
        return self.folder / "loss.jsonl"

    def loop(self, *own):
        words = [str(TORCH_LOOP), "--device", "cuda", "--iterations", "16", "--loss-log", str(self.loss_log)]
        return [*words, "--state-digest", str(self.digests), *own]


def started(folder, *words):
    """Run a command to its end in `folder`; with status 0."""
    folder.mkdir(mode=0o700, exist_ok=True)
    environment = {**os.environ, **DETERMINISTIC, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder)}
    told = folder / "out"  # no pipe: an SMP that stays would have it open
    with told.open("w") as out:
        running = subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, stdout=out, stderr=out)
        try:
            status = running.wait(BOUND)
        except subprocess.TimeoutExpired:
            status = None
            running.terminate()
            running.wait(BOUND)
    assert status == 0, told.read_text(errors="replace")[-6000:]


def events(folder, name):
    [path] = folder.glob("ft_plugins/*/*/events.jsonl")
    return [event for event in read(path) if event.name == name]


@pytest.fixture
def folder(own_environment):
    """One whose path leaves room for that of a socket."""
    folder = own_environment / f"j{len(list(own_environment.iterdir()))}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.skipif("MEGATRON_LM_PATH" not in os.environ, reason="set MEGATRON_LM_PATH")
def test_megatrons_own_script_that_is_killed_ends_as_an_unprotected_one(folder, tmp_path):
    script = [str(Path(os.environ["MEGATRON_LM_PATH"]) / "pretrain_gpt.py"), *MEGATRON]
    script += ["--data-path", str(write_corpus(tmp_path / "text"))]
    size = ("--nproc-per-node", "1")
    golden, killed = folder / "g", folder / "k"
    started(golden, *TORCHRUN, *size, *script, "--save", str(golden / "saved"))
    fault = "--ftp-faults=iteration.forward@iteration=6,rank=0,restart=0:kill"
    saved = ("--save", str(killed / "saved"), "--load", str(killed / "saved"))
    started(killed, *FT_RUN, *size, "--reft", "--reft-interval", "1", fault, *script, *saved)
    restored = [(event.fields["tier"], event.fields["iteration"]) for event in events(killed, "state.restored")]
    assert restored in ([("process", 5)], [("process", 4)])
    ours, theirs = (megatron_checkpoints.read(one / "saved" / "iter_0000007").state for one in (killed, golden))
    assert megatron_checkpoints.differences(theirs, ours) == []


@pytest.mark.parametrize("ranks", [1, 2], ids=["one-over-nccl", "two-of-one-device-over-gloo"])
def test_a_loop_of_plain_torch_that_is_killed_ends_as_an_unprotected_one(folder, ranks):
    golden, killed = Run(folder / "g"), Run(folder / "k")
    size = ("--nproc-per-node", str(ranks))
    started(golden.folder, *TORCHRUN, *size, *golden.loop("--unprotected"))
    fault = f"--ftp-faults=update.end@iteration=9,rank={ranks - 1},restart=0:kill"
    started(killed.folder, *FT_RUN, *size, "--reft", fault, *killed.loop())
    assert [event.fields["iteration"] for event in events(killed.folder, "state.restored")] == [8] * ranks
    assert_identical(killed, golden, ranks)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_deepspeed_job_that_is_killed_ends_as_an_unprotected_one(folder, stage):
    configuration = DeepSpeedConfiguration(1, stage)
    golden = DeepSpeedRun("g", folder / "g", configuration)
    killed = DeepSpeedRun("k", folder / "k", configuration, {"reft": {}})
    killed = killed.armed("update.middle@iteration=4,rank=0,restart=0:kill")
    for run, launcher in ((golden, FT_RUN), (killed, FT_RUN)):
        started(run.folder, *launcher, "--nproc-per-node", "1", str(EXAMPLE), *run.spec().argv)
    assert [event.fields["iteration"] for event in events(killed.folder, "state.restored")] == [3]
    assert_identical(killed, golden, 1)
