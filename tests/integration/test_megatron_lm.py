"""An unmodified Megatron-LM checkout under ft-run: what a user of `pretrain_gpt.py` gets, on the CPU.

Runs where MEGATRON_LM_PATH names a checkout of core_v0.16.1. The witness is Megatron's own checkpoint at the end of
each run: parameters, optimizer, scheduler, counters and random number generators, compared bit for bit. (Logs would not
do: the second loss logged after any start is a mean of two iterations.)
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ft_plugins import events
from ft_plugins.config import run_directory

pytestmark = pytest.mark.timeout(900)

NODE = "here"
RUN_SECONDS = 400
ITERATIONS = 7
JOB = (
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--tensor-model-parallel-size", "2"),
    *("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "8"),
    *("--train-iters", str(ITERATIONS), "--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--split", "90,5,5", "--num-workers", "0"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-rope-fusion"),
    *("--no-bias-dropout-fusion", "--no-persist-layer-norm", "--seed", "1234", "--log-interval", "1"),
    *("--eval-iters", "1", "--eval-interval", "3", "--ckpt-format", "torch", "--save-interval", "4"),
)
HARDEST = (
    *("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--num-layers-per-virtual-pipeline-stage", "1"),
)
SKIPPING = ("--iterations-to-skip", "2")  # the third: counted from 0; fp32, no distributed optimizer, 1F1B
# arguments that tell of a process's start
HISTORY = {
    "save",
    "load",
    "iteration",
    "num_floating_point_operations_so_far",
}


@pytest.fixture(scope="module")
def checkout() -> Path:
    named = os.environ.get("MEGATRON_LM_PATH")
    if not named:
        pytest.skip("set MEGATRON_LM_PATH")
    return Path(named)


@pytest.fixture(scope="module")
def corpus(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a small tokenized data set, written by Megatron's own builder."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("corpus") / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    drawn = np.random.default_rng(5)
    for _ in range(60):
        tokens = torch.from_numpy(drawn.integers(0, 126, size=200))
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@dataclass(frozen=True)
class Run:
    """One finished command: its status, what it printed, the folder that it saved to, its job's name."""

    status: int
    output: str
    saved: Path
    job: str

    def events(self, name: str) -> list[events.Event]:
        """The events of that name, in order."""
        written = events.read(run_directory(self.job, NODE) / "events.jsonl")
        return [event for event in written if event.name == name]


