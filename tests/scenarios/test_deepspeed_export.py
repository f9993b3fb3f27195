"""A checkpoint of a DeepSpeed job, exported, loads by `engine.load_checkpoint`, and training goes on bit for bit.

The job that loads it is not protected. DeepSpeed's checkpoints have neither data position nor random numbers: scripts
put their data in place by `engine.global_steps`, and these have no dropout.
"""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from ft_plugins.snapshot.checkpoint import checkpoint
from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.golden import explain, losses, state_differences

BEGUN, ITERATIONS = 3, 6  # an epoch of the script with loaders of its own has three
OWN_LOADER = f"{Path(__file__).with_name('own_loader.py')}:main"
LOADS = f"{Path(__file__).with_name('loads_deepspeed_export.py')}:main"
NOT_IN_DEEPSPEEDS = ("/small/rng/", "/small/position/", "/small/counters/micro_steps")
# The last stage has the tied layer as a function of it, which DeepSpeed does not save: its table of positions is read
# by nothing there, but decays, as parameters without a gradient are given an empty one. The first stage's is compared.
UNUSED = "/tied_modules.embedding.place"

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")

CONFIGURATIONS = (
    DeepSpeedConfiguration(2, 1),
    DeepSpeedConfiguration(2, 1, pp=2),
    DeepSpeedConfiguration(2, 0, bf16=False),
    DeepSpeedConfiguration(2, 2),
    DeepSpeedConfiguration(2, 3),
    DeepSpeedConfiguration(4, 0, bf16=False, pp=2),
    DeepSpeedConfiguration(4, 1, accumulate="fp32", pp=2),
)
MORE = CONFIGURATIONS[2:]


@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(one, id=str(one), marks=pytest.mark.all_configurations if one in MORE else ())
        for one in CONFIGURATIONS
    ],
)
def test_an_exported_checkpoint_is_loaded_by_deepspeed_and_trained_on_bit_for_bit(jobs, tmp_path, configuration):
    words = ("--dropout", "0", *(("--eval-at", "0") if configuration.pp else ("--loader", "distributed")))
    golden = DeepSpeedRun("golden", tmp_path / "golden", configuration, {}, 1234, ITERATIONS, words=words)
    if not configuration.pp:
        golden = replace(golden, script=OWN_LOADER)
    jobs.finish(golden)

    flags = ("--reft", "--reft-checkpoint-dir", str(tmp_path / "ck"), "--reft-checkpoint-interval", str(BEGUN))
    jobs.finish(replace(golden, folder=tmp_path / "written", iterations=BEGUN), flags=flags)
    (folder,) = (tmp_path / "ck").glob(f"*/v1-{BEGUN}")
    assert f"iteration {BEGUN}" in exported(folder, tmp_path / "exported").stdout

    words = (*words, "--load", str(tmp_path / "exported"))
    if configuration.pp:
        words = (*words, "--samples", str(BEGUN * configuration.json()["train_batch_size"]))
    loaded = replace(golden, name="loaded", folder=tmp_path / "loaded", words=words)
    loaded = replace(loaded, script=LOADS if configuration.pp else OWN_LOADER)
    jobs.finish(loaded)
    found = [
        line
        for line in state_differences(loaded.digests, golden.digests, configuration.ranks)
        if not any(place in line for place in NOT_IN_DEEPSPEEDS) and not unused(line, configuration)
    ]
    assert not found, explain(found)
    wanted = losses(golden.loss_log)
    assert losses(loaded.loss_log) == {number: wanted[number] for number in range(BEGUN + 1, ITERATIONS + 1)}

    path = folder / checkpoint.data_file(1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refused = exported(folder, tmp_path / "damaged")
    assert refused.returncode == 1 and not (tmp_path / "damaged").exists()
    (line,) = refused.stderr.splitlines()
    assert path.name in line


def unused(line, configuration):
    """Whether a difference is in what the last stage has and does not read."""
    stage = configuration.ranks // max(1, configuration.pp)  # the pipeline is the outermost axis
    last = range(configuration.ranks - stage, configuration.ranks) if configuration.pp else ()
    return UNUSED in line and any(line.startswith(f"rank {rank}: ") for rank in last)


def exported(folder, target):
    """`ft-plugins export` as a user gives it, without the job."""
    command = [Path(sys.executable).with_name("ft-plugins"), "export", folder, "--to", target]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
