"""Jobs in terms that Megatron and DeepSpeed share, so that one test runs with either: sizes, iterations, and whether
optimizer state is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ft_plugins.config import Config

from .deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from .megatron_runs import MegatronConfiguration, MegatronRun
from .runs import ExampleRun

FRAMEWORKS = ("megatron", "deepspeed")


@dataclass(frozen=True)
class JobShape:
    """A job of tp * pp * dp ranks. `pp` 0: DeepSpeed's engine without pipeline."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    distributed: bool = False  # optimizer
    iterations: int = 10
    global_batch: int = 0  # 0: the example's own

    @property
    def ranks(self) -> int:
        return self.tp * max(1, self.pp) * self.dp

    def run(
        self, framework: str, folder: Path = Path(), flags: Sequence[str] = (), protected: bool = False
    ) -> ExampleRun:
        """The job with a framework. A golden one has no flags, and is not protected."""
        make = {"megatron": self._megatron, "deepspeed": self._deepspeed}[framework]
        return make("run", folder, tuple(flags), protected)

    def _megatron(self, name: str, folder: Path, flags: tuple[str, ...], protected: bool) -> MegatronRun:
        """In bf16, with Megatron's distributed optimizer if state is sharded."""
        configuration = MegatronConfiguration(True, self.distributed, interleaved=False)
        argv: tuple[str, ...] = ("--order", "tp-cp-ep-pp-dp", "--tp", str(self.tp), "--pp", str(self.pp))
        argv += ("--global-batch", str(self.global_batch)) if self.global_batch else ()
        return MegatronRun(
            name, folder, configuration, protected, iterations=self.iterations, flags=flags, argv=argv, ranks=self.ranks
        )

    def _deepspeed(self, name: str, folder: Path, flags: tuple[str, ...], protected: bool) -> DeepSpeedRun:
        """A PipelineModule in bf16 with ZeRO-1, or in fp32 without ZeRO if state is replicated."""
        configuration = DeepSpeedConfiguration(
            self.ranks, int(self.distributed), self.distributed, pp=self.pp, tp=self.tp, batch=self.global_batch
        )
        words = ["--reft", *flags] if protected else list(flags)
        block = Config.from_flags(words)[0].block() if words else {}
        return DeepSpeedRun(name, folder, configuration, block, iterations=self.iterations)
