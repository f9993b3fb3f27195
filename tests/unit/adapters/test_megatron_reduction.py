"""Gradients that stay inside a replica of a Megatron job, modules, instances: each story of three files is a test."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FILES = ("megatron_reduction_stories", "megatron_module_stories", "megatron_instance_stories")
SECONDS = 280

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra [megatron]")


def stories() -> list[Any]:
    """The names of the stories, with the marker of those that are marked `large`."""
    return [
        pytest.param(f"{file}.{one.name}", marks=pytest.mark.all_configurations if one.decorator_list else ())
        for file in FILES
        for one in ast.parse((HERE / f"{file}.py").read_text()).body
        if isinstance(one, ast.FunctionDef) and one.name.startswith("it_")
    ]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """The traceback of each story that was selected, None if it held. One process imports Megatron for all."""
    own = [item for item in request.session.items if item.path == Path(__file__)]
    names = list(dict.fromkeys(item.callspec.params["name"] for item in own))  # type: ignore[attr-defined]
    command = [sys.executable, str(HERE / "gang_stories.py"), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", stories())
def test_the_reduction_of_a_megatron_job(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
