"""Keep the storage of a pipeline stage's output until its send is complete.

Upstream file: megatron/core/pipeline_parallel/schedules.py. The interleaved schedule frees an output's storage while
its isend may still be reading it. CUDA's stream order makes that harmless; gloo's sender thread reads freed memory
(observed as NaN losses).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .declared import Patch
from .versions import MEGATRON


def keeping_storage(original: Callable[..., None]) -> Callable[..., None]:
    """deallocate_output_tensor that attaches the old storage to the tensor.

    An isend's work object holds the tensor until it is waited for, and the schedule holds it until its backward, which
    needs a gradient that the receiver can send only after it has received: so the storage outlives the send.
    """

    @functools.wraps(original)
    def deallocate_output_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
        storage = out.untyped_storage() if isinstance(out, torch.Tensor) and deallocate_pipeline_outputs else None
        original(out, deallocate_pipeline_outputs)
        if storage is not None:
            out.storage_being_sent = storage

    return deallocate_output_tensor


def patches() -> tuple[Patch, ...]:
    """The patch of deallocate_output_tensor."""
    return (
        Patch(
            *("megatron-core", "megatron.core.pipeline_parallel.schedules", "deallocate_output_tensor", MEGATRON),
            reason="gloo may read an output that is freed before its isend has been waited for",
            replace=keeping_storage,
            parameters=("out", "deallocate_pipeline_outputs"),
            contains=("out.data = torch.empty((1,)",),
        ),
    )
