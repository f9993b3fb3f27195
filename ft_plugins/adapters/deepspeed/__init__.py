"""DeepSpeed as a host. `prepare()` comes before anything imports deepspeed; `install()` follows the script's loop.

Invariant: both only register what happens *when* a module is imported; a script that never imports DeepSpeed pays for
a few dictionary entries. In: the process. Out: DeepSpeed that builds nothing on a CPU, and engines that are followed
where a system is on.
"""

from __future__ import annotations

from collections.abc import Callable

from ...patches import apply_deepspeed_cpu
from ..imports import on_import
from .training import EngineHooks, Join


def prepare() -> bool:
    """Have DeepSpeed build nothing where there is no CUDA device; call it before anything imports deepspeed."""
    return apply_deepspeed_cpu(on_import)


def install(join: Join | None = None) -> Callable[[], None]:
    """Follow the engine that a script builds, as ft-run and the DeepSpeed configuration say. Call it once.

    `join` gives a rank that ft-run has not started what ft-run would have given it. What is returned is to be called
    when the script has ended in order.
    """
    hooks = EngineHooks(join)
    on_import("deepspeed.runtime.dataloader", hooks.positions.follow)
    on_import("deepspeed", hooks.follow)
    return hooks.finish


__all__ = ["install", "prepare"]
