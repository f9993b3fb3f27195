"""What all tests of adapters have: the workers of their loaders end with the test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


@pytest.fixture(autouse=True)
def workers_end() -> Iterator[None]:
    """Loaders are in a cycle with the classes that are made for a test. The workers of a loader that is found as
    garbage do not hear that they should end, and torch waits 5 s for each."""
    yield
    for one in gc.get_objects():
        if type(one) is _MultiProcessingDataLoaderIter:
            one._shutdown_workers()
