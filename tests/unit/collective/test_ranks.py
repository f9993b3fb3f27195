"""The collectives of protection, between real processes."""

import numpy as np
import pytest

from ft_plugins.collective import Collective, operations
from ft_plugins.collective import transfers as module
from ft_plugins.errors import BudgetError, ConfigError, FtError, ProtocolError, ResumeError
from ft_plugins.transport.framed import Link

SECRET = b"sixteen bytes or more"


def _gather(rank, world):
    collective = Collective()
    assert (collective.rank, collective.world_size) == (rank, world)
    found = [collective.gather(bytes([rank]) * (rank * 1000)), collective.gather(b""), collective.gather(b"x")]
    collective.barrier()
    return found


def test_every_rank_gets_the_payloads_of_all_whatever_their_sizes(ranks):
    expected = [[bytes([rank]) * (rank * 1000) for rank in range(3)], [b""] * 3, [b"x"] * 3]
    assert ranks(_gather, 3) == [expected] * 3


def _agree(rank, world, failing, tolerated=ProtocolError):
    try:
        with Collective().agreement(lambda error: isinstance(error, tolerated)) as agreement:
            if rank in failing:
                raise failing[rank]
    except FtError as error:
        return type(error).__name__, str(error), error.echo
    return str(agreement.tolerated) if agreement.tolerated else None


def test_an_error_of_one_rank_is_raised_on_all_and_only_his_is_no_echo(ranks):
    assert ranks(_agree, 3, {}) == [None] * 3
    assert ranks(_agree, 3, {1: ResumeError("rank 1: another job")}) == [
        ("ResumeError", "rank 1: another job", True),
        ("ResumeError", "rank 1: another job", False),
        ("ResumeError", "rank 1: another job", True),
    ]
    both = {2: BudgetError("rank 2: bytes"), 1: ResumeError("rank 1: another job")}
    assert [echo for _, _, echo in ranks(_agree, 3, both)] == [True, False, True], "the lowest speaks for all"


def test_a_tolerated_error_ends_no_rank_unless_another_one_is_not_tolerated(ranks):
    missing, another = BudgetError("rank 1: bytes"), ResumeError("rank 2: another job")
    assert ranks(_agree, 3, {1: missing}, BudgetError) == [None, "rank 1: bytes", None]
    assert ranks(_agree, 3, {1: missing, 2: another}, BudgetError) == [
        ("ResumeError", "rank 2: another job", True),
        ("ResumeError", "rank 2: another job", True),
        ("ResumeError", "rank 2: another job", False),
    ]


def test_an_error_of_another_kind_passes_an_agreement_at_once():
    with pytest.raises(KeyError), Collective().agreement():
        raise KeyError("a bug")


def test_a_job_of_one_process_needs_no_process_group():
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
    with collective.transfers() as transfers:
        ((offset, arrived),) = transfers.exchange_shares([0], [(0, 9)], own)
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


def _exchange(rank, world, part_bytes):
    module.PART_BYTES = part_bytes
    with Collective() as collective, collective.transfers() as transfers:
        return _streams(rank, transfers)


def _streams(rank, transfers):
    found = []
    for number, (replicas, shares) in enumerate(STREAMS):
        if rank not in replicas:
            continue
        stream = np.random.default_rng(number).integers(0, 256, shares[-1][1], dtype=np.uint8)
        start, stop = shares[replicas.index(rank)]
        received = np.zeros(len(stream), dtype=np.uint8)
        times = np.zeros(len(stream), dtype=np.uint8)
        longest = 0
        for offset, arrived in transfers.exchange_shares(replicas, shares, stream[start:stop].copy()):
            received[offset : offset + len(arrived)] = arrived
            times[offset : offset + len(arrived)] += 1
            longest = max(longest, len(arrived))
        assert (times == 1).all(), "every byte passes once"
        assert (received == stream).all(), (rank, number)
        found.append((received.tobytes(), longest))
    return found


