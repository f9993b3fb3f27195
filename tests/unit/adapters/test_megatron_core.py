"""The Megatron host with one rank: each story of `megatron_stories` and `naming_stories` is a test."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FILES = ("megatron_stories.py", "naming_stories.py", "megatron_paft_stories.py")


def stories(file: str) -> list[str]:
    tree = ast.parse(Path(__file__).with_name(file).read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("it_")]


pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra [megatron]")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    """Of every story: its traceback, None where it held."""
    found: dict[str, str | None] = {}
    for file in FILES:
        command = [sys.executable, str(Path(__file__).with_name(file))]
        told = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert told.returncode == 0, told.stderr[-4000:]
        found |= json.loads(told.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", [name for file in FILES for name in stories(file)])
def test_the_megatron_host(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
