"""The tables that rank 0 prints at the start: bounded, linear in the size of the job, and true."""

import pytest

from ft_plugins.model.topology import Topology
from ft_plugins.redundancy.exchange_plan import plan_exchange
from ft_plugins.redundancy.grouping import redundancy_groups
from ft_plugins.redundancy.neighbour import pipelines, plan_neighbours
from ft_plugins.redundancy.node_kinds import node_label, node_lines
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.systems.reft.reft_reports import budget_table
from harness.operations import instructions

SHARE = Shape(nbytes=100_000, small_nbytes=4096, buckets=1, layout="a", slots=3)
LARGER = Shape(nbytes=300_000, small_nbytes=4096, buckets=1, layout="b", slots=5, parity_nbytes=50_000)
GIB = 1 << 30


def all_of(*shapes):
    """All slots have memory."""
    return [(shape, shape.slots) for shape in shapes]


def test_one_node_is_shown_by_name_and_by_rank():
    total = SHARE.total + LARGER.total
    assert budget_table(all_of(SHARE, LARGER), ["a", "a"]).splitlines() == [
        f"host memory for protection on node a: {total} bytes ({total / GIB:.2f} GiB) for 350000 bytes captured and "
        "50000 of parity computed from replicas, all of it resident",
        f"  rank 0: 3 slots x {SHARE.slot_room} bytes",
        f"  rank 1: 5 slots x {LARGER.slot_room} bytes and 2 of parity x {LARGER.parity_room} bytes",
    ]


def test_what_is_claimed_is_the_sum_of_its_parts_without_more_than_a_page_of_padding_an_area():
    shape = Shape(3 << 30, 64 << 10, 1000, "a", 5, 1 << 30, 200)
    parts = 5 * ((2 << 30) + (64 << 10) + 8 * 1200) + 2 * ((1 << 30) + 8 * 1200) + 16 * 1000
    areas = 1 + 1 + 5 * 4 + 2 * 3
    assert parts <= shape.total <= parts + areas * 4096
    line = budget_table(all_of(shape), ["a"], memory=[100 << 30]).splitlines()[0]
    assert f"{shape.total} bytes (12.00 GiB, 12.0% of a node's memory)" in line


def test_nodes_with_equal_budgets_are_one_line():
    nodes = [f"n{rank // 2}" for rank in range(24)]
    shapes = [SHARE] * 20 + [SHARE, LARGER] * 2
    assert budget_table(all_of(*shapes), nodes, certifies=4).splitlines() == [
        f"host memory for protection on nodes 0-9 (10 nodes): {2 * SHARE.total} bytes each "
        f"({2 * SHARE.total / GIB:.2f} GiB) for 200000 bytes captured, all of it resident",
        f"  ranks 0-1 of each, counted on the node: 3 slots x {SHARE.slot_room} bytes each",
        f"host memory for protection on nodes n10, n11: {SHARE.total + LARGER.total} bytes each "
        f"({(SHARE.total + LARGER.total) / GIB:.2f} GiB) for 350000 bytes captured and 50000 of parity computed from "
        "replicas, all of it resident",
        f"  rank 0 of each, counted on the node: 3 slots x {SHARE.slot_room} bytes",
        f"  rank 1 of each, counted on the node: 5 slots x {LARGER.slot_room} bytes and 2 of parity x "
        f"{LARGER.parity_room} bytes",
        "  one slot of each rank keeps the newest snapshot whose replicas agreed; compared every 4 iterations",
    ]


def test_what_may_be_claimed_later_is_shown_next_to_what_is():
    shape = Shape(1 << 30, 4096, 1, "a", slots=5, first=2)
    lines = budget_table([(shape, 2), (shape, 3)], ["a", "a"], memory=[100 << 30] * 2).splitlines()
    claimed = 5 * shape.slot_room + 2 * shape.slots_start + 5 * 4096
    assert f"{claimed} bytes (5.00 GiB, 5.0% of a node's memory)" in lines[0]
    assert [line.split(":")[1].split("slots")[0].strip() for line in lines[1:3]] == ["2", "3"]
    assert lines[3].startswith(f"  up to 5 slots, {2 * shape.total} bytes (10.00 GiB, 10.0% of a node's memory), if")
    assert len(budget_table([(shape, 5)], ["a"]).splitlines()) == 2


def test_shares_that_differ_by_a_few_bytes_are_one_kind():
    nearly = Shape(nbytes=100_001, small_nbytes=4096, buckets=1, layout="c", slots=3)
    (first, _) = budget_table(all_of(SHARE, nearly), ["a", "b"]).splitlines()
    assert "on nodes a, b:" in first and "for 100000 to 100001 bytes captured" in first


def test_many_kinds_of_nodes_are_counted():
    shapes = [Shape(nbytes=4096 * (1 + node % 20), small_nbytes=0, buckets=1, layout="") for node in range(100)]
    lines = budget_table(all_of(*shapes), [f"n{node}" for node in range(100)]).splitlines()
    assert len(lines) == 8 * 2 + 1 and lines[-1] == "  ... and 12 more kinds of nodes (60 nodes)"


@pytest.mark.parametrize(
    ("positions_", "label"),
    [([2], "node n2"), ([0, 3], "nodes n0, n3"), ([0, 1, 2, 4, 5], "nodes 0-2, 4-5 (5 nodes)")],
)
def test_nodes_are_named_as_long_as_they_are_few(positions_, label):
    assert node_label(positions_, [f"n{at}" for at in range(6)]) == label


def test_every_other_node_is_not_listed_one_by_one():
    texts = ["x" if at % 2 else "y" for at in range(1000)]
    lines = node_lines(texts, [str(at) for at in range(1000)])
    assert lines[0] == "  nodes 0, 2, 4, 6, 8, 10, 12, 14, and 492 more (500 nodes): each y" and len(lines) == 2


def test_the_tables_of_thousands_of_ranks_are_a_few_lines_made_in_steps_of_their_number():
    def steps(dp):
        topology = Topology(tp=8, pp=16, dp=dp)
        ranks = topology.world_size
        nodes = [f"n{rank // 8}" for rank in range(ranks)]
        groups = redundancy_groups(nodes, tuple(topology.sharding_groups().values()), 8, 1)
        sizes = [(1 << 30) + (1 << 20) * (topology.coords(rank).pp in (0, 15)) for rank in range(ranks)]
        parity = plan_exchange(nodes, groups, sizes, 1)
        copies = plan_neighbours(nodes, pipelines(topology), sizes)
        claims = all_of(*[Shape(nbytes=size, small_nbytes=1 << 16, buckets=256, layout="") for size in sizes])
        tables = []
        count = instructions(lambda: tables.extend([budget_table(claims, nodes), parity.table(), copies.table()]))
        assert sum(len(table.splitlines()) for table in tables) < 50
        assert max(len(table) for table in tables) < 5000
        return count

    assert steps(32) < 2.5 * steps(16)
