"""The collectives of protection, on real gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from ft_plugins.collective import Collective
from ft_plugins.collective import ranks as module
from ft_plugins.errors import BudgetError, ConfigError, FtError, ProtocolError, ResumeError

Ranks = Callable[..., list[Any]]
SECRET = b"sixteen bytes or more"


def _gather(rank: int, world: int) -> list[list[bytes]]:
    collective = Collective()
    assert (collective.rank, collective.world_size) == (rank, world)
    found = [collective.gather(bytes([rank]) * (rank * 1000)), collective.gather(b""), collective.gather(b"x")]
    collective.barrier()
    return found


def test_every_rank_gets_the_payloads_of_all_whatever_their_sizes(ranks: Ranks) -> None:
    expected = [[bytes([rank]) * (rank * 1000) for rank in range(3)], [b""] * 3, [b"x"] * 3]
    assert ranks(_gather, 3) == [expected] * 3


def _agree(
    rank: int, world: int, failing: dict[int, FtError], tolerated: type[FtError] = ProtocolError
) -> tuple[str, str, bool] | str | None:
    try:
        with Collective().agreement(lambda error: isinstance(error, tolerated)) as agreement:
            if rank in failing:
                raise failing[rank]
    except FtError as error:
        return type(error).__name__, str(error), error.echo
    return str(agreement.tolerated) if agreement.tolerated else None


def test_an_error_of_one_rank_is_raised_on_all_and_only_his_is_no_echo(ranks: Ranks) -> None:
    assert ranks(_agree, 3, {}) == [None] * 3
    assert ranks(_agree, 3, {1: ResumeError("rank 1: another job")}) == [
        ("ResumeError", "rank 1: another job", True),
        ("ResumeError", "rank 1: another job", False),
        ("ResumeError", "rank 1: another job", True),
    ]
    both = {2: BudgetError("rank 2: bytes"), 1: ResumeError("rank 1: another job")}
    assert [echo for _, _, echo in ranks(_agree, 3, both)] == [True, False, True], "the lowest speaks for all"


def test_a_tolerated_error_ends_no_rank_unless_another_one_is_not_tolerated(ranks: Ranks) -> None:
    missing, another = BudgetError("rank 1: bytes"), ResumeError("rank 2: another job")
    assert ranks(_agree, 3, {1: missing}, BudgetError) == [None, "rank 1: bytes", None]
    assert ranks(_agree, 3, {1: missing, 2: another}, BudgetError) == [
        ("ResumeError", "rank 2: another job", True),
        ("ResumeError", "rank 2: another job", True),
        ("ResumeError", "rank 2: another job", False),
    ]


def test_an_error_of_another_kind_passes_an_agreement_at_once() -> None:
    with pytest.raises(KeyError), Collective().agreement():
        raise KeyError("a bug")


def test_a_job_of_one_process_needs_no_process_group() -> None:
    collective = Collective()
    assert (collective.rank, collective.world_size) == (0, 1)
    assert collective.gather(b"abc") == [b"abc"]
    collective.barrier()
    with collective.agreement():
        pass
    with pytest.raises(BudgetError, match="bytes") as caught, collective.agreement():
        raise BudgetError("bytes")
    assert not caught.value.echo
    own = np.arange(9, dtype=np.uint8)
    ((offset, arrived),) = collective.exchange_shares([0], [(0, 9)], own)
    assert offset == 0 and (arrived == own).all()


STREAMS = [  # replica set, shares
    ((0, 1), [(0, 64), (64, 200)]),
    ((0, 1), [(0, 200), (200, 200)]),  # the same set again, one share empty
    ((0, 1, 2), [(0, 100), (100, 100), (100, 777)]),
    ((0, 1, 2), [(0, 0), (0, 0), (0, 0)]),
    ((0, 2), [(0, 1), (1, 2)]),
    ((1, 2), [(0, 333), (333, 334)]),
    ((0, 1), [(0, 64), (64, 200)]),
]


def _exchange(rank: int, world: int, part_bytes: int) -> list[tuple[bytes, int]]:
    module.PART_BYTES = part_bytes
    others = [dist.new_group([0, 1]), dist.new_group([0])]  # the framework has groups too, not on all ranks as many
    collective = Collective()
    for _ in range(2):
        collective.connect(replicas for replicas, _ in STREAMS if rank in replicas)
    found = []
    for number, (replicas, shares) in enumerate(STREAMS):
        if rank not in replicas:
            continue
        stream = np.random.default_rng(number).integers(0, 256, shares[-1][1], dtype=np.uint8)
        start, stop = shares[replicas.index(rank)]
        received = np.zeros(len(stream), dtype=np.uint8)
        times = np.zeros(len(stream), dtype=np.uint8)
        longest = 0
        for offset, arrived in collective.exchange_shares(replicas, shares, stream[start:stop].copy()):
            received[offset : offset + len(arrived)] = arrived
            times[offset : offset + len(arrived)] += 1
            longest = max(longest, len(arrived))
        assert (times == 1).all(), "every byte passes once"
        assert (received == stream).all(), (rank, number)
        found.append((received.tobytes(), longest))
    assert len(others) == 2
    return found


@pytest.mark.parametrize("part_bytes", [64, 1000])
def test_a_set_puts_its_stream_together_from_uneven_shares_in_bounded_rounds(ranks: Ranks, part_bytes: int) -> None:
    found = ranks(_exchange, 3, part_bytes)
    assert [len(of_rank) for of_rank in found] == [6, 6, 4]
    assert max(longest for of_rank in found for _, longest in of_rank) <= part_bytes


def _start_gather(rank: int, world: int) -> list[list[bytes]]:
    collective = Collective()
    first = collective.start_gather(bytes([rank]) * rank, 5)
    second = collective.start_gather(b"later", 5)
    between = collective.gather(b"between")  # whatever else the ranks do meanwhile
    assert between == [b"between"] * world
    return [second.result(), first.result()]


def test_what_was_started_is_read_whenever_it_suits(ranks: Ranks) -> None:
    assert ranks(_start_gather, 3) == [[[b"later"] * 3, [b"", b"\1", b"\2\2"]]] * 3
    assert Collective().start_gather(b"alone", 8).result() == [b"alone"]
    with pytest.raises(ValueError, match="6 bytes, more than the agreed 5"):
        Collective().start_gather(b"longer", 5)


class _Relay:
    """Between rank 1 and the others: what arrives in its gathers goes through `change`, which has all earlier ones."""

    def __init__(self, change: str) -> None:
        self._real = dist.all_gather
        self._change = change
        self._seen: list[list[Any]] = []

    def all_gather(self, found: list[Any], own: Any, group: Any = None, async_op: bool = False) -> Any:
        self._real(found, own, group=group)
        before = next((each for each in self._seen[::-1] if len(each[0]) == len(own)), None)
        self._seen.append([part.clone() for part in found])
        if self._change == "a byte of the payload":
            found[2][8] ^= 1
        elif self._change == "its length":
            found[2][0] ^= 2
        elif self._change == "an earlier one in its place" and before is not None:
            found[2].copy_(before[2])
        elif self._change == "that of another rank":
            found[2].copy_(found[0])
        return self if async_op else None

    def wait(self) -> None:
        """All is here."""


def _altered(rank: int, world: int, change: str) -> list[str]:
    collective = Collective(SECRET)
    if rank == 1:
        dist.all_gather = _Relay(change).all_gather
    said = []
    for payload in (b"one", b"two"):
        started = collective.start_gather(payload, 5)  # of which `gather` is made
        try:
            assert started.result() == [payload] * world
        except ProtocolError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    "change", ["a byte of the payload", "its length", "an earlier one in its place", "that of another rank"]
)
def test_a_payload_that_was_altered_on_the_way_is_refused_with_the_rank_that_sent_it(ranks: Ranks, change: str) -> None:
    none, altered, nothing = ranks(_altered, 3, change)
    assert none == nothing == [] and altered
    assert all(words.startswith("rank 1: rejected data of rank 2: it was altered in transit") for words in altered)


def _altered_shares(rank: int, world: int, change: str) -> list[str]:
    """What a rank says of two streams of one round each, which rank 1 gets otherwise than they were sent."""
    collective = Collective(SECRET)
    collective.connect([range(world)])
    if rank == 1:
        dist.all_gather = _Relay(change).all_gather
    said = []
    for stream in range(2):
        own = np.arange(64, dtype=np.uint8) + rank + stream
        shares = [(64 * r, 64 * r + 64) for r in range(world)]
        try:
            for offset, arrived in collective.exchange_shares(range(world), shares, own):
                assert arrived.tolist() == [offset // 64 + stream + i for i in range(64)]
        except ProtocolError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("change", ["a byte of the payload", "an earlier one in its place", "that of another rank"])
def test_shares_that_were_altered_on_the_way_are_not_taken(ranks: Ranks, change: str) -> None:
    none, altered, nothing = ranks(_altered_shares, 3, change)
    assert none == nothing == [] and altered
    assert all(words.startswith("rank 1: rejected data of rank 2: it was altered in transit") for words in altered)


class _Arriving:
    """A receive of which `change` makes something else."""

    def __init__(self, work: Any, tensor: Any, change: str, before: list[Any]) -> None:
        self._work, self._tensor, self._change, self._before = work, tensor, change, before

    def wait(self) -> None:
        self._work.wait()
        real = self._tensor.clone()
        if self._change == "a byte":
            self._tensor[3] ^= 1
        elif self._change == "the one before" and self._before:
            self._tensor.copy_(self._before[-1])
        self._before.append(real)


def _swap(rank: int, world: int, change: str) -> list[str]:
    """What a rank says of two rounds in which each sends its number and the round's to the next."""
    collective = Collective(SECRET)
    real, before = dist.irecv, list[Any]()
    if rank == 1:
        dist.irecv = lambda tensor, **to: _Arriving(real(tensor, **to), tensor, change, before)
    into, said = np.zeros(4, dtype=np.uint8), []
    for number in range(2):
        sent = np.array([rank, number, 5, 6], dtype=np.uint8)
        try:
            collective.swap({(rank + 1) % world: sent}, {(rank - 1) % world: into})
            assert into.tolist() == [(rank - 1) % world, number, 5, 6]
        except ProtocolError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("change", ["nothing", "a byte", "the one before"])
