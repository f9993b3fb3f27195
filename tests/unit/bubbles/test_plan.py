"""The plan of a job's bubbles: every byte once, in windows that both share, never more than the links carry.

What is planned is checked by arithmetic of its own: grants against bubbles and reserves, and against links by what has
to be through between any two moments. Schedules are real ones (1F1B, interleaved, DeepSpeed's, GPipe), played in order.
"""

import itertools
from collections import defaultdict
from dataclasses import replace
from math import ceil
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.bubbles.bubble_plan import (
    LARGEST_RATE_DUTY,
    plan_bubbles,
    rate_duties,
)
from ft_plugins.bubbles.filling import Granularity, Transfer, transfers_of
from ft_plugins.bubbles.windows import Reserve
from ft_plugins.errors import ConfigError
from ft_plugins.model.timeline import Bubble, Kind, SenderFacts, Span, Timeline
from ft_plugins.redundancy.neighbour import plan_neighbours
from harness.operations import instructions

# schedules: in which order each rank computes what


def one_f_one_b(ranks, microbatches):
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        ops = [("F", i, rank) for i in range(ahead)]
        for i in range(microbatches - ahead):
            ops += [("F", ahead + i, rank), ("B", i, rank)]
        orders.append(ops + [("B", i, rank) for i in range(microbatches - ahead, microbatches)])
    return orders


def interleaved(ranks, microbatches, chunks=2):
    """Megatron's, for microbatches in multiples of the ranks."""
    orders = []
    total = microbatches * chunks
    for rank in range(ranks):

        def op(kind, number, rank=rank):
            turn, place = divmod(number, ranks * chunks)
            chunk = place // ranks if kind == "F" else chunks - 1 - place // ranks
            return kind, turn * ranks + place % ranks, chunk * ranks + rank

        ahead = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
        ops = [op("F", i) for i in range(ahead)]
        for i in range(total - ahead):
            ops += [op("F", ahead + i), op("B", i)]
        orders.append(ops + [op("B", i) for i in range(total - ahead, total)])
    return orders


def deepspeed(ranks, microbatches):
    """`TrainSchedule.steps`: steps in which even and odd stages take turns."""
    orders = []
    for rank in range(ranks):
        ops = []
        for step in range(2 * (microbatches + ranks - 1)):
            if step % 2 == rank % 2:
                kind, number = "F", step // 2 - rank // 2
            elif rank % 2:
                kind, number = "B", step // 2 - ranks + (rank + 1) // 2
            else:
                kind, number = "B", (step - 1) // 2 - ranks + 1 + rank // 2
            if 0 <= number < microbatches:
                ops.append((kind, number, rank))
        orders.append(ops)
    return orders


