"""The collector rests while something is planned, and is as it was afterwards."""

import gc

import pytest

from ft_plugins.model.timeline import gc_paused


@pytest.fixture(autouse=True)
def as_before():
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@gc_paused()
def looked(fails=False):
    if fails:
        raise IndexError("no such window")
    return gc.isenabled()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_it_rests_meanwhile_and_is_afterwards_what_it_was(before, fails):
    (gc.enable if before else gc.disable)()
    if fails:
        with pytest.raises(IndexError):
            looked(fails=True)
    else:
        assert not looked()
    assert gc.isenabled() == before
