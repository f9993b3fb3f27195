"""Every rank receives the byte ranges that it asked for, in frames of bounded size."""

import threading
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.recovery.resize import refill as pulling
from ft_plugins.recovery.resize.refill import PullRange, pull


class Ranks:
    """The collectives of several ranks, which are threads here."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=300)
        self.payloads = [b""] * count
        self.boxes = {}


class OneOf:
    def __init__(self, ranks, rank):
        self.ranks, self.rank = ranks, rank
        self.most, self.requested = 0, False

    def gather(self, payload):
        self.ranks.payloads[self.rank] = payload
        self.ranks.barrier.wait()
        found = list(self.ranks.payloads)
        self.ranks.barrier.wait()
        return found

    def transfers(self):
        return nullcontext(self)

    def swap(self, send, receive):
        if self.requested:
            self.most = max([self.most, *(len(data) for data in send.values())])
        self.requested = True  # by the first one
        for rank, data in send.items():
            self.ranks.boxes[self.rank, rank] = data
        for _ in range(2):
            self.ranks.barrier.wait()
        for rank, into in receive.items():
            into[:] = self.ranks.boxes.pop((rank, self.rank))
        self.ranks.barrier.wait()


@settings(deadline=None, max_examples=25)
@given(st.data(), st.integers(1, 4), st.integers(1, 5))
def test_every_rank_receives_the_ranges_it_asked_for(data, count, previous):
    frame = data.draw(st.sampled_from([7, 64, 4096]))
    generator = np.random.default_rng(3)
    held = {source: generator.integers(0, 256, 200, dtype=np.uint8) for source in range(previous)}
    holder = {source: data.draw(st.integers(0, count - 1)) for source in held}
    requests = st.tuples(st.sampled_from(range(previous)), st.integers(0, 150), st.integers(0, 50))
    asked = [data.draw(st.lists(requests, max_size=5)) for _ in range(count)]
    ranks = Ranks(count)
    found = {}
    ones = [OneOf(ranks, rank) for rank in range(count)]

    def work(rank):
        starts = np.cumsum([0, *(nbytes for _, _, nbytes in asked[rank])])
        into = np.zeros(starts[-1], dtype=np.uint8)
        ranges = [
            PullRange(holder[source], source, at, nbytes, int(target))
            for (source, at, nbytes), target in zip(asked[rank], starts, strict=False)
        ]

        def read(source):
            assert holder[source] == rank, "only what this rank can read"
            return held[source]

        pull(ones[rank], ranges, read, into)
        found[rank] = into.tobytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pulling, "FRAME_BYTES", frame)
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    for rank, wants in enumerate(asked):
        assert found[rank] == b"".join(held[source][at : at + nbytes].tobytes() for source, at, nbytes in wants)
    assert all(one.most <= frame for one in ones)


@pytest.mark.parametrize("count", [8, 64])
def test_what_a_rank_receives_does_not_grow_with_what_others_request(count):
    """Each rank requests two ranges of each of two others: all ranks learn that, and only those two what they are."""
    sent = []

    class Counted(OneOf):
        def gather(self, payload):
            sent.append(len(payload))
            return super().gather(payload)

    ranks, found = Ranks(count), dict[int, np.ndarray]()
    held = [np.full(64, rank, dtype=np.uint8) for rank in range(count)]

    def work(rank):
        others = [(rank + step) % count for step in (1, 2)]
        into = np.zeros(64, dtype=np.uint8)
        ranges = [PullRange(o, o, at, 16, 32 * n + at) for n, o in enumerate(others) for at in (0, 16)]
        pull(Counted(ranks, rank), ranges, lambda source: held[source], into)
        found[rank] = into

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for rank in range(count):
        assert found[rank].tolist() == [(rank + 1) % count] * 32 + [(rank + 2) % count] * 32
    assert sent == [16] * count, "two numbers for each rank that it reads from"
