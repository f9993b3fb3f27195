"""Runs of the FSDP2 example. Without any system it runs without the package."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ft_plugins.config import Config

from .forkserver import JobSpec
from .runs import EXAMPLES, ExampleRun

ITERATIONS = 9
EXAMPLE = EXAMPLES / "fsdp_loop.py"
PRELOAD = (
    *(str(EXAMPLE), "ft_plugins.adapters.torch.fsdp", "ft_plugins.session", "ft_plugins.launcher.node_launch"),
    "torch._dynamo",  # which each rank would import otherwise, with its first optimizer, in most of a second
)
_MODEL = ("--layers", "2", "--hidden", "16", "--heads", "2", "--sequence", "16", "--eval-at", "4")


@dataclass(frozen=True)
class FsdpRun(ExampleRun):
    """A run with flags `argv` of the example and `flags` of ft-run."""

    framework = "fsdp"

    argv: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    kills: str = ""
    iterations: int = ITERATIONS
    ranks: int = 4

    def armed(self, faults: str) -> FsdpRun:
        return replace(self, kills=faults or self.kills)

    def spec(self, **fields: object) -> JobSpec:
        flags = [*self.flags, *(["--ftp-faults", self.kills] if self.kills else [])]
        words = [*_MODEL, "--iterations", str(self.iterations), *self.argv]
        if not Config.from_flags(flags)[0].systems:
            words.append("--unprotected")
        return self.job(f"{EXAMPLE}:main", words, flags, fields)
