"""A gang of which a rank fails, dies or stands still is never taken for one that has answered, and leaves no rank."""

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.gang import RankError, gang


def _fails(rank, world, folder):
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        print("the last words")
        raise ValueError("what went wrong")
    dist.barrier()  # rank 1 never comes


def test_a_rank_that_fails_is_named_with_what_was_printed_and_ends_the_others(tmp_path):
    with pytest.raises(RankError, match=r"(?s)rank 1:.*what went wrong.*the last words"):
        gang(_fails, 2, str(tmp_path))
    for rank in range(2):
        assert not Path("/proc", (tmp_path / str(rank)).read_text()).exists()


def _killed(rank, world):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_a_rank_that_is_killed_ends_the_gang_at_once():
    with pytest.raises(RankError, match="rank 0 ended without an answer"):
        gang(_killed, 2)  # the other one waits for ever


def _stands(rank, world):
    if rank == 1:
        signal.pause()


def test_a_gang_that_does_not_end_is_ended():
    with pytest.raises(TimeoutError, match="ranks 0, 1 had not answered after 2 s"):
        gang(_stands, 2, seconds=2)
