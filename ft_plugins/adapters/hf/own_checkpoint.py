"""Decide which checkpoint of its own a Trainer loads.

Invariant: one that was not saved to its end, because the Trainer was killed in it, is not loaded. Of a complete one and
a version of this job `recovery/source_choice.py` decides which one counts: these checkpoints lack what callbacks keep,
so the job's own version does, unless the job has gone on elsewhere.

In: what the script gives `Trainer.train`; files. Out: what it is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LACKING = "what callbacks and a subclass of Trainer keep"
_STATE = "trainer_state.json"  # which a Trainer writes last


@dataclass(frozen=True)
class OwnCheckpoint:
    """`load`: what `train` is given as `resume_from_checkpoint`. `incomplete`: the checkpoint that is not loaded, and
    why; '' for none."""

    load: str | bool | None
    incomplete: str = ""


def own_checkpoint(given: str | bool | None, last: Callable[[], str | None]) -> OwnCheckpoint:
    """`given` by the script; `last` finds the last one in the Trainer's folder. What is no folder is the Trainer's to
    refuse."""
    path = (last() if given is True else given) or ""
    if not path or not Path(path).is_dir():
        return OwnCheckpoint(given)
    try:
        json.loads((Path(path) / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return OwnCheckpoint(None, f"{path} was not saved to its end ({_STATE}: {error})")
    return OwnCheckpoint(given)
