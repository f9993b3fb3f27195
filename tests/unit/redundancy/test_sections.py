"""Local encoding: every byte is in one section, no lost node of a group takes more than parity makes up for, all agree.

What a plan says is carried out byte by byte, for random jobs with random replica sets.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.redundancy.exchange_plan import plan_exchange
from ft_plugins.redundancy.parity import ALIGNMENT, plan_decode
from ft_plugins.redundancy.sections import Encoding, Extent
from harness.operations import doubling

LINE = ALIGNMENT


@dataclass(frozen=True)
class Job:
    """What a plan is made from: all sizes are whole cache lines, as in slots."""

    nodes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    replicated: tuple[tuple[Extent, ...], ...]
    losses: int = 1

    def plan(self):
        return plan_exchange(self.nodes, self.groups, self.nbytes, self.losses, self.replicated)


@st.composite
def jobs(draw):
    """Up to 2 groups over 2 to 5 nodes, ranks numbered at random; replica sets of any ranks, also of both groups."""
    count = draw(st.integers(2, 5))
    seats = []
    for group in range(draw(st.integers(1, 2))):
        there = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
        for node in draw(st.permutations(range(count)))[:2]:
            there[node] = max(1, there[node])
        seats += [(node, group) for node, ranks in enumerate(there) for _ in range(ranks)]
    seats = draw(st.permutations(seats))
    groups = defaultdict(list)
    for rank, (_, group) in enumerate(seats):
        groups[group].append(rank)
    ends = [LINE * draw(st.integers(0, 3)) for _ in seats]
    sets = draw(st.lists(st.sets(st.integers(0, len(seats) - 1), min_size=2), max_size=3, unique_by=tuple))
    replicated = []
    for replicas in sorted(tuple(sorted(found)) for found in sets):
        stream = []
        for rank in replicas:
            nbytes = LINE * draw(st.integers(0, 6))
            stream.append(Extent(rank, ends[rank], nbytes))
            ends[rank] += nbytes + LINE * draw(st.integers(0, 1))  # what lies between belongs to another set
        replicated.append(tuple(stream))
    names = tuple(f"n{node}" for node, _ in seats)
    return Job(names, tuple(map(tuple, groups.values())), tuple(ends), tuple(replicated))


def bytes_of(extents):
    return [(extent.rank, at) for extent in extents for at in range(extent.offset, extent.offset + extent.nbytes)]


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_every_byte_is_in_exactly_one_section_and_local_where_its_set_is_on_several_nodes_of_the_group(job):
    plan = job.plan()
    held = {encoding: Counter() for encoding in Encoding}
    for section in plan.sections:
        for stream in section.streams:
            held[section.encoding].update(bytes_of(stream))
    every = Counter((rank, at) for rank, size in enumerate(job.nbytes) for at in range(size))
    assert held[Encoding.LOCAL] + held[Encoding.EXCHANGED] == every
    local = [
        entry
        for stream in job.replicated
        for group in job.groups
        if len({job.nodes[extent.rank] for extent in stream if extent.rank in group}) > 1
        for entry in bytes_of([extent for extent in stream if extent.rank in group])
    ]
    assert held[Encoding.LOCAL] == Counter(local)


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_nothing_of_a_stripe_lies_with_anything_else_of_it_and_all_of_it_on_nodes_of_one_group(job):
    plan = job.plan()
    for section in plan.encoded(Encoding.LOCAL):
        ranks = {extent.rank for stream in section.streams for extent in stream}
        (group,) = [group for group in job.groups if ranks & set(group)]
        assert ranks <= set(group)
        for position, stream in zip(section.positions, section.streams, strict=True):
            assert {plan.position_of_rank[extent.rank] for extent in stream} == {position}
        for stripe in section.placement.stripes:
            on = [piece.node for piece in stripe.data] + list(stripe.parity_nodes)
            assert len(set(on)) == len(on)


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_the_parity_of_a_stripe_lies_once_in_slots_of_its_node_behind_the_data(job):
    plan = job.plan()
    for rank, parts in enumerate(plan.parts):
        end = job.nbytes[rank]
        for part in parts:
            section = plan.sections[part.section]
            (kept,) = section.placement.stripes[part.stripe].parity_nodes
            assert part.rank == rank and part.offset == end and part.start < part.stop and part.start % LINE == 0
            assert section.positions[kept] == plan.position_of_rank[rank] and rank in section.members(kept)
            end += part.stop - part.start
    for section in plan.encoded(Encoding.LOCAL):
        for stripe in section.placement.stripes if section.placement.block else ():
            parts = plan.parts_of_stripe[section.index, stripe.index]
            assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
            assert parts[-1].stop == section.placement.block


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_nothing_is_sent_of_what_is_computed_where_it_lies(job):
    plan = job.plan()
    sent = [
        entry
        for sends in plan.sends
        for send in sends
        for entry in bytes_of(list(plan.sections[send.area.section].extents(send.node, send.start, send.stop)))
    ]
    streams = [stream for section in plan.encoded(Encoding.EXCHANGED) for stream in section.streams]
    exchanged = [entry for stream in streams for entry in bytes_of(stream)]
    assert Counter(sent) == Counter(exchanged)
    assert all(plan.sections[area.section].encoding is Encoding.EXCHANGED for kept in plan.areas for area in kept)


@settings(max_examples=100, deadline=None)
@given(jobs(), st.integers(1, 5))
def test_each_byte_that_parity_was_made_from_is_compared_once_with_the_slot_that_holds_it(job, lines):
    plan = job.plan()
    compared = Counter()
    for rank, parts in enumerate(plan.parts):
        data = [(at, min(100, job.nbytes[rank] - at)) for at in range(0, job.nbytes[rank], 100)]
        parity = [
            (part.offset + at, min(lines * LINE, part.stop - part.start - at))
            for part in parts
            for at in range(0, part.stop - part.start, lines * LINE)
        ]
        checks = list(plan.checks(rank, data + parity))
        assert [check.entry for check in checks] == list(range(len(data + parity), len(data + parity) + len(checks)))
        for check in checks:
            assert check.keeper == rank and check.bucket >= len(data)
            assert plan.position_of_rank[check.source.rank] != plan.position_of_rank[rank]
            compared.update(bytes_of([check.source]))
    local = [entry for section in plan.encoded(Encoding.LOCAL) for s in section.streams for entry in bytes_of(s)]
    assert compared == Counter(local)


@settings(max_examples=60, deadline=None)
@given(jobs(), st.integers(0, 9))
def test_any_lost_node_of_each_group_is_computed_from_the_others_also_the_parity_that_it_kept(job, seed):
    plan = job.plan()
    rng = np.random.default_rng(seed)
    slots = [rng.integers(0, 256, size, dtype=np.uint8) for size in job.nbytes]
    for section in plan.encoded(Encoding.LOCAL):
        whole = [np.concatenate([slots[e.rank][e.offset :][: e.nbytes] for e in stream]) for stream in section.streams]
        kept = [np.zeros(section.placement.block, dtype=np.uint8) for _ in section.placement.stripes]
        for stripe in section.placement.stripes:
            for _, at, e in section.sources(stripe.index, 0, section.placement.block):
                kept[stripe.index][at : at + e.nbytes] ^= slots[e.rank][e.offset : e.offset + e.nbytes]
        for lost in range(len(section.positions)):
            for rebuild in plan_decode(section.placement, [lost]):
                stripe = section.placement.stripes[rebuild.stripe]
                pieces = {piece.node: piece for piece in stripe.data}
                found = np.zeros(section.placement.block, dtype=np.uint8)
                for kind, which, factor in rebuild.sources:
                    assert factor == 1 and (kind == "parity" or which != lost)
                    piece = pieces.get(which)
                    part = kept[stripe.index] if kind == "parity" else whole[which][piece.start : piece.stop]
                    found[: len(part)] ^= part
                if rebuild.wanted[0] == "data":
                    wanted = whole[lost][pieces[lost].start : pieces[lost].stop]
                    assert (found[: len(wanted)] == wanted).all() and not found[len(wanted) :].any()
                else:
                    assert (found == kept[stripe.index]).all()


def test_a_set_that_spans_two_groups_is_encoded_in_each_so_that_a_node_of_each_may_be_lost():
    """As tied embeddings are: on the first and the last pipeline stage, here on nodes of their own."""
    stream = tuple(Extent(rank, 0, 640) for rank in range(4))
    plan = plan_exchange(list("abcd"), [(0, 1), (2, 3)], [640] * 4, 1, [stream])
    assert [section.positions for section in plan.encoded(Encoding.LOCAL)] == [(0, 1), (2, 3)]


def test_a_set_on_one_node_of_the_group_is_sent():
    stream = (Extent(0, 0, 64), Extent(1, 0, 64))
    plan = plan_exchange(list("aab"), [(0, 1, 2)], [64, 64, 64], 1, [stream])
    assert not list(plan.encoded(Encoding.LOCAL)) and plan == plan_exchange(list("aab"), [(0, 1, 2)], [64] * 3, 1)


def test_against_two_losses_all_is_sent():
    stream = tuple(Extent(rank, 0, 640) for rank in range(4))
    plan = plan_exchange(list("abcd"), [(0, 1, 2, 3)], [640] * 4, 2, [stream])
    assert plan == plan_exchange(list("abcd"), [(0, 1, 2, 3)], [640] * 4, 2)


def test_a_job_whose_state_is_all_replicated_sends_none_of_it_and_claims_no_room_for_it():
    stream = tuple(Extent(rank, 0, 1280) for rank in range(3))
    plan = plan_exchange(list("abc"), [(0, 1, 2)], [1280] * 3, 1, [stream])
    assert all(plan.parity_bytes(position) == 0 for position in range(3))
    assert all(send.start == send.stop for sends in plan.sends for send in sends)
    assert plan.table().splitlines() == [
        "RAIM5 over 3 nodes: any 1 of each group may be lost",
        "  group 0: ranks 0-2 on a, b, c; blocks of 0 bytes",
        "    replicas: ranks 0-2 on a, b, c; blocks of 640 bytes, computed locally",
        "  nodes a, b, c: each keeps 0 bytes of parity, sends 0 per version; computes 640 of its own",
    ]


@pytest.mark.parametrize("width", [2, 16, 64])
def test_a_job_of_4096_ranks_is_planned(width):
    """512 nodes of 8 ranks, TP8; replica sets of each tensor rank and of each stage, half of all state is unique."""
    ranks, tp = 4096, 8
    nodes = [f"n{rank // 8}" for rank in range(ranks)]
    stages = [range(first, first + tp * width) for first in range(0, ranks, tp * width)]
    groups = [tuple(stage[t::tp]) for stage in stages for t in range(tp)]
    replicated = [tuple(Extent(rank, 1 << 29, 1 << 28) for rank in group) for group in groups]
    replicated += [tuple(Extent(rank, 3 << 28, 1 << 28) for rank in stage) for stage in stages]
    plan = plan_exchange(nodes, groups, [1 << 30] * ranks, 1, replicated)
    assert sum(send.stop - send.start for send in plan.sends[7]) == tp << 29, "half of the state"
    assert len(plan.parts[5]) == 2
    assert len(list(plan.encoded(Encoding.LOCAL))) == 2 * len(groups)
    part = plan.parts[5][0]
    buckets = [(at, min(4 << 20, part.offset + part.stop - part.start - at)) for at in
               range(part.offset, part.offset + part.stop - part.start, 4 << 20)]  # fmt: skip
    assert len(list(plan.checks(5, buckets))) == len(buckets) * (width - 1)
    assert len(plan.table().splitlines()) <= 1 + 8 + 3 + 8


def test_planning_twice_as_many_groups_with_replicas_takes_twice_the_steps():
    def plan(groups):
        members = [tuple(range(first, first + 8)) for first in range(0, 8 * groups, 8)]
        replicated = [tuple(Extent(rank, 1 << 29, 1 << 28) for rank in group) for group in members]
        plan_exchange([f"n{at}" for at in range(8 * groups)], members, [1 << 30] * 8 * groups, 1, replicated).table()

    assert doubling(plan, 32) < 2.2
