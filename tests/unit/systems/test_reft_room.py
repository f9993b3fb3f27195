"""The ranks of a node claim another slot each at about the same time: all of them, or none."""

from types import SimpleNamespace

import pytest

from ft_plugins.errors import BudgetError
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import PAGE, Shape
from ft_plugins.snapshot.segment.slots import FIRST, SLOTS, Pin, slots_for
from ft_plugins.systems.reft import reft
from ft_plugins.systems.reft.reft import Reft

SHAPE = Shape(20 * PAGE, 100, 1, 7, slots_for(Pin.NODE, Pin.SOURCE), free=SLOTS, first=FIRST)
RANKS = 8


@pytest.fixture
def paths(segment_path):
    made = [segment_path.with_name(f"{segment_path.name}{rank}") for rank in range(RANKS)]
    try:
        for rank, path in enumerate(made):
            create(path, SHAPE, rank, {})
        yield made
    finally:
        for path in made:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize(("slots", "passed"), [(RANKS, RANKS), (RANKS - 1, 0), (2 * RANKS - 2, RANKS)])
def test_each_rank_of_a_node_gets_the_slot_for_which_there_is_room_or_none_does(paths, monkeypatch, slots, passed):
    segments = [Segment(path) for path in paths]
    room = slots * SHAPE.slot_room + sum(segment.resident_bytes for segment in segments)

    def check_room(nbytes, claim, spare=0):
        if sum(segment.resident_bytes for segment in segments) + nbytes > room:
            raise BudgetError(claim)

    monkeypatch.setattr(reft, "check_room", check_room)
    claimed = 0
    for rank, segment in enumerate(segments):
        one = SimpleNamespace(_paths=paths, _host=SimpleNamespace(rank=rank), _mapped=lambda own=segment: own)
        try:
            Reft.check_room(one, SHAPE.slot_room)
        except BudgetError as error:
            assert f"rank {rank}: another slot for each of the {RANKS} ranks of this node" in str(error)
        else:
            segment.claim_slot(FIRST)
            claimed += 1
    assert claimed == passed
