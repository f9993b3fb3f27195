"""DeepSpeed's shared-memory collectives for CPUs, left out: they are compiled when the process group is set up.

Upstream file: deepspeed/comm/torch.py. The build takes tens of seconds and a C++ compiler, asks compilers what they can
before, and when it is killed it leaves a lock on which the next start hangs. gloo computes the same numbers.
"""

from __future__ import annotations

from typing import Any

from .declared import Patch
from .versions import DEEPSPEED


def patches() -> tuple[Patch, ...]:
    """For processes without a CUDA device."""
    return (
        Patch(
            *("deepspeed", "deepspeed.comm.torch", "build_shm_op", DEEPSPEED),
            reason="a build at start needs a compiler, and a killed one hangs the next start",
            replace=lambda _: _nothing,
            parameters=(),
        ),
    )


def _nothing() -> Any:
    """No operator: torch's own collectives are used."""
    return None
