"""For all tests of adapters: end the workers of their loaders with the test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


@pytest.fixture(autouse=True)
def workers_end() -> Iterator[None]:
    """Shut down all loader workers. A loader is in a reference cycle with the classes made for a test; the workers of a
    garbage-collected loader are not asked to end, and torch waits 5 s for each."""
    yield
    for one in gc.get_objects():
        if type(one) is _MultiProcessingDataLoaderIter:
            one._shutdown_workers()
