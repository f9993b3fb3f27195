"""Build no CUDA kernels for Megatron, and do not compile its fused functions.

megatron/core/jit.py: `jit_fuser` is torch.compile, which on the CPU calls a C++ compiler in every rank at start and may
round differently from one compilation to the next.
megatron/legacy/fused_kernels/__init__.py, up to 0.16, builds CUDA kernels.
"""

from __future__ import annotations

from .declared import Patch
from .versions import MEGATRON


def patches() -> tuple[Patch, ...]:
    """Both patches; jit_fuser is replaced before any module imports it."""
    return (
        Patch(
            *("megatron-core", "megatron.core.jit", "jit_fuser", MEGATRON),
            reason="torch.compile calls a C++ compiler in every rank; fusion gains nothing here",
            replace=lambda _: lambda function: function,
        ),
        Patch(
            *("megatron-core", "megatron.legacy.fused_kernels", "load", ("0.14.0", "0.15.3", "0.16.1")),
            reason="there is no nvcc; Megatron uses its unfused paths",
            replace=lambda _: lambda args: None,
            parameters=("args",),
        ),
    )
