"""Every byte of a checkpoint that an earlier version wrote is read, wherever the tests run: nothing is computed."""

import pytest

from ft_plugins.snapshot.checkpoint import checkpoint
from harness import earlier_state


@pytest.mark.parametrize("framework", earlier_state.FRAMEWORKS)
def test_a_checkpoint_of_an_earlier_version_is_listed_and_its_tensors_have_the_bytes_they_had(tmp_path, framework):
    state = earlier_state.unpack(framework, tmp_path / "archive")
    (listed,) = checkpoint.listing(state.checkpoint.parent)
    assert listed.complete and not listed.problem
    assert len(state.tensors) > 3
    assert earlier_state.tensors_of(state.checkpoint) == state.tensors
