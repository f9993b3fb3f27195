"""Tell stories that fork gangs of Megatron ranks, in a process that imports Megatron once and has the device shim.

Run as a program with the names of stories, module.story. Printed is a JSON object, name -> traceback, null for one that
held.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path


def tell(names: list[str]) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    outcomes: dict[str, str | None] = {}
    for name in names:
        module, _, story = name.partition(".")
        told = getattr(importlib.import_module(module), story)
        began = time.monotonic()
        try:
            outcomes[name] = told()
        except BaseException:
            outcomes[name] = traceback.format_exc()[-20_000:]
        print(f"{time.monotonic() - began:6.1f} s  {name}", file=sys.stderr, flush=True)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    tell(sys.argv[1:])
