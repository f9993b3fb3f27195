"""A gang: real ranks, their answers by rank, and no rank left when one of them fails."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ft_plugins.config import LaunchContext, launch_context
from harness.emulated_nodes import EmulatedHost
from harness.gang import LOCALHOST, RankError, gang


def _sum(rank: int, world: int, plus: int) -> tuple[int, int, int]:
    print("not shown")
    os.write(1, b"nor this")
    value = torch.tensor([rank + plus])
    dist.all_reduce(value)
    return rank, world, int(value)


def test_every_rank_answers_and_they_have_met(capfd: pytest.CaptureFixture[str]) -> None:
    assert gang(_sum, 3, 10) == [(0, 3, 33), (1, 3, 33), (2, 3, 33)]
    assert capfd.readouterr() == ("", "")


def _place(rank: int, world: int) -> LaunchContext:
    return launch_context()


def test_a_rank_finds_its_place_and_the_address_of_rank_0_as_from_a_launcher() -> None:
    assert gang(_place, 2) == [
        LaunchContext(None, None, 0, None, rank, rank, 2, 2, 0, 0, LOCALHOST.address) for rank in range(2)
    ]
    nodes = [EmulatedHost("", f"127.0.0.{number}", "lo") for number in (7, 8)]
    assert gang(_place, 3, hosts=[nodes[0], nodes[1], nodes[1]]) == [
        LaunchContext(None, None, 0, None, 0, 0, 3, 1, 0, 0, "127.0.0.7"),
        LaunchContext(None, None, 0, None, 1, 0, 3, 2, 0, 0, "127.0.0.7"),
        LaunchContext(None, None, 0, None, 2, 1, 3, 2, 1, 0, "127.0.0.7"),
    ]


def _fails(rank: int, world: int, folder: str) -> None:
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        print("the last words")
        raise ValueError("what went wrong")
    dist.barrier()  # rank 1 never comes


def test_a_rank_that_fails_is_named_with_what_was_printed_and_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1:.*what went wrong.*the last words"):
        gang(_fails, 2, str(tmp_path))
    for rank in range(2):
        assert not Path("/proc", (tmp_path / str(rank)).read_text()).exists()


def _killed(rank: int, world: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_a_rank_that_is_killed_ends_the_gang_at_once() -> None:
    begun = time.monotonic()
    with pytest.raises(RankError, match="rank 0 ended without an answer"):
        gang(_killed, 2)
    assert time.monotonic() - begun < 30


def _stands(rank: int, world: int) -> None:
    if rank == 1:
        signal.pause()


def test_a_gang_that_does_not_end_is_ended() -> None:
    with pytest.raises(TimeoutError, match="ranks 0, 1 had not answered after 2 s"):
        gang(_stands, 2, seconds=2)
