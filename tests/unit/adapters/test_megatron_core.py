"""The Megatron host with one rank: each story of `megatron_stories` is a test."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

STORIES = Path(__file__).with_name("megatron_stories.py")
NAMES = [node.name for node in ast.parse(STORIES.read_text()).body if isinstance(node, ast.FunctionDef)]
NAMES = [name for name in NAMES if name.startswith("it_")]

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra [megatron]")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    """Of every story: its traceback, None where it held."""
    told = subprocess.run([sys.executable, str(STORIES)], capture_output=True, text=True, timeout=240)
    assert told.returncode == 0, told.stderr[-4000:]
    found: dict[str, str | None] = json.loads(told.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_megatron_host(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
