"""Megatron's fused functions run as they are written.

Upstream file: megatron/core/jit.py. `jit_fuser` is torch.compile, which on the CPU would call a C++ compiler in every
rank at start and may round differently from one compilation to the next.
"""

from __future__ import annotations

from .declared import Patch
from .versions import MEGATRON


def patches() -> tuple[Patch, ...]:
    """The patch of jit_fuser, in place before any module takes it from there."""
    return (
        Patch(
            *("megatron-core", "megatron.core.jit", "jit_fuser", MEGATRON),
            reason="torch.compile calls a C++ compiler in every rank; fusion gains nothing here",
            replace=lambda _: lambda function: function,
        ),
    )
