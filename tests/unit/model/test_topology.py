"""Topology: against Megatron's own rank generator, and by its properties."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import TopologyError
from ft_plugins.model.topology import Coords, Topology
from harness.operations import doubling

ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "cp-dp-tp-pp", "pp-tp-cp-dp")
DENSE_GROUPS = ("tp", "pp", "dp", "cp", "dp-cp", "tp-pp", "tp-dp-cp", "tp-dp", "tp-cp", "cp-dp", "tp-cp-dp-pp")
EXPERT_GROUPS = ("tp", "ep", "dp", "pp", "tp-ep", "tp-ep-pp", "ep-dp")


def megatron(topology, expert):
    """Megatron's rank generator for the same job, made as initialize_model_parallel makes it."""
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    tp, ep, cp, dp = (
        (topology.expert_tp, topology.ep, 1, topology.expert_dp)
        if expert
        else (topology.tp, 1, topology.cp, topology.dp)
    )
    return parallel_state.RankGenerator(tp=tp, ep=ep, dp=dp, pp=topology.pp, cp=cp, order=topology.order)


def groups(topology, axes, expert):
    """All groups of a kind, each once, in the order of their lowest ranks."""
    return sorted({topology.group(axes, rank, expert) for rank in range(topology.world_size)})


def same_groups(topology):
    for expert, kinds in ((False, DENSE_GROUPS), (True, EXPERT_GROUPS)):
        theirs = megatron(topology, expert)
        for axes in kinds:
            expected = sorted(tuple(ranks) for ranks in theirs.get_ranks(axes))
            assert groups(topology, axes, expert) == expected, (topology, axes, expert)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tp, pp, dp, cp", list(itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2))))
def test_dense_groups_are_those_of_megatron(tp, pp, dp, cp, order):
    topology = Topology(tp, pp, dp, cp, order=order, etp=tp * cp)
    theirs = megatron(topology, expert=False)
    assert topology.world_size == theirs.world_size
    for axes in DENSE_GROUPS:
        assert groups(topology, axes, expert=False) == sorted(tuple(ranks) for ranks in theirs.get_ranks(axes)), axes


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "pp": 2, "dp": 4, "ep": 2},
        {"tp": 2, "pp": 2, "dp": 4, "ep": 4, "etp": 1},
        {"tp": 2, "pp": 2, "dp": 4, "ep": 8, "etp": 1},
        {"tp": 4, "pp": 2, "dp": 2, "ep": 2, "etp": 2},
        {"tp": 1, "pp": 4, "dp": 4, "ep": 4},
        {"tp": 2, "pp": 1, "dp": 2, "cp": 2, "ep": 4},
        {"tp": 2, "pp": 2, "dp": 2, "cp": 2, "ep": 2, "etp": 1},
        {"tp": 2, "pp": 2, "dp": 3, "ep": 3},
        {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "etp": 1, "order": "tp-cp-ep-pp-dp"},
        {"tp": 2, "pp": 2, "dp": 2, "cp": 2, "ep": 4, "etp": 1, "order": "tp-cp-ep-pp-dp"},
        {"tp": 2, "pp": 2, "dp": 2, "cp": 2, "ep": 2, "etp": 2, "order": "tp-cp-ep-pp-dp"},
        {"tp": 2, "pp": 2, "dp": 4, "ep": 2, "order": "ep-tp-dp-pp"},
        {"tp": 2, "pp": 1, "dp": 4, "ep": 2, "order": "dp-ep-tp"},
        {"tp": 2, "pp": 2, "dp": 2, "order": "dp-pp-tp"},
    ],
    ids=str,
)
def test_expert_groups_are_those_of_megatron(sizes):
    same_groups(Topology(**sizes))


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.integers(1, 4)] * 4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 1, 2]),
    st.permutations(["tp", "cp", "ep", "dp", "pp"]),
)
def test_whatever_can_be_laid_out_is_laid_out_as_megatron_does_and_megatron_refuses_the_rest(dense, ep, etp, axes):
    tp, pp, dp, cp = dense
    order = "-".join(axes)
    try:
        topology = Topology(tp, pp, dp, cp, ep, order=order, etp=etp)
    except TopologyError:
        assert refused_by_megatron(tp, pp, dp, cp, ep, tp if etp is None else etp, order)
    else:
        assert not refused_by_megatron(tp, pp, dp, cp, ep, topology.expert_tp, order)
        same_groups(topology)


def refused_by_megatron(tp, pp, dp, cp, ep, etp, order):
    """The conditions of initialize_model_parallel (core 0.16.1), in its own terms."""
    generator = pytest.importorskip("megatron.core.parallel_state").RankGenerator
    world = tp * pp * dp * cp
    if world % (etp * ep * pp):
        return True
    expert_dp = world // (etp * ep * pp)
    if not (order.endswith("pp") or pp == 1 or expert_dp == dp):
        return True
    dense = generator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    expert = generator(tp=etp, ep=ep, dp=expert_dp, pp=pp, cp=1, order=order)
    return dense.get_ranks("pp") != expert.get_ranks("pp")


sizes = st.integers(1, 5)


