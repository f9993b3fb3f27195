"""Tell stories that fork gangs of Megatron ranks, in a process that imports Megatron once and has the device shim.

Run as a program with the names of stories, module.story. Printed is a JSON object, name -> traceback, null for one that
held. `stories` and `selected` make tests of them. A story of a module without gangs is told on one rank.
"""

import ast
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
FOUND_IN = (HERE, HERE.parents[1], HERE.parents[2] / "launch" / "examples")  # siblings, the harness, the example
SECONDS = 280


def stories(*files):
    """Parametrizes a test with the names of the stories in these modules; those that are marked `large` are."""
    import pytest

    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                f"{file}.{one.name}",
                marks=[
                    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra [megatron]"),
                    *([pytest.mark.all_configurations] if one.decorator_list else []),
                ],
            )
            for file in files
            for one in ast.parse((HERE / f"{file}.py").read_text()).body
            if isinstance(one, ast.FunctionDef) and one.name.startswith("it_")
        ],
    )


def selected(items, path, seconds=SECONDS):
    """The outcomes of the stories that tests of the file `path` name, among all tests of the session."""
    names = list(dict.fromkeys(item.callspec.params["name"] for item in items if item.path == path))
    command = [sys.executable, str(Path(__file__)), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return found


def tell(names):
    """Tell stories one after another."""
    sys.path[:0] = map(str, FOUND_IN)
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    from harness.gang import gang

    outcomes = {}
    for name in names:
        module, _, story = name.partition(".")
        place = importlib.import_module(module)
        began = time.monotonic()
        try:
            told = getattr(place, story)
            outcomes[name] = told() if hasattr(place, "gang") else gang(_alone, 1, told)[0]
        except BaseException:
            outcomes[name] = traceback.format_exc()[-20_000:]
        print(f"{time.monotonic() - began:6.1f} s  {name}", file=sys.stderr, flush=True)
    print(json.dumps(outcomes))


def _alone(rank, world, told):
    told()


if __name__ == "__main__":
    tell(sys.argv[1:])