def played(orders, jitter=0.3, seed=1):
    """The timelines: forward 10 ms, backward 20 ms and up to so much more, each waiting for what it needs."""
    random, last = Random(seed), max(op[2] for ops in orders for op in ops)
    done = {}
    clock, at = [0.0] * len(orders), [0] * len(orders)
    spans = [[] for _ in orders]
    while any(place < len(ops) for place, ops in zip(at, orders, strict=True)):
        before = sum(at)
        for rank, ops in enumerate(orders):
            while at[rank] < len(ops):
                kind, number, stage = ops[at[rank]]
                if kind == "F":
                    needs = ("F", number, stage - 1) if stage else None
                else:
                    needs = ("B", number, stage + 1) if stage < last else ("F", number, stage)
                if needs is not None and needs not in done:
                    break
                begin = max(clock[rank], done[needs] if needs else 0.0)
                clock[rank] = begin + (0.01 if kind == "F" else 0.02) * (1 + jitter * random.random())
                done[kind, number, stage] = clock[rank]
                at[rank] += 1
                what = Kind.FORWARD if kind == "F" else Kind.BACKWARD
                spans[rank].append(Span(what, begin, clock[rank], number, stage // len(orders)))
        assert sum(at) > before, "the schedule cannot go on"
    return {rank: Timeline(rank, max(clock), tuple(those)) for rank, those in enumerate(spans)}


def bubbles_of(timeline):
    """All time between compute spans."""
    found = []
    end = 0.0
    for number, span in enumerate([*timeline.spans, Span(Kind.UPDATE, timeline.seconds, timeline.seconds)]):
        if span.begin > end:
            found.append(Bubble(len(found), end, span.begin, number - 1))
        end = span.end
    return tuple(found)


def around(bubbles, seconds):
    """Timelines whose spans end where those bubbles begin."""
    found = {}
    for rank, those in bubbles.items():
        ends = {bubble.after: bubble.begin for bubble in reversed(those)}  # of several after one span, the first
        last = max([*ends, -1])
        found[rank] = Timeline(
            rank, seconds, tuple(Span(Kind.FORWARD, 0.0, ends.get(number, 0.0)) for number in range(last + 1)), (70, 80)
        )
    return found


def ring(ranks, nbytes, per_node=1, layers=0):
    """Each stage sends to the nearest earlier one on another node."""
    found = []
    for rank in range(ranks):
        node, nodes = rank // per_node, ranks // per_node
        target = (node - 1) % nodes
        parts = tuple(nbytes // layers + 64 * layer for layer in range(layers))
        found.append(Transfer(rank, node, target * per_node + per_node - 1, target, sum(parts) or nbytes, parts))
    return found


# what holds for every plan


def inside(grant, edge, sender, receiver, reserve):
    """Whether a grant, counted from `edge`, lies in a bubble of each, out of what is reserved. Rounding: 1e-9 s."""
    (own,) = (bubble for bubble in sender if bubble.index == grant.bubble)
    begin, end = edge + grant.begin, edge + grant.deadline
    assert own.after == grant.after
    return begin < end and all(
        any(b.begin + reserve.begin <= begin + 1e-9 and end <= b.end - reserve.end + 1e-9 for b in bubbles)
        for bubbles in ([own], receiver)
    )


def turns_of(plan):
    """By iteration what each sender is granted; what every iteration offers, last."""
    for number in range(plan.iterations):
        yield {
            one.transfer.sender: one.iterations[number] if number < len(one.iterations) else () for one in plan.senders
        }
    yield {one.transfer.sender: one.every for one in plan.senders}


def check(plan, transfers, timelines, bubbles, speed, reserve):
    """Every byte once; no grant out of a shared window; no link carries more than it can between any two moments."""
    assert [one.transfer for one in plan.senders] == list(transfers)
    of = {one.sender: one for one in transfers}
    for one in plan.senders:
        granted = sum(grant.nbytes for grants in one.iterations for grant in grants)
        assert granted == (0 if one.reason else one.transfer.nbytes)
        assert len(one.iterations) <= plan.iterations
    for turn in turns_of(plan):
        links = defaultdict(list)
        for sender, grants in turn.items():
            for grant in grants:
                edge = timelines[sender].spans[grant.after].end if grant.after >= 0 else 0.0
                assert grant.nbytes > 0
                assert inside(grant, edge, bubbles[sender], bubbles[of[sender].receiver], reserve)
                job = edge + grant.begin, edge + grant.deadline, grant.nbytes
                links["out", of[sender].source].append(job)
                links["in", of[sender].target].append(job)
        for (_, position), jobs in links.items():
            carries = speed if isinstance(speed, (int, float)) else speed[position]
            for begin, end in itertools.product({job[0] for job in jobs}, {job[1] for job in jobs}):
                needed = sum(nbytes for low, high, nbytes in jobs if begin <= low and high <= end)
                assert needed <= carries * max(0.0, end - begin) * (1 + 1e-9) + 1e-3


SCHEDULES = {
    "1F1B": one_f_one_b(4, 8),
    "interleaved": interleaved(4, 8),
    "DeepSpeed": deepspeed(4, 8),
    "GPipe": [[(kind, i, rank) for kind in "FB" for i in range(8)] for rank in range(4)],
}


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_byte_of_a_real_schedule_goes_out_in_a_shared_bubble(name, per_node, granularity):
    timelines = played(SCHEDULES[name])
    bubbles = {rank: bubbles_of(timeline) for rank, timeline in timelines.items()}
    transfers, reserve = ring(4, 4_000_000, per_node, 12), Reserve(0.001, 0.0005)
    plan = plan_bubbles(transfers, timelines, bubbles, 1e8, reserve, granularity)
    check(plan, transfers, timelines, bubbles, 1e8, reserve)
    assert not plan.paced_by_rate and 1 <= plan.iterations < 20
    assert plan.fill_bytes is not None and plan.fill_layers is not None
    assert plan.fill_bytes >= 0.999, "all of a window, but for parts of a byte"
    assert 0.5 <= plan.fill_layers <= plan.fill_bytes
    for one in plan.senders:
        if granularity is Granularity.LAYER:
            parts = [part for turn in one.iterations for grant in turn for part in grant.parts]
            covered = sorted((part.start, part.stop) for part in parts)
            assert covered[0][0] == 0 and covered[-1][1] == one.transfer.nbytes
            assert all(a[1] == b[0] for a, b in zip(covered, covered[1:], strict=False))
            assert all(
                grant.nbytes == sum(part.nbytes for part in grant.parts) for turn in one.iterations for grant in turn
            )


@st.composite
def jobs(draw):
    """Up to 5 ranks anywhere on up to 3 nodes, idle at random, each with something to send to another node's."""
    count = draw(st.integers(2, 5))
    nodes = [0, 1, *draw(st.lists(st.integers(0, 2), min_size=count - 2, max_size=count - 2))]
    bubbles = {}
    for rank in range(count):
        edges = sorted(draw(st.lists(st.integers(0, 30), min_size=0, max_size=10, unique=True)))
        those = enumerate(zip(edges[::2], edges[1::2], strict=False))
        bubbles[rank] = tuple(Bubble(7 + i, float(begin), float(end), 3 * i) for i, (begin, end) in those)
    transfers = []
    for rank in range(count):
        other = draw(st.sampled_from([to for to in range(count) if nodes[to] != nodes[rank]]))
        layers = tuple(draw(st.lists(st.integers(0, 3000), min_size=1, max_size=4)))
        transfers.append(Transfer(rank, nodes[rank], other, nodes[other], sum(layers), layers))
    return transfers, bubbles, {node: float(draw(st.integers(50, 1000))) for node in range(3)}


@settings(max_examples=300)
@given(jobs(), st.sampled_from(Granularity), st.sampled_from([0, 0.5, 1]), st.sampled_from([0, 4.25, 40]))
def test_whatever_the_bubbles_every_byte_is_planned_once_or_refused_with_a_reason(job, granularity, kept, ready):
    transfers, bubbles, speed = job
    timelines = around(bubbles, 30.0)
    reserve = Reserve(kept, kept / 2)
    plan = plan_bubbles(transfers, timelines, bubbles, speed, reserve, granularity, ready)
    check(plan, transfers, timelines, bubbles, speed, reserve)
    assert plan.table()
    for one in plan.senders:
        if one.reason:
            assert one.bytes_per_second * plan.iterations * 30 == pytest.approx(one.transfer.nbytes)
            continue
        begins = {bubble.index: bubble.begin for bubble in bubbles[one.transfer.sender]}
        assert all(begins[grant.bubble] + grant.deadline > ready for turn in one.iterations[:1] for grant in turn)


# how many iterations: brute force


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=4),
    st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=4),
    st.integers(1, 90),
    st.integers(0, 3),
)
def test_a_single_sender_takes_as_many_iterations_as_counting_ticks_says(own, other, need, kept):
    """A byte a second, bubbles of whole seconds; two ranks that are idle where the lists say."""

    def idle(pairs):
        ticks = {at for low, high in pairs for at in range(low, high)}
        begins = sorted(at for at in ticks if at - 1 not in ticks)
        ends = sorted(at + 1 for at in ticks if at + 1 not in ticks)
        return tuple(Bubble(i, float(b), float(e), i) for i, (b, e) in enumerate(zip(begins, ends, strict=True)))

    def left(bubbles):
        return {at for b in bubbles for at in range(int(b.begin) + kept, int(b.end) - kept)}

    bubbles = {0: idle(own), 1: idle(other)}
    shared = len(left(bubbles[0]) & left(bubbles[1]))
    timelines = around(bubbles, 20.0)
    plan = plan_bubbles([Transfer(0, 0, 1, 1, need)], timelines, bubbles, 1.0, Reserve(kept, kept))
    (sender,) = plan.senders
    assert bool(sender.reason) == (shared * 100 < need)
    assert plan.iterations == (ceil(need / shared) if not sender.reason else ceil(need / (LARGEST_RATE_DUTY * 20)))