@pytest.mark.parametrize("part_bytes", [64, 1000])
def test_a_set_puts_its_stream_together_from_uneven_shares_in_bounded_rounds(ranks, part_bytes):
    found = ranks(_exchange, 3, part_bytes)
    assert [len(of_rank) for of_rank in found] == [6, 6, 4]
    assert max(longest for of_rank in found for _, longest in of_rank) <= part_bytes


def _start_gather(rank, world):
    collective = Collective()
    first = collective.start_gather(bytes([rank]) * rank)
    second = collective.start_gather(b"later")
    between = collective.gather(b"between")  # whatever else the ranks do meanwhile
    assert between == [b"between"] * world
    return [second.result(), first.result()]


def test_what_was_started_is_read_whenever_it_suits(ranks):
    assert ranks(_start_gather, 3) == [[[b"later"] * 3, [b"", b"\1", b"\2\2"]]] * 3
    assert Collective().start_gather(b"alone").result() == [b"alone"]


def _swap(rank, world, nbytes, change):
    """Each rank swaps with both others, twice; rank 0 alters a byte after it was authenticated, if `change`."""
    collective = Collective(SECRET)
    others = [other for other in range(world) if other != rank]
    if change and rank == 0:
        real = Link.write

        def altering(link):
            if link._left and len(link._left[0]) > 1000:
                link._left[0] = memoryview(bytes(link._left[0][:-1]) + bytes([link._left[0][-1] ^ 1]))
            real(link)

        Link.write = altering
    found = []
    with collective.transfers() as transfers:
        for turn in range(2):
            send = {other: np.full(nbytes + rank, 10 * turn + rank, dtype=np.uint8) for other in others}
            receive = {other: np.zeros(nbytes + other, dtype=np.uint8) for other in others}
            try:
                transfers.swap(send, receive)
            except ProtocolError as error:
                found.append(str(error))
                break
            for other, into in receive.items():
                assert (into == 10 * turn + other).all()
    collective.barrier()
    return found


@pytest.mark.parametrize("nbytes", [1, 5 << 20])
def test_swapped_bytes_arrive_whatever_their_number(ranks, nbytes):
    assert ranks(_swap, 3, nbytes, False) == [[], [], []]


def test_bytes_that_were_altered_on_the_way_are_not_taken(ranks):
    found = ranks(_swap, 3, 64 << 20, True)  # more than a socket takes at once
    refused = [words for of_rank in found[1:] for words in of_rank]
    assert refused and all("rejected data of rank 0: unit" in words or "was lost" in words for words in refused)
    assert any("rejected data of rank 0" in words for words in refused)


def _meets_again(rank, world):
    first, second = Collective(SECRET), Collective(SECRET)  # as of two incarnations
    if rank == 0:
        first.announce("degraded")
    second.barrier()
    first.barrier()
    return [first.announced("degraded"), second.announced("degraded")]


def test_a_word_is_known_to_the_ranks_of_its_incarnation_alone(ranks):
    assert ranks(_meets_again, 3) == [[True, False]] * 3


def _unlike(rank, world, *known):
    try:
        Collective(known[rank])
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_different_secrets_all_say_so(ranks):
    found = ranks(_unlike, 3, SECRET, SECRET, b"another secret, as long")
    assert all("give --ftp-secret-file, with the same content" in words for words in found)
    assert all(words.startswith("rank 0: rank 2 has another secret") for words in found), "the lowest speaks for all"


def _deceived(rank, world):
    """Rank 0 does not know the secret, and reports below that there is no error."""
    if rank == 0:
        operations._JOIN = {**operations._JOIN, operations.FrameKind.AGREE: lambda parts: b""}
    return _unlike(rank, world, b"another secret, as long", SECRET)


def test_what_a_rank_without_the_secret_reports_is_not_believed(ranks):
    found = ranks(_deceived, 2)
    assert found[1].startswith("rank 1: rank 0 has another secret"), found
