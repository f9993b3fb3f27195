"""A data loader draws the seed of its workers from a generator of its own.

Upstream file: torch/utils/data/dataloader.py. On a GPU the seed comes from the CPU's generator and dropout from the
device's. Here both would be one generator, and building loaders after a resume would shift dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .declared import Patch
from .versions import TORCH


def with_own_generator(original: Callable[..., None]) -> Callable[..., None]:
    """_BaseDataLoaderIter.__init__ for a loader that was given no generator: one seeded like the process."""

    @functools.wraps(original)
    def begin(self: Any, loader: Any) -> None:
        if loader.generator is None:
            loader.generator = torch.Generator().manual_seed(torch.initial_seed())
        original(self, loader)

    return begin


def patches() -> tuple[Patch, ...]:
    """The patch of the base class of both loader iterators."""
    return (
        Patch(
            *("torch", "torch.utils.data.dataloader", "_BaseDataLoaderIter.__init__", TORCH),
            reason="the seed draw of a loader built after a resume would shift dropout",
            replace=with_own_generator,
            parameters=("self", "loader"),
            contains=("random_(generator=loader.generator)",),
        ),
    )
