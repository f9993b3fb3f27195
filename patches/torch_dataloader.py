"""Give each data loader a generator of its own for the seed of its workers.

Upstream file: torch/utils/data/dataloader.py. On a GPU the seed comes from the CPU's generator and dropout from the
device's. Here both would be the same generator, and building loaders after a resume would shift dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .declared import Patch, around
from .versions import TORCH


def with_own_generator(original: Callable[..., None], self: Any, loader: Any) -> None:
    """_BaseDataLoaderIter.__init__ that gives a loader without a generator one with the process's seed."""
    if loader.generator is None:
        loader.generator = torch.Generator().manual_seed(torch.initial_seed())
    original(self, loader)


PATCHES = (
    Patch(
        *("torch", "torch.utils.data.dataloader", "_BaseDataLoaderIter.__init__", TORCH),  # base of both iterators
        reason="the seed draw of a loader built after a resume would shift dropout",
        replace=around(with_own_generator),
        parameters=("self", "loader"),
        contains=("random_(generator=loader.generator)",),
    ),
)