def test_swapped_bytes_arrive_and_those_that_were_altered_on_the_way_are_not_taken(ranks: Ranks, change: str) -> None:
    none, altered, nothing = ranks(_swap, 3, change)
    assert none == nothing == [] and bool(altered) == (change != "nothing")
    assert all(words.startswith("rank 1: rejected data of rank 0: it was altered in transit") for words in altered)


def _words(rank: int, world: int, forge: bytes, real: bool) -> tuple[bool, bool]:
    collective = Collective(SECRET)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1 and forge:
        store.set("ft_plugins/degraded", forge)
    collective.barrier()
    before = collective.announced("degraded")
    collective.barrier()
    if rank == 1 and real:
        collective.announce("degraded")
    collective.barrier()
    return before, collective.announced("degraded")


@pytest.mark.parametrize("forge", [b"", b"1", b"0", bytes(32)])
def test_a_word_is_believed_from_a_rank_and_from_no_one_else(ranks: Ranks, forge: bytes) -> None:
    assert ranks(_words, 3, forge, True) == [(False, True)] * 3
    assert ranks(_words, 2, forge, False) == [(False, False)] * 2


def _replay(rank: int, world: int) -> bool:
    first, second = Collective(SECRET), Collective(SECRET)  # as of two incarnations
    if rank == 0:
        first.announce("degraded")
    second.barrier()
    return second.announced("degraded")


def test_a_word_of_another_incarnation_is_not_believed(ranks: Ranks) -> None:
    assert ranks(_replay, 2) == [False, False]


def _unlike(rank: int, world: int, *known: bytes) -> str:
    try:
        Collective(known[rank])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("other", [b"", b"another secret, as long"])
def test_ranks_with_different_secrets_all_say_so(ranks: Ranks, other: bytes) -> None:
    found = ranks(_unlike, 3, SECRET, SECRET, other)
    assert all("give --ftp-secret-file, with the same content" in words for words in found)
    assert found[0].startswith("rank 0: rank 2 has another secret")
