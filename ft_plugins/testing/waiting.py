"""Reads what jobs of the rig have written about themselves, and waits for it: bounded, without polling for luck.

In: a file of JSON lines that other processes append to. Out: entries, or a TimeoutError that shows what was there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..events import recent_of

_LOOK_SECONDS = 0.005

Entry = dict[str, Any]


def entries(path: Path) -> list[Entry]:
    """The complete lines of `path`, none where there is no file yet; of events those of recent routine ones as well, by
    time."""
    found, recent = _lines(path), _lines(recent_of(path))
    return sorted([*recent, *found], key=lambda entry: float(entry["time"])) if recent else found


def _lines(path: Path) -> list[Entry]:
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for(path: Path, condition: Callable[[list[Entry]], bool], seconds: float) -> list[Entry]:
    """The entries once `condition` holds of them. Raises TimeoutError after `seconds`."""
    found: list[Entry] = []

    def holds() -> bool:
        found[:] = entries(path)
        return condition(found)

    wait_until(holds, seconds, lambda: f"{path.name}: last entries: {found[-5:]}")
    return found


def wait_until_stopped(pid: int, seconds: float) -> None:
    """Until the kernel says that `pid` is stopped by a signal. Raises TimeoutError after `seconds`."""

    def state() -> str:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    wait_until(lambda: state() == "T", seconds, lambda: f"process {pid} is in state {state()}")


def wait_until(holds: Callable[[], bool], seconds: float, found: Callable[[], str]) -> None:
    """Until `holds`. Raises TimeoutError after `seconds`, with what was `found` instead."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s; {found()}")
        time.sleep(_LOOK_SECONDS)
