"""Describe runs of the FSDP2 example for exactness tests: golden, and protected and killed.

Invariant: a golden run takes no snapshots. It and the killed run share all other flags. Without any system it runs
without the package.

In: flags of the example and of ft-run. Out: `JobSpec`s for the fork server, prefixes of their digests and loss logs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ft_plugins.config import Config

from .forkserver import JobSpec

ITERATIONS = 9
EXAMPLE = Path(__file__).resolve().parents[2] / "launch" / "examples" / "fsdp_loop.py"
PRELOAD = (
    *(str(EXAMPLE), "ft_plugins.adapters.torch.fsdp", "ft_plugins.session", "ft_plugins.launcher.node_launch"),
    "torch._dynamo",  # which each rank would import otherwise, with its first optimizer, in most of a second
)
_MODEL = ("--layers", "2", "--hidden", "16", "--heads", "2", "--sequence", "16", "--eval-at", "4")


@dataclass(frozen=True)
class FsdpRun:
    """A run in `folder`, where its digests and its loss log go. `argv`: of the example; `flags`: of ft-run."""

    name: str
    folder: Path
    argv: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    kills: str = ""
    iterations: int = ITERATIONS
    ranks: int = 4

    @property
    def digests(self) -> Path:
        """Prefix of the files that describe the final state."""
        return self.folder / "state-"

    @property
    def loss_log(self) -> Path:
        return self.folder / "loss.jsonl"

    def armed(self, faults: str) -> FsdpRun:
        """The same run with `faults` in place of its kills, if there are any."""
        return replace(self, kills=faults or self.kills)

    def spec(self, **fields: object) -> JobSpec:
        """The job for the fork server."""
        words = [*_MODEL, "--iterations", str(self.iterations), *self.argv]
        words += ["--state-digest", str(self.digests), "--loss-log", str(self.loss_log)]
        flags = [*self.flags, *(["--ftp-faults", self.kills] if self.kills else [])]
        if not Config.from_flags(flags)[0].systems:
            words.append("--unprotected")
        fields_of_run = {
            "entry": f"{EXAMPLE}:main",
            "argv": tuple(words),
            "name": self.name,
            "folder": str(self.folder),
            "nproc": self.ranks,
            "flags": tuple(flags),
            "environment": {"OMP_NUM_THREADS": "1"},
        }
        return JobSpec(**{**fields_of_run, **fields})  # type: ignore[arg-type]