def test_where_the_host_is_ahead_of_its_device_grants_are_later_by_that():
    """A host is at the end of a span before its device is; windows are the device's."""
    spans = (Span(Kind.FORWARD, 0.0, 2.0), Span(Kind.BACKWARD, 6.0, 8.0))
    usual = {rank: Timeline(rank, 8.0, spans) for rank in range(2)}
    ahead = {rank: replace(one, leads=(0.25, 0.0, 0.0, 1.5, 0.0, 0.0)) for rank, one in usual.items()}
    bubbles = {rank: (Bubble(0, 2.0, 6.0, 0),) for rank in range(2)}
    one, other = (
        plan_bubbles([Transfer(0, 0, 1, 1, 100)], timelines, bubbles, 100.0, Reserve(0.5, 0.5)).senders[0].every
        for timelines in (usual, ahead)
    )
    assert [(grant.begin, grant.deadline, grant.nbytes) for grant in one] == [(0.5, 3.5, 300)]
    assert [(grant.begin, grant.deadline, grant.nbytes) for grant in other] == [(2.0, 5.0, 300)]


@pytest.mark.parametrize(("left", "carried"), [(4.0, 300), (2.0, 100), (0.5, 0)])
def test_a_bubble_is_over_when_the_host_tells_of_what_comes_next(left, carried):
    """Then the gate is closed: the device may still be idle, or has not even begun to be."""
    spans = (Span(Kind.FORWARD, 0.0, 2.0), Span(Kind.RECV, 2.0, 6.0), Span(Kind.BACKWARD, 6.0, 8.0))
    leads = (0.0, 0.0, 0.0, 1.5, 1.5, 1.5, 4.0 - left, 0.0)
    timelines = {0: Timeline(0, 8.0, spans, leads=leads), 1: Timeline(1, 8.0, spans)}
    bubbles = {rank: (Bubble(0, 2.0, 6.0, 0),) for rank in range(2)}
    (one,) = plan_bubbles([Transfer(0, 0, 1, 1, 100)], timelines, bubbles, 100.0, Reserve(0.5, 0.5)).senders
    assert sum(grant.nbytes for grant in one.every) == carried
    assert bool(one.reason) == (not carried)
    past = {0: replace(timelines[0], leads=(*leads[:6], 5.0, 0.0)), 1: timelines[1]}
    (other,) = plan_bubbles([Transfer(0, 0, 1, 1, 100)], past, bubbles, 100.0, Reserve(0.5, 0.5)).senders
    assert "runs ahead of its device" in other.reason and other.bytes_per_second > 0


