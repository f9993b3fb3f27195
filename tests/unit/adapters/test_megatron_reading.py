"""A job's arguments are read by the parser that its own folder has, without starting it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
import json, sys
from pathlib import Path
from ft_plugins.adapters.megatron.arguments import read_arguments
from ft_plugins.errors import FtError
try:
    read = read_arguments(Path(sys.argv[1]), sys.argv[3:], int(sys.argv[2]))
    outcome = {**vars(read), "values": vars(read.values)}
except FtError as error:
    outcome = {"error": f"{type(error).__name__}: {error}"}
print("outcome" + json.dumps(outcome))
"""


def read(folder: Path, ranks: int, *words: str) -> dict[str, Any]:
    """What is read in a process of its own."""
    files = {"__init__": "", "core/__init__": "__version__ = '9.9'", "training/__init__": ""}
    files |= {"training/arguments": ARGUMENTS, "training/theoretical_memory_usage": MEMORY}
    for name, text in files.items():
        file = folder / "megatron" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    command = [sys.executable, "-W", "ignore", "-c", READ, str(folder), str(ranks), *words]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "validated" not in done.stdout, "what Megatron-LM prints is kept back"
    found: dict[str, Any] = json.loads(done.stdout.rpartition("outcome")[2])
    return found


def test_the_folders_own_parser_says_what_an_argument_is(tmp_path: Path) -> None:
    sizes = (
        "--tensor-model-parallel-size",
        "2",
        "--pipeline-model-parallel-size",
        "2",
        "--expert-tensor-parallel-size",
        "1",
    )
    found = read(tmp_path, 1, *sizes, "--fp8-format", "hybrid", "--own", "3", "--vocab-size", "7")
    assert (found["version"], found["unknown"], found["ranks"]) == ("9.9", ["--own"], 4)
    assert found["values"]["fp8"] == "hybrid" and found["values"]["data_parallel_size"] == 2
    assert found["problem"] == "AssertionError: one replica only (data_parallel_size 2)"
    assert found["parameters"] == 7 * 1000 * 4


def test_arguments_that_its_parser_refuses_are_one_line_and_an_exit_is_a_problem(tmp_path: Path) -> None:
    assert "FtError: Megatron-LM's own parser refuses" in read(tmp_path, 1, "--fp8-format", "fp9")["error"]
    ended = read(tmp_path, 1, "--end", "--expert-model-parallel-size", "3")
    problem = "SystemExit: not here (--end True, --vocab-size None)"
    assert (ended["problem"], ended["ranks"], ended["parameters"]) == (problem, 3, None)


def test_a_refusal_without_a_message_is_named_by_the_arguments_that_it_looks_at(tmp_path: Path) -> None:
    found = read(tmp_path, 1, "--fp8-format", "hybrid", "--vocab-size", "9")
    assert found["problem"] == "AssertionError: no message (--vocab-size 9, --fp8-format hybrid)"


def test_a_file_of_arguments_that_only_the_job_reads_cannot_be_checked(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("")
    refused = read(tmp_path, 1, "--yaml-cfg", str(tmp_path / "job.yaml"))["error"]
    assert refused.startswith("FtError: ") and "job.yaml: a YAML file of arguments is read when the job" in refused


def test_what_its_parser_raises_is_one_line(tmp_path: Path) -> None:
    missing = read(tmp_path, 1, "--yaml-cfg", "no.yaml")["error"]
    assert missing.startswith("FtError: Megatron-LM's own parser refuses") and "no.yaml" in missing
