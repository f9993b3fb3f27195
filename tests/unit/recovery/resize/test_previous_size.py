"""State of another size of the job: which version of it, who has it, and what is refused. Bytes pulled by those who
need them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.model.host import resizable
from ft_plugins.recovery.plan import NodeFacts, Way
from ft_plugins.recovery.resize import pull as pulling
from ft_plugins.recovery.resize.previous_job import Takeover, own_version, place, plan_size, read_sizes
from ft_plugins.recovery.resize.pull import Wanted, pull
from ft_plugins.smp.protection import Protection
from ft_plugins.snapshot.shape import Shape
from ft_plugins.snapshot.slots import Mark, Version

V3, V4, V5 = Version(1, 3), Version(1, 4), Version(1, 5)


def protection(position: int) -> Protection:
    """Four nodes of one rank, one sharding group, RAIM5."""
    return Protection(
        lineage=1, base=None, nodes=("n0", "n1", "n2", "n3"), groups=((0, 1, 2, 3),),
        shapes=(Shape(640, 64, 1, 9),) * 4, losses=1,
        position=position, endpoints=(("127.0.0.1", 1),) * 4, interval=1, exchange_mbps=0.0, detect_seconds=5.0,
    )  # fmt: skip


def answer(
    ranks: Mapping[int, list[Version]], size: int = 4, parity: list[Version] | None = None, position: int | None = None
) -> dict[str, Any]:
    """What an SMP says; with a `position` it was protected."""
    told = protection(position) if position is not None else None
    held = [[r, [0, 0], 1, 5, False, [[v.lineage, v.iteration] for v in versions]] for r, versions in ranks.items()]
    return {
        "sizes": [[size, held]] if held else [],
        "fingerprints": [],
        "parity": [[v.lineage, v.iteration] for v in parity or []],
        "counted": [1, 4] if parity else None,
        "position": position,
        "plan": told.digest if told else 0,
        "protection": told.block() if told else None,
        "released": 0,
    }


def test_the_newest_version_that_all_former_ranks_have_is_taken() -> None:
    (size,) = read_sizes([answer({0: [V3, V4], 1: [V4, V5]}), answer({2: [V4], 3: [V3, V4]})])
    plan = plan_size(size)
    assert plan.version == V4 and {source.way for source in plan.sources} == {Way.OWN}
    assert [size.holder(rank, V4) for rank in range(4)] == [0, 0, 1, 1] and plan.completed == 5
    assert size.holder(1, V3) is None and size.places == dict.fromkeys(range(4), (0, 0))


def test_a_lost_node_is_made_up_for_by_parity() -> None:
    told = [answer({rank: [V4, V5]}, parity=[V4], position=rank) for rank in (0, 1, 2)]
    (size,) = read_sizes(told)
    plan = plan_size(size)
    assert plan.version == V4 and plan.sources[3].way is Way.DECODE and plan.gone == (3,)
    assert plan.holders == {0: 0, 1: 1, 2: 2}
    assert plan_size(size, banned=[V4]).version is None


def test_too_much_lost_is_told_as_state_that_is_lost() -> None:
    (size,) = read_sizes([answer({rank: [V4]}, parity=[V4], position=rank) for rank in (0, 1)])
    plan = plan_size(size)
    assert plan.version is None and plan.state_lost and "RAIM5 makes up for 1" in plan.reason


def test_a_corrupt_slot_counts_as_lost() -> None:
    (size,) = read_sizes([answer({rank: [V4]}, parity=[V4], position=rank) for rank in range(4)])
    plan = plan_size(size, corrupt=[(2, V4)])
    assert plan.version == V4 and plan.sources[2].way is Way.DECODE
    assert plan_size(size, corrupt=[(2, V4), (1, V4)]).version is None


def test_parity_of_another_size_is_of_no_use() -> None:
    told = [answer({rank: [V4]}, size=5, parity=[V4], position=rank) for rank in range(4)]
    (size,) = read_sizes(told)
    assert size.protection is None and plan_size(size).version is None


@pytest.mark.parametrize("newest", [0, 1, 2])
def test_what_protected_the_job_last_counts_whoever_answers_first(newest: int) -> None:
    """A node that was not there for the newest lineage knows of an older one; the last that answers is a spare."""
    told = [answer({rank: [V4]}, parity=[V4], position=rank) for rank in (0, 1, 2)]
    told[newest]["protection"] |= {"lineage": 4, "endpoints": [["127.0.0.1", 2]] * 4}
    (size,) = read_sizes(told[:2], told[2:])
    assert size.protection is not None
    assert (size.protection.lineage, size.protection.endpoints[0]) == (4, ("127.0.0.1", 2))


def test_sizes_are_told_apart() -> None:
    told = [answer({0: [V4], 1: [V4]}, size=2), answer({0: [V5]}, size=1)]
    one, two = read_sizes(told)
    assert (one.world_size, plan_size(one).version) == (1, V5)
    assert (two.world_size, plan_size(two).version) == (2, V4)


def test_what_a_spare_holds_is_fetched_to_a_node_of_the_job_and_its_parity_counts() -> None:
    """Four nodes of one rank were, two are: one is lost, one has no part."""
    members = [answer({rank: [V4]}, parity=[V4], position=rank) for rank in (0, 1)]
    spare = answer({2: [V4]}, parity=[V4], position=2)
    (without,) = read_sizes(members)
    assert plan_size(without).version is None and plan_size(without).state_lost
    (size,) = read_sizes(members, [spare])
    plan = plan_size(size)
    assert (size.members, plan.version, size.holder(2, V4)) == (2, V4, 2)
    assert [source.way for source in plan.sources] == [Way.OWN, Way.OWN, Way.OWN, Way.DECODE]
    assert plan.holders == {0: 0, 1: 1, 2: 2} and plan.gone == (3,), "decoded with the spare's help"
    where = place(size, plan, {})
    assert where == {0: 0, 1: 1, 2: 0, 3: 1} and max(where.values()) < size.members
    assert place(size, plan, {(2, V4): 1})[2] == 1, "it was put together there"
    assert plan_size(size, corrupt=[(2, V4)]).version is None, "what cannot be read of it is lost"


def test_a_member_goes_before_a_spare_and_what_the_spare_alone_has_newer_is_of_no_use() -> None:
    members = [answer({0: [V4], 1: [V4], 2: [V4]}), answer({3: [V4]})]
    (size,) = read_sizes(members, [answer({2: [V4, V5]})])
    plan = plan_size(size)
    assert plan.version == V4 and place(size, plan, {}) == {0: 0, 1: 0, 2: 0, 3: 1}


def test_what_a_job_has_gone_on_without_is_never_taken_for_its_state() -> None:
    told = [answer({rank: [V4]}) for rank in range(4)]
    told[2] |= {"released": 2}  # it was a spare while lineage 2 counted
    (size,) = read_sizes(told)
    plan = plan_size(size)
    assert plan.version is None and plan.state_lost and "went on in lineage 2" in plan.reason


def test_what_this_size_has_of_its_own_needs_no_attached_rank() -> None:
    facts = [NodeFacts({0: frozenset([V4, V5])}), NodeFacts({1: frozenset([V4])})]
    assert own_version(facts, 2, None, 0).version == V4
    assert own_version(facts, 3, None, 0).version is None


def test_the_former_ranks_of_a_place_are_found() -> None:
    found = Takeover(4, V4, V5, {}, {0: (0, 0), 1: (1, 0), 2: (0, 0), 3: (1, 0)}, 4)
    assert found.of_place((1, 0)) == (1, 3) and found.of_place((0, 1)) == ()


def test_only_what_depends_on_the_size_may_differ() -> None:
    now = {"seed": 1, "parallel": {"tp": 2, "dp": 4}, "gradient_buckets": 7, "world_size": 8}
    assert resizable(now) == {"seed": 1, "parallel": {"tp": 2}}
    assert resizable({**now, "parallel": {"tp": 1, "dp": 4}}) != resizable(now)


# ---- pull ----


class Ranks:
    """Collectives of several threads, as `Collective` has them."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=30)
        self.told: list[bytes] = [b""] * count
        self.boxes: dict[tuple[int, int], np.ndarray] = {}