def test_of_three_that_share_a_link_none_is_crowded_out_of_its_only_bubble():
    """Any plan that lets the first two take what they like in the first second needs another iteration."""
    bubbles = {rank: tuple(Bubble(i, t, t + 1.0, i) for i, t in enumerate(times))
               for rank, times in enumerate([(0.0, 1.0), (0.0, 2.0), (1.0,), (0.0, 1.0, 2.0)])}  # fmt: skip
    transfers = [Transfer(rank, 0, 3, 1, 1000) for rank in range(3)]
    timelines = around(bubbles, 4.0)
    plan = plan_bubbles(transfers, timelines, bubbles, 1000.0, Reserve(0, 0))
    assert plan.iterations == 1
    check(plan, transfers, timelines, bubbles, 1000.0, Reserve(0, 0))


def test_one_with_a_longer_window_begins_when_the_one_with_the_short_window_is_through():
    bubbles = {0: (Bubble(0, 0.0, 10.0, -1),), 1: (Bubble(0, 0.0, 5.0, -1),), 2: (Bubble(0, 0.0, 10.0, -1),)}
    transfers = [Transfer(rank, 0, 2, 1, 500) for rank in range(2)]
    plan = plan_bubbles(transfers, around(bubbles, 10.0), bubbles, 100.0, Reserve(0, 0))
    grants = [[(grant.begin, grant.deadline, grant.nbytes) for grant in one.every] for one in plan.senders]
    assert grants == [[(5.0, 10.0, 500)], [(0.0, 5.0, 500)]] and plan.iterations == 1


