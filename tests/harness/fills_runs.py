"""Runs of `fills`, the job of plain torch whose tensors show their version."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from .forkserver import JobSpec
from .runs import ExampleRun


@dataclass(frozen=True)
class FillsRun(ExampleRun):
    """A run of so many iterations of `seconds`, with so many MiB of state a rank."""

    framework = "torch"

    iterations: int
    ranks: int = 1
    mib: int = 8
    seconds: float = 0.0
    replicated: bool = False
    flags: tuple[str, ...] = ("--reft",)

    @property
    def journal(self) -> Path:
        """What ranks have restored, and where they have ended."""
        return self.folder / "journal"

    def armed(self, faults: str) -> FillsRun:
        return replace(self, flags=(*self.flags, "--ftp-faults", faults)) if faults else self

    def spec(self, **fields: object) -> JobSpec:
        self.folder.mkdir(parents=True, exist_ok=True)
        sizes = ("--iterations", str(self.iterations), "--mib", str(self.mib), "--seconds", str(self.seconds))
        words = (*sizes, "--journal", str(self.journal), *(["--replicated"] if self.replicated else []))
        own = {"entry": "harness.fills:main", "argv": words, "name": self.name, "folder": str(self.folder)}
        return JobSpec(**{**own, "nproc": self.ranks, "flags": self.flags, **fields})  # type: ignore[arg-type]
