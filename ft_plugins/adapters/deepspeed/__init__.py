"""DeepSpeed as a host. `prepare()` comes before anything imports deepspeed; `install()` follows the script's loop.

Invariant: both only register what happens *when* a module is imported; a script that never imports DeepSpeed pays for
a few dictionary entries. In: the process. Out: DeepSpeed that builds nothing on a CPU, and engines that are followed
where a system is on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from ... import events
from ...config import LaunchContext
from ...patches import apply_deepspeed_cpu, deepspeed_patches, untested
from ..script_hooks import on_import
from .training import EngineHooks, Join


def prepare() -> bool:
    """Have DeepSpeed build nothing where there is no CUDA device; call it before anything imports deepspeed."""
    return apply_deepspeed_cpu(on_import)


def prepare_launched(context: LaunchContext) -> None:
    """`prepare` for a rank that a launcher has started. Rank 0 says what is patched, and of a job that ft-run protects
    that its version of DeepSpeed is untested. Nothing here pretends to be a CUDA device, so no job is refused."""
    names = " and ".join(f"{one.module}.{one.symbol}" for one in deepspeed_patches())
    patched = f"no CUDA device is visible: patched, as far as they are imported, are {names}" if prepare() else ""
    protected = context.config is not None and bool(context.config.systems)

    def report(module: ModuleType) -> None:
        remarks = (patched, untested("DeepSpeed", module.__version__) if protected else "")
        if any(remarks):
            events.say(". ".join(filter(None, remarks)))

    if context.rank == 0:
        on_import("deepspeed", report)


def install(join: Join | None = None) -> Callable[[], None]:
    """Follow the engine that a script builds, as ft-run and the DeepSpeed configuration say. Call it once.

    `join` gives a rank that ft-run has not started what ft-run would have given it. What is returned is to be called
    when the script has ended in order.
    """
    hooks = EngineHooks(join)
    on_import("deepspeed.runtime.dataloader", hooks.positions.follow)
    on_import("deepspeed", hooks.follow)
    return hooks.finish


__all__ = ["install", "prepare", "prepare_launched"]