def test_a_node_that_receives_from_two_gives_each_its_part_of_the_link():
    bubbles = {rank: (Bubble(0, 0.0, 10.0, -1),) for rank in range(3)}
    transfers = [Transfer(0, 0, 2, 2, 3000), Transfer(1, 1, 2, 2, 1000)]
    timelines = around(bubbles, 10.0)
    plan = plan_bubbles(transfers, timelines, bubbles, {0: 1000.0, 1: 1000.0, 2: 200.0}, Reserve(0, 0))
    assert [sender.every[0].nbytes for sender in plan.senders] == [1500, 500] and plan.iterations == 2


def test_a_window_that_carries_less_than_is_worth_a_frame_is_left_alone_unless_there_are_no_others():
    """Of four senders each has a quarter of the link, and of two windows one carries 50 bytes for each, one 200."""
    bubbles = {rank: (Bubble(0, 0.0, 2.0, -1), Bubble(1, 4.0, 12.0, 3)) for rank in range(5)}
    transfers = [Transfer(rank, 0, 4, 1, 1000) for rank in range(4)]
    for least, carried in ((50, [50, 200]), (51, [200]), (200, [200]), (201, [50, 200])):
        plan = plan_bubbles(transfers, around(bubbles, 12.0), bubbles, 100.0, Reserve(0, 0), least_bytes=least)
        assert [[grant.nbytes for grant in one.every] for one in plan.senders] == [carried] * 4
    short = [replace(one, nbytes=50) for one in transfers]  # all there is goes in any of them
    plan = plan_bubbles(short, around(bubbles, 12.0), bubbles, 100.0, Reserve(0, 0), least_bytes=60)
    assert [[grant.bubble for grant in turn] for one in plan.senders for turn in one.iterations] == [[0]] * 4


# grants, and the trainer that counts spans


def planned(ready=0.0, need=250):
    own = (Bubble(0, 1.0, 2.0, 0), Bubble(1, 4.0, 6.0, 5))
    bubbles = {0: own, 1: (Bubble(0, 0.0, 4.5, 0), Bubble(1, 5.0, 9.0, 1))}
    timelines = around(bubbles, 10.0)
    plan = plan_bubbles([Transfer(0, 0, 1, 1, need)], timelines, bubbles, 100.0, Reserve(0.1, 0.1), ready_seconds=ready)
    return plan, plan.senders[0]


def test_a_bubble_in_which_the_receiver_computes_has_two_grants_and_counts_from_its_begin():
    _, sender = planned()
    first, second, third = sender.grants_after(0, 0) + sender.grants_after(0, 5)
    assert (first.bubble, first.begin, first.deadline, first.nbytes) == pytest.approx((0, 0.1, 0.9, 80))
    assert (second.bubble, second.begin, second.deadline, second.nbytes) == pytest.approx((1, 0.1, 0.4, 30))
    assert (third.begin, third.deadline, third.nbytes) == pytest.approx((1.1, 1.9, 80))
    assert sender.grants_after(0, 3) == ()


def test_a_bubble_behind_a_reduction_counts_from_the_span_before_the_reduction():
    """Both bubbles begin after the same compute span: its end is what a trainer can tell."""
    bubbles = {0: (Bubble(0, 1.0, 2.0, 0), Bubble(1, 5.0, 6.0, 0)), 1: (Bubble(0, 0.0, 9.0, -1),)}
    plan = plan_bubbles([Transfer(0, 0, 1, 1, 150)], around(bubbles, 10.0), bubbles, 100.0, Reserve(0, 0))
    found = [(grant.bubble, grant.begin, grant.deadline) for grant in plan.senders[0].grants_after(0, 0)]
    assert found == [(0, 0.0, 1.0), (1, 4.0, 5.0)]


