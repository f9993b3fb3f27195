"""A job's arguments are read by the parser that its own folder has, without starting it."""

import json
import os
import subprocess
import sys

import pytest

ARGUMENTS = """
import argparse, os, sys

def add_megatron_arguments(parser):
    for name in ("tensor-model", "pipeline-model", "context", "expert-model"):
        parser.add_argument(f"--{name}-parallel-size", type=int, default=1)
    parser.add_argument("--expert-tensor-parallel-size", type=int)
    parser.add_argument("--fp8-format", dest="fp8", choices=["hybrid"])
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--end", action="store_true")
    parser.add_argument("--yaml-cfg")
    return parser

def parse_args(ignore_unknown_args=False):
    args, _ = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_known_args()
    args.world_size = int(os.environ["WORLD_SIZE"])
    if args.yaml_cfg:
        open(args.yaml_cfg)
    return args

def validate_args(args, defaults):
    print("validated", args.world_size)
    args.data_parallel_size = args.world_size // args.tensor_model_parallel_size
    if args.end and args.vocab_size != 7:
        sys.exit("not here")
    assert (
        args.data_parallel_size == 1), "one replica only"
    for name in ("fp8", "vocab_size"):
        if name == "vocab_size":
            with open(os.devnull):
                assert not args.vocab_size or args.fp8 is None
"""
MEMORY = """
def compute_weight_and_optimizer_memory(args):
    assert not args.use_distributed_optimizer
    return 18 * 1000 * args.padded_vocab_size
"""
READ = """
import json, os, sys
from pathlib import Path
from ft_plugins.adapters.megatron.arguments import read_arguments
from ft_plugins.errors import FtError
for line in sys.stdin:
    if os.fork() == 0:
        folder, ranks, words = json.loads(line)
        try:
            read = read_arguments(Path(folder), words, ranks)
            outcome = {**vars(read), "values": vars(read.values)}
        except FtError as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        print("outcome" + json.dumps(outcome), flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit("a read ended with an exception")
"""


@pytest.fixture(scope="module")
def reader():
    """A process that has imported what reads, and reads each folder in a fork: a process reads one version."""
    command = [sys.executable, "-W", "ignore", "-c", READ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": ""}, **pipes) as started:
        yield started
        started.stdin.close()
        assert started.wait(200) == 0


@pytest.fixture
def read(reader, tmp_path):
    """What is read of a folder with Megatron-LM's modules, by ranks and arguments."""
    files = {"__init__": "", "core/__init__": "__version__ = '9.9'", "training/__init__": ""}
    files |= {"training/arguments": ARGUMENTS, "training/theoretical_memory_usage": MEMORY}
    for name, text in files.items():
        file = tmp_path / "megatron" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def ask(ranks, *words):
        print(json.dumps([str(tmp_path), ranks, words]), file=reader.stdin, flush=True)
        said = reader.stdout.readline()  # ends if the process does
        assert said.startswith("outcome"), "what Megatron-LM prints is kept back"
        found = json.loads(said.removeprefix("outcome"))
        return found

    return ask


def test_the_folders_own_parser_says_what_an_argument_is(read):
    sizes = (
        "--tensor-model-parallel-size",
        "2",
        "--pipeline-model-parallel-size",
        "2",
        "--expert-tensor-parallel-size",
        "1",
    )
    found = read(1, *sizes, "--fp8-format", "hybrid", "--own", "3", "--vocab-size", "7")
    assert (found["version"], found["unknown"], found["ranks"]) == ("9.9", ["--own"], 4)
    assert found["values"]["fp8"] == "hybrid" and found["values"]["data_parallel_size"] == 2
    assert found["problem"] == 'AssertionError: one replica only (args.data_parallel_size == 1), "one replica only")'
    assert found["parameters"] == 7 * 1000 * 4


def test_arguments_that_its_parser_refuses_are_one_line_and_an_exit_is_a_problem(read):
    assert "FtError: Megatron-LM's own parser refuses" in read(1, "--fp8-format", "fp9")["error"]
    ended = read(1, "--end", "--expert-model-parallel-size", "3")
    problem = 'SystemExit: not here (sys.exit("not here"))'
    assert (ended["problem"], ended["ranks"], ended["parameters"]) == (problem, 3, None)


def test_a_refusal_without_a_message_is_named_by_the_line_of_megatron_that_it_comes_from(read):
    found = read(1, "--fp8-format", "hybrid", "--vocab-size", "9")
    assert found["problem"] == "AssertionError: no message (assert not args.vocab_size or args.fp8 is None)"


def test_a_file_of_arguments_that_only_the_job_reads_cannot_be_checked(read, tmp_path):
    (tmp_path / "job.yaml").write_text("")
    refused = read(1, "--yaml-cfg", str(tmp_path / "job.yaml"))["error"]
    assert refused.startswith("FtError: ") and "job.yaml: a YAML file of arguments is read when the job" in refused


def test_what_its_parser_raises_is_one_line(read):
    missing = read(1, "--yaml-cfg", "no.yaml")["error"]
    assert missing.startswith("FtError: Megatron-LM's own parser refuses") and "no.yaml" in missing
