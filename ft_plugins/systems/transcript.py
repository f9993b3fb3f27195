"""Write down what one rank reads, computes and keeps in each iteration, for `ft-plugins rehearse`.

One file per rank, in which each incarnation adds lines of JSON: `restored` right before the first iteration after a
restore, `iteration` at each version point. Both hold digests of every state item and the small state in readable form
(`model.digest`).

Invariant: writing changes no state. It takes as long as reading all state does: it is for rehearsals, not for training.

In: a host, the observations of its ledger. Out: lines.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..base import files
from ..model.digest import readable, state_digest
from ..model.host import Host
from ..model.progress import LONG, WorkPhase

RESTORED, ITERATION = "restored", "iteration"


def transcript_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.jsonl"


class Transcript:
    """The transcript of one rank in one incarnation."""

    def __init__(self, folder: str, host: Host) -> None:
        """Raises OSError if the folder cannot be made."""
        self._host = host
        self.lineage = 0  # of this incarnation, once it is known
        self._path = transcript_path(Path(folder), host.rank)
        files.make_private(self._path.parent)

    def restored(self, iteration: int) -> None:
        """All state of `iteration` is restored, data position and random numbers included."""
        self._add({"kind": RESTORED, "iteration": iteration, "loss": None})

    def completed(self, iteration: int, seen: dict[str, Any], long_phases: int, deferred: bool) -> None:
        """The version point of `iteration`. `long_phases`: a bit for each long phase that has been. `deferred`: its
        version is captured later."""
        phases = [phase.name.lower() for phase in WorkPhase if phase >= LONG and long_phases >> phase & 1]
        exact = {name: readable(value) for name, value in seen.items()}
        facts = {"kind": ITERATION, "iteration": iteration, "loss": seen["loss"], "deferred": deferred}
        self._add({**facts, "seen": exact, "phases": phases})

    def _add(self, line: dict[str, Any]) -> None:
        facts = {"lineage": self.lineage, "world_size": self._host.topology().world_size}
        text = json.dumps({**line, **facts, **state_digest(self._host)}) + "\n"
        with open(self._path, "a", opener=files.private) as file:
            file.write(text)


@torch.no_grad()
def disturb(host: Host, seed: int) -> None:
    """Overwrite every state item and seed the process's generators, as another initialisation would."""
    for tensor in (one for one in host.tensors().values() if not one.is_meta):
        tensor.detach().fill_(torch.tensor(7 + seed).to(tensor.dtype).item())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
