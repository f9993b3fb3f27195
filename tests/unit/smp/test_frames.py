"""Frames: what they name adds up, over GF(256), to the slot that is lost; each byte once, each parity bucket once.

Streams and parity are made here from random bytes; no segment, no socket.
"""

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ResumeError
from ft_plugins.redundancy import blocked
from ft_plugins.redundancy.exchange_plan import plan_exchange
from ft_plugins.redundancy.field import power, times
from ft_plugins.redundancy.sections import Extent
from ft_plugins.smp.exchange import frames as module
from ft_plugins.smp.exchange.frames import Data, Parity, copied, decoded
from ft_plugins.snapshot.segment.slots import Version

LIMIT = 300  # bytes of a frame here: small states have several
VERSION = Version(3, 14)
TIMES = np.array([[times(a, b) for b in range(256)] for a in range(256)], dtype=np.uint8)


@pytest.fixture(autouse=True, scope="module")
def small_frames():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PAYLOAD_LIMIT", LIMIT)
        yield


def made(plan, nbytes, rng):
    """Slot data by rank, and what the nodes keep of it by area."""
    data = {rank: np.frombuffer(rng.randbytes(size), dtype=np.uint8) for rank, size in enumerate(nbytes)}
    parity = {(a.section, a.stripe, a.which): np.zeros(a.nbytes, dtype=np.uint8) for kept in plan.areas for a in kept}
    for send in itertools.chain(*plan.sends):
        section = plan.sections[send.area.section]
        extents = section.extents(send.node, send.start, send.stop)
        source = np.concatenate([np.empty(0, np.uint8), *(data[e.rank][e.offset :][: e.nbytes] for e in extents)])
        target = parity[send.area.section, send.area.stripe, send.area.which][: len(source)]
        target ^= TIMES[power(send.exponent)][source]
    return data, parity


def put_together(frame, data, parity):
    found = np.zeros(frame.nbytes, dtype=np.uint8)
    for part in frame.parts:
        wanted = part.wanted
        source = data[wanted.rank] if isinstance(wanted, Data) else parity[wanted.key]
        held = source[wanted.at : wanted.at + wanted.nbytes]
        assert len(held) == wanted.nbytes, "a part lies where there are bytes"
        found[part.at : part.at + wanted.nbytes] ^= TIMES[part.factor][held]
    return found


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_frames_of_any_lost_rank_add_up_to_its_slot(draw):
    losses = draw.draw(st.sampled_from([1, 2]))
    count = draw.draw(st.integers(2 if losses == 1 else 4, 6))
    ranks_on = draw.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    nodes = [f"n{node}" for node, ranks in enumerate(ranks_on) for _ in range(ranks)]
    nbytes = draw.draw(st.lists(st.integers(0, 4 * LIMIT), min_size=len(nodes), max_size=len(nodes)))
    lost = draw.draw(st.permutations(range(count)))[: draw.draw(st.integers(1, losses))]
    plan = plan_exchange(nodes, [tuple(range(len(nodes)))], nbytes, losses)
    data, parity = made(plan, nbytes, Random(draw.draw(st.integers(0, 9))))
    for rank in (rank for position in lost for rank in plan.ranks[position]):
        done = 0
        for frame in decoded(plan, rank, VERSION, lost):
            assert frame.offset == done and 0 < frame.nbytes <= LIMIT
            done += frame.nbytes
            assert (put_together(frame, data, parity) == data[rank][frame.offset : done]).all()
            assert not {part.position for part in frame.parts} & set(lost), "nothing is asked of a lost node"
            assert all(part.wanted.version == VERSION and part.factor for part in frame.parts)
            may = [part.factor == 1 and part.wanted.nbytes == frame.nbytes for part in frame.parts]
            assert frame.has_base == any(may) == may[0], "the others can be added to the first one, if to any"
        assert done == nbytes[rank]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_frames_of_a_rank_that_computes_parity_itself_add_up_to_its_data_alone(draw):
    """Part of each slot is of a replica set of all ranks; what lies before and behind it is the rank's own."""
    count = draw.draw(st.integers(2, 5))
    ranks_on = draw.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    nodes = [f"n{node}" for node, ranks in enumerate(ranks_on) for _ in range(ranks)]
    replicated = [
        Extent(rank, 64 * draw.draw(st.integers(0, 2)), 64 * draw.draw(st.integers(0, 9))) for rank in range(len(nodes))
    ]
    nbytes = [extent.offset + extent.nbytes + 64 * draw.draw(st.integers(0, 4)) for extent in replicated]
    lost = draw.draw(st.integers(0, count - 1))
    plan = plan_exchange(nodes, [tuple(range(len(nodes)))], nbytes, 1, [replicated])
    data, parity = made(plan, nbytes, Random(draw.draw(st.integers(0, 9))))
    whole = {}
    for rank, parts in enumerate(plan.parts):
        behind = [np.zeros(part.stop - part.start, dtype=np.uint8) for part in parts]
        for part, target in zip(parts, behind, strict=True):
            for _, at, e in plan.sections[part.section].sources(part.stripe, part.start, part.stop):
                target[at : at + e.nbytes] ^= data[e.rank][e.offset : e.offset + e.nbytes]
        whole[rank] = np.concatenate([data[rank], *behind])
    for rank in plan.ranks[lost]:
        done = 0
        for frame in decoded(plan, rank, VERSION, [lost]):
            assert frame.offset == done and 0 < frame.nbytes <= LIMIT
            done += frame.nbytes
            assert (put_together(frame, whole, parity) == whole[rank][frame.offset : done]).all()
            assert all(part.position != lost and part.factor for part in frame.parts)
            may = [part.factor == 1 and part.wanted.nbytes == frame.nbytes for part in frame.parts]
            assert frame.has_base == any(may) == any(may[:1])
        assert done == nbytes[rank], "its own parity is computed again"


