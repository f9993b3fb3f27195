"""For all tests of adapters: nothing is searched that earlier tests have left; the workers of loaders end with the
test."""

import gc

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


@pytest.fixture(autouse=True)
def earlier_objects_are_frozen():
    """Hide what imports have made, and what hooks of earlier tests keep alive, from searches of all objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def workers_end():
    """Shut down all loader workers. A loader is in a reference cycle with the classes made for a test; the workers of a
    garbage-collected loader are not asked to end, and torch waits 5 s for each."""
    yield
    for one in gc.get_objects():
        if type(one) is _MultiProcessingDataLoaderIter:
            one._shutdown_workers()