def test_what_is_left_goes_in_the_next_iteration_and_after_that_all_bubbles_are_open_for_what_was_late():
    plan, sender = planned()
    assert plan.iterations == 2
    assert [[grant.nbytes for grant in turn] for turn in sender.iterations] == [[80, 30, 80], [60]]
    assert sender.grants_after(1, 5) == () and sender.grants_after(2, 5) == sender.grants_after(0, 5)


def test_nothing_is_planned_before_the_version_is_there():
    plan, sender = planned(ready=5.5)
    assert [[grant.nbytes for grant in turn] for turn in sender.iterations] == [[40], [80, 30, 80], [20]]
    assert plan.iterations == 3


def test_what_is_sent_is_what_the_neighbours_keep_and_what_goes_beside_it():
    neighbours = plan_neighbours(["a", "a", "b", "b"], [(0, 2), (1, 3)], [100, 70, 50, 20])
    assert transfers_of(neighbours.copies)[:2] == (Transfer(0, 0, 2, 1, 100), Transfer(1, 0, 3, 1, 70))
    facts = {rank: SenderFacts(extra_bytes=rank + 1) for rank in range(3)}
    assert [one.nbytes for one in transfers_of(neighbours.copies, facts)] == [101, 72, 53, 20]
    assert transfers_of(neighbours.copies[2:], facts)[0] == Transfer(2, 1, 0, 0, 53)


def test_what_goes_beside_a_slot_is_planned_like_a_layer_of_it():
    def layers(nbytes, *senders):
        """Of two ranks: what goes beside the slot of each, and its layers."""
        facts = {rank: SenderFacts(extra_bytes=extra, layers=known) for rank, (extra, known) in enumerate(senders)}
        return [one.layers for one in transfers_of(plan_neighbours(["a", "b"], [(0, 1)], nbytes).copies, facts)]

    assert layers([100, 70], (5, (60, 40)), (0, (70,))) == [(60, 40, 5), (70,)]
    assert layers([100, 70], (5, ()), (1, ())) == [(), ()], "not known"
    assert layers([0, 70], (5, ()), (0, (70,))) == [(5,), (70,)], "a rank that has nothing else"


@pytest.mark.parametrize("granularity", Granularity)
def test_by_layers_a_bubble_is_open_for_as_much_as_whole_layers_have(granularity):
    """100 bytes fit into each iteration's only bubble, layers have 60, 60 and 30."""
    bubbles = {rank: (Bubble(0, 0.0, 1.0, -1),) for rank in range(2)}
    transfer = Transfer(0, 0, 1, 1, 150, (60, 60, 30))
    plan = plan_bubbles([transfer], around(bubbles, 10.0), bubbles, 100.0, Reserve(0, 0), granularity)
    (one,) = plan.senders
    planned = [[grant.nbytes for grant in turn] for turn in one.iterations]
    assert planned == ([[90], [60]] if granularity is Granularity.LAYER else [[100], [50]])
    assert [grant.nbytes for grant in one.every] == ([90] if granularity is Granularity.LAYER else [100])
    assert (plan.fill_bytes, plan.fill_layers) == (1.0, 150 / 160), "of the last window what is used"


# fallbacks, refusals


def test_a_schedule_without_bubbles_says_so_and_is_paced_by_a_rate():
    timelines = {rank: Timeline(rank, 2.0, (Span(Kind.FORWARD, 0, 2),)) for rank in range(2)}
    plan = plan_bubbles([Transfer(0, 0, 1, 1, 1000)], timelines, {0: (), 1: ()}, 1e4, Reserve(0, 0))
    assert plan.senders[0].reason == "its schedule has no bubbles" and plan.paced_by_rate == plan.senders
    assert plan.iterations == 1 and plan.senders[0].bytes_per_second == 500
    assert plan.fill_bytes is None and plan.senders[0].grants_after(0, -1) == ()
    assert "rank 0 is paced by a rate, 500 bytes/s: its schedule has no bubbles" in plan.table()


