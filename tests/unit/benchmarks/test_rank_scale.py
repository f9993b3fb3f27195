"""Emulated ranks of a job meet and agree, and are counted as those of the job would be."""

import pytest

from workloads import rank_scale


def test_ranks_meet_with_few_operations_of_the_store():
    figures = rank_scale.measure(24, 4)
    assert figures.ranks == 24
    assert figures.meet_seconds > 0 and figures.barrier_seconds > 0 and figures.gather_seconds > 0
    entries = 24 + 23 + 6  # the one of rank 0; that of the parent; 6 ranks have others below them
    assert 24 * figures.store_operations == entries
    assert figures.threads == 4


@pytest.mark.parametrize("ranks, on_node, sockets", [(8, 8, 14), (16, 8, 15), (72, 8, 22), (2, 1, 1)])
def test_the_sockets_of_a_node_are_those_of_its_ranks(ranks, on_node, sockets):
    assert rank_scale.connections_of_a_node(ranks, on_node) == (sockets, on_node)
