"""Kernels that need nvcc or triton are not built, and refuse when they are called.

Upstream files: megatron/legacy/fused_kernels/__init__.py, and the modules that import triton outside of any `try`.
"""

from __future__ import annotations

from .declared import Patch, Stub

VERSIONS = ("0.16.1",)
REASON = "it is written in triton, which needs a CUDA device"


def patches() -> tuple[Patch, ...]:
    """The patch of the build of the CUDA kernels."""
    return (
        Patch(
            *("megatron-core", "megatron.legacy.fused_kernels", "load", VERSIONS),
            reason="there is no nvcc; the unfused paths are taken",
            replace=lambda _: lambda args: None,
            parameters=("args",),
        ),
    )


def stubs() -> tuple[Stub, ...]:
    """Modules that training imports without using them."""
    core = "megatron.core"
    return (
        Stub(
            *("megatron-core", f"{core}.transformer.custom_layers.batch_invariant_kernels", VERSIONS, REASON, "triton"),
            answers={"is_batch_invariant_mode_enabled": lambda: False},
        ),
        Stub(
            *("megatron-core", f"{core}.inference.contexts.attention_context.triton.tensor_ops", VERSIONS, REASON),
            needs="triton",
        ),
        Stub(
            *("megatron-core", f"{core}.inference.contexts.fused_kv_append_kernel", ("0.15.3", *VERSIONS), REASON),
            needs="triton",
        ),
    )
