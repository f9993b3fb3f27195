"""Runs of the Megatron GPT example, usually at TP2 x PP2 x DP2.

Invariant: golden and killed runs share the same skipped update (an infinite gradient under a constant loss scale; a
skipped batch if the optimizer has no scaler) and the same evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ft_plugins.config import Config

from .forkserver import JobSpec
from .runs import EXAMPLES, ExampleRun

RANKS = 8
ITERATIONS = 8
SKIPPED, EVALUATED = 3, 5  # iterations
EXAMPLE = EXAMPLES / "megatron_gpt.py"
PRELOAD = ("ft_plugins.adapters.megatron:prepare", str(EXAMPLE), "ft_plugins.launcher.node_launch")


@dataclass(frozen=True)
class MegatronConfiguration:
    """One combination of precision, optimizer, schedule and overlap."""

    bf16: bool
    distributed_optimizer: bool
    interleaved: bool
    overlap_param_gather: bool = False
    sgd: bool = False  # with momentum, in place of Adam

    def __str__(self) -> str:
        words = ["bf16" if self.bf16 else "fp32", "distopt" if self.distributed_optimizer else "replicated"]
        words += ["interleaved" if self.interleaved else "1f1b"] + ["overlap"] * self.overlap_param_gather
        return "-".join(words + ["sgd"] * self.sgd)

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
        words += ["--optimizer", "sgd"] if self.sgd else []
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
) + tuple(MegatronConfiguration(bf16, False, False, sgd=True) for bf16 in (False, True))
HARDEST = MegatronConfiguration(True, True, True, True)


@dataclass(frozen=True)
class MegatronRun(ExampleRun):
    """A run of a configuration. `flags`: of ft-run; `argv`: further ones of the example; `kills`: faults."""

    framework = "megatron"

    configuration: MegatronConfiguration
    protected: bool = False
    kills: str = ""
    seed: int = 1234
    iterations: int = ITERATIONS
    flags: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    ranks: int = RANKS

    def armed(self, faults: str) -> MegatronRun:
        return replace(self, kills=faults or self.kills)

    def spec(self, **fields: object) -> JobSpec:
        faults = ";".join(filter(None, (self.configuration.faults(), self.kills)))
        words = [*self.configuration.argv(), "--seed", str(self.seed), "--iterations", str(self.iterations), *self.argv]
        flags = [*self.flags, *(["--ftp-faults", faults] if faults else [])]
        if self.protected:
            flags.insert(0, "--reft")
        if not Config.from_flags(flags)[0].systems:
            words, flags = words + flags, []  # without a system ft-run ignores them; the job reads them itself
        return self.job(f"{EXAMPLE}:main", words, flags, fields)
