"""Megatron is patched for the CPU where its job asks for that, and nowhere else."""

import subprocess
import sys

import pytest
import torch

from ft_plugins.adapters.megatron import Decision, asked_by, decide
from ft_plugins.config import Config

GLOO = "--distributed-backend gloo"


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], ""),
        (["--distributed-backend", "gloo", "--lr", "1"], GLOO),
        (["--distributed-backend=gloo"], GLOO),
        (["--distributed-backend", "nccl"], ""),
        (["--distributed-backend", "gloo", "--distributed-backend", "nccl"], ""),
        (["--distributed-backend", "nccl", "--distributed-backend=gloo"], GLOO),
        (["gloo", "--distributed-backend"], ""),
        (["--other-backend", "gloo"], ""),
    ],
)
def test_a_job_asks_for_the_cpu_by_its_backend_or_by_our_switch(arguments, asked):
    assert asked_by(arguments, Config()) == asked_by(arguments, None) == asked
    assert asked_by(arguments, Config(cpu=True)) == "--ftp-cpu"


def test_only_a_job_that_asks_is_patched_and_only_a_protected_one_is_refused():
    decisions = {
        (device, asked, protected): decide(device, asked, protected)
        for device in (True, False)
        for asked in (True, False)
        for protected in (True, False)
    }
    assert {facts for facts, found in decisions.items() if found is Decision.PATCH} == {
        (False, True, True), (False, True, False)
    }  # fmt: skip
    assert {facts for facts, found in decisions.items() if found is Decision.REFUSE} == {(False, False, True)}


RANK = """
import sys
folder, flags, rank, *arguments = sys.argv[1:]
sys.path.insert(0, folder)
sys.argv = ["pretrain.py", *arguments]
from importlib.util import find_spec
import torch
from ft_plugins.config import Config, LaunchContext
from ft_plugins.launcher import hooks
config, _ = Config.from_flags(flags.split())
hooks.register(LaunchContext(config, None, 0, None, int(rank), int(rank), 2, 2, 0, 0))
assert find_spec("megatron") and not find_spec("megatron_lm"), "a script may look whether it is there"
try:
    import megatron.core
except Exception as error:
    print(type(error).__name__, error)
print("devices", torch.cuda.device_count(), torch.cuda.is_available(), torch.zeros(1).type())
"""
BARE = "devices 0 False torch.FloatTensor"
PATCHED = "devices 2 True torch.cuda.FloatTensor"


def ran(folder, flags, *arguments, rank=0):
    """What a rank of ft-run prints that imports Megatron, of a version that is not there yet."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True, exist_ok=True)
    (core / "__init__.py").write_text("__version__ = '0.99.0'\n")
    command = [sys.executable, "-c", RANK, folder, flags, str(rank), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@without_cuda
def test_a_protected_job_that_does_not_ask_is_refused_with_the_remedy_and_nothing_is_patched(tmp_path):
    refused, state = ran(tmp_path, "--reft", "--distributed-backend", "nccl")
    assert refused.startswith("ConfigError no CUDA device is visible on this node (torch: ")
    assert "--distributed-backend gloo or --ftp-cpu" in refused and "drain this node" in refused
    assert state == BARE


@without_cuda
def test_an_unprotected_job_that_does_not_ask_is_left_alone(tmp_path):
    assert ran(tmp_path, "") == [BARE]


@without_cuda
def test_a_job_that_asks_is_patched_and_its_first_rank_says_what_and_that_the_version_is_untested(tmp_path):
    said, state = ran(tmp_path, "--reft", "--distributed-backend", "gloo")
    assert said.startswith("ft_plugins: running Megatron on the CPU (--distributed-backend gloo; no CUDA device")
    assert "torch.cuda, " in said and "megatron.core.optimizer.distrib_optimizer" in said
    assert "Megatron 0.99.0 is untested with ft_plugins; tested versions: 0.14.0" in said
    assert state == PATCHED
    assert ran(tmp_path, "--reft --ftp-cpu", rank=1) == [PATCHED], "the other ranks say nothing"
    said, state = ran(tmp_path, "--ftp-cpu")
    assert "(--ftp-cpu; no CUDA device" in said and "untested" not in said and state == PATCHED
