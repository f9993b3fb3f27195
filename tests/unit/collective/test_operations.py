"""What ranks send each other joins to the right result, in whatever order it arrives."""

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.collective.operations import (
    Finished,
    FrameKind,
    Known,
    Operations,
    RankFrame,
    SendFrame,
    failed,
    failure,
    framed,
    payloads,
    place_of,
)
from ft_plugins.errors import ProtocolError


class Network:
    """All ranks of a job; frames between two of them keep their order, nothing else does."""

    def __init__(self, world_size, on_node, seed):
        self.ranks = [Operations(place_of(rank, world_size, on_node)) for rank in range(world_size)]
        self.links = {}
        self.results = [[] for _ in range(world_size)]
        self.known = set()  # ranks whose word all others know
        self.random = random.Random(seed)

    def act(self, rank, actions):
        for action in actions:
            match action:
                case SendFrame(to, frame):
                    self.links.setdefault((rank, to), deque()).append(frame)
                case Finished(number, result):
                    assert number == len(self.results[rank]) + 1, "in order"
                    self.results[rank].append(bytes(result))
                case Known():
                    self.known.add(rank)

    def call(self, rank, kind, body):
        self.act(rank, self.ranks[rank].call(kind, body)[1])

    def deliver_one(self):
        busy = [link for link, frames in self.links.items() if frames]
        if not busy:
            return False
        source, target = self.random.choice(busy)
        self.act(target, self.ranks[target].receive(source, self.links[source, target].popleft()))
        return True

    def run(self):
        while self.deliver_one():
            pass


SHAPES = st.tuples(st.integers(1, 60), st.integers(1, 5), st.integers(0, 2**31))


@given(SHAPES, st.integers(1, 4))
def test_gathers_and_agreements_reach_all_in_order(shape, count):
    world_size, on_node, seed = shape
    network = Network(world_size, on_node, seed)
    calls = [(rank, number) for rank in range(world_size) for number in range(count)]
    order = sorted(calls, key=lambda call: (call[1] + 1.5 * network.random.random(), call[0]))
    done = [0] * world_size
    for rank, _ in order:
        number = done[rank]
        done[rank] += 1
        network.call(rank, FrameKind.GATHER, framed(f"{rank}.{number}".encode() * number))
        for _ in range(network.random.randrange(3)):
            network.deliver_one()
    network.run()
    expected = [[f"{rank}.{number}".encode() * number for rank in range(world_size)] for number in range(count)]
    for results in network.results:
        assert [payloads(result, world_size) for result in results] == expected


@given(SHAPES, st.data())
def test_the_lowest_error_that_is_no_echo_speaks_for_all(shape, data):
    world_size, on_node, seed = shape
    network = Network(world_size, on_node, seed)
    raised = data.draw(st.dictionaries(st.integers(0, world_size - 1), st.booleans()))
    for rank in range(world_size):
        own = failure(rank, "ConfigError", f"of {rank}", raised[rank]) if rank in raised else b""
        network.call(rank, FrameKind.AGREE, own)
    network.run()
    first = min(raised, key=lambda rank: (raised[rank], rank)) if raised else None
    expected = None if first is None else (first, "ConfigError", f"of {first}")
    assert [failed(result) for results in network.results for result in results] == [expected] * world_size


@given(SHAPES, st.data())
def test_when_all_who_announced_a_word_go_on_everybody_knows_it(shape, data):
    """An announcer waits until all know its word; the others may meanwhile have heard it, or announced it, too."""
    world_size, on_node, seed = shape
    network = Network(world_size, on_node, seed)
    announcing = data.draw(st.lists(st.integers(0, world_size - 1), min_size=1, unique=True))
    for rank in announcing:
        network.act(rank, network.ranks[rank].announce("degraded"))
        for _ in range(network.random.randrange(4)):
            network.deliver_one()
    while True:
        if network.known >= set(announcing):
            assert all("degraded" in rank.words for rank in network.ranks)
            break
        assert network.deliver_one(), "no rank waits for ever"
    network.run()


def test_another_operation_than_that_of_the_other_ranks_is_named():
    network = Network(2, 1, 0)
    network.call(0, FrameKind.GATHER, b"")
    network.call(1, FrameKind.AGREE, b"")
    with pytest.raises(ProtocolError, match="operation 1 is agree on rank 1, but gather on rank 0"):
        network.run()


@pytest.mark.parametrize("number", [17, 1 << 60])
def test_a_rank_far_ahead_is_not_believed(number):
    with pytest.raises(ProtocolError, match=f"rank 1 is at operation {number}, rank 0 at 0"):
        Operations(place_of(0, 2, 1)).receive(1, RankFrame(FrameKind.GATHER, number, b""))


@pytest.mark.parametrize("joined", [b"", b"\1", framed(b"a") + b"\0", framed(b"a"), framed(b"a") * 3, b"\xff" * 16])
def test_what_is_not_the_payloads_of_two_ranks_is_refused(joined):
    with pytest.raises(ProtocolError, match="expected the payloads of 2 ranks"):
        payloads(joined, 2)


@pytest.mark.parametrize("body", [b"\xc1", b"\x90", failure(0, "E", "t", False)[:-1], b"\x94\x00\x00\xa0\xa0"])
def test_an_error_that_cannot_be_read_is_refused(body):
    with pytest.raises(ProtocolError, match="an error of another rank cannot be read"):
        failed(body)