def test_one_that_cannot_keep_up_goes_by_a_rate_and_the_others_by_bubbles():
    bubbles = {0: (Bubble(0, 0.0, 1.0, -1),), 1: (Bubble(0, 0.5, 1.0, 2),), 2: (Bubble(0, 5.0, 6.0, 2),)}
    timelines = around(bubbles, 10.0)
    transfers = [Transfer(0, 0, 1, 1, 90), Transfer(1, 1, 2, 2, 10), Transfer(2, 2, 2, 0, 100_000)]
    plan = plan_bubbles(transfers, timelines, bubbles, 100.0, Reserve(0, 0))
    assert [one.reason for one in plan.senders] == [
        "",
        "it shares no long enough idle time with rank 2, apart from regular communication",
        "its bubbles carry 100 of 100000 bytes per iteration, not all within 100",
    ]


def test_what_cannot_be_planned_is_refused_in_words():
    timelines, bubbles = {0: Timeline(0, 1.0, ()), 1: Timeline(1, 1.0, ())}, {0: (), 1: ()}
    one = Transfer(0, 0, 1, 1, 10)
    with pytest.raises(ConfigError, match="nothing to send"):
        plan_bubbles([], timelines, bubbles, 1.0, Reserve(0, 0))
    with pytest.raises(ConfigError, match="rank 5 has no timeline"):
        plan_bubbles([replace(one, receiver=5)], timelines, bubbles, 1.0, Reserve(0, 0))
    with pytest.raises(ConfigError, match="rank 0: its layers are unknown"):
        plan_bubbles([one], timelines, bubbles, 1.0, Reserve(0, 0), Granularity.LAYER)
    with pytest.raises(ConfigError, match="rank 0: its layers have 9 bytes, but it sends 10"):
        Transfer(0, 0, 1, 1, 10, (4, 5))
    with pytest.raises(ConfigError, match="from position 0 to 1 has no bandwidth"):
        plan_bubbles([one], timelines, bubbles, {0: 1.0, 1: 0.0}, Reserve(0, 0))


# scale, and people


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_many_stages_microbatches_and_layers_are_planned_in_steps_of_their_number(granularity, jitter):
    def steps(stages, microbatches, layers):
        timelines = played(one_f_one_b(stages, microbatches), jitter)
        bubbles = {rank: bubbles_of(timeline) for rank, timeline in timelines.items()}
        transfers, reserve = ring(stages, 1 << 30, 1, layers), Reserve(*[(1 << 20) / 1.25e9] * 2)
        plans = []
        count = instructions(
            lambda: plans.append(plan_bubbles(transfers, timelines, bubbles, 1.25e9, reserve, granularity))
        )
        assert not plans[0].paced_by_rate
        assert all(sum(g.nbytes for t in one.iterations for g in t) == one.transfer.nbytes for one in plans[0].senders)
        return count

    assert steps(16, 128, 48) < 2.5 * steps(8, 128, 48)
    assert steps(16, 128, 96) < 2.5 * steps(16, 128, 48)
    assert steps(16, 256, 48) < 2.5 * steps(16, 128, 48)


def test_the_table_says_who_sends_what_when():
    plan, _ = planned()
    assert plan.table().splitlines() == [
        "a version every 2 iteration(s) of 10.000 s, bubbles filled by bytes (100.0% by bytes)",
        "  rank     to          bytes   idle shared  bubbles    n",
        "     0      1            250  30.0%  19.0%        2    2",
    ]


def test_what_goes_by_a_rate_from_one_node_never_takes_more_than_its_part_of_the_time():
    shares = rate_duties({4: 3000, 5: 1000, 6: 0})
    assert sum(shares.values()) == pytest.approx(LARGEST_RATE_DUTY)
    assert shares[4] == pytest.approx(3 * shares[5]), "a rank with little is not given what another needs"
    assert rate_duties({0: 0, 1: 0}) == {0: LARGEST_RATE_DUTY / 2, 1: LARGEST_RATE_DUTY / 2}
    assert min(rate_duties({0: 1 << 40, 1: 0}).values()) > 0.02, "what goes beside an empty slot goes by it, too"