def _buckets(plan, wanted):
    ((offset, position),) = [
        (a.offset, a.position) for kept in plan.areas for a in kept if (a.section, a.stripe, a.which) == wanted.key
    ]
    start, stop = offset + wanted.at, offset + wanted.at + wanted.nbytes
    return [(position, number) for number in range(start // LIMIT, -(-stop // LIMIT))]


def test_a_frame_of_the_middle_of_a_block_is_one_bucket_of_its_parity():
    nbytes = [5000 - 64 * rank for rank in range(6)]
    plan = plan_exchange(list("aabbcc"), [(0, 2, 4), (1, 3, 5)], nbytes, 1)
    assert any(area.offset % LIMIT for kept in plan.areas for area in kept), "or this test shows nothing"
    for rank in (2, 3):
        frames = list(decoded(plan, rank, VERSION, [1]))
        for frame in frames:
            (parity,) = [part.wanted for part in frame.parts if isinstance(part.wanted, Parity)]
            assert len(_buckets(plan, parity)) == 1
        assert len(frames) <= nbytes[rank] // LIMIT + 2 * 2, "at most a short one at either end of each of the blocks"


def test_more_lost_than_parity_makes_up_for_is_refused_before_a_frame_is_asked_for():
    plan = plan_exchange(list("abc"), [(0, 1, 2)], [500, 500, 500], 1)
    with pytest.raises(ResumeError, match="makes up for 1"):
        decoded(plan, 1, VERSION, [0, 1])


def test_a_slot_that_lies_whole_is_read_from_end_to_end():
    frames = list(copied(7, VERSION, 2 * LIMIT + 1, 4))
    assert [(frame.offset, frame.nbytes) for frame in frames] == [(0, LIMIT), (LIMIT, LIMIT), (2 * LIMIT, 1)]
    assert all(frame.has_base and [part.position for part in frame.parts] == [4] for frame in frames)
    assert list(copied(7, VERSION, 0, 4)) == []


def test_the_reckoning_here_is_the_one_of_the_loops():
    source = np.arange(256, dtype=np.uint8)
    for factor in (1, 2, 29, 255):
        target = np.zeros(256, dtype=np.uint8)
        blocked.combine([target], [source], ((factor,),), overwrite=False)
        assert (target == TIMES[factor][source]).all()