@given(sizes, sizes, sizes, sizes, st.sampled_from(ORDERS), st.data())
def test_a_rank_and_its_coordinates_name_each_other(tp, pp, dp, cp, order, choice):
    topology = Topology(tp, pp, dp, cp, order=order, etp=tp * cp)
    rank = choice.draw(st.integers(0, topology.world_size - 1))
    at = topology.coords(rank)
    assert [other for other in range(topology.world_size) if topology.coords(other) == at] == [rank]
    assert at.tp < tp and at.pp < pp and at.dp < dp and at.cp < cp
    for axes in DENSE_GROUPS:
        group = topology.group(axes, rank)
        assert rank in group and list(group) == sorted(set(group))
        assert all(topology.group(axes, other) == group for other in group)
        kept = [name for name in ("tp", "pp", "dp", "cp") if name not in axes.split("-")]
        assert all(getattr(topology.coords(other), name) == getattr(at, name) for other in group for name in kept)


@given(sizes, sizes, sizes, sizes)
def test_sharding_groups_cut_the_job_into_sets_of_replicas(tp, pp, dp, cp):
    topology = Topology(tp, pp, dp, cp)
    groups = topology.sharding_groups()
    assert list(groups) == sorted(itertools.product(range(pp), range(tp)))
    assert sorted(rank for ranks in groups.values() for rank in ranks) == list(range(topology.world_size))
    for (stage, tensor), ranks in groups.items():
        assert all(topology.replicas(rank) == ranks for rank in ranks)
        assert {(topology.coords(rank).pp, topology.coords(rank).tp) for rank in ranks} == {(stage, tensor)}


def test_megatrons_default_order_puts_tensor_ranks_side_by_side_and_stages_far_apart():
    topology = Topology(tp=2, pp=2, dp=2)
    assert topology.coords(5) == Coords(tp=1, pp=1, dp=0, etp=1)
    assert topology.replicas(1) == (1, 3)
    assert topology.sharding_groups() == {(0, 0): (0, 2), (0, 1): (1, 3), (1, 0): (4, 6), (1, 1): (5, 7)}
    other = Topology(tp=2, pp=2, dp=2, order="tp-cp-ep-pp-dp")
    assert other.sharding_groups() == {(0, 0): (0, 4), (0, 1): (1, 5), (1, 0): (2, 6), (1, 1): (3, 7)}


def test_an_experts_replicas_are_fewer_than_those_of_dense_layers():
    topology = Topology(tp=2, pp=1, dp=4, ep=2)
    assert topology.replicas(0) == (0, 2, 4, 6)
    assert topology.expert_replicas(0) == (0, 4)
    assert topology.coords(2).ep == 1 and topology.coords(6).edp == 1
    assert topology.group("ep", 0) == (0, 2)


def test_a_pipeline_is_one_rank_of_each_stage():
    topology = Topology(tp=2, pp=3, dp=2)
    assert topology.group("pp", 1) == (1, 5, 9)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"tp": 0, "pp": 1, "dp": 1}, "tp=0 is not a parallel size"),
        ({"tp": 1, "pp": 1, "dp": 1.5}, "dp=1.5 is not a parallel size"),
        ({"tp": 1, "pp": 1, "dp": 1, "etp": 0}, "etp=0 is not a parallel size"),
        ({"tp": 1, "pp": 1, "dp": 2, "vpp": 2}, "vpp=2 needs pipeline stages, but pp=1"),
        ({"tp": 2, "pp": 2, "dp": 2, "order": "tp-dp"}, "leaves out pp, whose size is 2"),
        ({"tp": 2, "pp": 2, "dp": 2, "order": "tp-dp-pp-dp"}, "at most once"),
        ({"tp": 2, "pp": 2, "dp": 2, "order": "tp-data-pp"}, "must name each of tp, pp, dp, ep, cp"),
        ({"tp": 2, "pp": 2, "dp": 2, "ep": 4}, "8 ranks are not divisible by etp=2 x ep=4 x pp=2 = 16"),
        ({"tp": 2, "pp": 2, "dp": 4, "ep": 2, "order": "tp-cp-ep-pp-dp"}, "2 ranks apart and those of experts 4"),
        ({"tp": 2, "pp": 2, "dp": 2, "order": "tp-pp-dp", "cp": 2}, "leaves out cp, whose size is 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_laid_out_is_refused_with_the_numbers(sizes, message):
    with pytest.raises(TopologyError, match=message):
        Topology(**sizes)


def test_ranks_indices_and_axes_that_do_not_exist_are_refused():
    topology = Topology(2, 2, 2)
    for ask in (topology.coords, lambda rank: topology.group("tp", rank)):
        for rank in (-1, 8):
            with pytest.raises(TopologyError, match=f"rank {rank} is not in this job of 8 ranks"):
                ask(rank)
    with pytest.raises(TopologyError, match="'cp-ep' is not a group of expert layers"):
        topology.group("cp-ep", 0)
    with pytest.raises(TopologyError, match="'dp-dp' is not a group of dense layers"):
        topology.group("dp-dp", 0)


def test_laying_out_twice_as_many_ranks_takes_twice_the_steps():
    def lay_out(dp):
        topology = Topology(tp=4, pp=4, dp=dp, cp=2, ep=8, etp=1)
        groups = topology.sharding_groups()
        for rank in range(topology.world_size):
            at = topology.coords(rank)
            assert rank in groups[at.pp, at.tp]
        assert len(groups) == 16 and {len(ranks) for ranks in groups.values()} == {2 * dp}
        assert topology.replicas(0) == groups[0, 0]

    assert doubling(lay_out, 32) < 2.2
