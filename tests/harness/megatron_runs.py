"""Describe runs of the Megatron GPT example at TP2 x PP2 x DP2 for exactness tests: golden, and protected and killed.

Invariant: a golden run has no system. It and the killed run share all other flags, the same skipped update (an infinite
gradient under a constant loss scale; a skipped batch if the optimizer has no scaler) and the same evaluation.

In: a `MegatronConfiguration`. Out: `JobSpec`s for the fork server, prefixes of their digests and loss logs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ft_plugins.config import Config

from .forkserver import JobSpec

RANKS = 8
ITERATIONS = 8
SKIPPED, EVALUATED = 3, 5  # iterations
EXAMPLE = Path(__file__).resolve().parents[2] / "launch" / "examples" / "megatron_gpt.py"
PRELOAD = ("ft_plugins.adapters.megatron:prepare", str(EXAMPLE), "ft_plugins.launcher.node_launch")


@dataclass(frozen=True)
class MegatronConfiguration:
    """One combination of precision, optimizer, schedule and overlap."""

    bf16: bool
    distributed_optimizer: bool
    interleaved: bool
    overlap_param_gather: bool = False

    def __str__(self) -> str:
        words = ["bf16" if self.bf16 else "fp32", "distopt" if self.distributed_optimizer else "replicated"]
        words += ["interleaved" if self.interleaved else "1f1b"] + ["overlap"] * self.overlap_param_gather
        return "-".join(words)

    @property
    def has_scaler(self) -> bool:
        """Whether Megatron's optimizer checks for infinities and skips the update."""
        return self.bf16 or self.distributed_optimizer

    def argv(self) -> list[str]:
        """The example's flags."""
        words = ["--tp", "2", "--pp", "2", "--eval-at", str(EVALUATED), "--bf16" if self.bf16 else "--fp32"]
        words += ["--virtual-stages", "2"] if self.interleaved else []
        words += ["--distributed-optimizer"] if self.distributed_optimizer else []
        words += ["--overlap-param-gather"] if self.overlap_param_gather else []
        words += ["--loss-scale", "1.0"] if self.has_scaler else ["--iterations-to-skip", str(SKIPPED)]
        return words

    def faults(self) -> str:
        """The infinite gradient, on every rank."""
        return f"update.begin@iteration={SKIPPED}:inf" if self.has_scaler else ""


ALL = tuple(
    MegatronConfiguration(bf16, distributed, interleaved, overlap)
    for bf16 in (False, True)
    for distributed in (False, True)
    for interleaved in (False, True)
    for overlap in ((False, True) if distributed else (False,))
)
HARDEST = MegatronConfiguration(True, True, True, True)


@dataclass(frozen=True)
class MegatronRun:
    """A run in `folder`, where its digests and its loss log go."""

    name: str
    folder: Path
    configuration: MegatronConfiguration
    protected: bool = False
    kills: str = ""
    seed: int = 1234
    iterations: int = ITERATIONS
    flags: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    ranks: int = RANKS

    @property
    def digests(self) -> Path:
        """Prefix of the files that describe the final state."""
        return self.folder / "state-"

    @property
    def loss_log(self) -> Path:
        return self.folder / "loss.jsonl"

    def armed(self, faults: str) -> MegatronRun:
        """The same run with `faults` in place of its kills, if there are any."""
        return replace(self, kills=faults or self.kills)

    def spec(self, **fields: object) -> JobSpec:
        """The job for the fork server."""
        faults = ";".join(filter(None, (self.configuration.faults(), self.kills)))
        words = [*self.configuration.argv(), "--seed", str(self.seed), "--iterations", str(self.iterations)]
        words += ["--state-digest", str(self.digests), "--loss-log", str(self.loss_log), *self.argv]
        flags = [*self.flags, *(["--ftp-faults", faults] if faults else [])]
        if self.protected:
            flags.insert(0, "--reft")
        if not Config.from_flags(flags)[0].systems:
            words, flags = words + flags, []  # without a system ft-run ignores them; the job reads them itself
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
