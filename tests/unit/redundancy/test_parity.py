"""Placement and decoding: no two pieces of a stripe on a node, each byte in one piece, every survivable loss undone."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ResumeError, TopologyError
from ft_plugins.redundancy import blocked, kernels
from ft_plugins.redundancy.field import ORDER, inverse, power, solve, times
from ft_plugins.redundancy.parity import ALIGNMENT, StripePiece, cut, place_parity, plan_decode
from harness.operations import doubling

SIZES = st.just(0) | st.integers(1, 3) | st.integers(0, 700) | st.sampled_from([63, 64, 65, 128, 192, 448, 640])


@st.composite
def groups(draw, largest=8):
    """Sizes of the streams, and how many losses are to be survived."""
    losses = draw(st.sampled_from([1, 2]))
    nodes = draw(st.integers(2 if losses == 1 else 4, largest))
    return draw(st.lists(SIZES, min_size=nodes, max_size=nodes)), losses


# placement


@given(st.integers(0, 10_000), st.integers(1, 20))
def test_a_cut_covers_its_bytes_in_order_with_edges_on_cache_lines_and_near_equal_parts(nbytes, parts):
    ranges = cut(nbytes, parts)
    assert len(ranges) == parts and ranges[0][0] == 0 and ranges[-1][1] == nbytes
    assert all(left[1] == right[0] for left, right in zip(ranges, ranges[1:], strict=False))
    assert all(start % ALIGNMENT == 0 or start == nbytes for start, _ in ranges)
    sizes = [stop - start for start, stop in ranges]
    assert min(sizes) >= 0 and max(sizes) - min(sizes) <= 2 * ALIGNMENT


@settings(max_examples=200, deadline=None)
@given(groups(24))
def test_every_byte_of_every_stream_is_in_exactly_one_piece(group):
    sizes, losses = group
    placement = place_parity(sizes, losses)
    for node, size in enumerate(sizes):
        pieces = [piece for stripe in placement.stripes for piece in stripe.data if piece.node == node]
        assert len(pieces) == len(sizes) - losses
        held = Counter(at for piece in pieces for at in range(piece.start, piece.stop))
        assert held == Counter(range(size))
        assert all(0 <= piece.start <= piece.stop <= min(size, piece.start + placement.block) for piece in pieces)
        assert all(piece.stop in (size, piece.start + placement.block) for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(groups(24))
def test_no_two_pieces_of_a_stripe_are_on_one_node_and_each_node_takes_part_once(group):
    sizes, losses = group
    placement = place_parity(sizes, losses)
    assert [stripe.index for stripe in placement.stripes] == list(range(len(sizes)))
    for stripe in placement.stripes:
        assert sorted([*stripe.parity_nodes, *(piece.node for piece in stripe.data)]) == list(range(len(sizes)))
        assert stripe.parity_nodes == tuple((stripe.index + which) % len(sizes) for which in range(losses))
        assert [piece.exponent for piece in stripe.data] == list(range(len(stripe.data)))


@settings(max_examples=200, deadline=None)
@given(groups(24))
def test_each_node_keeps_as_much_parity_as_the_others_and_every_parity_is_kept_once(group):
    sizes, losses = group
    placement = place_parity(sizes, losses)
    cuts = len(sizes) - losses
    assert placement.block % ALIGNMENT == 0 and 0 <= placement.block * cuts - max(sizes) < ALIGNMENT * cuts
    kept = [(thing, node) for node in range(len(sizes)) for thing in placement.parities_on(node)]
    expected = {(stripe.index, which) for stripe in placement.stripes for which in range(losses)}
    assert {thing for thing, _ in kept} == expected and len(kept) == len(expected)
    assert all(placement.stripes[stripe].parity_nodes[which] == node for (stripe, which), node in kept)
    assert {len(placement.parities_on(node)) for node in range(len(sizes))} == {losses}


def test_a_node_gives_its_blocks_to_the_stripes_behind_it():
    placement = place_parity([300, 300, 250, 10])
    assert placement.block == 128
    node_2 = {stripe.index: (p.start, p.stop) for stripe in placement.stripes for p in stripe.data if p.node == 2}
    assert node_2 == {3: (0, 128), 0: (128, 250), 1: (250, 250)}
    assert place_parity([300] * 4, 2).parities_on(0) == ((0, 0), (3, 1))
    assert place_parity([300] * 4, 2).block == 192


def test_with_two_nodes_parity_is_a_mirror():
    placement = place_parity([100, 70])
    assert [(stripe.parity_nodes, *stripe.data) for stripe in placement.stripes] == [
        ((0,), StripePiece(1, 0, 70, 0)),
        ((1,), StripePiece(0, 0, 100, 0)),
    ]


@pytest.mark.parametrize(
    "sizes, losses, found",
    [
        ([], 1, "a group of 0 node"),
        ([100], 1, "a group of 1 node.* cannot be protected"),
        ([100], 2, "cannot be protected"),
        ([100] * 3, 2, "at least 4 nodes in a group, found 3: .* or use RAIM5, which needs 2"),
        ([100] * 4, 0, "parity against 0 lost nodes is not supported: expected 1 .* or 2"),
        ([100] * 8, 3, "against 3 lost nodes"),
        ([100, -1], 1, "node 1: its stream has -1 bytes"),
        ([1] * 258, 2, "at most 257 nodes in a group, found 258"),
    ],
)
def test_a_group_that_cannot_be_protected_is_refused(sizes, losses, found):
    with pytest.raises(TopologyError, match=found):
        place_parity(sizes, losses)


@pytest.mark.parametrize("losses", [1, 2])
def test_placing_and_decoding_take_the_square_of_the_nodes_as_the_pieces_do_and_no_more(losses):
    assert doubling(lambda nodes: plan_decode(place_parity([1 << 30] * nodes, losses), range(losses)), 32) < 5


@pytest.mark.parametrize("nodes, losses", [(512, 1), (257, 2)])
def test_a_group_of_hundreds_of_nodes_is_placed_and_decoded(nodes, losses):
    placement = place_parity([1 << 30] * nodes, losses)
    found = plan_decode(placement, range(losses))
    assert len(found) == losses * nodes
    exponents = {piece.exponent for stripe in placement.stripes for piece in stripe.data}
    assert losses == 1 or len({power(exponent) for exponent in exponents}) == nodes - 2


# decoding


def streams_of(sizes):
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def encode(placement, streams, loops):
    """Every parity, by (stripe, 0 for P or 1 for Q)."""
    found = {}
    for stripe in placement.stripes:
        pieces = [streams[piece.node][piece.start : piece.stop] for piece in stripe.data]
        parities = [np.zeros(placement.block, dtype=np.uint8) for _ in stripe.parity_nodes]
        rows = [[power(which * piece.exponent) for piece in stripe.data] for which in range(len(parities))]
        kernels.combine_into(parities, pieces, rows, loops=loops)
        found.update({(stripe.index, which): parity for which, parity in enumerate(parities)})
    return found


def thing(stripe, kind, which, streams, parities):
    """The bytes that `kind, which` of a stripe has."""
    if kind == "parity":
        return parities[stripe.index, which]
    (piece,) = [piece for piece in stripe.data if piece.node == which]
    return streams[which][piece.start : piece.stop]


def check_undone(placement, lost, loops=blocked):
    """Decode the loss of `lost`, a stripe in one pass, and compare all that lay there with what it was."""
    streams = streams_of(list(placement.sizes))
    parities = encode(placement, streams, loops)
    wanted = Counter()
    for index, group in itertools.groupby(plan_decode(placement, lost), lambda rebuild: rebuild.stripe):
        stripe, rebuilds = placement.stripes[index], list(group)
        originals = [thing(stripe, *rebuild.wanted, streams, parities) for rebuild in rebuilds]
        found = [np.full_like(original, 99) for original in originals]
        members = list(dict.fromkeys(source[:2] for rebuild in rebuilds for source in rebuild.sources))
        for kind, which in members:
            assert (which if kind == "data" else stripe.parity_nodes[which]) not in lost, f"{rebuilds} read a lost node"
        sources = [thing(stripe, *member, streams, parities)[: max(map(len, found))] for member in members]
        factors = [{source[:2]: source[2] for source in rebuild.sources} for rebuild in rebuilds]
        assert all(source.size for source in sources) and all(1 <= f <= 255 for row in factors for f in row.values())
        rows = [[row.get(member, 0) for member in members] for row in factors]
        kernels.combine_into(found, sources, rows, overwrite=True, loops=loops)
        for rebuild, one, original in zip(rebuilds, found, originals, strict=True):
            assert np.array_equal(one, original), f"{rebuild} of {placement.sizes}"
            wanted[rebuild.stripe, rebuild.wanted, rebuild.node] += 1
    data = {(s.index, ("data", p.node), p.node) for s in placement.stripes for p in s.data if p.node in lost}
    parity = {(s, ("parity", which), node) for node in lost for s, which in placement.parities_on(node)}
    assert wanted == Counter(data | parity)


@pytest.mark.parametrize("loops", [blocked, None], ids=["numpy", "chosen"])
@settings(max_examples=60, deadline=None)
@given(groups())
def test_every_loss_that_was_promised_to_be_survived_gives_back_data_and_parity(loops, group):
    sizes, losses = group
    placement = place_parity(sizes, losses)
    for count in range(losses + 1):
        for lost in itertools.combinations(range(len(sizes)), count):
            check_undone(placement, lost, loops)


@pytest.mark.parametrize(
    "nodes, losses", [(nodes, losses) for losses in (1, 2) for nodes in range(losses * 2, 9)], ids=str
)
def test_groups_of_all_small_sizes_survive_each_pattern(nodes, losses):
    placement = place_parity([64 * nodes + 17 * node for node in range(nodes)], losses)
    for lost in itertools.combinations(range(nodes), losses):
        check_undone(placement, lost)


@pytest.mark.parametrize("pair", [(0, 1), (0, 30), (13, 29), (15, 16)])
def test_exponents_beyond_the_bits_of_a_byte_survive_pairs(pair):
    check_undone(place_parity([2000 + node for node in range(31)], 2), pair)


@settings(max_examples=100, deadline=None)
@given(groups(), st.data())
def test_more_losses_than_promised_are_refused_with_the_names_of_the_nodes(group, data):
    sizes, losses = group
    lost = data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=losses + 1))
    with pytest.raises(ResumeError) as caught:
        plan_decode(place_parity(sizes, losses), lost)
    names = ", ".join(map(str, sorted(lost)))
    assert f"nodes {names} of the group are lost, but its parity makes up for {losses}" in str(caught.value)


def test_a_node_outside_of_the_group_cannot_be_lost_and_keeps_nothing():
    placement = place_parity([100] * 3)
    with pytest.raises(TopologyError, match=r"nodes \[3\] are not in this group of 3"):
        plan_decode(placement, [3])
    with pytest.raises(TopologyError, match="node -1 is not in this group of 3"):
        placement.parities_on(-1)


@pytest.mark.parametrize("losses", [1, 2])
def test_one_lost_node_is_made_up_for_by_plain_xor_wherever_p_is_left(losses):
    placement = place_parity([1280] * 6, losses)  # no piece is empty
    for node in range(6):
        for rebuild in plan_decode(placement, [node]):
            stripe = placement.stripes[rebuild.stripe]
            if rebuild.wanted != ("parity", 1) and stripe.parity_nodes[0] != node:
                assert {factor for _, _, factor in rebuild.sources} == {1}
                assert ("parity", 1) not in {source[:2] for source in rebuild.sources}


def test_a_lost_piece_without_bytes_needs_no_source_and_leaves_the_other_one_to_plain_xor():
    placement = place_parity([0, 500, 500, 500], 2)
    found = {rebuild.wanted: rebuild.sources for rebuild in plan_decode(placement, [0, 1]) if rebuild.stripe == 2}
    assert found == {("data", 0): (), ("data", 1): (("parity", 0, 1),)}


# the numbers


def test_the_field_multiplies_like_polynomials_and_every_number_has_an_inverse():
    def product(a, b):
        total = 0
        for bit in range(8):
            total ^= (a << bit) * (b >> bit & 1)
        for bit in range(14, 7, -1):
            total ^= (0x11D << bit - 8) * (total >> bit & 1)
        return total

    assert all(times(a, b) == product(a, b) for a in range(256) for b in range(256))
    assert all(times(a, inverse(a)) == 1 for a in range(1, 256))
    assert [power(exponent) for exponent in (0, 1, 7, 8, ORDER, -1)] == [1, 2, 128, 0x1D, 1, inverse(2)]
    with pytest.raises(ZeroDivisionError):
        inverse(0)


@settings(deadline=None)
@given(st.integers(0, 4), st.data())
def test_solutions_of_equations_fit_them(unknowns, data):
    row = st.lists(st.integers(0, 255), min_size=unknowns, max_size=unknowns)
    equations = data.draw(st.lists(row, min_size=unknowns, max_size=unknowns))
    hidden = data.draw(row)

    def right(values):
        totals = [0] * unknowns
        for at, equation in enumerate(equations):
            for factor, value in zip(equation, values, strict=True):
                totals[at] ^= times(factor, value)
        return totals

    try:
        found = solve(equations, right(hidden))
    except ZeroDivisionError:
        return  # not one solution
    assert right(found) == right(hidden) and list(found) == hidden
