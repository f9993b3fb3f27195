"""What runs of every example share: a folder for digests and loss log, and the job for the fork server.

Invariant: a golden run is not protected. It and the killed run that is compared with it share all other flags.

In: a run. Out: its `JobSpec`; what it wrote of its final state.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from .forkserver import JobSpec

EXAMPLES = Path(__file__).resolve().parents[2] / "launch" / "examples"
Run = TypeVar("Run", bound="ExampleRun")


@dataclass(frozen=True)
class ExampleRun:
    """A run of an example. `framework` names its fork server."""

    name: str
    folder: Path

    framework: ClassVar[str]

    @property
    def ranks(self) -> int:
        raise NotImplementedError

    @property
    def digests(self) -> Path:
        """Prefix of the files that describe the final state."""
        return self.folder / "state-"

    @property
    def loss_log(self) -> Path:
        return self.folder / "loss.jsonl"

    def state(self, rank: int) -> dict[str, Any]:
        """The description of a rank's final state."""
        found: dict[str, Any] = json.loads(Path(f"{self.digests}{rank:05d}.json").read_text())
        return found

    def items(self, rank: int) -> dict[str, Any]:
        """Digests of what a rank held in the end of parameters, by name; without what belongs to its optimizer."""
        return {name: digest for name, digest in self.state(rank)["items"].items() if ":" not in name}

    def armed(self: Run, faults: str) -> Run:
        """The same run with these faults, if there are any."""
        raise NotImplementedError

    def spec(self, **fields: object) -> JobSpec:
        """The job for the fork server; `fields` replace its own."""
        raise NotImplementedError

    def job(self, entry: str, words: Sequence[str], flags: Sequence[str], fields: dict[str, object]) -> JobSpec:
        """What `spec` returns, from the entry with its own words and the flags of ft-run. Makes the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {
            "entry": entry,
            "argv": (*words, "--state-digest", str(self.digests), "--loss-log", str(self.loss_log)),
            "name": self.name,
            "folder": str(self.folder),
            "nproc": self.ranks,
            "flags": tuple(flags),
            "environment": {"OMP_NUM_THREADS": "1"},
        }
        return JobSpec(**{**own, **fields})  # type: ignore[arg-type]
