"""What the benchmark of the tree measures is what happened: versions everywhere, the lost node, every connection."""

from __future__ import annotations

import pytest

from workloads.tree_scale import measure

DETECT = 1.5


@pytest.mark.parametrize(("nodes", "depth", "sockets"), [(1, 0, 0), (8, 1, 7), (40, 2, 9)])
def test_a_small_job_is_measured(nodes: int, depth: int, sockets: int) -> None:
    figures = measure(nodes, 2.0, DETECT)
    assert (figures.nodes, figures.depth, figures.iterations, figures.sockets) == (nodes, depth, 2, sockets)
    assert 0 <= figures.processor_share <= figures.processor_share_busiest < 1
    assert figures.messages <= figures.messages_busiest and figures.bytes <= figures.bytes_busiest
    assert 0 <= figures.commit_seconds < 1
    if nodes > 1:
        assert 3 <= figures.messages < 40, "news of an iteration, and heartbeats"
        # upwards: time for which this process, which is all nodes, is not run by a busy machine does not count
        assert 0.7 * DETECT < figures.lost_seconds < 6 * DETECT
    assert figures.sockets_after_loss <= 2 * 17
