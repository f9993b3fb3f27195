"""Megatron's CUDA kernels are not built.

Upstream file: megatron/legacy/fused_kernels/__init__.py, up to 0.16.
"""

from __future__ import annotations

from .declared import Patch


def patches() -> tuple[Patch, ...]:
    """The patch of the build."""
    return (
        Patch(
            *("megatron-core", "megatron.legacy.fused_kernels", "load", ("0.14.0", "0.15.3", "0.16.1")),
            reason="there is no nvcc; the unfused paths are taken",
            replace=lambda _: lambda args: None,
            parameters=("args",),
        ),
    )
