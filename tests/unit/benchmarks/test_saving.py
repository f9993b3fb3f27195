"""What saving is compared with: CheckFreq's way, and the largest stage of a pipeline."""

from contextlib import ExitStack

import torch

from double_capture import largest_stage
from workloads.saving_peers import CheckFreq


def test_what_checkfreq_writes_is_the_state_before_the_update_that_waited_for_its_copy():
    state = {"a": torch.arange(4.0), "b": torch.ones(2)}
    with ExitStack() as stack:
        system = CheckFreq(state, stack)
        for value in (1.0, 2.0):
            state["b"].fill_(value)
            system.snapshot()
            system.fence()
            state["b"].zero_()
            assert system.committed() > 0
            assert torch.load(system._path)["b"].tolist() == [value, value]
        folder = system._path.parent
    assert not folder.exists()


def test_stages_have_equal_numbers_of_tensors_in_order():
    state = {str(size): torch.zeros(size) for size in (1, 9, 2, 3, 4, 5)}
    assert list(largest_stage(state, 1)) == list(state)
    assert list(largest_stage(state, 3)) == ["1", "9"] and list(largest_stage(state, 2)) == ["1", "9", "2"]