def ft_run(script: Sequence[object], saved: Path, *arguments: object, job: str, ranks: int = 8) -> Run:
    """`ft-run ... script arguments`, bounded; a run that takes too long is ended with all that it started."""
    protected = "--reft" in arguments
    ours = ["--ftp-job", job, "--ftp-node-name", NODE] if protected else []
    launcher = [Path(sys.executable).with_name("ft-run"), "--nproc-per-node", ranks]
    command = [str(word) for word in (*launcher, *ours, *script, *arguments)]
    settings = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment = {**os.environ, **settings, "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"{' '.join(command)} took more than {RUN_SECONDS} s; it printed:\n{output[-4000:]}")
    return Run(process.returncode, output, saved, job)


def final_state(saved: Path) -> dict[str, Any]:
    """What Megatron saved at the end, by file."""
    folder = saved / f"iter_{ITERATIONS:07d}"
    files = sorted(folder.rglob("*.pt"))
    names = {file.name for file in files}
    assert len(files) == 4 * len(names), f"expected the files of 4 model-parallel ranks in {folder}, found {files}"
    return {str(file.relative_to(folder)): torch.load(file, weights_only=False) for file in files}


def differences(left: Any, right: Any, place: str = "") -> Iterator[str]:
    """Where two nested states differ, bit for bit."""
    match left:
        case torch.Tensor():
            same = isinstance(right, torch.Tensor) and left.dtype == right.dtype and left.shape == right.shape
            if not same or not torch.equal(as_bytes(left), as_bytes(right)):
                yield place
        case np.ndarray():
            if not np.array_equal(left, right):
                yield place
        case argparse.Namespace():
            yield from differences(vars(left), vars(right), place)
        case dict():
            if left.keys() != right.keys():
                yield f"{place}: keys {sorted(map(str, left.keys() ^ right.keys()))}"
            for key in left.keys() & right.keys():
                if not (place.endswith("args") and key in HISTORY):
                    yield from differences(left[key], right[key], f"{place}/{key}")
        case list() | tuple():
            if len(left) != len(right):
                yield f"{place}: {len(left)} and {len(right)} entries"
            for index, (one, other) in enumerate(zip(left, right, strict=False)):
                yield from differences(one, other, f"{place}[{index}]")
        case _:
            if left != right:
                yield f"{place}: {left!r} and {right!r}"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Case:
    """A configuration, the iteration in which rank 3 is killed, and where."""

    name: str
    options: tuple[str, ...]
    point: str
    iteration: int


CASES = (
    Case("overlapped-interleaved", HARDEST, "iteration.forward", 6),  # Megatron's own save has 4, memory 5
    Case("skipped-iteration", SKIPPING, "update.middle", 4),  # what is restored is the skipped one's version point
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def script(checkout: Path, corpus: Path, case: Case) -> list[object]:
    return [checkout / "pretrain_gpt.py", *JOB, *case.options, "--data-path", corpus]


@pytest.fixture(scope="module")
def unfailed(script: list[object], case: Case, tmp_path_factory: pytest.TempPathFactory) -> Run:
    saved = tmp_path_factory.mktemp("unfailed")
    run = ft_run(script, saved, "--save", saved, "--load", saved, job=f"unfailed-{case.name}")
    assert run.status == 0, run.output[-4000:]
    return run


def test_a_killed_run_ends_in_the_state_of_an_unfailed_one(
    script: list[object], case: Case, unfailed: Run, tmp_path: Path
) -> None:
    kill = f"{case.point}@iteration={case.iteration},rank=3,restart=0:kill"

    killed = ft_run(
        *(script, tmp_path, "--save", tmp_path, "--load", tmp_path),
        *("--reft", "--reft-interval", 1, "--ftp-faults", kill, "--ftp-orphan-seconds", 30),
        job=f"killed-{case.name}",
    )

    assert killed.status == 0, killed.output[-4000:]
    assert [event.fields["signal"] for event in killed.events("worker.failed") if event.rank == 3] == ["SIGKILL"]
    restored = killed.events("restore.done")
    assert sorted(event.rank for event in restored) == list(range(8)), restored
    versions = {(event.fields["tier"], event.fields["iteration"]) for event in restored}
    sealed, older = ("process", case.iteration - 1), ("process", case.iteration - 2)
    assert versions in ({sealed}, {older}), versions
    assert list(differences(final_state(unfailed.saved), final_state(tmp_path))) == []


def test_another_seed_ends_in_another_state(script: list[object], unfailed: Run, tmp_path: Path) -> None:
    other = ft_run(script, tmp_path, "--save", tmp_path, "--seed", 4321, job="megatron-seed")
    assert other.status == 0, other.output[-4000:]
    found = list(differences(final_state(unfailed.saved), final_state(tmp_path)))
    assert any("exp_avg" in place for place in found), found


def test_help_shows_our_flags_among_megatrons(checkout: Path, tmp_path: Path) -> None:
    shown = ft_run([checkout / "pretrain_gpt.py", "--help"], tmp_path, "--ftp-cpu", job="megatron-help", ranks=1)
    assert shown.status == 0, shown.output[-4000:]
    for flag in ("--reft", "--reft-interval", "--ftp-resume", "--tensor-model-parallel-size"):
        assert flag in shown.output


def test_a_restore_leaves_what_megatrons_own_load_leaves(checkout: Path, tmp_path: Path) -> None:
    probe = Path(__file__).with_name("megatron_probe.py")
    folders = {name: tmp_path / name for name in ("restored", "loaded", "save")}
    for folder in folders.values():
        folder.mkdir()
    options = [*JOB, "--mock-data", "--bf16", "--use-distributed-optimizer", "--save", folders["save"]]

    kill = "update.middle@iteration=5,rank=0,restart=0:kill"  # Megatron has saved iteration 4; memory has sealed it
    ours = ft_run(
        *([probe, checkout, folders["restored"], *options], tmp_path),
        *("--reft", "--ftp-faults", kill, "--ftp-orphan-seconds", 30),
        job="megatron-restored",
    )
    assert ours.status == 0, ours.output[-4000:]
    (folders["save"] / "latest_checkpointed_iteration.txt").write_text("4")
    theirs = ft_run(
        [probe, checkout, folders["loaded"], *options, "--load", folders["save"]], tmp_path, job="megatron-loaded"
    )
    assert theirs.status == 0, theirs.output[-4000:]

    for rank in range(8):
        restored, loaded = (
            torch.load(folders[name] / f"rank{rank}.pt", weights_only=False) for name in ("restored", "loaded")
        )
        assert restored["args"]["iteration"] == loaded["args"]["iteration"] == 4
        assert restored["args"]["num_floating_point_operations_so_far"] > 0
        assert restored["args"].pop("num_floating_point_operations_so_far") == loaded["args"].pop(
            "num_floating_point_operations_so_far"
        )
        assert list(differences(restored, loaded)) == [], f"rank {rank}"


EXPORTED = 4  # the iteration whose checkpoint is exported
OWN = ("--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable", "--make-vocab-size-divisible-by", "64")
VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "1")
OF_THE_LOOP = ("curr_iteration", "do_train", "do_valid", "do_test", "num_query_groups")  # set where they are used
EXPORTS = {
    "bf16-distopt-interleaved-swiglu": ((*HARDEST[:4], "--swiglu"), VIRTUAL),
    "fp32-replicated-untied": (("--untie-embeddings-and-output-weights",), ()),
}


@pytest.mark.parametrize("options", EXPORTS.values(), ids=EXPORTS)
def test_an_exported_checkpoint_is_the_one_that_megatron_saves_and_goes_on_alike(
    checkout: Path, corpus: Path, tmp_path: Path, options: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    model, virtual = options
    script = [checkout / "pretrain_gpt.py", *JOB, *model, *OWN, "--data-path", corpus]
    own, exported, gone_on, resized = (tmp_path / name for name in ("own", "exported", "gone-on", "resized"))
    storage = ("--reft", "--reft-checkpoint-dir", tmp_path / "ck", "--reft-checkpoint-interval", EXPORTED)
    storage += ("--ftp-orphan-seconds", 30)

    both = ft_run(script, own, *virtual, "--save", own, *storage, job=f"export-{len(model)}")
    assert both.status == 0, both.output[-4000:]
    (folder,) = (tmp_path / "ck").glob(f"*/v1-{EXPORTED}")
    command = [Path(sys.executable).with_name("ft-plugins"), "export", folder, "--to", exported]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    theirs, ours = saved_by_megatron(own, EXPORTED), saved_by_megatron(exported, EXPORTED)
    for arguments in (vars(theirs["common"]["args"]), vars(ours["common"]["args"])):
        for name in OF_THE_LOOP:
            arguments.pop(name, None)
    assert list(differences(theirs, ours)) == []

    plain = ft_run(script, gone_on, *virtual, "--load", exported, "--save", gone_on, job="export-gone-on")
    assert plain.status == 0, plain.output[-4000:]
    assert not (gone_on / f"iter_{EXPORTED:07d}").exists(), "it went on from the exported checkpoint, not from nothing"
    assert list(differences(saved_by_megatron(own, ITERATIONS), saved_by_megatron(gone_on, ITERATIONS))) == []

    sizes = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1")
    as_it_is = ("--train-iters", EXPORTED, "--save-interval", "3", "--use-checkpoint-opt_param-scheduler")
    other = ft_run(
        script, resized, *sizes, *as_it_is, "--load", exported, "--save", resized, job="export-resized", ranks=2
    )
    assert other.status == 0, other.output[-4000:]
    left, right = (saved_by_megatron(place, EXPORTED)["tensors"] for place in (exported, resized))
    assert list(differences(left, right)) == []


def saved_by_megatron(place: Path, iteration: int) -> dict[str, Any]:
    """A `torch_dist` checkpoint: every global tensor, the objects, what is common to all ranks."""
    folder = place / f"iter_{iteration:07d}"
    reader = dcp.FileSystemReader(folder)
    told = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in told.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    objects: dict[str, Any] = {key: None for key in told if key not in tensors}
    found: dict[str, Any] = {**tensors, **objects}
    dcp.load(found, storage_reader=reader, no_dist=True)
    common = torch.load(folder / "common.pt", weights_only=False)
    return {"tensors": tensors, "objects": {key: found[key] for key in objects}, "common": common}
