"""Megatron as a host. `prepare()` comes before anything imports megatron.

In: nothing but the process. Out: a process in which megatron-core and Megatron-LM run on this machine's device.
"""

from __future__ import annotations

from ...patches import apply_cpu
from ..imports import instead_of_import, on_import


def prepare(device_count: int = 1) -> bool:
    """Apply the CPU device shim where there is no CUDA device; call it before anything imports megatron.

    `device_count` is what torch.cuda.device_count() shall answer: the number of local ranks. Returns whether the shim
    was applied now. Raises PatchError naming file, symbol and version where a patch no longer applies.
    """
    return apply_cpu(on_import, instead_of_import, device_count)


__all__ = ["prepare"]
