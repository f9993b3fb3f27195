"""Bytes are copied to all ranks that lack them, each once, in as few rounds as doubling takes."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.collective import Collective
from ft_plugins.collective.transfers import rounds_of, spread
from ft_plugins.errors import FtError
from ft_plugins.recovery.nodes import SeenNodes
from ft_plugins.smp.serve import job_file
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.snapshot.segment.shape import Shape

NODES = ("a", "a", "b", "c", "d")  # of each rank
CONTENT = bytes(range(256)) * 4000


@given(st.integers(1, 20), st.integers(0, 300))
def test_each_that_lacks_it_receives_once_from_one_that_has_it(count, lacking):
    have, lack = list(range(count)), list(range(count, count + lacking))
    holders, received = set(have), list[int]()
    rounds = rounds_of(have, lack)
    for pairs in rounds:
        senders, receivers = zip(*pairs, strict=True)
        assert set(senders) <= holders and len(set(senders)) == len(senders), "one copy for each in a round"
        holders |= set(receivers)
        received += receivers
    assert sorted(received) == lack
    assert len(rounds) == next(n for n in range(20) if count << n >= count + lacking)


def _spread(rank, world):
    collective = Collective()
    with collective.transfers() as transfers:
        if rank == 0:  # takes no part
            return b""
        return _filled(transfers, rank)


def _filled(transfers, rank):
    held = np.frombuffer(CONTENT, dtype=np.uint8).copy() if rank == 2 else np.zeros(len(CONTENT), dtype=np.uint8)
    spread(transfers, rank, [2], [1, 3, 4], held)
    return held.tobytes()


def test_all_that_take_part_have_the_same_bytes(ranks):
    assert ranks(_spread, 5) == [b"", *[CONTENT] * 4]


def protection():
    return Protection(
        1, None, NODES, ((0, 2, 3, 4), (1,)), (Shape(640, 64, 1, 9),) * 5, 1, 2, (("127.0.0.1", 1),) * 4, 1, 0.0, 5.0
    )


def _share(rank, world, folder, damaged):
    """Node c has the file; all receive it, or all get the error."""
    run_dir = Path(folder) / NODES[rank]
    nodes = SeenNodes(Collective(), NODES, run_dir)
    reference, content = job_file.refer(protection())
    if rank == 3:
        job_file.write(run_dir, protection())
        if damaged:
            (run_dir / f"job-{reference.job}.json").write_bytes(content[:-1] + b" ")
    if damaged and rank == 3:  # it passes on what it has
        job_file.read_content = lambda run_dir, digest: content[:-1] + b" "
    try:
        nodes.share_jobs([(reference, {2})])
    except FtError as error:
        return str(error)
    return "read" if nodes.protection(reference) == protection() else "other"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_job_file_that_one_node_has_is_on_all_nodes_afterwards(ranks, tmp_path, damaged):
    for name in set(NODES):
        (tmp_path / name).mkdir()
    found = ranks(_share, 5, str(tmp_path), damaged)
    if damaged:
        assert all("does not match its digest" in answer for answer in found)
    else:
        assert found == ["read"] * 5
