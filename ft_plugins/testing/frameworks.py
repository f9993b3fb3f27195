"""The job of a story, on each framework that can run it.

Invariant: what a story says of its job means the same on all of them: sizes, sharded or replicated optimizer state,
iterations, flags of ft_plugins. Data-parallel replicas stand on different nodes. What a framework's example cannot be
is refused, not approximated.

In: a `JobShape`. Out: a `Run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..config import Config
from . import deepspeed_runs, gpt_runs
from .deepspeed_runs import DeepSpeedRun
from .gpt_runs import GptRun
from .multinode import Run
from .story import JobShape


def megatron_run(shape: JobShape, name: str, folder: Path, flags: Sequence[str] = (), protected: bool = True) -> GptRun:
    """On megatron-core, in bf16, with its distributed optimizer where the story wants it."""
    argv = ["--order", "tp-cp-ep-pp-dp", "--tp", str(shape.tp), "--pp", str(shape.pp)]
    if shape.global_batch:
        argv += ["--global-batch", str(shape.global_batch)]
    configuration = gpt_runs.Configuration(bf16=True, distributed_optimizer=shape.distributed, interleaved=False)
    return GptRun(
        name, folder, configuration, protected=protected, iterations=shape.iterations,
        flags=tuple(flags), argv=tuple(argv), ranks=shape.ranks,
    )  # fmt: skip


def deepspeed_run(
    shape: JobShape, name: str, folder: Path, flags: Sequence[str] = (), protected: bool = True
) -> DeepSpeedRun:
    """On DeepSpeed, as a PipelineModule: bf16 with ZeRO-1, else fp32 without ZeRO."""
    configuration = deepspeed_runs.Configuration(
        shape.ranks, 1 if shape.distributed else 0, bf16=shape.distributed, pp=shape.pp, tp=shape.tp,
        batch=shape.global_batch or 0,
    )
    words = ["--reft", *flags] if protected else list(flags)
    block = Config.from_flags(words)[0].block() if words else {}
    return DeepSpeedRun(name, folder, configuration, block, iterations=shape.iterations)


FRAMEWORKS: dict[str, Callable[..., Run]] = {"megatron": megatron_run, "deepspeed": deepspeed_run}
