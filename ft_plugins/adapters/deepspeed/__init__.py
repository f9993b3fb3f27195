"""DeepSpeed as a host. Call `prepare()` before anything imports deepspeed; `install()` hooks the script's loop.

Invariant: both only register what happens *when* a module is imported; a script that never imports DeepSpeed pays for
a few dictionary entries. In: the process. Out: a DeepSpeed that builds nothing on a CPU, and hooked engines if a system
is on."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from ... import events
from ...config import LaunchContext
from ...patches import apply_deepspeed_cpu, untested
from ...patches.deepspeed_cpu import PATCHES
from ..script.script_hooks import on_import
from .clients.known import follow_known
from .training import EngineHooks, Join


def prepare() -> bool:
    """Make DeepSpeed build nothing without a CUDA device; call it before anything imports deepspeed."""
    return apply_deepspeed_cpu(on_import)


def prepare_launched(context: LaunchContext) -> None:
    """`prepare` for a rank that a launcher started. Rank 0 reports the patches, and in a protected job an untested
    version of DeepSpeed. Unlike Megatron's shim nothing imitates a CUDA device, so no job is refused."""
    names = " and ".join(f"{one.module}.{one.symbol}" for one in PATCHES)
    patched = f"no CUDA device is visible: patching {names} when imported" if prepare() else ""
    protected = context.config is not None and bool(context.config.systems)

    def report(module: ModuleType) -> None:
        remarks = (patched, untested("DeepSpeed", module.__version__) if protected else "")
        if any(remarks):
            events.say(". ".join(filter(None, remarks)))

    if context.rank == 0:
        on_import("deepspeed", report)


def install(join: Join | None = None) -> Callable[[], None]:
    """Hook the engine that a script builds, as configured by ft-run and the DeepSpeed configuration. Call it once.

    `join` connects a rank that ft-run did not start. Returns a function to call at the script's orderly end.
    """
    hooks = EngineHooks(join)
    on_import("deepspeed.runtime.dataloader", hooks.positions.follow)
    on_import("deepspeed", hooks.follow)
    follow_known(hooks.clients, on_import)
    return hooks.finish
