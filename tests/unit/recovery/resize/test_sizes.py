"""The numbers of nodes with which a job can continue."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.launcher.rounds.roster_file import RosterFile
from ft_plugins.launcher.rounds.rounds import Rules
from ft_plugins.model.topology import Topology
from ft_plugins.recovery.resize import sizes
from ft_plugins.recovery.resize.sizes import SizeReport, admissible
from ft_plugins.redundancy.exchange_plan import why_unprotected
from ft_plugins.redundancy.grouping import copies_possible, parity_possible
from ft_plugins.redundancy.neighbour import pipelines, why_unplaced
from harness.operations import doubling


def nodes(count, each):
    return [f"n{rank // each}" for rank in range(count * each)]


def batch(total):
    return lambda replicas: total % (2 * replicas) == 0


def survives(losses):
    """Parity over the nodes of a sharding group, against so many losses."""
    return lambda topology, per_node: parity_possible(topology, per_node, losses)


def anything(topology, per_node):
    return True


def rank_by_rank(topology, nodes, admits, impossible, largest):
    """The reference: each number of nodes with the nodes of all ranks written out, at a quadratic cost."""
    names = set(nodes)
    per_node = len(nodes) // len(names)
    if any(nodes.count(name) != per_node for name in names) or topology.ep > 1:
        return ()
    model = topology.tp * topology.pp * topology.cp
    counts = []
    for count in range(1, max(largest, len(names)) + 1):
        ranks = count * per_node
        if ranks % model or not admits(ranks // model):
            continue
        resized = replace(topology, dp=ranks // model)
        if count <= len(names) and impossible(resized, [f"node{rank // per_node}" for rank in range(ranks)]):
            continue
        counts.append(count)
    return tuple(counts)


@st.composite
def jobs(draw):
    """A topology and ranks per node that fill whole nodes."""
    axes = draw(st.permutations(["tp", "cp", "ep", "dp", "pp"]))
    tp, pp, cp = (draw(st.integers(1, 4)) for _ in range(3))
    if cp > 1:  # experts, laid out without cp, must have the same pipeline stages
        axes = [*(axis for axis in axes if axis != "pp"), "pp"]
    dp, per_node = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    return Topology(tp, pp, dp * per_node, cp, order="-".join(axes)), per_node


@settings(max_examples=300, deadline=None)
@given(jobs(), st.sampled_from([(0, False), (1, False), (2, False), (0, True), (1, True)]), st.integers(1, 5))
def test_sizes_by_arithmetic_equal_those_found_rank_by_rank(job, protected, divisor):
    (topology, per_node), (losses, copied) = job, protected

    def by_arithmetic(resized, on_node):
        return not (copied and not copies_possible(resized, on_node)) and (
            not losses or parity_possible(resized, on_node, losses)
        )

    def by_rank(resized, there):
        reason = why_unplaced(there, pipelines(resized)) if copied else ""
        groups = tuple(resized.sharding_groups().values())
        return reason or (why_unprotected(there, groups, losses, whole=False) if losses else "")

    there = nodes(topology.world_size // per_node, per_node)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sizes, "_MAX_NODES", 40)
        found = admissible(topology, there, lambda replicas: replicas % divisor == 0, by_arithmetic)
    assert found == rank_by_rank(topology, there, lambda replicas: replicas % divisor == 0, by_rank, 40)
    assert sizes.unpacked(sizes.packed(found)) == found


def test_a_size_for_which_ranks_cannot_be_laid_out_is_left_out():
    topology = Topology(tp=1, pp=1, dp=4, etp=2)
    assert admissible(topology, nodes(4, 1), lambda replicas: replicas < 7, anything) == (2, 4, 6)


def test_the_sizes_of_a_job_are_found_in_steps_of_its_nodes(monkeypatch):
    def found(count):
        topology = Topology(tp=1, pp=4, dp=2 * count)
        sizes_found = admissible(topology, nodes(count, 8), lambda replicas: True, survives(1))
        assert sizes_found == tuple(range(5, count + 1))

    monkeypatch.setattr(sizes, "_MAX_NODES", 1)
    assert doubling(found, 512) < 2.2


@pytest.mark.parametrize(
    ("count", "total", "losses", "expected"),
    [
        (4, 24, 0, (1, 2, 3, 4, 6, 12)),
        (4, 24, 1, (2, 3, 4, 6, 12)),  # on one node a lost one cannot be survived
        (4, 16, 1, (2, 4, 8)),
        (4, 24, 2, (4, 6, 12)),  # RAIM6 needs four
    ],
)
def test_the_batch_is_divided_and_what_was_asked_for_can_be_had(count, total, losses, expected):
    topology = Topology(tp=2, pp=2, dp=count, order="tp-cp-ep-pp-dp")
    assert admissible(topology, nodes(count, 4), batch(total), survives(losses) if losses else anything) == expected


def test_copies_on_the_stage_before_need_a_pipeline_over_nodes_at_every_size():
    spread = Topology(tp=2, pp=2, dp=4, order="tp-cp-ep-dp-pp")  # 4 nodes of 4 ranks: a stage on two of them
    assert admissible(spread, nodes(4, 4), batch(24), copies_possible) == (
        2,
        3,
        4,
        6,
        12,
    )  # at 3 a stage and a half on a node
    within = Topology(tp=2, pp=2, dp=4, order="tp-cp-ep-pp-dp")  # a pipeline on each
    assert admissible(within, nodes(4, 4), batch(24), copies_possible) == (6, 12)


def test_a_model_larger_than_a_node_needs_whole_replicas():
    topology = Topology(tp=4, pp=2, dp=2)
    assert admissible(topology, nodes(4, 4), lambda replicas: replicas < 4, anything) == (2, 4, 6)


def test_unequal_nodes_and_parallel_experts_are_not_resized():
    assert admissible(Topology(tp=1, pp=1, dp=3), ["a", "a", "b"], lambda replicas: True, anything) == ()
    assert admissible(Topology(tp=1, pp=1, dp=4, ep=2), nodes(2, 2), lambda replicas: True, anything) == ()


def test_the_rendezvous_reads_the_report_of_the_ranks(tmp_path):
    memory = RosterFile("job", tmp_path)
    assert memory.sizes() == SizeReport()
    for report in (SizeReport((2, 3, 4)), SizeReport((2, 4), spares_asked=True)):
        sizes.write(tmp_path, report)
        assert memory.sizes() == report
    strange = json.dumps({"sizes": [2, "3", None], "spares_asked": "yes"})
    for broken in ("{", "[]", "3", strange):
        (tmp_path / sizes.FILE).write_text(broken)
        assert memory.sizes() == SizeReport() == RosterFile("job", None).sizes()


def test_sizes_are_taken_as_far_as_the_rules_allow_them():
    rules = Rules(2, 6)
    assert rules.among((1, 3, 4, 8)).sizes == (3, 4)
    assert rules.among((3, 4)).stateful and not rules.stateful
    assert not rules.among((3, 4), spares_asked=True).stateful
    assert rules.among((8, 9)) is rules and rules.among(()) is rules
    assert Rules(2, 6, (4, 6)).among((3, 4, 5)).sizes == (4,)


def test_the_message_names_the_sizes_around_the_current_one():
    assert "1 (unprotected), 2, 4, 6 nodes" in sizes.describe((1, 2, 4, 6), 4, (2, 4, 6))
    assert "1, 2 nodes" in sizes.describe((1, 2), 2, ()), "nothing is protected now, which the start has said"
    assert "1, 2, 3, 4, 6, 12 nodes" in sizes.describe((1, 2, 3, 4, 6, 12), 4, (1, 2, 3, 4, 6, 12))
