"""Reads what jobs of the rig have written about themselves, and waits for it: bounded, without polling for luck.

In: a file of JSON lines that other processes append to. Out: entries, or a TimeoutError that shows what was there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 0.005

Entry = dict[str, Any]


def entries(path: Path) -> list[Entry]:
    """The complete lines of `path`; none where there is no file yet."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for(path: Path, condition: Callable[[list[Entry]], bool], seconds: float) -> list[Entry]:
    """The entries once `condition` holds of them. Raises TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        found = entries(path)
        if condition(found):
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name}: not within {seconds:.0f} s; last entries: {found[-5:]}")
        time.sleep(_LOOK_SECONDS)