class OfOne:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self.most = 0

    def gather(self, payload: bytes) -> list[bytes]:
        self.ranks.told[self.rank] = payload
        self.ranks.barrier.wait()
        found = list(self.ranks.told)
        self.ranks.barrier.wait()
        return found

    def swap(self, send: Mapping[int, np.ndarray], receive: Mapping[int, np.ndarray]) -> None:
        self.most = max([self.most, *(len(data) for data in send.values())])
        for rank, data in send.items():
            self.ranks.boxes[self.rank, rank] = data
        for _ in range(2):
            self.ranks.barrier.wait()
        for rank, into in receive.items():
            into[:] = self.ranks.boxes.pop((rank, self.rank))
        self.ranks.barrier.wait()


@settings(deadline=None, max_examples=25)
@given(st.data(), st.integers(1, 4), st.integers(1, 5))
def test_every_rank_has_what_it_wanted(data: st.DataObject, count: int, formers: int) -> None:
    frame = data.draw(st.sampled_from([7, 64, 4096]))
    generator = np.random.default_rng(3)
    held = {former: generator.integers(0, 256, 200, dtype=np.uint8) for former in range(formers)}
    holder = {former: data.draw(st.integers(0, count - 1)) for former in held}
    ranges = st.tuples(st.sampled_from(range(formers)), st.integers(0, 150), st.integers(0, 50))
    asked = [data.draw(st.lists(ranges, max_size=5)) for _ in range(count)]
    ranks = Ranks(count)
    found: dict[int, bytes] = {}
    ones = [OfOne(ranks, rank) for rank in range(count)]

    def work(rank: int) -> None:
        starts = np.cumsum([0, *(nbytes for _, _, nbytes in asked[rank])])
        into = np.zeros(starts[-1], dtype=np.uint8)
        wanted = [
            Wanted(holder[former], former, at, nbytes, int(target))
            for (former, at, nbytes), target in zip(asked[rank], starts, strict=False)
        ]

        def read(former: int) -> np.ndarray:
            assert holder[former] == rank, "only what this rank can read"
            return held[former]

        pull(ones[rank], wanted, read, into)  # type: ignore[arg-type]
        found[rank] = into.tobytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pulling, "FRAME_BYTES", frame)
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for rank, wants in enumerate(asked):
        assert found[rank] == b"".join(held[former][at : at + nbytes].tobytes() for former, at, nbytes in wants)
    assert all(one.most <= frame for one in ones)


def test_of_another_size_too_what_is_certified_is_taken_first() -> None:
    told = answer({rank: [V3, V4, V5] for rank in range(4)}) | {"marks": [[V4.lineage, V4.iteration, Mark.CERTIFIED]]}
    (size,) = read_sizes([told])
    plan = plan_size(size)
    assert (plan.version, plan.mark) == (V4, Mark.CERTIFIED)
