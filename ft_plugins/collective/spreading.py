"""Copy bytes from the ranks that have them to those that lack them, in rounds in which the number of holders doubles.

Invariant: all ranks that take part know who has the bytes, so no message needs a header; a rank sends to as many others
as there are rounds, the logarithm of their number. Other ranks do not call.

In: who has the bytes and who lacks them. Out: the bytes on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from .transfers import Bytes, Transfers


def rounds_of(have: Sequence[int], lack: Sequence[int]) -> list[list[tuple[int, int]]]:
    """By round, the (sender, receiver) of each copy. Pure."""
    holders, waiting, rounds = list(have), list(lack), list[list[tuple[int, int]]]()
    while waiting and holders:
        pairs = list(zip(holders, waiting, strict=False))
        rounds.append(pairs)
        holders += waiting[: len(pairs)]
        waiting = waiting[len(pairs) :]
    return rounds


def spread(transfers: Transfers, rank: int, have: Sequence[int], lack: Sequence[int], held: Bytes) -> None:
    """Fill `held` on the ranks that `lack` it with what it is on those that `have` it. Each `rank` of these calls.

    Raises ProtocolError for altered bytes.
    """
    for pairs in rounds_of(have, lack):
        for sender, receiver in pairs:
            if sender == rank:
                transfers.swap({receiver: held}, {})
            elif receiver == rank:
                transfers.swap({}, {sender: held})
